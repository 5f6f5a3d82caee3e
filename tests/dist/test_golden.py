"""The learning half on recorded rollouts goes as it went when the golden trajectories were written, for every loss.

On the kind of CPU that wrote them the numbers are the same to the last bit. Other instruction sets add up in another
order, and AdamW hands that on; see TOLERANCE. A change of the numbers that is meant is written by tools/make_golden.py.
"""

import json

import golden
import launching
import pytest

# Largest gaps on one CPU between AVX-512, AVX2 and no vector instructions (ATEN_CPU_CAPABILITY, the last with
# MKL_CBWR=COMPATIBLE): 5e-6 in the first step, 3e-5 in twenty, and 6e-4 for dapo, which has the default's weights of
# whole completions. The bounds leave room for other CPUs, and lie far below what a change of the loss makes.
FIRST, LATER, LATER_WITH_WEIGHTS = 3e-5, 2e-4, 5e-3
SAMPLER_GAP = 1e-4  # of fp32 in two programs, here over twenty steps


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory):
    return golden.learn(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("loss", golden.LOSSES)
def test_trajectory_is_the_golden_one(trajectories, loss):
    """Every metric of each of twenty steps, and the sum and norm of every weight after them."""
    steps, weights = golden.gaps(trajectories[loss], golden.read(loss))
    assert len(steps) == golden.NUM_STEPS
    later = LATER_WITH_WEIGHTS if loss == "dapo" else LATER
    assert steps[0] <= FIRST and max(steps) <= later and weights <= later, f"{loss}: {steps}, weights {weights:.1e}"


def test_dapo_is_the_policy_that_sampled(trajectories):
    """The rollouts were sampled by a run with its settings: twenty steps later it still is that policy."""
    for step in trajectories["dapo"]["steps"]:
        assert step["sampling/sampling_logp_difference/mean"] <= SAMPLER_GAP
        assert step["sampling/masked_fraction"] == 0


def test_the_schedule_counts_every_optimizer_step(trajectories):
    """Four of them a rollout, eighty in all, linear from 1e-3: a step's highest rate is that of its first."""
    for loss, trajectory in trajectories.items():
        rates = [step["learning_rate"] for step in trajectory["steps"]]
        assert rates == pytest.approx([1e-3 * (1 - 4 * step / 80) for step in range(golden.NUM_STEPS)]), loss


def test_no_two_losses_go_the_same_way():
    """The bound tells the losses from one another: their golden trajectories are further apart than ten times it."""
    found = {loss: golden.read(loss) for loss in golden.LOSSES}
    for loss, trajectory in found.items():
        for other in found.keys() - {loss}:
            gap = max(abs(a["loss"] - b["loss"]) for a, b in zip(trajectory["steps"], found[other]["steps"]))
            assert gap > 10 * LATER, f"{loss} and {other} differ by {gap:.1e}"


def test_trajectories_are_in_full_precision_and_whole():
    """Each file has every step's metrics as the numbers came, and a clip or a mask was at work somewhere."""
    for loss in golden.LOSSES:
        text = golden.path_of(loss).read_text()
        steps = json.loads(text)["steps"]
        assert all({"loss", "grad_norm", "entropy", "ratio", "sampling/kl"} <= step.keys() for step in steps)
        assert json.dumps(json.loads(text), indent=1) + "\n" == text
        at_work = ["cispo_clip_ratio", "clip_ratio/region_mean", "sampling/masked_fraction"]
        assert any(step.get(name, 0) > 0 for step in steps for name in at_work), loss


def test_a_reason_is_asked_for(capsys):
    """The tool rewrites nothing without one."""
    tool = launching.load_tool("make_golden")
    for arguments in ([], ["--reason", " "]):
        with pytest.raises(SystemExit):
            tool.main(arguments)
        assert "--reason" in capsys.readouterr().err
