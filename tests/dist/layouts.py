"""The layout table: which cells there are, how they are run, and how far two of them are apart.

A cell is a loss, a ZeRO stage and a way to fill rows, on a number of ranks. Each learns the same two rollouts: one with
a single trained completion, so that all ranks but one train nothing, and a ragged one with a flat group and a masked
completion. The standard is one rank at stage 0 with all in one row; the standard of that is a model on padded rows.
"""

import functools
import json
import random
from pathlib import Path

import padded
import torch
import worker_learn
from launching import ROOT, Once, torchrun
from safetensors.torch import load_file

WORKER = str(ROOT / "tests" / "dist" / "worker_learn.py")
RANKS = [1, 2, 4]
STAGES = [0, 1, 2, 3]
COPIES = {"one-row": {"max_tokens_per_microbatch": 4096, "shared_prompt": False},
          "some-rows": {"max_tokens_per_microbatch": 40, "shared_prompt": False},
          "row-each": {"max_tokens_per_microbatch": 1, "shared_prompt": False}}
# Whole groups in a row; rows of groups; parts of groups.
SHARED = {"shared": {"max_tokens_per_microbatch": 4096, "shared_prompt": True},
          "shared-rows": {"max_tokens_per_microbatch": 40, "shared_prompt": True},
          "shared-split": {"max_tokens_per_microbatch": 20, "shared_prompt": True}}
ROWS = COPIES | SHARED
STANDARD = (1, 0, "one-row")  # ranks, stage, rows

AS_SAMPLED = {"importance_sampling_correction": False}
# The second pass has ratios other than 1, which a clip is for; the smaller step leaves some tokens unclipped.
TWICE, SMALL_STEP = AS_SAMPLED | {"num_iterations": 2}, {"learning_rate": 0.05}
# Loss -> sections of the config. Between them every loss type, level, estimator and option that changes the loss.
LOSSES = {
    "dapo": {"loss": AS_SAMPLED},
    "grpo-kl": {"loss": AS_SAMPLED | {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}},
    "dapo-clipped": {"loss": TWICE | {"epsilon_high": 0.28}, "policy": SMALL_STEP},
    "grpo-dual-clip": {"loss": TWICE | {"loss_type": "grpo", "dual_clip": 1.5}, "policy": SMALL_STEP},
    "dr_grpo-delta": {"loss": TWICE | {"loss_type": "dr_grpo", "delta": 1.5}, "advantages": {"scale_rewards": "none"},
                      "policy": SMALL_STEP},
    "cispo": {"loss": TWICE | {"loss_type": "cispo", "epsilon_high": 1.2}, "policy": SMALL_STEP},
    "sapo": {"loss": TWICE | {"loss_type": "sapo"}, "policy": SMALL_STEP},
    "gspo": {"loss": TWICE | {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1},
             "policy": SMALL_STEP},
    "gspo-token": {"loss": TWICE | {"importance_sampling_level": "sequence_token", "epsilon": 0.1},
                   "policy": SMALL_STEP},
    "kl-unbiased": {"loss": TWICE | {"beta": 0.1}, "policy": SMALL_STEP},
    "kl-k2": {"loss": TWICE | {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False},
              "policy": SMALL_STEP},
    "kl-moving": {"loss": TWICE | {"beta": 0.2, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6},
                  "policy": SMALL_STEP},
    "kl-in-reward": {"loss": AS_SAMPLED | {"beta": 0.1, "kl_estimator": "k1", "kl_in": "reward"},
                     "advantages": {"scale_rewards": "none"}},
    # The quantile lies among the first tokens of a group, which have one distribution.
    "top-entropy": {"loss": AS_SAMPLED | {"entropy_coef": 0.01, "top_entropy_quantile": 0.27}},
    "minibatches": {"loss": AS_SAMPLED, "batch": {"num_minibatches": 2}},  # of two groups, and of the one left over
    "sampler-token": {"loss": {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": 1.1},
                      "policy": SMALL_STEP},
    "sampler-sequence": {"loss": {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_max": 1.2},
                         "policy": SMALL_STEP},
    "rloo": {"loss": AS_SAMPLED, "advantages": {"baseline": "leave_one_out", "scale_rewards": "none"}},
    "whiten": {"loss": AS_SAMPLED, "advantages": {"scale_rewards": "whiten"}},
}
TEMPERATURE = 0.7
COMMON = {"rollout": {"temperature": TEMPERATURE, "max_completion_length": 16},
          "policy": {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.5}}

TOLERANCE = 1e-6
# A ratio, a sampler's weight and a KL are exponentials of log-probs, around -12 here, and hand on their error: between
# fp32 and float64 plain Transformers is off by up to 2.2e-6 in kl and ratio, and 3.9e-6 in the norm of a gradient that
# such factors weigh. Two layouts may differ by twice the former. A completion's weight sums up 16 such errors.
TOLERANCE_OF_RATIOS, TOLERANCE_OF_COMPLETIONS = 4.5e-6, 1e-5
RATIOS = ("ratio", "kl", "sampling/")
NOT_COMPARED = ("timing/", "perf/", "memory/", "targets", "second_shards", "leaves")


def name_of(stage, rows, loss):
    return f"stage{stage}-{rows}-{loss}"


def cell_of(stage, rows, loss, **fields):
    """What the worker runs."""
    cell = {name: dict(COMMON.get(name, {})) | LOSSES[loss].get(name, {}) for name in worker_learn.SECTIONS}
    cell["batch"] |= ROWS[rows]
    cell["policy"] |= {"zero_stage": stage}
    return cell | {"name": name_of(stage, rows, loss)} | fields


@functools.cache
def rollouts_of(folder):
    """Both rollouts, sampled as it were by this model up to noise: some weights are within the bounds, some beyond."""
    draw = random.Random(0)
    steps = [worker_learn.completions_of(step) for step in worker_learn.STEPS]
    for completions in steps:
        for c, logprobs in zip(completions, padded.logprobs_of(folder, completions, TEMPERATURE), strict=True):
            c.sampler_logprobs = [value + draw.uniform(-0.3, 0.3) for value in logprobs]
    return steps


class Learned:
    """Results and weights of cells, from one launch a table, number of ranks and model, made when asked for."""

    def __init__(self, models, folder, tables):
        """models: name -> folder. tables: name -> function from a number of ranks to cells."""
        self._models, self._folder, self._tables = models, folder, tables
        self._launched = Once(self._launch)

    def cell(self, table, num_ranks, stage, rows, loss, model="tied"):
        path = self._launched(table, num_ranks, model) / name_of(stage, rows, loss)
        return json.loads(Path(f"{path}.json").read_text()), load_file(f"{path}.safetensors")

    def _launch(self, table, num_ranks, model):
        folder = self._folder / f"{table}-{num_ranks}-{model}"
        folder.mkdir()
        rollouts = folder / "rollouts.jsonl"
        worker_learn.write_rollouts(rollouts, rollouts_of(self._models[model]))
        cells = self._tables[table](num_ranks)
        job = folder / "job.json"
        job.write_text(json.dumps(dict(model=str(self._models[model]), folder=str(folder), rollouts=str(rollouts),
                                       cells=cells)))
        torchrun(num_ranks, [WORKER, str(job)], timeout_s=60 + 5 * num_ranks * len(cells)).succeeded()
        return folder


def padded_reference(folder, loss, dtype=torch.float64):
    """The standard by plain Transformers on padded rows: metrics of each rollout, and weights."""
    steps = rollouts_of(folder)
    config = worker_learn.config_of(cell_of(0, "one-row", loss), str(folder), len(steps))
    return padded.learn_all(folder, config, steps, dtype)


def metric_gaps(found, wanted):
    """Name -> largest gap over the rollouts, relative, absolute below magnitude 1."""
    gaps = {}
    for result, want in zip(found, wanted, strict=True):
        for name in want:
            if not name.startswith(NOT_COMPARED):
                gap = abs(result[name] - want[name]) / max(1.0, abs(want[name]))
                gaps[name] = max(gaps.get(name, 0.0), gap)
    return gaps


def weight_gap(found, wanted):
    """Largest difference over the tensor's largest magnitude, absolute below magnitude 1; of all tensors."""
    assert found.keys() == wanted.keys()
    return max(float((tensor.double() - wanted[name].double()).abs().max()) / max(1.0, float(wanted[name].abs().max()))
               for name, tensor in found.items())


def gaps_of(cell, wanted):
    """Everything that is compared: metric or "weights" -> gap. `wanted` says which metrics."""
    return metric_gaps(cell[0], wanted[0]) | {"weights": weight_gap(cell[1], wanted[1])}


def tolerance(name, loss):
    """Of a metric, or of "weights"."""
    config = worker_learn.config_of(cell_of(0, "one-row", loss), "", 1)
    is_corrected = config.loss.importance_sampling_correction
    if is_corrected and config.loss.importance_sampling_mode.startswith("sequence"):
        return TOLERANCE_OF_COMPLETIONS
    is_weighed = is_corrected or config.updates_per_step > 1
    if name.startswith(RATIOS) or (is_weighed and name in ("loss", "grad_norm")):
        return TOLERANCE_OF_RATIOS
    return TOLERANCE


def too_large(gaps, loss):
    """Those beyond their tolerance."""
    return {name: gap for name, gap in gaps.items() if not gap <= tolerance(name, loss)}
