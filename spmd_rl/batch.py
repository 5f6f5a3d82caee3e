"""Prompts, completions, and the packed micro-batches that the policy learns from.

Shape legend, used in names over the whole program:
    S  tokens of one packed row
    N  target tokens of one row: the positions whose log-prob is needed
    H  width of the hidden states
    V  vocabulary
A packed row holds whole sequences (a prompt and one of its completions) one after the other. Token
ids are the truth from the engine to the loss: nothing is decoded and encoded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EMPTY_ROW_TOKENS = 8  # a row without sequences still passes every module: ZeRO-3's gathers are collective


@dataclass(frozen=True)
class Prompt:
    """A row of the data set, ready for the engine."""

    row: int
    """Its place in the data set: what identifies it. Never its text, which rows may share."""
    content: Any
    """The prompt as the data has it: text, or messages."""
    token_ids: list[int]
    columns: dict[str, Any]
    """The row's other columns, for the rewards."""
    source: str = ""
    """The file or data set that the row is of."""


@dataclass
class Completion:
    """What the engine sampled for a prompt, and what the step then finds out about it."""

    group: int
    """Index of its prompt in the step: the completions that are compared."""
    sample: int
    """Which of the group it is."""
    prompt_ids: list[int]
    token_ids: list[int]
    """Sampled ids, with the end of sequence where one was sampled."""
    sampler_logprobs: list[float]
    """The engine's log-prob of each token, at the sampling temperature."""
    finish_reason: str
    """The engine's: "stop", or "length" for a truncated one."""
    version: int
    """Version of the weights that sampled it."""
    text: str = ""
    rewards: list[float | None] = field(default_factory=list)
    """One for each reward function; None where the function does not apply."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reward function -> how it failed on this completion."""
    reward: float | None = None
    """Weighted sum of `rewards`; None where no function applies."""
    advantage: float = 0.0
    is_trained: bool = True
    """Whether it stands in the loss; false for one that is masked as a whole."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion: its cost in a packed row."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True)
class StepTotals:
    """Normalisers of the loss over all ranks and micro-batches of one optimizer step."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Completions with at least one trained token."""

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> "StepTotals":
        """Counts of the completions that one optimizer step trains on."""
        lengths = [len(c.token_ids) for c in completions if c.is_trained]
        return cls(tokens=sum(lengths), sequences=sum(n > 0 for n in lengths))


@dataclass
class MicroBatch:
    """One packed row on the device. Tensors end in their shape."""

    completions: Sequence[Completion]
    """The sequences of the row, in order."""
    input_ids_S: Tensor
    positions_S: Tensor
    """Position within the sequence, from 0."""
    segment_ids_S: Tensor
    """Which sequence a token belongs to; tokens of different segments never see each other. -1 is filler."""
    target_index_N: Tensor
    """Place in the row of the token whose hidden state predicts the target."""
    target_ids_N: Tensor
    sequence_N: Tensor
    """Which sequence of the row a target belongs to."""
    lengths_N: Tensor
    """Completion tokens of the target's sequence."""
    advantages_N: Tensor
    sampler_logprobs_N: Tensor
    old_logprobs_N: Tensor | None = None
    """Policy before the update; absent where the current ones serve."""
    old_entropy_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None

    @property
    def num_targets(self) -> int:
        """N; 0 for a row that only keeps step with the other ranks."""
        return self.target_ids_N.numel()

    def take_advantages(self) -> None:
        """Read the completions' advantages again, after they changed."""
        values = [c.advantage for c in self.completions for _ in c.token_ids]
        self.advantages_N = torch.tensor(values, dtype=torch.float32).to(self.advantages_N.device)


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Share out items by cost: indices for each rank, the loads nearly equal.

    Longest first to the least loaded rank (Graham 1969); ties by index, so that every rank finds the same.
    """
    loads = [0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(share) for share in shares]


def plan_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill rows to a token budget: indices for each row, first fit in order of decreasing length.

    A sequence longer than the budget gets a row of its own.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(max_tokens)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def plan_step(completions: Sequence[Completion], num_ranks: int, max_tokens: int) -> list[list[list[Completion]]]:
    """Rows of completions for each rank, every rank with the same number of them.

    All ranks know all lengths, so all find the same plan and no collective is needed. The rank with
    the most rows decides; the others get empty ones. Completions without trained tokens are left out.
    """
    trained = [c for c in completions if c.token_ids and c.is_trained]
    shares = deal([c.num_tokens for c in trained], num_ranks)
    plans = []
    for share in shares:
        mine = [trained[i] for i in share]
        plans.append([[mine[i] for i in row] for row in plan_rows([c.num_tokens for c in mine], max_tokens)])
    num_rows = max(1, *(len(plan) for plan in plans))
    return [plan + [[] for _ in range(num_rows - len(plan))] for plan in plans]


def minibatches(completions: Sequence[Completion], count: int) -> list[list[Completion]]:
    """Parts of whole groups, in order, as many groups in each as can be."""
    groups = list(dict.fromkeys(c.group for c in completions))
    part_of = {group: i * count // len(groups) for i, group in enumerate(groups)}
    return [[c for c in completions if part_of[c.group] == part] for part in range(count)]


def pack(row: Sequence[Completion], device: torch.device, block: int = 1) -> MicroBatch:
    """Lay sequences one after the other; an empty list gives a dummy row without targets.

    block: the row is filled up to a multiple of this many tokens (segment -1, no targets), so that
    few different lengths occur where each would be compiled anew.
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    columns: dict[str, list] = {name: [] for name in ("index", "id", "sequence", "length", "advantage", "logprob")}
    for number, c in enumerate(row):
        assert len(c.token_ids) == len(c.sampler_logprobs), f"{len(c.token_ids)} tokens, {len(c.sampler_logprobs)}"
        start, n = len(ids), len(c.token_ids)
        ids += [*c.prompt_ids, *c.token_ids]
        positions += range(c.num_tokens)
        segments += [number] * c.num_tokens
        first = start + len(c.prompt_ids) - 1  # the prompt's last state predicts the first token
        columns["index"] += range(first, first + n)
        columns["id"] += c.token_ids
        columns["sequence"] += [number] * n
        columns["length"] += [n] * n
        columns["advantage"] += [c.advantage] * n
        columns["logprob"] += c.sampler_logprobs
    filler = 0 if ids else EMPTY_ROW_TOKENS
    filler += -(len(ids) + filler) % block
    ids += [0] * filler
    positions += range(filler)
    segments += [-1] * filler

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)

    return MicroBatch(
        completions=row, input_ids_S=integers(ids), positions_S=integers(positions), segment_ids_S=integers(segments),
        target_index_N=integers(columns["index"]), target_ids_N=integers(columns["id"]),
        sequence_N=integers(columns["sequence"]), lengths_N=floats(columns["length"]),
        advantages_N=floats(columns["advantage"]), sampler_logprobs_N=floats(columns["logprob"]),
    )
