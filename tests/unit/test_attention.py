"""Packed attention: a token sees its own sequence's past, and nothing of its neighbours."""

import importlib.machinery
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from spmd_rl import attention
from spmd_rl.attention import PackedSegments, packed_attention
from spmd_rl.batch import pack
from spmd_rl.config import ModelConfig
from spmd_rl.model import build, load_hf_config

# A number is a segment that stands alone, a negative one filler; (prompt, lengths) a prompt and segments that see it.
LAYOUTS = {"one": [9], "several": [3, 1, 7, 4], "filler": [5, 2, -6], "filler alone": [-8], "ones": [1] * 6,
           "shared": [(4, [3, 1, 5])], "shared of one": [(3, [4])],
           "several groups": [2, (1, [1, 2]), (5, [2, 6]), 3, -4],
           "empty ones": [(3, [0, 2, 0])], "nobody": [(4, [])]}


def segments_of(layout):
    """segments_3S of a layout."""
    columns = []

    def add(length, prompt=(0, 0)):
        columns.extend([(len(columns), *prompt)] * length)

    for entry in layout:
        prompt, branches = entry if isinstance(entry, tuple) else (entry, ())
        start = len(columns)
        for length in [1] * -prompt if prompt < 0 else [prompt]:
            add(length)
        for length in branches:
            add(length, (start, start + prompt))
    return torch.tensor(columns, dtype=torch.int32).T.contiguous()


def sees(layout, window):
    """Who sees whom by the sequences themselves: (S, S) bool. A token's sequence is its prompt and its segment, and the
    window counts in it."""
    size = segments_of(layout).shape[1]
    mask, place = torch.zeros(size, size, dtype=torch.bool), 0
    for entry in layout:
        prompt, branches = entry if isinstance(entry, tuple) else (entry, ())
        own = range(place, place + abs(prompt))
        sequences = [[at] for at in own] if prompt < 0 else [[*own]]
        start, place = place, place + abs(prompt)
        for length in branches:
            sequences.append([*range(start, start + prompt), *range(place, place + length)])
            place += length
        for sequence in sequences:
            for i, query in enumerate(sequence):
                first = 0 if window is None else max(0, i - window + 1)
                mask[query, sequence[first:i + 1]] = True
    return mask


def draw(size, heads=4, key_heads=2, head_dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, size, head_dim, generator=g) for h in (heads, key_heads, key_heads)]


def reference(query, key, value, mask, scaling):
    """Every pair of positions in float64, masked by hand: (1, S, heads, head size)."""
    repeat = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(repeat, 1), value.double().repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_attention_over_every_pair(close, layout, window):
    """Causal within a sequence, `window` tokens back at most (itself included), grouped key heads, any layout: values
    and gradients."""
    segments = segments_of(LAYOUTS[layout])
    tensors = [t.requires_grad_() for t in draw(segments.shape[1])]
    out, weights = packed_attention(None, *tensors, None, sliding_window=window, packed=PackedSegments(segments))
    assert weights is None
    expected = reference(*tensors, sees(LAYOUTS[layout], window), None)
    close(out.detach(), expected.detach(), 1e-6)
    weigh = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((out * weigh).sum(), tensors)
    for got, want in zip(found, torch.autograd.grad((expected * weigh).sum(), tensors)):
        close(got, want, 2e-6)


@pytest.mark.parametrize("scaling", [0.1, 1.0])
@pytest.mark.parametrize("heads, key_heads", [(4, 4), (4, 1), (6, 2)])
def test_scaling_and_key_heads_are_the_models(close, heads, key_heads, scaling):
    """The model's own scale, and key heads shared as it shares them."""
    segments = segments_of([4, 6])
    query, key, value = draw(10, heads, key_heads)
    out, _ = packed_attention(None, query, key, value, None, scaling=scaling, packed=PackedSegments(segments))
    close(out, reference(query, key, value, sees([4, 6], None), scaling), 1e-6)


@pytest.mark.parametrize("window", [None, 2])
def test_gradients_stay_in_the_sequence(window):
    """A token's output has no gradient by anything outside of its own sequence: exactly 0."""
    layout = [3, (4, [5, 2]), -2]
    segments, mask = segments_of(layout), sees(layout, window)
    tensors = [t.requires_grad_() for t in draw(segments.shape[1])]
    out, _ = packed_attention(None, *tensors, None, sliding_window=window, packed=PackedSegments(segments))
    for query in range(segments.shape[1]):
        _, by_key, by_value = torch.autograd.grad(out[0, query].sum(), tensors, retain_graph=True)
        touched = by_value.abs().sum((0, 1, 3)) > 0
        assert torch.equal(touched, mask[query])
        assert not by_key[:, :, ~mask[query]].any()


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mask_is_the_same_rule(layout, window):
    """Entry by entry; what is beyond the row sees nothing and is not seen."""
    packed = PackedSegments(segments_of(LAYOUTS[layout]))
    place = torch.arange(packed.length)
    mask = packed.block_mask(window).mask_mod(0, 0, place[:, None], place[None, :])
    right = sees(LAYOUTS[layout], window)
    assert torch.equal(mask[:len(right), :len(right)], right)
    assert not mask[len(right):].any() and not mask[:, len(right):].any()


MASK_TENSORS = [side + name for side in ("kv", "full_kv", "q", "full_q") for name in ("_num_blocks", "_indices")]
LONG_LAYOUTS = {
    "one": [1000], "on the edge": [128, 256, 128], "one over": [129, 255, 129], "many": [37] * 30,
    "shared": [(300, [200, 90, 1, 500])], "prompt of blocks": [(256, [128, 128, 60])], "short prompt": [(5, [400] * 3)],
    "mixed": [70, (130, [10, 300]), 64, (1, [1, 1]), (640, [0, 200, 56]), -90],
}


@pytest.mark.parametrize("counted_at_once", [1, 2**24])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
@pytest.mark.parametrize("layout", LONG_LAYOUTS)
def test_blocks_are_those_of_the_dense_mask(monkeypatch, layout, window, counted_at_once):
    """Absent, partial and full blocks are exactly what torch finds by looking at every pair, both ways round; a full
    one that is not skips the mask, a partial one that is absent costs time."""
    monkeypatch.setattr(attention, "COUNTED_AT_ONCE", counted_at_once)
    packed = PackedSegments(segments_of(LONG_LAYOUTS[layout]), lengths=[512, 2048])
    found = packed.block_mask(window)
    dense = create_block_mask(found.mask_mod, None, None, packed.length, packed.length, device="cpu")
    assert found.shape == dense.shape and found.BLOCK_SIZE == dense.BLOCK_SIZE
    for name in MASK_TENSORS:
        got, want = getattr(found, name), getattr(dense, name)
        assert got.dtype == want.dtype and torch.equal(got, want), name


def test_the_mask_of_a_long_row_is_small(largest_tensor):
    """64k tokens: no tensor has more than a share of the row's pairs, of which there are 4 billion."""
    segments = segments_of([(16384, [6144] * 8)])
    with largest_tensor() as largest:
        PackedSegments(segments).block_mask(None)
    assert largest.numel <= attention.COUNTED_AT_ONCE


@pytest.mark.parametrize("lengths, size, expected", [
    ((), 1, 128), ((), 128, 128), ((), 129, 256), ((512, 1024), 3, 512), ((512, 1024), 513, 1024),
    ((512, 1024), 1024, 1024), ((512, 1024), 1025, 1152)])
def test_a_row_takes_the_next_length(lengths, size, expected):
    """Few lengths are compiled: the next one; a row beyond all of them has its own, in whole blocks."""
    assert PackedSegments(segments_of([size]), lengths).length == expected


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_attention_gives_the_same(monkeypatch, close, layout, window):
    """The way taken on CUDA, with FlexAttention's own plain computation: filled up, masked, cut back."""
    monkeypatch.setattr(attention, "_compiled_flex", flex_attention)
    segments = segments_of(LAYOUTS[layout])
    packed = PackedSegments(segments, lengths=[256])
    tensors = draw(segments.shape[1])
    with torch.no_grad():
        out = attention._flex(*tensors, packed, window, 0.3)
    close(out.transpose(1, 2), reference(*tensors, sees(LAYOUTS[layout], window), 0.3), 1e-6)


def test_masks_are_made_once():
    """All layers of a kind share one mask."""
    packed = PackedSegments(segments_of([2, 3]))
    assert packed.block_mask(2) is packed.block_mask(2)
    assert packed.block_mask(2) is not packed.block_mask(None)


@pytest.mark.parametrize("keyword, word", [({"softcap": 30.0}, "soft-capping"), ({"softcap": 0.0}, "soft-capping"),
                                           ({"s_aux": torch.zeros(4)}, "sinks"),
                                           ({"position_bias": torch.zeros(1)}, "bias")])
def test_what_would_be_ignored_is_refused(keyword, word):
    """Other attention than the engine's, in silence."""
    packed = PackedSegments(segments_of([4]))
    with pytest.raises(ValueError, match=word):
        packed_attention(None, *draw(4), None, packed=packed, **keyword)


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
        found, _ = models[family](mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N,
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


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False):
    """The package's function by its documentation, plainly: tokens before heads, sequences one after the other, keys
    from window_size[0] before a query to window_size[1] after it (-1 is all), fewer key heads than query heads."""
    assert causal and dropout_p == 0 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff()
    assert max_seqlen_q == max_seqlen_k == lengths.max() and cu_seqlens_q[-1] == len(q)
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    mask = (sequence[:, None] == sequence[None, :]) & (back >= 0)
    if window_size[0] >= 0:
        mask &= back <= window_size[0]
    return reference(*(t.transpose(0, 1)[None] for t in (q, k, v)), mask, softmax_scale)[0].to(q.dtype)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", [[9], [3, 1, 7, 4], [1] * 6, []])
def test_flash_attention_is_called_as_documented(monkeypatch, completion, close, lengths, window):
    """Where that package is installed (a stand-in here), rows without shared prompts take it: the same values."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func, __spec__=importlib.machinery.ModuleSpec("flash_attn", None)))
    attention.flash_attention.cache_clear()
    mb = pack([completion([5] * (n - 1), prompt_ids=[1]) for n in lengths], torch.device("cpu"), block=4)
    packed = PackedSegments(mb.segments_3S, (), mb.boundaries_B, mb.longest)
    tensors = draw(mb.input_ids_S.numel())
    found = attention._flash(*tensors, packed, window, 0.3)
    attention.flash_attention.cache_clear()
    wanted, _ = packed_attention(None, *tensors, None, scaling=0.3, sliding_window=window, packed=packed)
    close(found, wanted, 1e-6)


def test_another_package_of_the_name_is_not_flash_attention(monkeypatch):
    """A folder `flash_attn` without that function: FlexAttention goes on serving all rows."""
    monkeypatch.setitem(sys.modules, "flash_attn",
                        types.SimpleNamespace(__spec__=importlib.machinery.ModuleSpec("flash_attn", None)))
    attention.flash_attention.cache_clear()
    assert attention.flash_attention() is None
    attention.flash_attention.cache_clear()


def test_a_shared_prompt_has_no_boundaries(completion):
    """Its completions see more than their own segment, which FlashAttention cannot say."""
    unit = [completion([5], prompt_ids=[1, 2]), completion([6, 7], prompt_ids=[1, 2])]
    assert pack([unit], torch.device("cpu")).boundaries_B is None
    copies = pack(unit, torch.device("cpu"), block=4)
    assert copies.boundaries_B.tolist() == [0, 3, 7, 8] and copies.longest == 4


def test_rows_of_one_length_share_a_compilation(monkeypatch, close):
    """FlexAttention is compiled once for rows of any segments, sizes and windows that take one length."""
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "_compiled_flex",
                        torch.compile(flex_attention, dynamic=False, backend="aot_eager"))
    before = attention.num_compilations()
    for seed, layout in enumerate([[9], [3, (4, [5, 2])], [200], [(100, [20] * 5)], [256], [-3]]):
        for window in (None, 3):
            segments = segments_of(layout)
            # As projections give them: tokens before heads.
            tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw(segments.shape[1], seed=seed)]
            with torch.no_grad():
                out = attention._flex(*tensors, PackedSegments(segments, lengths=[256]), window, None)
            close(out.transpose(1, 2), reference(*tensors, sees(layout, window), None), 2e-6)
    assert attention.num_compilations() == before + 1


def test_all_lengths_are_compiled_for_with_the_first_row(monkeypatch):
    """A run's first short row may come late: no step compiles then."""
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "_met", set())
    monkeypatch.setattr(attention, "_compiled_flex",
                        torch.compile(flex_attention, dynamic=False, backend="aot_eager"))
    before = attention.num_compilations()
    for layout in ([300], [40, (10, [5])], [512], [900]):
        tensors = draw(segments_of(layout).shape[1], seed=1)
        with torch.no_grad():
            attention._flex(*tensors, PackedSegments(segments_of(layout), lengths=[256, 512, 1024]), None, None)
        assert attention.num_compilations() == before + 3


def test_compiling_for_all_lengths_leaves_a_checkpointed_layer_its_gradient(monkeypatch):
    """It runs forward and backward in the midst of the layer's forward. (Not FlexAttention, which has no backward on a
    CPU.)"""
    calls, backwards = [], []

    def blend(query, key, value, **kwargs):
        calls.append(query.shape[2])
        out = (query * key.repeat_interleave(2, 1)).tanh() + value.repeat_interleave(2, 1)
        out.register_hook(lambda gradient: backwards.append(gradient.shape[2]))
        return out

    monkeypatch.setattr(attention, "_met", set())
    monkeypatch.setattr(attention, "_compiled_flex", blend)
    packed = PackedSegments(segments_of([40, 60]), lengths=[128, 256])
    row = [t.requires_grad_() for t in draw(100)]
    out = checkpoint(lambda *row: attention._flex(*row, packed, None, None), *row, use_reentrant=False)
    found = torch.autograd.grad(out.sin().sum(), row)
    assert calls == [128, 256, 128, 128]  # all lengths, the row, the row again
    assert backwards == [128, 256, 128]
    for got, want in zip(found, torch.autograd.grad(blend(*row).sin().sum(), row), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_no_layer_reads_from_the_device(monkeypatch, model_folder, completion, family, reads):
    """Forward and backward the way that CUDA takes, on tensors without data: a host that waits for a value of the
    device fails here (and so does the test's own read of one)."""
    def on_device(query, key, value, packed, window, scaling):
        if reads:
            int(packed.block_mask(window).kv_num_blocks.max())
        return attention._flex(query, key, value, packed, window, scaling)

    def same_operands(query, key, value, block_mask, **kwargs):
        assert block_mask.shape[-1] == query.shape[2] == 128
        return query + key.repeat_interleave(query.shape[1] // key.shape[1], 1)

    monkeypatch.setattr(attention, "_per_segment", on_device)
    monkeypatch.setattr(attention, "_compiled_flex", same_operands)
    config = ModelConfig(path=model_folder(family, num_layers=2), dtype="float32")
    model = build(config, load_hf_config(config), 1.0).train()
    model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    mb = pack([[completion([5] * 9, prompt_ids=[1] * 30), completion([6, 7], prompt_ids=[1] * 30)]],
              torch.device("cpu"))

    def learn():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = [mode.from_tensor(t) for t in (mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N,
                                                  mb.target_ids_N)]
            logprobs_N, entropy_N = model(*fake, 0.7)
            (logprobs_N + entropy_N).sum().backward()

    if reads:
        with pytest.raises(DataDependentOutputException):
            learn()
    else:
        learn()


def test_the_documented_figure_is_the_mask(completion):
    """docs/shared_prompts.md draws a prompt of 4 with completions of 3 and 2, and a sequence of 3 beside them."""
    text = (Path(__file__).parents[2] / "docs" / "shared_prompts.md").read_text()
    lines = text.split("```")[1].strip().splitlines()[1:]
    drawn = [[mark == "#" for mark in line if mark in "#."] for line in lines]
    positions = [int(re.search(r"\d+", line)[0]) for line in lines]
    row = [[completion([1] * n, prompt_ids=[0] * 4) for n in (3, 2)], completion([1], prompt_ids=[0, 0])]
    mb = pack(row, torch.device("cpu"))
    mask = PackedSegments(mb.segments_3S).block_mask(None).mask_mod
    place = torch.arange(12)
    assert drawn == mask(0, 0, place[:, None], place[None, :]).tolist()
    assert positions == mb.positions_S.tolist()


@pytest.mark.parametrize("num_heads", [1, 2, 8])
@pytest.mark.parametrize("layout", ["projections", "heads first", "rotated"])
def test_rows_of_a_compiled_length_have_the_strides_of_filled_ones(num_heads, layout):
    """Whatever a model's own layout is, and for a single head too: compiled code is for strides, and every other row
    would be compiled for again. Values stay, filler is 0, and the gradient is the values' own."""
    found = []
    for size in (5, 8):
        heads = torch.randn(1, size, num_heads, 4, requires_grad=True)
        given = heads.transpose(1, 2)
        if layout == "heads first":
            given = given.contiguous()
        elif layout == "rotated":
            given = given * 2 + torch.cat((given[..., 2:], given[..., :2]), -1)
        filled = attention.filled_up(given, 8)
        assert torch.equal(filled[:, :, :size], given) and not filled[:, :, size:].any()
        filled.sum().backward()
        assert torch.equal(heads.grad, torch.full_like(heads, 3.0 if layout == "rotated" else 1.0))
        found.append(filled.stride())
    assert found[0] == found[1] == (8 * num_heads * 4, 4, num_heads * 4, 1)
