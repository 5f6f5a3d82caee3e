"""Sharing out, packing rows, laying them out: nothing is lost, doubled, or shifted."""

import itertools
import math
import random
import statistics
import time

import pytest
import torch

from spmd_rl.batch import (EMPTY_ROW_TOKENS, MIN_SAVING, StepTotals, cost, deal, deal_groups, fit, num_tokens,
                           pack, plan_rows, plan_step, share_prompts)
from spmd_rl.flops import ModelShape

CPU = torch.device("cpu")


def draw_lengths(seed, count, longest=40):
    return [random.Random(seed).randint(1, longest) for _ in range(count)] if count else []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_deal_gives_every_item_once_and_balances(num_ranks, count):
    """Every index goes to one rank; loads differ by at most the largest cost."""
    costs = draw_lengths(count + num_ranks, count)
    shares = deal(costs, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(i for share in shares for i in share) == list(range(count))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_deal_by_hand():
    """The largest difference is taken against the next: 7 and 5 differ by 2, 4 and 3 by 1, their join by 1 (7 + 3
    against 5 + 4), and the 1 goes to the lighter side: 10 and 10. Longest first would give the same loads here, but
    not for 8, 7, 6, 5, 4: it has 8 + 5 + 4 and 7 + 6, differencing 14 and 16."""
    assert sorted(deal([3, 7, 5, 1, 4], 2)) == [[0, 1], [2, 3, 4]]
    loads = sorted(sum([8, 7, 6, 5, 4][i] for i in share) for share in deal([8, 7, 6, 5, 4], 2))
    assert loads == [14, 16]
    assert sorted(map(len, deal([2, 2, 2], 2))) == [1, 2]
    assert deal([5], 3).count([]) == 2


@pytest.mark.parametrize("max_tokens", [1, 10, 40, 97, 10_000])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_rows_hold_every_sequence_once_within_the_budget(max_tokens, count):
    """A row is within the budget, or is one sequence longer than it; no row is empty."""
    lengths = draw_lengths(count, count)
    rows = plan_rows(lengths, max_tokens)
    assert sorted(i for row in rows for i in row) == list(range(count))
    for row in rows:
        assert sum(lengths[i] for i in row) <= max_tokens or len(row) == 1


def test_rows_by_hand():
    """First fit in order of decreasing length, budget 10: 12 alone; 6 + 4; 5 + 5 (the 4 no longer fits 6 + 4)."""
    assert plan_rows([5, 6, 12, 4, 5], 10) == [[2], [1, 3], [0, 4]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [8, 50, 4096])
@pytest.mark.parametrize("count", [0, 1, 3, 17])
def test_every_rank_has_as_many_rows(completion, num_ranks, max_tokens, count):
    """All ranks pass the same number of rows, at least one: gathers are collective. Every completion is in one row.

    A rank without completions gets rows without targets.
    """
    lengths = draw_lengths(num_ranks + count, count, 20)
    completions = [completion([7] * n, prompt_ids=[1] * (n % 3 + 1), sample=i) for i, n in enumerate(lengths)]
    plan = plan_step(completions, num_ranks, max_tokens)
    assert len(plan) == num_ranks
    num_rows = {len(rows) for rows in plan}
    assert len(num_rows) == 1 and num_rows.pop() >= 1
    assert any(all(rows) for rows in plan) or not count, "a row more than the most loaded rank needs"
    placed = [c.sample for rows in plan for row in rows for unit in row for c in unit]
    assert sorted(placed) == list(range(count))
    for row in (row for rows in plan for row in rows):
        assert len(row) <= 1 or sum(map(num_tokens, row)) <= max_tokens


def test_completions_without_tokens_are_left_out_and_not_counted(completion):
    """A completion of no token has nothing to train on: in no row, in neither normaliser."""
    completions = [completion([], sample=0), completion([7, 8], sample=1), completion([], sample=2)]
    plan = plan_step(completions, 2, 100)
    assert sorted([[[c.sample for c in unit] for unit in row] for row in rows] for rows in plan) == [[[]], [[[1]]]]
    assert StepTotals.of(completions) == StepTotals(tokens=2, sequences=1)


@pytest.mark.parametrize("block", [1, 4, 7, 64])
def test_pack_by_hand(completion, block):
    """Each target's place is that of the token before it, and everything else stands beside the right target.

    Off by one, a token would be predicted from itself.
    """
    row = [completion([11, 12, 2], prompt_ids=[5, 6], advantage=0.5, logprobs=[-0.1, -0.2, -0.3]),
           completion([2], prompt_ids=[8], advantage=-2.0, logprobs=[-4.0])]
    mb = pack(row, CPU, block)
    size = -(-7 // block) * block
    filler = size - 7
    assert mb.input_ids_S.tolist()[:7] == [5, 6, 11, 12, 2, 8, 2]
    assert mb.positions_S.tolist() == [0, 1, 2, 3, 4, 0, 1] + [0] * filler
    assert mb.segments_3S.tolist() == [[0, 0, 0, 0, 0, 5, 5, *range(7, size)], [0] * size, [0] * size]
    assert mb.input_ids_S.numel() == size
    assert mb.target_index_N.tolist() == [1, 2, 3, 5]
    assert mb.target_ids_N.tolist() == [11, 12, 2, 2]
    assert mb.sequence_N.tolist() == [0, 0, 0, 1]
    assert mb.lengths_N.tolist() == [3, 3, 3, 1]
    assert mb.advantages_N.tolist() == [0.5, 0.5, 0.5, -2.0]
    assert mb.sampler_logprobs_N.tolist() == pytest.approx([-0.1, -0.2, -0.3, -4.0])
    assert mb.num_targets == 4
    assert mb.target_ids_N.tolist() == mb.input_ids_S[mb.target_index_N + 1].tolist()


@pytest.mark.parametrize("block", [1, 8, 128])
@pytest.mark.parametrize("seed", range(3))
def test_case_10_trained_ids_are_the_engines_ids_one_by_one(completion, seed, block):
    """A segment of the row is the prompt's ids as the engine reported them and the sampled ids, element by element."""
    rng = random.Random(seed)
    row = [completion([rng.randrange(320) for _ in range(rng.randint(1, 9))],
                      prompt_ids=[rng.randrange(320) for _ in range(rng.randint(1, 9))]) for _ in range(5)]
    mb = pack(row, CPU, block)
    for number, c in enumerate(row):
        start = mb.segments_3S[0].unique()[number]
        assert mb.input_ids_S[mb.segments_3S[0] == start].tolist() == c.prompt_ids + c.token_ids
        assert mb.target_ids_N[mb.sequence_N == number].tolist() == c.token_ids


@pytest.mark.parametrize("block", [1, 8, 13, 128])
def test_an_empty_row_is_filler_alone(block):
    """A row without sequences has tokens to pass through every module, and no target."""
    mb = pack([], CPU, block)
    assert mb.num_targets == 0
    assert mb.input_ids_S.numel() >= EMPTY_ROW_TOKENS and mb.input_ids_S.numel() % block == 0
    assert mb.segments_3S[0].tolist() == list(range(mb.input_ids_S.numel()))  # each alone


# Ids 0 and 2 stand for pad and EOS in turn: 2 is EOS, pad is 2 or 0, and the filler is 0.
@pytest.mark.parametrize("token_ids", [[9, 4, 2], [2], [0, 0, 2], [2, 2, 2], [0], [9, 4, 0]])
@pytest.mark.parametrize("size", [5, 8])
def test_case_12_the_mask_comes_from_lengths(completion, token_ids, size):
    """A completion's tokens are trained, all of them and nothing after, whatever ids pad and EOS have.

    Comparing ids with the pad's loses EOS where pad = EOS ([1,1,0,0,0]), or trains the filler.
    """
    mb = pack([completion(token_ids, prompt_ids=[7])], CPU, block=size + 1)
    mask = torch.zeros(mb.input_ids_S.numel(), dtype=torch.long)
    mask[mb.target_index_N + 1] = 1
    n = len(token_ids)
    assert mask.tolist() == [0] + [1] * n + [0] * (size - n)
    assert mb.target_ids_N.tolist() == token_ids  # its last one, EOS, too


def test_pack_checks_that_every_token_has_a_logprob(completion):
    """A log-prob too few would shift all that follow in the row."""
    with pytest.raises(AssertionError, match="3 tokens, 2"):
        pack([completion([1, 2, 3], logprobs=[-1.0, -1.0])], CPU)


@pytest.mark.parametrize("shared_prompt", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [8, 30, 1000])
def test_case_01_targets_of_a_step_do_not_depend_on_the_layout(completion, num_ranks, max_tokens, shared_prompt):
    """(token, length, advantage) of all rows of all ranks is one multiset, for any ranks and any budget."""
    lengths = draw_lengths(5, 9, 12)
    completions = [completion([50 + i] * n, advantage=i - 4.0, group=i % 3) for i, n in enumerate(lengths)]
    found = []
    for rows in plan_step(completions, num_ranks, max_tokens, shared_prompt):
        for mb in (pack(row, CPU, block=4) for row in rows):
            found += zip(mb.target_ids_N.tolist(), mb.lengths_N.tolist(), mb.advantages_N.tolist())
    assert sorted(found) == sorted((50 + i, n, i - 4.0) for i, n in enumerate(lengths) for _ in range(n))


# Shared prompts. ------------------------------------------------------------------------------------------------------

QWEN_1_7B = ModelShape(linear_parameters=28 * 50_331_648, windows=(None,) * 28, query_width=2048, vocabulary=151936,
                       hidden=2048)


def group_of(completion, lengths, prompt=(5, 6, 7), group=0):
    return [completion([50 + i] * n, prompt_ids=prompt, group=group, sample=i, advantage=float(i), logprobs=[-i] * n)
            for i, n in enumerate(lengths)]


def test_a_shared_prompt_by_hand(completion):
    """The prompt once; each completion at the positions after it, its first token predicted from the prompt's last
    state; an empty one leaves no trace but its number."""
    mb = pack([group_of(completion, [2, 0, 1, 3])], CPU)
    assert mb.input_ids_S.tolist() == [5, 6, 7, 50, 50, 52, 53, 53, 53]
    assert mb.positions_S.tolist() == [0, 1, 2, 3, 4, 3, 3, 4, 5]
    assert mb.segments_3S.tolist() == [[0, 0, 0, 3, 3, 5, 6, 6, 6], [0] * 9, [0, 0, 0, 3, 3, 3, 3, 3, 3]]
    assert mb.target_index_N.tolist() == [2, 3, 2, 2, 6, 7]
    assert mb.target_ids_N.tolist() == [50, 50, 52, 53, 53, 53]
    assert mb.sequence_N.tolist() == [0, 0, 2, 3, 3, 3]
    assert mb.lengths_N.tolist() == [2, 2, 1, 3, 3, 3]
    assert mb.advantages_N.tolist() == [0, 0, 2, 3, 3, 3]
    assert mb.sampler_logprobs_N.tolist() == [0, 0, -2, -3, -3, -3]
    assert [c.sample for c in mb.completions] == [0, 1, 2, 3]
    for c in mb.completions:
        c.advantage += 1
    mb.take_advantages()
    assert mb.advantages_N.tolist() == [1, 1, 3, 4, 4, 4]


def test_units_stand_side_by_side(completion):
    """A shared group, a completion for one and a unit of one in a row: places count on, a unit of one is in one segment
    with its prompt."""
    alone = completion([9, 9], prompt_ids=[8], group=1)
    row = [group_of(completion, [1, 1]), alone, [alone], group_of(completion, [2, 1], prompt=(4,), group=2)]
    mb = pack(row, CPU, block=16)
    assert mb.segments_3S.tolist() == [
        [0, 0, 0, 3, 4, 5, 5, 5, 8, 8, 8, 11, 12, 12, 14, 15],
        [0] * 12 + [11] * 3 + [0], [0, 0, 0, 3, 3] + [0] * 7 + [12] * 3 + [0]]
    assert mb.positions_S.tolist() == [0, 1, 2, 3, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 0]
    assert mb.target_index_N.tolist() == [2, 2, 5, 6, 8, 9, 11, 12, 11]


def test_a_unit_has_one_prompt(completion):
    """Completions of other prompts in one group would see the first one's."""
    with pytest.raises(AssertionError, match="several prompts"):
        pack([[completion([1], prompt_ids=[5]), completion([1], prompt_ids=[6])]], CPU)


@pytest.mark.parametrize("lengths, room, expected", [
    ([4, 3, 2, 1], 100, [[0, 1, 2, 3]]), ([4, 3, 2, 1], 10, [[0, 1, 2, 3]]), ([4, 3, 2, 1], 9, [[0, 1, 2], [3]]),
    ([4, 3, 2, 1], 5, [[0, 3], [1, 2]]), ([4, 9, 1], 5, [[1], [0, 2]]), ([4, 3], -2, [[0], [1]])])
def test_a_group_that_does_not_fit_is_split(completion, lengths, room, expected):
    """Parts as few as the budget less the prompt allows; a completion beyond it, or a prompt, has a row of its own."""
    unit = group_of(completion, lengths)
    found = fit(unit, room + 3)
    assert [[c.sample for c in part] for part in found] == expected
    assert all(num_tokens(part) == 3 + sum(lengths[c.sample] for c in part) for part in found)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("max_tokens", [4, 20, 60, 1000])
def test_interleaved_groups_share_their_prompts(completion, num_ranks, max_tokens):
    """Completions of several groups in any order: each is in one unit with others of its group, in a row within the
    budget, and every rank has as many rows."""
    groups = [group_of(completion, draw_lengths(g, g + 1, 12), prompt=range(g + 1), group=g) for g in range(5)]
    mixed = [c for column in itertools.zip_longest(*groups) for c in column if c]
    plan = plan_step(mixed, num_ranks, max_tokens, True)
    assert len({len(rows) for rows in plan}) == 1
    units = [unit for rows in plan for row in rows for unit in row]
    assert all(len({c.group for c in unit}) == 1 for unit in units)
    assert sorted((c.group, c.sample) for unit in units for c in unit) == sorted((c.group, c.sample) for c in mixed)
    for row in (row for rows in plan for row in rows):
        assert sum(map(num_tokens, row)) <= max_tokens or [len(unit) for unit in row] == [1]
    if num_ranks == 1 and max_tokens == 1000:
        assert sorted(map(len, units)) == [1, 2, 3, 4, 5]


# Tokens of prompt and completions -> whether sharing saves 3 % of 1.7B's operations.
@pytest.mark.parametrize("prompt, lengths, pays", [
    (512, [1024] * 8, True), (64, [1024] * 8, True), (16, [1024] * 8, False), (1, [1] * 8, True), (512, [1024], False),
    (100, [1024] * 2, True), (60, [1024] * 2, False)])
def test_auto_shares_where_it_pays(completion, prompt, lengths, pays):
    """By the model's arithmetic, group by group."""
    unit = group_of(completion, lengths, prompt=[1] * prompt)
    copies = QWEN_1_7B.of_copies(prompt, lengths).forward
    assert (QWEN_1_7B.of(prompt, lengths).forward <= (1 - MIN_SAVING) * copies) == pays
    other = group_of(completion, [5, 5], prompt=[1] * 50, group=1)
    found = share_prompts([*unit, *other], "auto", QWEN_1_7B)
    assert sorted(map(len, found)) == sorted(([len(lengths)] if pays else [1] * len(lengths)) + [2])
    assert all(len(u) == 1 for u in share_prompts(unit, False, QWEN_1_7B))
    assert len(share_prompts(unit, True, QWEN_1_7B)) == 1


# Balance over ranks. --------------------------------------------------------------------------------------------------


def log_normal_groups(completion, seed, num_groups=64, size=8, sigma=0.8):
    draw = random.Random(seed)

    def length(median):
        return max(1, round(draw.lognormvariate(math.log(median), sigma)))

    return [group_of(completion, [length(1024) for _ in range(size)], [1] * length(512), g) for g in range(num_groups)]


def test_groups_are_dealt_evenly_and_fast(completion):
    """200 draws of 64 whole groups of 8 with log-normal lengths (sigma 0.8) over 8 ranks: the most loaded rank's
    operations over the mean are at most 1.03 in the median and 1.06 in the worst, and dealing takes below 50 ms."""
    ratios, seconds = [], []
    for seed in range(200):
        groups = log_normal_groups(completion, seed)
        start = time.process_time()
        shares = deal_groups(groups, 8, QWEN_1_7B)
        seconds.append(time.process_time() - start)
        assert sorted(len(unit) for share in shares for unit in share) == [8] * 64
        loads = [sum(cost(unit, QWEN_1_7B) for unit in share) for share in shares]
        ratios.append(max(loads) / (sum(loads) / 8))
    assert statistics.median(ratios) <= 1.03 and max(ratios) <= 1.06
    assert statistics.median(seconds) < 0.05


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("a_rank", [8, 32, 33, 128])
def test_many_items_are_dealt_evenly_and_fast(num_ranks, a_rank):
    """The heaviest load is within 2 % of the mean, or one item that is larger; in a second or so."""
    draw = random.Random(num_ranks)
    costs = [draw.lognormvariate(0, 0.8) for _ in range(a_rank * num_ranks)]
    start = time.process_time()
    shares = deal(costs, num_ranks)
    assert time.process_time() - start < 1.5
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) <= max(1.02 * sum(loads) / num_ranks, max(costs) * (1 + 1e-9))


@pytest.mark.parametrize("num_groups, num_ranks", [(1, 2), (1, 8), (2, 8), (9, 8), (3, 2)])
def test_few_groups_are_split_over_many_ranks(completion, num_groups, num_ranks):
    """Whole groups would leave ranks idle: the heaviest rank has less than with whole groups, and no rank nothing."""
    groups = [group_of(completion, [100 + 10 * i for i in range(8)], [1] * 20, g) for g in range(num_groups)]
    shares = deal_groups(groups, num_ranks, QWEN_1_7B)
    loads = [sum(cost(unit, QWEN_1_7B) for unit in share) for share in shares]
    whole = -(-num_groups // num_ranks) * cost(groups[0], QWEN_1_7B)
    assert max(loads) < whole and min(loads) > 0
    assert sorted((c.group, c.sample) for share in shares for unit in share for c in unit) == \
        [(g, i) for g in range(num_groups) for i in range(8)]


def test_groups_stay_whole_where_that_is_even(completion):
    """A prompt is not computed twice for a balance that is there already."""
    groups = [group_of(completion, [100] * 8, [1] * 20, g) for g in range(8)]
    shares = deal_groups(groups, 4, QWEN_1_7B)
    assert [[len(unit) for unit in share] for share in shares] == [[8, 8]] * 4


def test_a_ranks_rows_fall_in_cost(completion):
    """Ranks wait for one another in each row at stage 3: heavy ones meet heavy ones, and empty ones come last."""
    for rows in plan_step([c for g in log_normal_groups(completion, 3, 12) for c in g], 4, 8192, True, QWEN_1_7B):
        costs = [sum(cost(unit, QWEN_1_7B) for unit in row) for row in rows]
        assert costs == sorted(costs, reverse=True)
