"""Attention of sequences that are split over the ranks of a context-parallel group."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..._arguments import checked
from ..._distributed import exchange
from ...ops.attention import varlen_attention
from ...ops.attention.op_common import autocast_dtype
from ...ops.attention.op_varlen import check_bounds, check_heads
from .. import parallel_state
from ._exchange import all_gather_attention, all_to_all_attention
from ._parts import check_documents
from ._ring import RingAttention
from ._rows import equal_bounds

COMMUNICATIONS = ("p2p", "all_gather", "a2a")


@checked
def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    group: Any = None,
    comm: str = "p2p",
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Return attention, shaped like the query, of sequences that are split over the ranks of `group`, two chunks each.

    Tensors are [sequence, batch, heads, head size], with this rank's part of the sequence as
    `get_batch_on_this_cp_rank` returns it. With `cu_seqlens`, the bounds of packed documents in the whole rows, they
    are [rows, heads, head size] as `get_thd_batch_on_this_cp_rank` returns them. Key and value may have fewer heads.
    `group` is the context-parallel group of the model by default.

    `comm` is the exchange between ranks: "p2p" passes keys around a ring while computing, "all_gather" collects all
    keys first, "a2a" exchanges heads for whole sequences. `window` is the number of keys before its own position that a
    query sees; it needs a causal mask and "all_gather" or "a2a". `max_seqlen`, at least the length of the longest
    document, saves time with `cu_seqlens`.
    """
    if comm not in COMMUNICATIONS:
        raise ValueError(f"comm={comm!r} must be one of {', '.join(map(repr, COMMUNICATIONS))}")
    if window is not None and (window < 0 or not causal or comm == "p2p"):
        raise ValueError(
            f'window={window} must be at least 0, and needs causal=True and comm="all_gather" or "a2a", got '
            f"causal={causal}, comm={comm!r}"
        )
    packed = cu_seqlens is not None
    if query.dim() != (3 if packed else 4):
        expected = "[rows, heads, head size] with cu_seqlens" if packed else "[sequence, batch, heads, head size]"
        raise ValueError(f"query has shape {list(query.shape)}, expected {expected}")
    if group is None and not parallel_state.is_unitialized():
        group = parallel_state.get_context_parallel_group()
    ranks = 1 if group is None else dist.get_world_size(group)
    dtype = autocast_dtype(query)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    (query_rows, key_rows, value_rows), layout = _packed((query, key, value), ranks, cu_seqlens, max_seqlen)
    bounds, _, longest = layout
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    elif not 0.0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be positive and finite")
    if ranks > 1:
        tensors, what = (query_rows, key_rows, value_rows), "context-parallel attention"
        query_rows, key_rows, value_rows = exchange.taking_part(tensors, group, what)
    masks: dict[str, Any] = {
        "causal": causal,
        "scale": scale,
        "window_size": (-1 if window is None else window, -1),
    }
    if ranks == 1:
        output: Any = varlen_attention(query_rows, key_rows, value_rows, bounds, longest, **masks)
    elif comm == "p2p":
        sequences = 0 if packed else query.shape[1]
        output = RingAttention.apply(query_rows, key_rows, value_rows, *layout, sequences, scale, causal, group)
    else:
        attend = all_gather_attention if comm == "all_gather" else all_to_all_attention
        output = attend(query_rows, key_rows, value_rows, layout, masks, group)
    return output if packed else output.unflatten(0, (query.shape[1], query.shape[0])).transpose(0, 1)


def _packed(
    tensors: tuple[Tensor, ...], ranks: int, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[list[Tensor], tuple[Tensor, int, int]]:
    """Return tensors as packed rows, and bounds, number of rows and greatest length of the whole sequences."""
    query = tensors[0]
    for name, tensor in zip(("key", "value"), tensors[1:], strict=True):
        if tensor.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, query {list(query.shape)}; they may differ in heads only"
            )
    if cu_seqlens is not None:
        check_heads(*tensors)
        total = query.shape[0] * ranks
        longest = total if max_seqlen is None else max_seqlen
        edges = check_bounds("", cu_seqlens, longest, total, query.device)
        check_documents(edges, total, ranks)
        if ranks > 1:  # exchanges need the bounds on the device; a single rank may use them on the host
            cu_seqlens = cu_seqlens.to(query.device, non_blocking=True)
        return [tensor.contiguous() for tensor in tensors], (cu_seqlens.long(), total, longest)
    length, batch = query.shape[0], query.shape[1]
    if ranks > 1 and length % 2:
        raise ValueError(
            f"this rank's part of the sequence has {length} rows; it must be two chunks of equal length: pad sequences "
            f"to a multiple of {2 * ranks}"
        )
    bounds = equal_bounds(batch, length * ranks, query.device)
    rows = [tensor.transpose(0, 1).flatten(0, 1).contiguous() for tensor in tensors]
    check_heads(*rows)
    return rows, (bounds, batch * length * ranks, length * ranks)
