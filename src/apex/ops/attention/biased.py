"""Attention with a mask and a bias that has a gradient, as protein models use it.

Letters: `...` batches, H heads, M queries, N keys, D the size of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _device, _library
from . import launches, native, reference
from .family import FAMILY, autocast_dtype, takes_head

# Kernels multiply the stride of a row by the rows of a tile, at most 128, in 32 bits.
LARGEST_ROW_STRIDE = 2**31 // 128


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    inf: float = 1e9,
) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias + (mask - 1) * inf) v, for query [..., H, M, D] and key, value [..., H, N, D].

    `mask` (1 to attend, 0 not to) and `bias` are broadcast to [..., H, M, N]. `mask` has no gradient.
    """
    dtype = autocast_dtype(query)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    check(query, key, value, mask, bias)
    mask = None if mask is None else mask.detach()
    if not runs_kernels(query, key):
        return native.attention(query, key, value, mask, bias, inf)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return AttentionFunction.apply(query, key, value, mask, bias, inf)
    return forward(query, key, value, mask, bias, inf, saves=False)[0]


def runs_kernels(query: Tensor, key: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    return takes_head(query) and query.numel() > 0 and key.numel() > 0 and _library.runs_triton(FAMILY, query)


def check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> None:
    """Raises for tensors that do not fit together."""
    if query.dim() < 3 or key.dim() != query.dim():
        raise ValueError(
            f"query and key have shapes {list(query.shape)} and {list(key.shape)}; both must be [..., heads, length, "
            "head size]"
        )
    if key.shape[:-2] != query.shape[:-2] or key.shape[-1] != query.shape[-1] or query.shape[-1] == 0:
        raise ValueError(
            f"query and key have shapes {list(query.shape)} and {list(key.shape)}; they may differ in their length only"
        )
    if value.shape != key.shape:
        raise ValueError(f"value has shape {list(value.shape)}, key has {list(key.shape)}; they must be equal")
    logits = (*query.shape[:-1], key.shape[-2])
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is not None and not _broadcasts(tensor.shape, logits):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, which does not broadcast to {list(logits)}")
    if not query.is_floating_point():
        raise TypeError(f"attention needs floating-point tensors, query is {query.dtype}")
    for name, tensor in (("key", key), ("value", value), ("mask", mask), ("bias", bias)):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}")
        if name in ("key", "value") and tensor is not None and tensor.dtype != query.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, query {query.dtype}; they must be equal")


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    padding = len(full) - len(shape)
    return padding >= 0 and all(size in (1, wanted) for size, wanted in zip(shape, full[padding:], strict=True))


class _Added(NamedTuple):
    """How a mask or a bias becomes what the kernels take: [groups, N] or [groups, H, M, N]."""

    group: int  # batches that share one
    expanded: tuple[int, ...] | None  # the shape to expand it to first, if any
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        if self.expanded is not None:
            tensor = tensor.expand(self.expanded)
        return tensor.reshape(self.shape).contiguous()


def _added(shape: tuple[int, ...], lead: tuple[int, ...], inner: tuple[int, ...]) -> _Added:
    """`shape`, broadcast to [*lead, *inner], with batches that share it kept together where they lie together."""
    padded = (1,) * (len(lead) + len(inner) - len(shape)) + shape
    outer = padded[: len(lead)]
    own = len(lead)
    while own and outer[own - 1] == 1:
        own -= 1
    shared = outer[:own] == lead[:own]
    outer = outer if shared else lead
    groups = math.prod(outer)
    expanded = (*outer, *inner)
    return _Added(
        math.prod(lead) // groups,
        None if expanded == padded else expanded,
        (groups, inner[-1]) if inner[:-1] == (1, 1) else (groups, *inner),
    )


class _Plan(NamedTuple):
    problem: launches.Problem
    mask: _Added | None
    bias: _Added | None


@functools.lru_cache(maxsize=4096)
def _plan(
    query: tuple[int, ...],
    key: tuple[int, ...],
    mask: tuple[int, ...] | None,
    bias: tuple[int, ...] | None,
    inf: float,
    dtype: torch.dtype,
) -> _Plan:
    *lead, heads, rows, head_dim = query
    columns = key[-2]
    batches = tuple(lead)
    of_mask = None if mask is None else _added(mask, batches, (1, 1, columns))
    of_bias = None if bias is None else _added(bias, batches, (heads, rows, columns))
    return _Plan(
        launches.Problem(
            math.prod(batches),
            heads,
            rows,
            columns,
            head_dim,
            dtype,
            inf,
            of_mask.group if of_mask else 0,
            of_bias.group if of_bias else 0,
        ),
        of_mask,
        of_bias,
    )


def _planned(
    query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float
) -> tuple[launches.Problem, Tensor | None, Tensor | None]:
    """The problem, and mask and bias as the kernels take them."""
    if mask is not None and mask.dim() > 1 and (mask.shape[-2] != 1 or (mask.dim() > 2 and mask.shape[-3] != 1)):
        # Of single logits, not of whole keys.
        bias = _folded(mask, bias, inf)
        mask = None
    problem, of_mask, of_bias = _plan(
        tuple(query.shape),
        tuple(key.shape),
        None if mask is None else tuple(mask.shape),
        None if bias is None else tuple(bias.shape),
        inf,
        query.dtype,
    )
    if of_mask is not None and mask is not None:
        if mask.dtype not in _library.TRITON_DTYPES:
            mask = mask.to(torch.float32)
        mask = of_mask.of(mask)
    if of_bias is not None and bias is not None:
        if bias.dtype not in _library.TRITON_DTYPES:
            bias = bias.to(torch.float32)
        bias = of_bias.of(bias)
    return problem, mask, bias


def _folded(mask: Tensor, bias: Tensor | None, inf: float) -> Tensor:
    terms = (mask.to(torch.float32) - 1) * inf
    return terms if bias is None else bias + terms


def _strided(tensor: Tensor) -> tuple[Tensor, launches.Strides]:
    """The tensor, copied if a kernel could not walk through it, and its strides of batch, head and row."""
    strides = _strides(tuple(tensor.shape), tensor.stride())
    if strides is None:
        tensor = tensor.contiguous()
        strides = _strides(tuple(tensor.shape), tensor.stride())
        assert strides is not None
    return tensor, strides


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> launches.Strides | None:
    if (strides[-1] != 1 and shape[-1] != 1) or strides[-2] >= LARGEST_ROW_STRIDE:
        return None
    batch = next_stride = None
    for size, stride in zip(reversed(shape[:-3]), reversed(strides[:-3]), strict=True):
        if size == 1:
            continue
        if batch is None:
            batch = stride
        elif stride != next_stride:
            return None
        next_stride = stride * size
    return batch or 0, strides[-3], strides[-2]


def _empty_like(tensor: Tensor) -> tuple[Tensor, launches.Strides]:
    """Memory for a result, laid out like `tensor` where possible, and its strides."""
    result = torch.empty_like(tensor)
    strides = _strides(tuple(result.shape), result.stride())
    return (result, strides) if strides is not None else _strided(fake_like(tensor))


def fake_like(tensor: Tensor) -> Tensor:
    """What `_empty_like` returns, for sizes that are not known yet too."""
    result = torch.empty_like(tensor)
    if _strides.__wrapped__(tuple(result.shape), result.stride()) is None:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return result


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    inf: float,
    *,
    saves: bool = True,
) -> tuple[Tensor, Tensor]:
    """Output and statistics, which are empty unless it `saves` them."""
    if not runs_kernels(query, key):
        problem = _planned(query, key, mask, bias, inf)[0]
        output = reference.attention(query, key, value, mask, bias, inf)
        return _empty_like(query)[0].copy_(output), query.new_zeros(problem.statistics_shape, dtype=torch.float32)
    problem, mask, bias = _planned(query, key, mask, bias, inf)
    query, q = _strided(query)
    key, k = _strided(key)
    value, v = _strided(value)
    output, out = _empty_like(query)
    statistics = query.new_empty(problem.statistics_shape if saves else (0,), dtype=torch.float32)
    device = query.device
    launch = launches.forward(problem, q, k, v, out, saves, device, _device.facts(device))
    launch(query, key, value, mask, bias, None, None, output, statistics)
    return output, statistics


def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    inf: float,
    bias_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if wanted, bias."""
    bias_grad = bias_grad and bias is not None
    if not runs_kernels(query, key):
        return reference.backward(dout, query, key, value, mask, bias, inf)
    problem, mask, added = _planned(query, key, mask, bias, inf)
    query, q = _strided(query)
    key, k = _strided(key)
    value, v = _strided(value)
    output, out = _strided(output)
    dout, g = _strided(dout)
    dquery, dq = _empty_like(query)
    dkey, dk = _empty_like(key)
    dvalue, dv = _empty_like(value)
    where = query.device, _device.facts(query.device)
    given = query, key, value, mask, added, None, None, output, dout, statistics
    if bias_grad and bias is not None:

        def run(batches: tuple[int, int], dlogits: Tensor) -> None:
            launch = launches.backward_keys(problem, q, k, v, out, g, dk, dv, batches, *where)
            launch(*given, None, dlogits, dkey, dvalue)
            launches.backward_stored(problem, k, dq, batches, *where)(dlogits, key, dquery)

        dbias = _bias_gradient(problem, query.device, run)
        return dquery, dkey, dvalue, _reduced(dbias, bias, query, key)
    delta = statistics.new_empty(statistics.shape[1:])
    launches.backward_queries(problem, q, k, v, out, g, dq, *where)(*given, delta, dquery)
    launches.backward_keys(problem, q, k, v, out, g, dk, dv, None, *where)(*given, delta, None, dkey, dvalue)
    return dquery, dkey, dvalue, None


def _bias_gradient(
    problem: launches.Problem, device: torch.device, run: Callable[[tuple[int, int], Tensor], None]
) -> Tensor:
    """The gradient of a bias [groups, H, M, N]: that of the logits, summed over the batches that share it.

    `run` writes the gradients of logits [batches, H, N, M] of some batches, given as the first one and their number.
    They are stored, part by part, because computing them a second time for the sum takes longer.
    """
    batch, group = problem.batch, problem.bias_group
    at_once = launches.batches_at_once(problem)
    shape = problem.heads, problem.columns, problem.rows
    dlogits = torch.empty((at_once, *shape), dtype=problem.dtype, device=device)
    if at_once >= group:
        sums = []
        for first in range(0, batch, at_once):
            count = min(at_once, batch - first)
            run((first, count), dlogits)
            sums.append(dlogits[:count].unflatten(0, (-1, group)).sum(1, dtype=torch.float32))
        total = sums[0] if len(sums) == 1 else torch.cat(sums)
    else:
        total = torch.zeros((batch // group, *shape), device=device)
        for index, of_group in enumerate(total):
            for first in range(0, group, at_once):
                count = min(at_once, group - first)
                run((index * group + first, count), dlogits)
                of_group += dlogits[:count].sum(0, dtype=torch.float32)
    return total.transpose(-1, -2)


def _reduced(dbias: Tensor, bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The gradient of what the kernels took, summed over what `bias` was broadcast along."""
    if dbias.numel() != bias.numel():
        full = (*query.shape[:-1], key.shape[-2])
        padded = (1,) * (len(full) - bias.dim()) + tuple(bias.shape)
        groups = dbias.shape[0]
        lead = padded[:-3] if math.prod(padded[:-3]) == groups else full[:-3]
        dbias = dbias.reshape(*lead, *full[-3:]).sum_to_size(padded)
    return torch.empty_like(bias, memory_format=torch.contiguous_format).copy_(dbias.reshape(bias.shape))


def forward_and_save(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float
) -> Tensor:
    """The forward of every such attention's autograd Function; arguments were checked."""
    ctx.inf = inf
    ctx.graph = None
    statistics = None
    wanted = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        output, statistics = torch.ops.apex.attention_forward(query, key, value, mask, bias, inf)
    elif runs_kernels(query, key) or True not in wanted:
        output, statistics = forward(query, key, value, mask, bias, inf)
    else:
        ctx.graph = native.Graph(
            lambda query, key, value, bias: native.attention(query, key, value, mask, bias, inf),
            (query, key, value, bias),
            (*wanted[:3], wanted[4]),
        )
        output = ctx.graph.output
    ctx.save_for_backward(query, key, value, mask, bias, output, statistics)
    return output


def backward_from_saved(
    ctx: Any, dout: Tensor, bias_grad: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The backward of every such attention's autograd Function: gradients of query, key, value, bias."""
    query, key, value, mask, bias, output, statistics = ctx.saved_tensors
    if torch.compiler.is_compiling():
        *gradients, dbias = torch.ops.apex.attention_backward(
            dout, query, key, value, mask, bias, output, statistics, ctx.inf, bias_grad
        )
        return *gradients, dbias if bias_grad else None
    if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
        return reference.backward(dout, query, key, value, mask, bias, ctx.inf)
    if ctx.graph is not None:
        dquery, dkey, dvalue, dbias = ctx.graph.backward(dout)
        return dquery, dkey, dvalue, dbias
    return backward(dout, query, key, value, mask, bias, output, statistics, ctx.inf, bias_grad)


class AttentionFunction(torch.autograd.Function):
    """The autograd node behind `attention`."""

    forward = staticmethod(forward_and_save)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        dquery, dkey, dvalue, dbias = backward_from_saved(ctx, dout, ctx.needs_input_grad[4])
        return dquery, dkey, dvalue, None, dbias, None
