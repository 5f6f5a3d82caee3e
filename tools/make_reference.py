"""Write docs/reference.md, every option with type, default and meaning, from the dataclasses of spmd_rl/config.py.

    python tools/make_reference.py            # write it
    python tools/make_reference.py --check    # exit 1 where it is not current
"""
import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, PAGE = ROOT / "spmd_rl" / "config.py", ROOT / "docs" / "reference.md"
HEAD = """# Every option

Made from `spmd_rl/config.py` by `python tools/make_reference.py`; do not edit. An option is `section.name`, in YAML

```yaml
section:
  name: value
```

or on the command line, which wins over the file: `--section.name value`. `--print_config` prints all with their values,
`--dry_run` checks them without loading weights.
"""


def fields_of(node):
    """(name, type, default, meaning) of each field of a dataclass."""
    for statement, following in zip(node.body, [*node.body[1:], None]):
        if isinstance(statement, ast.AnnAssign):
            meaning = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                meaning = " ".join(following.value.value.split())
            yield statement.target.id, ast.unparse(statement.annotation), default_of(statement.value), meaning


def default_of(value):
    """The default as written, that of a factory as what it makes."""
    if not isinstance(value, ast.Call):
        return ast.unparse(value)
    factory, = (keyword.value for keyword in value.keywords if keyword.arg == "default_factory")
    if isinstance(factory, ast.Lambda):
        return ast.unparse(factory.body)
    return {"list": "[]", "dict": "{}"}[factory.id]


def type_of(annotation):
    """A type as a reader wants it: the choices of a Literal, plain names otherwise."""
    if annotation.startswith("Literal["):
        return " · ".join(f"`{choice.strip()}`" for choice in annotation[8:-1].replace("'", "").split(","))
    return f"`{annotation}`".replace("|", "\\|")


def render():
    """The whole page."""
    tree = ast.parse(SOURCE.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    parts = [HEAD]
    raw = []
    for statement, following in zip(classes["Config"].body, [*classes["Config"].body[1:], None]):
        if not isinstance(statement, ast.AnnAssign):
            continue
        section, node = statement.target.id, classes.get(ast.unparse(statement.annotation))
        if node is None:
            raw.append(f"`{section}`: {' '.join(following.value.value.split())}")
            continue
        parts += [f"\n## {section}\n\n{ast.get_docstring(node)}\n", "| option | type | default | meaning |",
                  "|---|---|---|---|"]
        for name, annotation, default, meaning in fields_of(node):
            shown = default.replace("|", "\\|")
            text = meaning.replace("|", "\\|")
            parts.append(f"| `{section}.{name}` | {type_of(annotation)} | `{shown}` | {text} |")
    parts += ["\n## Raw options\n", *(f"- {line}" for line in raw),
              "\nWhat one of the fields above decides is refused in them by name."]
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is not current")
    if parser.parse_args().check:
        sys.exit(PAGE.read_text() != render())
    PAGE.write_text(render())
    print(PAGE)


if __name__ == "__main__":
    main()
