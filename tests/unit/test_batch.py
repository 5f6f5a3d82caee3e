"""Sharing out, packing rows, laying them out: nothing is lost, doubled, or shifted."""

import random

import pytest
import torch

from spmd_rl.batch import EMPTY_ROW_TOKENS, StepTotals, deal, pack, plan_rows, plan_step

CPU = torch.device("cpu")


def draw_lengths(seed, count, longest=40):
    return [random.Random(seed).randint(1, longest) for _ in range(count)] if count else []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_deal_gives_every_item_once_and_balances(num_ranks, count):
    """Every index goes to one rank; loads differ by at most the largest cost (longest first, least loaded rank)."""
    costs = draw_lengths(count + num_ranks, count)
    shares = deal(costs, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(i for share in shares for i in share) == list(range(count))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_deal_by_hand():
    """Longest first to the least loaded rank, ties to the lower index: 7 -> 0, 5 -> 1, 4 -> 1, 3 -> 0, 1 -> 1."""
    # Loads: 7|0, 7|5, 7|9, 10|9, 10|10.
    assert deal([3, 7, 5, 1, 4], 2) == [[0, 1], [2, 3, 4]]
    assert deal([2, 2, 2], 2) == [[0, 2], [1]]


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
    placed = [c.sample for rows in plan for row in rows for c in row]
    assert sorted(placed) == list(range(count))
    for row in (row for rows in plan for row in rows):
        assert len(row) <= 1 or sum(c.num_tokens for c in row) <= max_tokens


def test_completions_without_tokens_are_left_out_and_not_counted(completion):
    """A completion of no token has nothing to train on: in no row, in neither normaliser."""
    completions = [completion([], sample=0), completion([7, 8], sample=1), completion([], sample=2)]
    plan = plan_step(completions, 2, 100)
    assert [[[c.sample for c in row] for row in rows] for rows in plan] == [[[1]], [[]]]
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
    assert mb.positions_S.tolist() == [0, 1, 2, 3, 4, 0, 1, *range(filler)]
    assert mb.segment_ids_S.tolist() == [0, 0, 0, 0, 0, 1, 1] + [-1] * filler
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
        assert mb.input_ids_S[mb.segment_ids_S == number].tolist() == c.prompt_ids + c.token_ids
        assert mb.target_ids_N[mb.sequence_N == number].tolist() == c.token_ids


@pytest.mark.parametrize("block", [1, 8, 13, 128])
def test_an_empty_row_is_filler_alone(block):
    """A row without sequences has tokens to pass through every module, and no target."""
    mb = pack([], CPU, block)
    assert mb.num_targets == 0
    assert mb.input_ids_S.numel() >= EMPTY_ROW_TOKENS and mb.input_ids_S.numel() % block == 0
    assert set(mb.segment_ids_S.tolist()) == {-1}


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


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [8, 30, 1000])
def test_case_01_targets_of_a_step_do_not_depend_on_the_layout(completion, num_ranks, max_tokens):
    """(token, length, advantage) of all rows of all ranks is one multiset, for any ranks and any budget."""
    lengths = draw_lengths(5, 9, 12)
    completions = [completion([50 + i] * n, advantage=i - 4.0) for i, n in enumerate(lengths)]
    found = []
    for rows in plan_step(completions, num_ranks, max_tokens):
        for mb in (pack(row, CPU, block=4) for row in rows):
            found += zip(mb.target_ids_N.tolist(), mb.lengths_N.tolist(), mb.advantages_N.tolist())
    assert sorted(found) == sorted((50 + i, n, i - 4.0) for i, n in enumerate(lengths) for _ in range(n))
