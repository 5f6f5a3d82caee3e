"""Calls spmd_rl.train.main many times in one process: ``worker_options.py CASES.json RESULTS.json``.

A case is {"arguments": [...], "env": {...}}; a result the exit code, what was printed, and whether vllm or deepspeed
was imported by then. A case that is not refused ends where the process group would be made.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

from spmd_rl import train


def started(*args):
    raise AssertionError("nothing was refused: the run starts")


def call(case):
    out, err = io.StringIO(), io.StringIO()
    before = dict(os.environ)
    os.environ.update(case.get("env", {}))
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            train.main(case["arguments"])
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        code = "raised"
        err.write(traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(before)
    engines = [name for name in ("vllm", "deepspeed") if name in sys.modules]
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue(), "engines": engines}


if __name__ == "__main__":
    train.Mesh = started
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: call(case) for name, case in cases.items()}))
