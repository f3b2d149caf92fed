"""Attention within packed sequences whose queries, keys and values are tensors of their own, with masks.

`query` is [total of queries, H, D], `key` and `value` are [total of keys, heads of keys, D]. Sequence i has the queries
`cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]` and the keys `cu_seqlens_k[i]` to `cu_seqlens_k[i + 1]`. The host never waits
for the device: it reads the lengths only of bounds that are on the CPU.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_floats, check_tensors, integer, number, values_at_hand
from .._host import on_host
from .._op import Derivative, Kernels, Op, Saved
from . import reference
from .op_common import FAMILY, autocast_dtype, launch_packed_backward, launch_packed_forward, takes_head
from .op_packed import draw_seed


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax(scale * q k^T) v within every sequence, shaped like the query.

    The keys have the bounds of the queries unless `cu_seqlens_k` is given. `max_seqlen_q` and `max_seqlen_k` are at
    least the lengths of the longest sequences. If keys and values have fewer heads, consecutive heads of the query
    share one. The last query of a sequence has the position of its last key. With `causal`, a query sees no key after
    its own position. With `window_size=(left, right)` it sees at most `left` keys before its position and `right` after
    it, -1 for all. `scale` is 1 / sqrt(D) by default. Probabilities are dropped with probability `dropout_p`.

    Bounds may be on the CPU while the other tensors are on a GPU. Half-precision sequences of equal lengths then go
    through PyTorch's `scaled_dot_product_attention`, as a batch.

    Rows that see no key, and rows after the last sequence, are zeros. With `return_lse`, also returns the logarithm of
    each row's sum of exponentials, [H, total of queries], which has no gradient; it is -inf for rows that see no key.
    """
    check_tensors(query=query, key=key, value=value)
    dtype = autocast_dtype(query)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    own_keys = cu_seqlens_k is not None
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        if max_seqlen_k is not None and integer("max_seqlen_k", max_seqlen_k) < max_seqlen_q:
            raise ValueError(
                f"max_seqlen_k={max_seqlen_k} is less than max_seqlen_q={max_seqlen_q}; without cu_seqlens_k keys have "
                "the lengths of the queries"
            )
    if max_seqlen_k is None:
        max_seqlen_k = max_seqlen_q
    edges = _check(query, key, value, (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k), own_keys)
    left, right = _window(window_size, causal, max_seqlen_q, max_seqlen_k)
    if not 0.0 <= number("dropout_p", dropout_p) < 1.0:
        raise ValueError(f"dropout_p={dropout_p} is not in [0, 1)")
    if scale is None:
        scale = 1 / math.sqrt(query.shape[2])
    elif not 0.0 < number("scale", scale) < math.inf:
        raise ValueError(f"scale={scale} must be positive and finite")
    sequences = 0 if dropout_p or return_lse else _batch_size((query, key), edges, (left, right))
    if sequences:
        # `reshape` takes the host half the time of `unflatten`.
        batch = [tensor.reshape(sequences, -1, *tensor.shape[1:]).transpose(1, 2) for tensor in (query, key, value)]
        output = reference.batched_attention(*batch, causal=right == 0, scale=float(scale))
        return output.transpose(1, 2).reshape(query.shape)
    cu_seqlens_q, cu_seqlens_k = (bounds.to(query.device, non_blocking=True) for bounds in (cu_seqlens_q, cu_seqlens_k))
    seed = draw_seed(query.device) if dropout_p > 0 else None
    bounds_k = cu_seqlens_k if own_keys else None
    settings = (max_seqlen_q, max_seqlen_k, float(scale), left, right, float(dropout_p), return_lse)
    arguments = (query, key, value, cu_seqlens_q, bounds_k, seed, *settings)
    if not return_lse:
        return VARLEN_ATTENTION(*arguments)
    if torch.compiler.is_compiling() or not (_library.is_eager(query) and torch.is_grad_enabled()):
        output, statistics = VARLEN_ATTENTION.run_or_trace(*arguments)
    else:
        output, statistics = _WithLse.apply(*arguments)
    return output, statistics.detach()


class _WithLse(torch.autograd.Function):
    """The autograd node of packed attention that also returns the log of each row's sum of exponentials."""

    @staticmethod
    def forward(ctx, *arguments):  # type: ignore[no-untyped-def, override]
        results = VARLEN_ATTENTION.run(*arguments)
        ctx.mark_non_differentiable(results[1])
        return VARLEN_ATTENTION.save(ctx, arguments, results), results[1]

    @staticmethod
    def backward(ctx, dout, _):  # type: ignore[no-untyped-def, override]
        return *VARLEN_ATTENTION.backward_from_saved(ctx, dout), *(None,) * 10


def _window(window_size: tuple[int, int], causal: bool, longest: int, longest_keys: int) -> tuple[int, int]:
    """Return how many keys before and after its own position a query sees, -1 for all.

    A window of at least all keys is -1, because sums of a position and a number near 2^31 overflow in kernels.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size={window_size!r} must be (left, right), -1 for all keys")
    left, right = (integer("window_size", size) for size in window_size)
    if min(left, right) < -1:
        raise ValueError(f"window_size={tuple(window_size)} must be (left, right), each at least 0, or -1 for all keys")
    left = -1 if left > 0 and left >= longest_keys else left
    right = -1 if right > 0 and right >= longest else right
    return left, 0 if causal else right


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise if shapes [rows, heads, head size], dtypes or devices of query, key and value do not fit together."""
    check_floats(query=query, key=key, value=value)
    dtype, device = query.dtype, query.device
    shape, key_shape, value_shape = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    for name, tensor, sizes in (("query", query, shape), ("key", key, key_shape), ("value", value, value_shape)):
        if len(sizes) != 3 or not sizes[1] or not sizes[2]:
            raise ValueError(f"{name} has shape {list(sizes)}; it must be [total, heads, head size]")
        if tensor.dtype != dtype or tensor.device != device:
            kinds = f"{tensor.dtype} on {tensor.device}, query {dtype} on {device}"
            raise ValueError(f"{name} is {kinds}; they must be alike")
    if key_shape != value_shape:
        raise ValueError(f"key has shape {list(key_shape)}, value {list(value_shape)}; they must be equal")
    if shape[2] != key_shape[2] or shape[1] % key_shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads of {query.shape[2]}, key {key.shape[1]} of {key.shape[2]}; heads must "
            "have equal sizes, and the query's number must be a multiple of the key's"
        )


def check_bounds(name: str, bounds: Tensor, longest: int, rows: int, device: torch.device) -> list[int] | None:
    """Raise for bounds cu_seqlens_NAME of `rows` rows; return the bounds that the host can read without waiting."""
    longest_name, name = f"max_seqlen{name}", f"cu_seqlens{name}"
    check_tensors(**{name: bounds})
    if bounds.dim() != 1 or not bounds.shape[0]:
        raise ValueError(f"{name} has shape {list(bounds.shape)}; it must be [sequences + 1]")
    if bounds.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {bounds.dtype}; int32 and int64 are accepted")
    if bounds.device != device and not on_host(bounds):
        raise ValueError(f"{name} is on {bounds.device}, query on {device}")
    integer(longest_name, longest)
    edges = values_at_hand(bounds)
    if edges is None:
        return None
    lengths = [end - start for start, end in pairwise(edges)]
    if edges[0] != 0 or edges[-1] > rows or min(lengths, default=0) < 0:
        raise ValueError(f"{name}={edges} must grow from 0 to at most the {rows} rows it bounds")
    if lengths and max(lengths) > longest:
        raise ValueError(f"{longest_name}={longest} is less than the longest sequence, {max(lengths)} rows")
    return edges


def _check(
    query: Tensor, key: Tensor, value: Tensor, queries: tuple[Tensor, int], keys: tuple[Tensor, int], own_keys: bool
) -> tuple[list[int] | None, list[int] | None]:
    """Raise for arguments that do not fit together; return the bounds that the host can read without waiting."""
    check_heads(query, key, value)
    edges = check_bounds("_q", *queries, query.shape[0], query.device)
    edges_k = check_bounds("_k", *keys, key.shape[0], query.device) if own_keys else edges
    if keys[0].shape != queries[0].shape:
        shapes = f"{list(queries[0].shape)} and {list(keys[0].shape)}"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k have shapes {shapes}; they must be equal")
    if not own_keys and key.shape[0] != query.shape[0]:
        raise ValueError(
            f"query has {query.shape[0]} rows, key {key.shape[0]}; without cu_seqlens_k they must be equal"
        )
    return edges, edges_k


def _batch_size(
    tensors: tuple[Tensor, Tensor], edges: tuple[list[int] | None, list[int] | None], window: tuple[int, int]
) -> int:
    """Return the number of sequences if query and key are batches that PyTorch's attention takes, otherwise 0.

    Only half precision: PyTorch's attention computes float32 with grouped queries without its fused kernels.
    """
    lengths = []
    for tensor, bounds in zip(tensors, edges, strict=True):
        if bounds is None or len(bounds) < 2 or not bounds[1] or tensor.dtype.itemsize != 2:
            return 0
        # Rows after the last sequence, fewer than a sequence has, would become a part of the batch.
        if bounds[-1] != tensor.shape[0] or bounds != list(range(0, tensor.shape[0] + 1, bounds[1])):
            return 0
        lengths.append(bounds[1])
    # PyTorch aligns its causal mask to the first query and key; for equal lengths that makes no difference.
    takes = window == (-1, -1) or (window == (-1, 0) and lengths[0] == lengths[1])
    return tensors[0].shape[0] // lengths[0] if takes else 0


def takes(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, *others: Any) -> bool:
    """Return whether the kernels take tensors of these shapes."""
    longest, longest_keys = others[2:4]
    return (
        takes_head(query)
        and min(query.numel(), key.numel()) > 0
        and cu_seqlens_q.shape[0] > 1
        and min(longest, longest_keys) > 0
    )


def launch_forward(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    """Return output and statistics: the log of each row's sum of exponentials, [H, total]."""
    results = launch_packed_forward((query, key, value), others[:3], None, (*others[3:-1], True, False))
    return results or VARLEN_ATTENTION.run_reference(query, key, value, *others)


def launch_backward(dout: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key and value.

    `saved` is the saved tensors of `VARLEN_ATTENTION`, its settings and `wanted`.
    """
    wanted, options = saved[-1], (*saved[8:-2], True, False)
    gradients: Any = launch_packed_backward(
        dout, saved[:3], saved[3:6], saved[6:8], None, options, wanted[1] or wanted[2]
    )
    if gradients is None:
        return VARLEN_ATTENTION.run_reference_backward((dout,), saved[:8], saved[8:-1], wanted)
    dquery, dkey, dvalue = gradients
    return dquery if wanted[0] else None, dkey if wanted[1] else None, dvalue if wanted[2] else None


def _reference(query, key, value, bounds, bounds_k, seed, *settings):  # type: ignore[no-untyped-def]
    longest, longest_keys, scale, left, right, dropout_p, with_lse = settings
    bounds_k = bounds if bounds_k is None else bounds_k
    lengths, masks = (bounds, bounds_k, longest, longest_keys), (scale, left, right, dropout_p, seed)
    return reference.sdpa_varlen_attention(query, key, value, lengths, masks, with_lse)


def _formula(query, key, value, bounds, bounds_k, seed, *settings):  # type: ignore[no-untyped-def]
    longest, longest_keys, scale, left, right, dropout_p, *_ = settings
    bounds_k = bounds if bounds_k is None else bounds_k
    lengths, masks = (bounds, bounds_k, longest, longest_keys), (scale, left, right, dropout_p, seed)
    return reference.padded_varlen_attention(query, key, value, lengths, masks)


def _fake(query, *others):  # type: ignore[no-untyped-def]
    total, heads, _ = query.shape
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty((heads, total), dtype=statistics)


VARLEN_ATTENTION = Op(
    FAMILY,
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, "
    "int max_seqlen_q, int max_seqlen_k, float scale, int left, int right, float dropout_p, bool with_lse) "
    "-> (Tensor output, Tensor statistics)",
    reference=_reference,
    kernels=Kernels(launch_forward, launch_backward, takes),
    shapes=_fake,
    saved=Saved("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "seed", "output", "statistics"),
    derivative=Derivative(of=("query", "key", "value"), formula=_formula),
)
