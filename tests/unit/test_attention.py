"""Packed attention: a token sees its own segment's past, and nothing of its neighbours."""

import pytest
import torch

from spmd_rl.attention import PackedSegments, packed_attention
from spmd_rl.batch import pack
from spmd_rl.config import ModelConfig
from spmd_rl.model import build, load_hf_config

LAYOUTS = {"one": [9], "several": [3, 1, 7, 4], "filler": [5, 2, -6], "filler alone": [-8], "ones": [1] * 6}


def segments_of(lengths):
    """Segment ids of neighbouring segments; a negative length is filler."""
    return torch.tensor([-1 if n < 0 else i for i, n in enumerate(lengths) for _ in range(abs(n))])


def draw(size, heads=4, key_heads=2, head_dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, size, head_dim, generator=g) for h in (heads, key_heads, key_heads)]


def reference(query, key, value, segments, window, scaling):
    """Every pair of positions in float64, masked by hand: (1, S, heads, head size)."""
    repeat = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(repeat, 1), value.double().repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    for i in range(len(segments)):
        for j in range(len(segments)):
            if segments[i] != segments[j] or j > i or (window and i - j >= window):
                scores[..., i, j] = -torch.inf
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_attention_over_every_pair(close, layout, window):
    """Causal within a segment, `window` tokens back at most (itself included), grouped key heads, any layout."""
    segments = segments_of(LAYOUTS[layout])
    query, key, value = draw(len(segments))
    out, weights = packed_attention(None, query, key, value, None, sliding_window=window,
                                    packed=PackedSegments(segments))
    assert weights is None
    close(out, reference(query, key, value, segments, window, None), 1e-6)


@pytest.mark.parametrize("scaling", [0.1, 1.0])
@pytest.mark.parametrize("heads, key_heads", [(4, 4), (4, 1), (6, 2)])
def test_scaling_and_key_heads_are_the_models(close, heads, key_heads, scaling):
    """The model's own scale, and key heads shared as it shares them."""
    segments = segments_of([4, 6])
    query, key, value = draw(10, heads, key_heads)
    out, _ = packed_attention(None, query, key, value, None, scaling=scaling, packed=PackedSegments(segments))
    close(out, reference(query, key, value, segments, None, scaling), 1e-6)


@pytest.mark.parametrize("window", [None, 2])
def test_gradients_stay_in_the_segment(window):
    """A segment's output has no gradient by another's query, key or value: exactly 0."""
    segments = segments_of([3, 5, -2])
    tensors = [t.requires_grad_() for t in draw(len(segments))]
    out, _ = packed_attention(None, *tensors, None, sliding_window=window, packed=PackedSegments(segments))
    out[0, segments == 1].sum().backward()
    for t in tensors:
        assert torch.equal(t.grad[:, :, segments != 1], torch.zeros_like(t.grad[:, :, segments != 1]))
    assert tensors[2].grad.abs().sum() > 0


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mask_is_the_same_rule(layout, window):
    """Same segment, not later, within the window: entry by entry."""
    segments = segments_of(LAYOUTS[layout])
    place = torch.arange(len(segments))
    mask = PackedSegments(segments).block_mask(window).mask_mod(0, 0, place[:, None], place[None, :])
    for i in range(len(segments)):
        for j in range(len(segments)):
            right = segments[i] == segments[j] and j <= i and (window is None or i - j < window)
            assert bool(mask[i, j]) == bool(right)


def test_masks_are_made_once():
    """All layers of a kind share one mask."""
    packed = PackedSegments(segments_of([2, 3]))
    assert packed.block_mask(2) is packed.block_mask(2)
    assert packed.block_mask(2) is not packed.block_mask(None)


@pytest.mark.parametrize("softcap", [30.0, 50.0, 0.0])
def test_a_soft_cap_is_refused(softcap):
    """It would be ignored: other attention than the engine's, in silence."""
    packed = PackedSegments(segments_of([4]))
    with pytest.raises(ValueError, match="soft-capping"):
        packed_attention(None, *draw(4), None, softcap=softcap, packed=packed)


def test_a_call_without_segments_is_refused():
    """A path that loses the keyword would let every sequence see the others."""
    with pytest.raises(ValueError, match="packed"):
        packed_attention(None, *draw(4), None)


@pytest.fixture(scope="module")
def logprobs_of(model_folder):
    """A function from (family, completions, block) to each sequence's log-probs, in one packed row."""
    models = {}

    @torch.no_grad()
    def logprobs(family, row, block=1):
        if family not in models:
            config = ModelConfig(path=model_folder(family, num_layers=2), dtype="float32")
            models[family] = build(config, load_hf_config(config), 1.0).eval()
        mb = pack(row, torch.device("cpu"), block)
        found, _ = models[family](mb.input_ids_S, mb.positions_S, mb.segment_ids_S, mb.target_index_N,
                                  mb.target_ids_N, 1.0)
        return [found[mb.sequence_N == i] for i in range(len(row))]

    return logprobs


def sequence(completion, seed, prompt, length):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(320, (prompt + length,), generator=g).tolist()
    return completion(ids[prompt:], prompt_ids=ids[:prompt])


# gemma3 has a sliding window of 32 in every other layer: sequences of 50 go beyond it.
FAMILIES = ["qwen3", "gemma3"]
LENGTHS = [(3, 9), (20, 30), (1, 1), (10, 4)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", range(len(LENGTHS)))
def test_other_tokens_in_a_neighbour_change_nothing_bit_for_bit(logprobs_of, completion, family, place):
    """Any neighbour's tokens replaced by others: every other sequence's log-probs are equal bit for bit."""
    row = [sequence(completion, i, *size) for i, size in enumerate(LENGTHS)]
    before = logprobs_of(family, row)
    row[place] = sequence(completion, 100 + place, *LENGTHS[place])
    after = logprobs_of(family, row)
    for i in range(len(row)):
        assert torch.equal(before[i], after[i]) == (i != place)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [1, 16, 128])
def test_order_company_and_filler_change_no_logprob(logprobs_of, completion, close, family, block):
    """A sequence has the same log-probs alone, in any order and company, and before filler, to 1e-5."""
    row = [sequence(completion, i, *size) for i, size in enumerate(LENGTHS)]
    alone = [logprobs_of(family, [c])[0] for c in row]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [1, 3]):
        for place, found in zip(order, logprobs_of(family, [row[i] for i in order], block)):
            close(found, alone[place], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_padded_batch(logprobs_of, model_folder, completion, close, family):
    """Padded rows with mask and positions, the reference: the same log-probs to 1e-5, padded left or right."""
    from transformers import AutoModelForCausalLM

    row = [sequence(completion, i, *size) for i, size in enumerate(LENGTHS)]
    packed = logprobs_of(family, row)
    model = AutoModelForCausalLM.from_pretrained(model_folder(family, num_layers=2), dtype=torch.float32)
    longest = max(c.num_tokens for c in row)
    for left in (True, False):
        for c, found in zip(row, packed):
            pad = longest - c.num_tokens
            ids = c.prompt_ids + c.token_ids
            spans = ([256] * pad, ids) if left else (ids, [256] * pad)
            start = pad if left else 0
            mask = torch.zeros(1, longest, dtype=torch.long)
            mask[0, start:start + len(ids)] = 1
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([spans[0] + spans[1]]), attention_mask=mask,
                               position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[0, start:start + len(ids)]
            logprobs = logits.log_softmax(-1)[len(c.prompt_ids) - 1:-1]
            close(found, logprobs.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0], 1e-5)
