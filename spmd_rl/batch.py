"""Prompts, completions, and the packed micro-batches that the policy learns from.

Shape legend, used in names over the whole program:
    S  tokens of one packed row
    N  target tokens of one row: the positions whose log-prob is needed
    H  width of the hidden states
    V  vocabulary
    B  segments of a row
A packed row holds whole sequences (a prompt and one of its completions) one after the other, or a prompt
once and several of its completions after it. Token ids are the truth from the engine to the loss: nothing
is decoded and encoded again.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from spmd_rl.flops import Flops, ModelShape

EMPTY_ROW_TOKENS = 8  # a row without sequences still passes every module: ZeRO-3's gathers are collective
MIN_SAVING = 0.03  # share of a group's operations that sharing its prompt must save
MANY = 32  # items a rank from which the largest-first way of dealing is even enough
BALANCED = 1.06  # the heaviest rank's load over the mean that is good enough to leave units whole


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
    segments_3S: Tensor
    """What a token sees, as places in the row (int32): from the start of its own segment to itself, and from the start
    to before the end of its prompt's segment, which are equal where the prompt is in its own."""
    boundaries_B: Tensor | None
    """Starts of the row's segments and its end (int32), where none sees a shared prompt; else absent."""
    longest: int
    """Tokens of the longest segment."""
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


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Share out items by cost: indices for each rank, the loads nearly equal.

    Largest differencing (Karmarkar and Karp 1982): of partial solutions, the two whose ranks differ most are joined,
    the fuller ranks of the one with the emptier of the other. Of many items, where that takes seconds, the largest
    first to the least loaded rank (Graham 1969), which is as even then. Ties by order, so that every rank finds the
    same.
    """
    if len(costs) > MANY * num_ranks:
        loads = [(0.0, rank) for rank in range(num_ranks)]
        shares: list[list[int]] = [[] for _ in range(num_ranks)]
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            load, rank = loads[0]
            shares[rank].append(index)
            heapq.heapreplace(loads, (load + costs[index], rank))
        return [sorted(share) for share in shares]
    order = itertools.count()

    def entry(ranks: list[tuple[float, list[int]]]) -> tuple[float, int, list[tuple[float, list[int]]]]:
        ranks.sort(key=lambda rank: (-rank[0], rank[1]))
        return ranks[-1][0] - ranks[0][0], next(order), ranks

    heap = [entry([(cost, [i]), *((0.0, []) for _ in range(num_ranks - 1))]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        heapq.heappush(heap, entry(joined))
    ranks = heap[0][2] if heap else [(0.0, []) for _ in range(num_ranks)]
    return [sorted(items) for _, items in ranks]


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


Unit = Sequence[Completion]
"""Completions that are computed with one copy of their prompt."""
Row = list[Unit]


def plan_step(completions: Sequence[Completion], num_ranks: int, max_tokens: int,
              shared_prompt: bool | Literal["auto"] = False, shape: ModelShape = ModelShape()) -> list[list[Row]]:
    """Rows of units for each rank, every rank with the same number of them.

    All ranks know all lengths, so all find the same plan and no collective is needed. The rank with the most rows
    decides; the others get empty ones. A rank's rows are in order of falling cost: ranks that wait for one another in
    each row then wait little. Completions without trained tokens are left out.
    """
    trained = [c for c in completions if c.token_ids and c.is_trained]
    plans = []
    for share in deal_groups(share_prompts(trained, shared_prompt, shape), num_ranks, shape):
        units = [unit for group in share for unit in fit(group, max_tokens)]
        rows: list[Row] = [[units[i] for i in row] for row in plan_rows([num_tokens(u) for u in units], max_tokens)]
        plans.append(sorted(rows, key=lambda row: -sum(cost(unit, shape) for unit in row)))
    num_rows = max(1, *(len(plan) for plan in plans))
    return [plan + [[] for _ in range(num_rows - len(plan))] for plan in plans]


def share_prompts(completions: Sequence[Completion], shared_prompt: bool | Literal["auto"],
                  shape: ModelShape) -> list[Unit]:
    """Units of whole groups where their prompt is computed once, of one completion where not.

    "auto": where that saves at least MIN_SAVING of the group's operations; less is not worth a mask of more parts.
    """
    groups: dict[int, list[Completion]] = {}
    for c in completions:
        groups.setdefault(c.group, []).append(c)
    units: list[Unit] = []
    for group in groups.values():
        pays = bool(shared_prompt)
        if shared_prompt == "auto":
            lengths = [len(c.token_ids) for c in group]
            prompt_length = len(group[0].prompt_ids)
            copies = shape.of_copies(prompt_length, lengths).forward
            pays = shape.of(prompt_length, lengths).forward <= (1 - MIN_SAVING) * copies
        units += [group] if pays else [[c] for c in group]
    return units


def deal_groups(units: Sequence[Unit], num_ranks: int, shape: ModelShape) -> list[list[Unit]]:
    """Share out units by cost, whole where the ranks' loads are nearly equal then.

    Where they are not (few groups on many ranks) units are halved, and halved again: a prompt is computed once more
    for each part. The parts that make the heaviest rank lightest are taken.
    """
    mean = sum(cost(unit, shape) for unit in units) / num_ranks
    best: list[list[Unit]] = []
    least = float("inf")
    parts = 1
    while True:
        pieces = [piece for unit in units for piece in halves(unit, parts)]
        costs = [cost(piece, shape) for piece in pieces]
        shares = deal(costs, num_ranks)
        heaviest = max(sum(costs[i] for i in share) for share in shares)
        if heaviest < least:
            best, least = [[pieces[i] for i in share] for share in shares], heaviest
        if least <= BALANCED * mean or parts >= max((len(unit) for unit in units), default=1):
            return best
        parts *= 2


def halves(unit: Unit, parts: int) -> list[Unit]:
    """A unit's completions in at most `parts` units of nearly the same length."""
    shares = deal([len(c.token_ids) for c in unit], min(parts, len(unit)))
    return [[unit[i] for i in share] for share in shares if share]


def fit(unit: Unit, max_tokens: int) -> list[Unit]:
    """A unit in as few units as the token budget allows, each with a copy of the prompt."""
    room = max_tokens - len(unit[0].prompt_ids)
    return [[unit[i] for i in sorted(part)] for part in plan_rows([len(c.token_ids) for c in unit], room)]


def num_tokens(unit: Unit) -> int:
    """Tokens that a unit takes in a row."""
    return len(unit[0].prompt_ids) + sum(len(c.token_ids) for c in unit)


def work(rows: Sequence[Row], shape: ModelShape) -> Flops:
    """Forward of rows as they are computed."""
    units = [unit for row in rows for unit in row]
    return sum((shape.of(len(u[0].prompt_ids), [len(c.token_ids) for c in u]) for u in units), Flops())


def work_of_copies(rows: Sequence[Row], shape: ModelShape) -> Flops:
    """Forward of the same completions with a copy of the prompt for each."""
    units = [unit for row in rows for unit in row]
    return sum((shape.of_copies(len(u[0].prompt_ids), [len(c.token_ids) for c in u]) for u in units), Flops())


def cost(unit: Unit, shape: ModelShape) -> float:
    """Operations of a unit's forward and backward with recomputation."""
    return shape.of(len(unit[0].prompt_ids), [len(c.token_ids) for c in unit]).training(recomputed=1)


def minibatches(completions: Sequence[Completion], count: int) -> list[list[Completion]]:
    """Parts of whole groups, in order, as many groups in each as can be."""
    groups = list(dict.fromkeys(c.group for c in completions))
    part_of = {group: i * count // len(groups) for i, group in enumerate(groups)}
    return [[c for c in completions if part_of[c.group] == part] for part in range(count)]


def pack(row: Sequence[Completion | Unit], device: torch.device, block: int = 1) -> MicroBatch:
    """Lay units one after the other; an empty list gives a dummy row without targets.

    A completion that stands alone, in a unit or for one, follows its prompt in one segment. Of more, the prompt is a
    segment, and each completion one that sees the prompt's and itself; positions go on from the prompt in each.

    block: the row is filled up to a multiple of this many tokens, each alone in its segment and without target.
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: tuple[list[int], list[int], list[int]] = [], [], []
    completions: list[Completion] = []
    columns: dict[str, list] = {name: [] for name in ("index", "id", "sequence", "length", "advantage", "logprob")}

    def add_segment(tokens: Sequence[int], first_position: int, prompt_start: int, prompt_end: int) -> None:
        for column, value in zip(segments, (len(ids), prompt_start, prompt_end), strict=True):
            column.extend([value] * len(tokens))
        ids.extend(tokens)
        positions.extend(range(first_position, first_position + len(tokens)))

    def add_targets(c: Completion, last_of_prompt: int, start: int) -> None:
        """last_of_prompt: the place whose state predicts the first token; start: the place of that token."""
        n = len(c.token_ids)
        assert n == len(c.sampler_logprobs), f"{n} tokens, {len(c.sampler_logprobs)} log-probs"
        columns["index"] += [last_of_prompt, *range(start, start + n - 1)][:n]
        columns["id"] += c.token_ids
        columns["sequence"] += [len(completions)] * n
        columns["length"] += [n] * n
        columns["advantage"] += [c.advantage] * n
        columns["logprob"] += c.sampler_logprobs
        completions.append(c)

    for entry in row:
        unit = [entry] if isinstance(entry, Completion) else entry
        prompt_ids, start = unit[0].prompt_ids, len(ids)
        end = start + len(prompt_ids)
        assert all(c.prompt_ids == prompt_ids for c in unit), f"group {unit[0].group} has several prompts"
        if len(unit) == 1:
            add_segment([*prompt_ids, *unit[0].token_ids], 0, 0, 0)
            add_targets(unit[0], end - 1, end)
        else:
            add_segment(prompt_ids, 0, 0, 0)
            for c in unit:
                add_targets(c, end - 1, len(ids))
                add_segment(c.token_ids, len(prompt_ids), start, end)
    is_shared = any(start < end for start, end in zip(*segments[1:], strict=True))
    filler = 0 if ids else EMPTY_ROW_TOKENS
    for _ in range(filler + -(len(ids) + filler) % block):
        add_segment([0], 0, 0, 0)

    own = Counter(segments[0])  # each segment's start, in order -> its tokens

    def integers(values: Sequence, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)

    return MicroBatch(
        completions=completions, input_ids_S=integers(ids), positions_S=integers(positions),
        segments_3S=integers(segments, torch.int32),
        boundaries_B=None if is_shared else integers([*own, len(ids)], torch.int32), longest=max(own.values()),
        target_index_N=integers(columns["index"]), target_ids_N=integers(columns["id"]),
        sequence_N=integers(columns["sequence"]), lengths_N=floats(columns["length"]),
        advantages_N=floats(columns["advantage"]), sampler_logprobs_N=floats(columns["logprob"]),
    )
