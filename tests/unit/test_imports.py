"""The rules of the layout, over the syntax trees of spmd_rl."""

import ast
import os
import sys

import pytest

from spmd_rl import __file__ as package_file

# A module imports modules of lower levels only, never its own level's.
LEVELS = {
    "__init__": 0, "config": 0, "slurm": 0, "flops": 0, "watchdog": 0, "offload": 0, "load_plan": 0,
    "files": 1, "mesh": 1, "signals": 1, "batch": 1, "attention": 1, "logprobs": 1, "layers": 1, "adoption": 1,
    "shards": 1, "rows": 1, "profiling": 1, "system": 1, "reward_functions": 1, "handles": 1,
    "advantages": 2, "losses": 2, "model": 2, "run_folder": 2, "plan": 2, "sinks": 2, "reward_pool": 2, "recording": 2,
    "transports": 2,
    "between_hosts": 3, "prompts": 3, "rollout": 3, "policy": 3, "metrics": 3, "checks": 3, "rewards": 3,
    "weight_sync": 4, "memory": 4, "export": 4, "checkpoint": 4,
    "step": 5,
    "evaluate": 6, "replay": 6,
    "job": 7,
    "train": 8, "report": 8, "inference": 8,
    "cli": 9,
}
# Where a heavy library may be imported, at the top or inside a function.
HOMES = {
    "vllm": {"rollout"},
    "deepspeed": {"policy"},
    "jsonargparse": {"config"},
    "transformers": {"model", "prompts", "policy", "export"},
    "datasets": {"rows"},
}
FOLDER = os.path.dirname(package_file)
MODULES = sorted(LEVELS)


def tree(module):
    with open(f"{FOLDER}/{module}.py", encoding="utf-8") as file:
        return ast.parse(file.read())


def imported(module, top_only=False):
    """Dotted names that a module imports, `importlib.import_module("name")` included."""
    names = []
    nodes = tree(module).body if top_only else ast.walk(tree(module))
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: a relative import"
            # `from spmd_rl import model` imports a module, `from spmd_rl.model import build` a name of one.
            names += [f"spmd_rl.{a.name}" for a in node.names] if node.module == "spmd_rl" else [node.module]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "__import__"):
            names += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return names


def siblings(module):
    """Modules of spmd_rl that a module imports."""
    return {name.split(".")[1] for name in imported(module) if name.startswith("spmd_rl.")}


def libraries(module):
    """Top-level packages that a module imports, spmd_rl left out."""
    return {name.split(".")[0] for name in imported(module)} - {"spmd_rl"}


def test_the_table_is_the_package():
    """Every module has a level, and every level's module is there: a new file must find its place."""
    found = {name[:-3] for name in os.listdir(FOLDER) if name.endswith(".py")}
    folders = {name for name in os.listdir(FOLDER) if os.path.isdir(f"{FOLDER}/{name}") and name != "__pycache__"}
    assert found | folders == set(LEVELS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module):
    """Strictly to lower levels: a cycle, or a step sideways, cannot be tested or read alone."""
    wrong = {name: LEVELS[name] for name in siblings(module) if LEVELS[name] >= LEVELS[module]}
    assert not wrong, f"{module} (level {LEVELS[module]}) imports {wrong}"


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_lives_in_its_module_only(library):
    """A change of that library is a change of one module."""
    assert {m for m in MODULES if library in libraries(m)} <= HOMES[library]


@pytest.mark.parametrize("library", ["vllm", "deepspeed"])
def test_engines_are_imported_when_they_are_built(library):
    """Not at the top of a module: --help and the checks of a config start no engine library."""
    assert {m for m in MODULES if library in {n.split(".")[0] for n in imported(m, top_only=True)}} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if LEVELS[m] <= 2])
def test_the_lower_levels_know_no_engine(module):
    """Levels 0 to 2 run on any machine: maths and data."""
    assert not libraries(module) & {"vllm", "deepspeed"}


def test_weight_sync_sees_neither_library():
    """vLLM's side is in rollout, DeepSpeed's in policy."""
    assert not libraries("weight_sync") & {"vllm", "deepspeed"}


@pytest.mark.parametrize("module", ["config", "cli", "report"])
def test_what_starts_first_imports_nothing_heavy(module):
    """A typing error in an option costs no start of torch or an engine."""
    top = {name.split(".")[0] for name in imported(module, top_only=True)}
    assert not top & {"torch", "transformers", "vllm", "deepspeed", "matplotlib", "numpy"}


def test_the_step_imports_no_third_party_package():
    """The algorithm is readable without knowing any library."""
    assert libraries("step") <= set(sys.stdlib_module_names)


def test_the_step_has_no_rank_check():
    """No condition of the step looks at a rank: all ranks take the same way."""
    conditions = [node.test for node in ast.walk(tree("step")) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
    conditions += [test for node in ast.walk(tree("step")) if isinstance(node, ast.comprehension) for test in node.ifs]
    words = [getattr(node, "id", getattr(node, "attr", "")) for test in conditions for node in ast.walk(test)]
    assert words, "no condition found: the test looks at nothing"
    assert not [word for word in words if "rank" in word.lower() or word == "on_main"]


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ("mesh", "slurm")])
def test_rank_appears_in_mesh_alone(module):
    """No other module asks the launcher or the process group which rank it is."""
    attributes = ("get_rank", "rank", "_rank", "local_rank", "get_node_local_rank")
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and node.attr in attributes:
            found.append((node.lineno, node.attr))
        if isinstance(node, ast.Constant) and node.value in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"):
            found.append((node.lineno, node.value))
    assert not found, f"{module}: {found}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_swallowed(module):
    """No bare except, no `except Exception: pass`: an error ends the run with its traceback."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{module}, line {node.lineno}: a bare except"
            silent = all(isinstance(statement, (ast.Pass, ast.Continue)) for statement in node.body)
            assert not silent, f"{module}, line {node.lineno}: an error is swallowed"


@pytest.mark.parametrize("module", MODULES)
def test_every_wait_has_its_reason_on_the_line(module):
    """A barrier, synchronize, empty_cache or sleep says why it is there, or goes; its own definition aside."""
    names = {"barrier", "synchronize", "empty_cache", "sleep"}
    with open(f"{FOLDER}/{module}.py", encoding="utf-8") as file:
        lines = file.read().splitlines()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in names:
            owner = ast.unparse(node.func.value)
            if "rollout" in owner or owner == "self._llm" or owner == "self":
                continue  # the engine's sleep is a state, not a wait
            assert "#" in lines[node.lineno - 1], f"{module}, line {node.lineno}: {lines[node.lineno - 1].strip()}"


def test_test_files_have_names_of_their_own():
    """pytest imports them as modules of no package: of two with one name it runs one, and stops at the other."""
    names = [name for _, _, files in os.walk(os.path.join(os.path.dirname(FOLDER), "tests")) for name in files
             if name.startswith("test_") and name.endswith(".py")]
    assert len(names) > 50 and sorted(set(names)) == sorted(names)
