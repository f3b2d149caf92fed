"""Attention with a mask and a bias that has a gradient, as protein models use it.

Letters: `...` batches, H heads, M queries, N keys, D the size of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_floats, check_optional_tensors
from . import native, plans, reference
from .checks import check
from .family import FAMILY, autocast_dtype, takes_head


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
    check_floats(query=query, key=key, value=value)
    check_optional_tensors(mask=mask)
    if bias is not None:
        check_floats(bias=bias)
    dtype = autocast_dtype(query)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mask is not None and mask.requires_grad:
        mask = mask.detach()
    kernels = query.dim() > 2 and query.is_floating_point() and runs_kernels(query, key)
    compiling = torch.compiler.is_compiling()
    if compiling or not kernels or plans.folds(mask):
        check(query, key, value, mask, bias)  # else by the plan
    if not kernels:
        return native.attention(query, key, value, mask, bias, inf)
    if compiling or torch.is_grad_enabled():
        return AttentionFunction.apply(query, key, value, mask, bias, inf)
    return forward(query, key, value, mask, bias, inf, saves=False)[0]


def runs_kernels(query: Tensor, key: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    return takes_head(query) and query.numel() > 0 and key.numel() > 0 and _library.runs_triton(FAMILY, query)


def _kernel_inputs(mask: Tensor | None, bias: Tensor | None, inf: float) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias of which the mask is one of whole keys."""
    if mask is not None and plans.folds(mask):
        return None, plans.folded(mask, bias, inf)
    return mask, bias


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
        *lead, heads, rows, _ = query.shape
        planes = 1 if mask is None and bias is None else 2
        statistics = query.new_zeros((planes, math.prod(lead), heads, rows), dtype=torch.float32)
        output = reference.attention(query, key, value, mask, bias, inf)
        return plans.empty_like(query).copy_(output), statistics
    mask, bias = _kernel_inputs(mask, bias, inf)
    return plans.plan(query, key, value, mask, bias, inf).forward(query, key, value, mask, bias, saves)


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
    if not runs_kernels(query, key):
        return reference.backward(dout, query, key, value, mask, bias, inf)
    of_keys, added = _kernel_inputs(mask, bias, inf)
    plan = plans.plan(query, key, value, of_keys, added, inf)
    if output.stride() != plan.query.result_strides:
        output = torch.empty_strided(
            output.shape, plan.query.result_strides, dtype=output.dtype, device=output.device
        ).copy_(output)
    planned = plan.backward(dout.stride(), bias_grad and bias is not None)
    dquery, dkey, dvalue, dbias = planned.run(dout, query, key, value, of_keys, added, output, statistics)
    if dbias is None or bias is None:
        return dquery, dkey, dvalue, None
    dbias = _reduced(dbias, bias, query, key)
    return dquery, dkey, dvalue, torch.empty_like(bias, memory_format=torch.contiguous_format).copy_(dbias)


def _reduced(dbias: Tensor, bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The gradient of what the kernels took, summed over what `bias` was broadcast along."""
    if dbias.shape == bias.shape:
        return dbias
    if dbias.numel() != bias.numel():
        full = (*query.shape[:-1], key.shape[-2])
        padded = (1,) * (len(full) - bias.dim()) + tuple(bias.shape)
        groups = dbias.shape[0]
        lead = padded[:-3] if math.prod(padded[:-3]) == groups else full[:-3]
        dbias = dbias.reshape(*lead, *full[-3:]).sum_to_size(padded)
    return dbias.reshape(bias.shape)


def forward_and_save(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float
) -> Tensor:
    """The forward of every such attention's autograd Function; arguments were checked."""
    ctx.inf = inf
    ctx.graph = ctx.planned = statistics = None
    wanted = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        output, statistics = torch.ops.apex.attention_forward(query, key, value, mask, bias, inf)
    elif runs_kernels(query, key):
        if mask is not None and plans.folds(mask):
            output, statistics = forward(query, key, value, mask, bias, inf)
        else:
            plan = plans.plan(query, key, value, mask, bias, inf)
            output, statistics = plan.forward(query, key, value, mask, bias, True)
            # Planned here, for a gradient laid out as the output is: autograd's thread is slow at Python.
            ctx.planned = plan.backward(plan.query.result_strides, bias is not None and wanted[4])
    elif True in wanted:
        ctx.graph = native.Graph(
            lambda query, key, value, bias: native.attention(query, key, value, mask, bias, inf),
            (query, key, value, bias),
            (*wanted[:3], wanted[4]),
        )
        output = ctx.graph.output
    else:
        output, statistics = forward(query, key, value, mask, bias, inf)
    ctx.save_for_backward(query, key, value, mask, bias, output, statistics)
    return output


def backward_from_saved(
    ctx: Any, dout: Tensor, bias_grad: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The backward of every such attention's autograd Function: gradients of query, key, value, bias."""
    query, key, value, mask, bias, output, statistics = ctx.saved_tensors
    planned = ctx.planned
    if planned is not None and not torch.is_grad_enabled():
        if dout.stride() != planned.dout_strides:
            planned = planned.plan.backward(dout.stride(), planned.bias_grad)
        *gradients, dbias = planned.run(dout, query, key, value, mask, bias, output, statistics)
        return *gradients, None if dbias is None else _reduced(dbias, bias, query, key).to(bias.dtype)
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
