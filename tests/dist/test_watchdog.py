"""Who is late and where is said before any process group's time-out, and a rank that vanishes ends the others."""

import pytest
from launching import ROOT, without_launcher

WORKER = str(ROOT / "tests" / "dist" / "worker_watchdog.py")


# Where rank 1 is slow -> where rank 0 waits for it.
PHASES = {"rollout": "gather", "reward": "gather", "save": "save"}


@pytest.mark.parametrize("phase", ["save", *(pytest.param(p, marks=pytest.mark.long) for p in ("rollout", "reward"))])
def test_case_74_a_late_rank_is_named_with_its_phase(phase):
    """A limit of 5 s against 8 s of generation, reward or save on rank 1: all ranks end, and the message has rank,
    phase and limit."""
    finished = without_launcher(2, [WORKER, "slow", phase, "5"], timeout_s=60)
    output = "\n".join(process.output for process in finished)
    assert all(process.returncode == 1 for process in finished), output
    assert "rank 0 has waited" in output and f"in phase {PHASES[phase]} for rank 1 (in phase {phase} for" in output
    assert "mesh.timeout_s is 5" in output


@pytest.mark.parametrize("phase", ["save", *(pytest.param(p, marks=pytest.mark.long) for p in ("rollout", "reward"))])
def test_case_74_a_slow_rank_within_the_limit_is_waited_for(phase):
    """The same with a limit of 20 s."""
    finished = without_launcher(2, [WORKER, "slow", phase, "20"], timeout_s=60)
    assert [process.returncode for process in finished] == [0, 0], "\n".join(p.output for p in finished)
    assert all("all together" in process.output for process in finished)


@pytest.mark.long
def test_a_killed_rank_is_noticed_without_a_collective():
    """Kill -9 of rank 1 while rank 0 is busy by itself for 100 s: rank 0 ends within a minute, and says who is gone."""
    finished = without_launcher(2, [WORKER, "killed", "reward", "1800"], timeout_s=120)
    assert finished[0].returncode == 1 and finished[1].returncode == -9
    assert "rank 1 has vanished: no sign of life for 4" in finished[0].output
    assert finished[0].ended - finished[1].ended < 60
