"""docs/first_run.md as a new user follows it: its commands one after the other, in an empty folder."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, needs_cpu_engine, script

pytestmark = [needs_cpu_engine, pytest.mark.long]
MINUTES = 15


def test_the_first_run_page_works(tmp_path):
    """All blocks but the set-up: within 15 minutes on a CPU, to a risen reward, with page, samples and export."""
    text = (ROOT / "docs" / "first_run.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 6 and "```bash setup" in text
    path = Path(tmp_path) / "page.sh"
    path.write_text("set -euo pipefail\n" + "\n".join(blocks))
    env = {"SPMD_RL": str(ROOT)}
    if not (Path(sys.executable).parent / "spmd-rl").exists():  # where the project is on the path and not installed
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "spmd-rl").write_text(f'#!/bin/sh\nexec {sys.executable} -m spmd_rl.cli "$@"\n')
        (tmp_path / "bin" / "spmd-rl").chmod(0o755)
        env["PATH"] = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    start = time.monotonic()
    finished = script([str(path)], env=env, cwd=tmp_path, timeout_s=60 * MINUTES).succeeded()
    seconds = time.monotonic() - start
    lines = [json.loads(line) for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "loss" in line]
    print(f"{seconds:.0f} s, reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    assert len(rewards) == 60 and rewards[0] < 0.2 and sum(rewards[-5:]) / 5 > 0.5
    assert (tmp_path / "runs/first/report.html").exists() and "Some digits like 7: " in finished.output
