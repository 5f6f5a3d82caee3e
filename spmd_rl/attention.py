"""Attention over packed rows: a token sees the earlier tokens of its own segment, and its prompt where others share it.

`packed_attention` has the signature of Transformers' attention interface, which `model` registers it under, so no model
class is patched. The row's segments reach it as the keyword `packed`; the mask argument stays empty.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "spmd_rl_packed"
MAX_COMPILATIONS = 128
BLOCK = 128  # queries and keys of one block of FlexAttention's mask
# FlexAttention's own. Never ROWS_GUARANTEED_SAFE: a query may see nothing of the first block that is computed for it.
KERNEL_OPTIONS: Any = {}
COUNTED_AT_ONCE = 2**24  # (query, block of keys) pairs whose counts are held at a time
# Keywords of Transformers' interface that change what attention is -> what they ask for.
UNSUPPORTED = {"softcap": "attention soft-capping", "s_aux": "attention sinks", "position_bias": "a position bias"}


def round_up(size: int) -> int:
    """The next multiple of BLOCK, at least one of them."""
    return max(1, -(-size // BLOCK)) * BLOCK


class PackedSegments:
    """Who sees whom in one row, and the masks that follow from it, made once for all layers."""

    def __init__(self, segments_3S: Tensor, lengths: Sequence[int] = (), boundaries_B: Tensor | None = None,
                 longest: int = 0) -> None:
        """lengths: the row lengths that FlexAttention is compiled for, rising; a row takes the next one, a row beyond
        the last a length of its own. The others as in MicroBatch."""
        self._segments_3S, self.boundaries_B, self.longest = segments_3S, boundaries_B, longest
        self.lengths = tuple(lengths)
        size = segments_3S.shape[1]
        self.length = next((n for n in lengths if n >= size), round_up(size))
        self._masks: dict[int | None, Any] = {}

    def bounds(self, window: int | None, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """(own_L, low_L, high_L), int32: query q sees keys own[q] to q and low[q] to before high[q].

        window: tokens that a position sees back, itself included; None is all. It counts in the sequence, where a
        completion follows its prompt. Queries from the row's end to `length` see nothing.
        """
        own, low, high = self._segments_3S
        place = torch.arange(own.numel(), dtype=torch.int32, device=own.device)
        if window is not None:
            position = place - own + high - low
            own = torch.maximum(own, place - (window - 1))
            low = low + (position - (window - 1)).clamp(min=0)
        beyond = length - own.numel()
        # Beyond any place: no key is at or after it and not after the query.
        return F.pad(own, (0, beyond), value=length), F.pad(low, (0, beyond)), F.pad(high, (0, beyond))

    def block_mask(self, window: int | None) -> Any:
        """FlexAttention's mask over `length` places, made once a window."""
        if window not in self._masks:
            self._masks[window] = self._make_block_mask(window)
        return self._masks[window]

    def _make_block_mask(self, window: int | None) -> Any:
        """From the bounds: torch's create_block_mask takes every pair of tokens, 10 GiB for a row of 32k tokens."""
        from torch.nn.attention.flex_attention import BlockMask

        own, low, high = self.bounds(window, self.length)

        def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return ((key >= own[query]) & (key <= query)) | ((key >= low[query]) & (key < high[query]))

        visible = visible_pairs(own, low, high)
        is_full = visible == BLOCK * BLOCK
        return BlockMask.from_kv_blocks(*_ordered((visible > 0) & ~is_full), *_ordered(is_full), BLOCK_SIZE=BLOCK,
                                        mask_mod=seen, seq_lengths=(self.length, self.length))

    @cached_property
    def roots(self) -> "Padded | None":
        """The segments that see themselves alone, as rows of a padded batch."""
        return self._padded(is_root=True)

    @cached_property
    def branches(self) -> "Padded | None":
        """The segments that see a shared prompt too."""
        return self._padded(is_root=False)

    def _padded(self, is_root: bool) -> "Padded | None":
        own, low, high = self._segments_3S.long()
        start, length = torch.unique_consecutive(own, return_counts=True)
        chosen = (low[start] == high[start]) == is_root
        start, length = start[chosen], length[chosen]
        if not start.numel():
            return None
        place_BQ, is_query_BQ = _columns(start, length)
        prompt_BP, is_prompt_BP = _columns(low[start], (high - low)[start])
        return Padded(place_BQ, is_query_BQ, torch.cat([prompt_BP, place_BQ], 1),
                      torch.cat([is_prompt_BP, is_query_BQ], 1))


@dataclass
class Padded:
    """B segments as rows of a batch: Q places of the longest; K keys, those of the longest prompt and then Q."""

    place_BQ: Tensor
    is_query_BQ: Tensor
    key_BK: Tensor
    is_key_BK: Tensor


def _columns(start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Places of B runs as rows of one length, (place_BC, valid_BC): a run's end is repeated, so that also a query that
    is not valid has keys."""
    column = torch.arange(int(length_B.max()), device=start_B.device)
    last_B = (length_B - 1).clamp(min=0)
    return start_B[:, None] + torch.minimum(column[None, :], last_B[:, None]), column[None, :] < length_B[:, None]


def visible_pairs(own_L: Tensor, low_L: Tensor, high_L: Tensor) -> Tensor:
    """How many of the pairs of each block of queries and block of keys see each other: (L / BLOCK, L / BLOCK), int32.

    A query sees two intervals, so a block of keys has as many of them as the two overlaps have.
    """
    size = own_L.numel()
    key = torch.arange(0, size, BLOCK, dtype=torch.int32, device=own_L.device)
    place = torch.arange(size, dtype=torch.int32, device=own_L.device)
    step = max(1, COUNTED_AT_ONCE // (key.numel() * BLOCK)) * BLOCK
    counts = []
    for at in range(0, size, step):
        own, low, high, query = (t[at:at + step, None] for t in (own_L, low_L, high_L, place))
        seen = (torch.minimum(key + BLOCK, query + 1) - torch.maximum(key, own)).clamp_(min=0)
        seen += (torch.minimum(key + BLOCK, high) - torch.maximum(key, low)).clamp_(min=0)
        counts.append(seen.view(-1, BLOCK, key.numel()).sum(1, dtype=torch.int32))
    return torch.cat(counts)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(number, indices) of the true entries of each row, as FlexAttention has them: (1, 1, rows) and (1, 1, rows,
    columns), int32, the true ones first."""
    indices = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]


def packed_attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                     scaling: float | None = None, sliding_window: int | None = None,
                     packed: PackedSegments | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of one packed row.

    query (1, heads, S, head size); key and value (1, key heads, S, head size). Returns (1, S, heads, head
    size) and None for the weights. Raises ValueError for what it would ignore silently, a soft cap say.
    """
    if packed is None:
        raise ValueError("packed_attention needs the row's segments as the keyword `packed`")
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{what} is not supported ({name} is {kwargs[name]!s:.40})")
    window = sliding_window if isinstance(sliding_window, int) and sliding_window > 0 else None
    is_half = query.dtype in (torch.bfloat16, torch.float16)  # it has no kernels for others
    if query.is_cuda and is_half and packed.boundaries_B is not None and flash_attention():
        return _flash(query, key, value, packed, window, scaling), None
    if query.is_cuda:
        out = _flex(query, key, value, packed, window, scaling)
    else:
        out = _per_segment(query, key, value, packed, window, scaling)
    return out.transpose(1, 2), None


def _per_segment(query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, window: int | None,
                 scaling: float | None) -> Tensor:
    """sdpa with an explicit mask over one segment a row: on a CPU the dense mask of the whole packed row
    would compute every pair of segments."""
    outs, places = [], []
    for padded in filter(None, (packed.roots, packed.branches)):
        if padded is packed.roots:
            # Keys beyond a segment's end come after all of its queries: one causal mask for all.
            place = torch.arange(padded.place_BQ.shape[1])
            back = place[:, None] - place[None, :]
            seen = ((back >= 0) if window is None else (back >= 0) & (back < window))[None]
        else:
            own, low, high = (bound[padded.place_BQ][:, :, None] for bound in packed.bounds(window, query.shape[2]))
            place_BQ1, key_B1K = padded.place_BQ[:, :, None], padded.key_BK[:, None, :]
            seen = (key_B1K >= own) & (key_B1K <= place_BQ1) | (key_B1K >= low) & (key_B1K < high)
            seen = seen & padded.is_key_BK[:, None, :]
        q = query[0][:, padded.place_BQ].transpose(0, 1)
        k, v = (t[0][:, padded.key_BK].transpose(0, 1) for t in (key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scaling,
                                             enable_gqa=query.shape[1] != key.shape[1])
        outs.append(out.transpose(1, 2)[padded.is_query_BQ])
        places.append(padded.place_BQ[padded.is_query_BQ])
    out_SHD = torch.cat(outs)[torch.cat(places).argsort()]
    return out_SHD.transpose(0, 1)[None]


@functools.cache
def flash_attention() -> Callable[..., Tensor] | None:
    """FlashAttention's function for rows of several sequences, where that package is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    # Other packages put folders of their own under the name.
    return getattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func", None)


def _flash(query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, window: int | None,
           scaling: float | None) -> Tensor:
    """FlashAttention over segments that see themselves alone: (1, S, heads, head size)."""
    attend = flash_attention()
    assert attend is not None and packed.boundaries_B is not None, "no FlashAttention, or a shared prompt"
    tokens = [t[0].transpose(0, 1) for t in (query, key, value)]
    return attend(*tokens, packed.boundaries_B, packed.boundaries_B, packed.longest, packed.longest,
                  softmax_scale=scaling, causal=True, window_size=(-1 if window is None else window - 1, 0),
                  deterministic=torch.are_deterministic_algorithms_enabled())[None]


def num_compilations() -> int:
    """Graphs that torch compiled in this process so far, forward and backward counted as one."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def filled_up(heads: Tensor, length: int) -> Tensor:
    """(1, heads, S, head size) with zeros up to `length`, in memory in the order (S, heads, head size) of the
    projections: the result of attention is then in it too, and needs no copy.

    With the same strides whether anything was filled or not, also those of axes of one item, which torch takes as they
    come: code is compiled for strides, and a row that has the length already would be compiled for again.
    """
    tokens = heads.transpose(1, 2)
    if length > tokens.shape[1]:
        tokens = F.pad(tokens, (0, 0, 0, 0, 0, length - tokens.shape[1]))
    return tokens.reshape(-1, tokens.shape[3]).view(tokens.shape).transpose(1, 2)


_compiled_flex = None
_met: set[tuple[Any, ...]] = set()


def _meet_all_lengths(query: Tensor, key: Tensor, packed: PackedSegments, scaling: float | None) -> None:
    """Compile for the other lengths of rows like these too, forward and backward, when the first one comes.

    Else the first short row may come late in a run, and its step take seconds longer than the others.
    """
    heads = (query.shape[1], key.shape[1], query.shape[3])
    kind = (*heads, query.dtype, query.requires_grad, torch.is_grad_enabled(), scaling, packed.lengths)
    if kind in _met:
        return
    _met.add(kind)
    # Hooks of their own: under gradient checkpointing what is saved would be taken for the layer's.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for length in packed.lengths:
            one_token = PackedSegments(torch.zeros(3, 1, dtype=torch.int32, device=query.device), (length,))
            row = [torch.zeros(1, 1, n, heads[2], dtype=query.dtype, device=query.device).transpose(1, 2)
                   .requires_grad_(query.requires_grad) for n in (heads[0], heads[1], heads[1])]
            out = _flex_filled(row[0], row[1], row[2], one_token, None, scaling)
            if out.requires_grad:
                torch.autograd.grad(out, row, torch.zeros_like(out))


def _flex(query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, window: int | None,
          scaling: float | None) -> Tensor:
    """FlexAttention, compiled for the lengths that rows are filled up to."""
    _meet_all_lengths(query, key, packed, scaling)
    return _flex_filled(query, key, value, packed, window, scaling)


def _flex_filled(query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, window: int | None,
                 scaling: float | None) -> Tensor:
    """FlexAttention, compiled once a length: dynamic shapes cost speed. The row is filled up to the length here and not
    before: blocks of the filler are skipped, while every other layer would compute it.

    A length is compiled with and without gradient. At the compiler's limit it would go on without compilation and hold
    all scores, 27 GiB for 16k tokens: an error is better.
    """
    global _compiled_flex
    if _compiled_flex is None:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    size = query.shape[2]
    query, key, value = (filled_up(t, packed.length) for t in (query, key, value))
    with torch._dynamo.config.patch(recompile_limit=MAX_COMPILATIONS, fail_on_recompile_limit_hit=True):
        out = _compiled_flex(query, key, value, block_mask=packed.block_mask(window), scale=scaling,
                             enable_gqa=query.shape[1] != key.shape[1], kernel_options=KERNEL_OPTIONS or None)
    return out[:, :, :size]
