"""Attention over packed rows: a token sees the earlier tokens of its own segment and no other.

`packed_attention` has the signature of Transformers' attention interface, which `policy` registers it
under, so no model class is patched. The row's segments reach it as the keyword `packed`; the mask
argument stays empty.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "spmd_rl_packed"
MAX_COMPILATIONS = 128


class PackedSegments:
    """Segments of one row, and the masks that follow from them, made once for all layers."""

    def __init__(self, segment_ids_S: Tensor) -> None:
        self.segment_ids_S = segment_ids_S
        self._masks: dict[int | None, Any] = {}

    def block_mask(self, window: int | None) -> Any:
        """FlexAttention's mask of who sees whom, made once a window.

        window: tokens that a position sees back, itself included; None is all. It counts within a
        segment, since tokens of a segment are neighbours in the row.
        """
        if window not in self._masks:
            self._masks[window] = self._make_block_mask(window)
        return self._masks[window]

    def _make_block_mask(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        segments = self.segment_ids_S

        def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed = (segments[query] == segments[key]) & (query >= key)
            return allowed if window is None else allowed & (query - key < window)

        size = segments.numel()
        return create_block_mask(seen, None, None, size, size, device=segments.device)

    @cached_property
    def padded_index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of one segment each: (place_BL, valid_BL, row-and-column of each token).

        B segments, filler included as one; L the longest. place_BL points into the row (0 where not valid).
        """
        _, counts = torch.unique_consecutive(self.segment_ids_S, return_counts=True)
        starts = counts.cumsum(0) - counts
        column = torch.arange(int(counts.max()), device=counts.device)
        valid_BL = column[None, :] < counts[:, None]
        place_BL = torch.where(valid_BL, starts[:, None] + column[None, :], 0)
        return place_BL, valid_BL, valid_BL.flatten().nonzero()[:, 0]


def packed_attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                     scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
                     packed: PackedSegments | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of one packed row.

    query (1, heads, S, head size); key and value (1, key heads, S, head size). Returns (1, S, heads, head
    size) and None for the weights. Raises ValueError for a soft cap, which would be ignored silently.
    """
    if packed is None:
        raise ValueError("packed_attention needs the row's segments as the keyword `packed`")
    if softcap is not None:
        raise ValueError(f"attention soft-capping ({softcap}) is not supported")
    window = sliding_window if isinstance(sliding_window, int) and sliding_window > 0 else None
    if query.is_cuda:
        out = _flex(query, key, value, packed.block_mask(window), scaling)
    else:
        out = _per_segment(query, key, value, packed, window, scaling)
    return out.transpose(1, 2), None


def _per_segment(query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, window: int | None,
                 scaling: float | None) -> Tensor:
    """sdpa with an explicit mask over one segment a row: on a CPU the dense mask of the whole packed row
    would compute every pair of segments."""
    place_BL, valid_BL, token_S = packed.padded_index
    length = place_BL.shape[1]
    back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    # Keys beyond a segment's end come after all of its queries: the causal mask hides them.
    q, k, v = (t[0][:, place_BL].transpose(0, 1) for t in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None], scale=scaling,
                                         enable_gqa=query.shape[1] != key.shape[1])
    out_SHD = out.transpose(1, 2).flatten(0, 1)[token_S]
    return out_SHD.transpose(0, 1)[None]


_compiled_flex = None


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None) -> Tensor:
    """FlexAttention, compiled once a length: dynamic shapes cost speed, and `pack` rounds lengths.

    A length is compiled with and without gradient, and for each window. At the compiler's limit it would go on without
    compilation and hold all scores, 27 GiB for 16k tokens: an error is better.
    """
    global _compiled_flex
    if _compiled_flex is None:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=MAX_COMPILATIONS, fail_on_recompile_limit_hit=True):
        return _compiled_flex(query, key, value, block_mask=mask, scale=scaling,
                              enable_gqa=query.shape[1] != key.shape[1])
