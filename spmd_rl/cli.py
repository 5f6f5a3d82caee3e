"""The `spmd-rl` command: ``spmd-rl train ...``, ``spmd-rl export RUN``, ``spmd-rl report RUN`` and the others.

Under a launcher: ``torchrun ... -m spmd_rl.cli COMMAND ...``.
"""

import importlib
import sys

COMMANDS = {
    "train": ("spmd_rl.train", "train; the same options as python -m spmd_rl.train"),
    "export": ("spmd_rl.export", "write a Hugging Face folder from a checkpoint"),
    "eval": ("spmd_rl.inference:main_eval", "evaluate a saved model on held-out prompts"),
    "logprobs": ("spmd_rl.inference:main_logprobs", "log-probs of given completions under a saved model"),
    "report": ("spmd_rl.report", "a page of figures of one or several runs"),
}


def main(args: list[str] | None = None) -> None:
    """Call the named command's own `main` with the rest of the arguments; exits with 2 for an unknown one."""
    args = sys.argv[1:] if args is None else args
    if not args or args[0] not in COMMANDS:
        wrong = bool(args) and args[0] not in ("-h", "--help")
        lines = ["usage: spmd-rl COMMAND ...", *(f"  {name:8} {what}" for name, (_, what) in COMMANDS.items())]
        if wrong:
            lines.insert(0, f"error: no command {args[0]!r}")
        print("\n".join(lines), file=sys.stderr if wrong else sys.stdout)
        sys.exit(2 if wrong else 0)
    # Imported when called: --help of one command must not start another's libraries.
    module, _, function = COMMANDS[args[0]][0].partition(":")
    getattr(importlib.import_module(module), function or "main")(args[1:])


if __name__ == "__main__":
    main()
