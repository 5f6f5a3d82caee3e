"""A step's decisions on completions, with scripted parts in place of engines: what is kept, masked and resampled."""

from types import SimpleNamespace

import pytest
import torch

from spmd_rl.batch import Completion, Prompt, StepTotals, pack
from spmd_rl.config import Config
from spmd_rl.losses import LOSSES, LossInputs, policy_loss
from spmd_rl.metrics import Metrics
from spmd_rl.step import Parts, sample

NUM_GENERATIONS = 2


class Scripted:
    """Prompts, engine and rewards in one: the row's columns say each sample's length, end and reward."""

    names = ["scripted"]
    weights = [1.0]

    def __init__(self, rows):
        self.prompts = [Prompt(number, "?", [1, 2], {"samples": samples}) for number, samples in enumerate(rows)]
        self.rounds, self.submitted = [], []

    def draw(self, step):
        return self.prompts[:2]

    def draw_again(self, step, round_, count):
        self.rounds.append((round_, count))
        start = 2 * round_
        return self.prompts[start:start + count]

    def epoch(self, step):
        return 0.0

    def check_current(self):
        pass

    def generate(self, prompts, first_group, step, sampling, on_finished):
        assert sampling.num_generations == NUM_GENERATIONS
        made = [Completion(first_group + number, sample_number, prompt.token_ids, [9] * length, [-1.0] * length, end, 0)
                for number, prompt in enumerate(prompts)
                for sample_number, (length, end, _) in enumerate(prompt.columns["samples"])]
        for place in reversed(range(len(made))):  # they end in any order
            on_finished(place, made[place])
        return made

    def submit(self, prompt, completion):
        self.submitted.append((prompt, completion))

    def collect(self):
        for prompt, completion in self.submitted:
            completion.reward = prompt.columns["samples"][completion.sample][2]
            completion.rewards = [completion.reward]
        self.submitted = []


def sampled(mesh, rows, **loss_and_rollout):
    """(completions, metrics, script) of one step's sampling."""
    config = Config()
    config.batch.prompts_per_step, config.rollout.num_generations = 2, NUM_GENERATIONS
    for name, value in loss_and_rollout.items():
        section = config.loss if hasattr(config.loss, name) else config.rollout
        setattr(section, name, value)
    script, metrics = Scripted(rows), Metrics(mesh, [])
    parts = Parts(config=config, mesh=mesh, metrics=metrics, rewards=script, rollout=script, tokenizer=None,
                  sampler=script, policy=SimpleNamespace(), reference=None, weight_sync=script,
                  memory=SimpleNamespace())
    return sample(parts, 0), metrics.reduce(), script


def ends(*rewards):
    return [(3, "stop", reward) for reward in rewards]


FLAT, SPREAD = ends(1.0, 1.0), ends(0.0, 1.0)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_case_04_truncated_completions_are_in_no_count(mesh, loss_type):
    """Ten tokens finished, thirty cut at the limit and masked: the loss is that of the ten alone. Counted before the
    mask, dapo's coefficient is -A / 40 and grpo's -A / 20; the generated tokens are still forty."""
    rows = [[(10, "stop", 1.0), (30, "length", 0.0)], [(0, "stop", 0.0), (0, "stop", 0.0)]]
    completions, metrics, _ = sampled(mesh, rows, mask_truncated_completions=True)
    assert metrics["num_completion_tokens"] == 40 and metrics["completions/clipped_ratio"] == 0.25
    totals = StepTotals.of(completions)
    assert (totals.tokens, totals.sequences) == (10, 1)
    kept, cut, *_ = completions
    assert kept.is_trained and not cut.is_trained
    mb = pack([c for c in completions if c.is_trained and c.token_ids], torch.device("cpu"))
    old = mb.sampler_logprobs_N.double()
    logprobs = old.clone().requires_grad_()
    inputs = LossInputs(logprobs, old, old, mb.advantages_N.double(), mb.sequence_N, mb.lengths_N.double(),
                        torch.zeros_like(old))
    config = Config().loss
    config.loss_type, config.epsilon_high = loss_type, 5.0
    policy_loss(inputs, config, totals, 40).backward()
    weight = 1 / 40 if loss_type == "dr_grpo" else 1 / 10  # dr_grpo: one completion times the longest allowed
    assert logprobs.grad.tolist() == pytest.approx([-kept.advantage * weight] * 10)


def test_without_the_mask_all_count(mesh):
    """The option off: a truncated completion stands in the loss as any other."""
    completions, _, _ = sampled(mesh, [[(10, "stop", 1.0), (30, "length", 0.0)], SPREAD])
    assert StepTotals.of(completions) == StepTotals(46, 4)


@pytest.mark.parametrize("rows, rounds, groups", [
    # Prompts 0 and 1 first, then two more a round of which as many as are missing are taken.
    ([SPREAD, SPREAD], [], [0, 1]),  # nothing to replace: no round
    ([SPREAD, FLAT, SPREAD], [(1, 1)], [0, 2]),
    ([FLAT, FLAT, SPREAD, SPREAD], [(1, 2)], [2, 3]),
    ([FLAT, SPREAD, FLAT, FLAT, SPREAD], [(1, 1), (2, 1)], [1, 4]),
    ([SPREAD, FLAT, FLAT, FLAT, FLAT, FLAT], [(1, 1), (2, 1)], [0]),  # flat after the last round: left out
    ([FLAT, FLAT, FLAT, FLAT, FLAT, FLAT], [(1, 2), (2, 2)], [4, 5]),  # all flat: a step without gradient
])
def test_flat_groups_are_resampled_in_bounded_rounds(mesh, rows, rounds, groups):
    """DAPO's dynamic sampling: groups without spread are replaced, at most resample_rounds times; groups that spread
    stay, and a group number is never used twice."""
    completions, metrics, script = sampled(mesh, rows, resample_rounds=2)
    assert script.rounds == rounds
    assert [c.group for c in completions] == [g for g in groups for _ in range(NUM_GENERATIONS)]
    assert metrics.get("resampling/rounds", 0) == len(rounds)
    if any(row == SPREAD for row in rows):
        assert all(abs(c.advantage) == pytest.approx(0.5 ** 0.5, abs=1e-3) for c in completions)


def test_without_resampling_flat_groups_stay(mesh):
    """resample_rounds 0: nothing is drawn again, nothing left out."""
    completions, metrics, script = sampled(mesh, [FLAT, SPREAD])
    assert len(completions) == 4 and not script.rounds and "resampling/rounds" not in metrics
