"""The dense layers with autograd. The Functions have upstream's names and arguments, since clients call them by name.

They take inputs of any number of dimensions and compute as many gradients as are wanted. Under autocast they run in the
dtype they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._checks import check_tensors
from .launches import ActivationPlan
from .nodes import as_given, cast_like_autocast, differentiable_gradients, shaped
from .op import (
    FAMILY,
    activated_linear,
    activation_backward,
    as_rows,
    check_dense_gelu_dense,
    check_input,
    check_layer,
    fits,
    gelu,
    is_large,
    linear,
    plan_activation_backward,
)


class FusedDenseFunc(torch.autograd.Function):
    """A dense layer."""

    @staticmethod
    @as_given
    def forward(ctx, input, weight, bias):  # type: ignore[override]
        ctx.save_for_backward(input, weight)
        return shaped(linear(as_rows(input), weight, bias), input)

    @staticmethod
    @as_given
    def backward(ctx, grad_output):  # type: ignore[override]
        input, weight = ctx.saved_tensors
        return *_dense_gradients(ctx.needs_input_grad, input, weight, grad_output), (
            as_rows(grad_output).sum(0) if ctx.needs_input_grad[2] else None
        )


class DenseNoBiasFunc(torch.autograd.Function):
    """A dense layer without bias."""

    @staticmethod
    @as_given
    def forward(ctx, input, weight):  # type: ignore[override]
        ctx.save_for_backward(input, weight)
        return shaped(linear(as_rows(input), weight, None), input)

    @staticmethod
    @as_given
    def backward(ctx, grad_output):  # type: ignore[override]
        input, weight = ctx.saved_tensors
        return _dense_gradients(ctx.needs_input_grad, input, weight, grad_output)


def _dense_gradients(
    wanted: Sequence[bool], input: Tensor, weight: Tensor, dy: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    rows = as_rows(dy)
    return (
        shaped(rows.mm(weight), input) if wanted[0] else None,
        rows.t().mm(as_rows(input)) if wanted[1] else None,
    )


class FusedDenseGeluDenseFunc(torch.autograd.Function):
    """Two dense layers with gelu (the tanh form) between them; biases may be None."""

    @staticmethod
    @as_given
    def forward(ctx, input, weight1, bias1, weight2, bias2):  # type: ignore[override]
        if True not in ctx.needs_input_grad:
            return _infer_dense_gelu_dense(input, weight1, bias1, weight2, bias2)
        output, hidden, active = dense_gelu_dense_forward(as_rows(input), weight1, bias1, weight2, bias2)
        # Here, because autograd's thread runs Python at 0.6 times the speed.
        ctx.plan = plan_activation_backward(hidden, "gelu", ctx.needs_input_grad[2])
        ctx.save_for_backward(input, weight1, bias1, weight2, bias2, hidden, active)
        return shaped(output, input)

    @staticmethod
    @as_given
    def backward(ctx, grad_output):  # type: ignore[override]
        *inputs, hidden, active = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return differentiable_gradients(ctx.needs_input_grad, composed_dense_gelu_dense, inputs, grad_output)
        input, weight1, _, weight2, _ = inputs
        dx, *gradients = dense_gelu_dense_backward(
            as_rows(grad_output), as_rows(input), hidden, active, weight1, weight2, ctx.needs_input_grad, ctx.plan
        )
        return None if dx is None else shaped(dx, input), *gradients


def _infer_dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    active = activated_linear(as_rows(input), weight1, bias1, "gelu")
    return shaped(linear(active, weight2, bias2), input)


def dense_gelu_dense_forward(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the output of the first layer and its gelu, for an input of two dimensions."""
    hidden = linear(input, weight1, bias1)
    active = gelu(hidden)
    return linear(active, weight2, bias2), hidden, active


def dense_gelu_dense_backward(
    dy: Tensor,
    input: Tensor,
    hidden: Tensor,
    active: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    wanted: Sequence[bool] = (True,) * 5,
    plan: ActivationPlan | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Those gradients of input, weight1, bias1, weight2 and bias2 that are wanted."""
    dbias2 = dy.sum(0) if wanted[4] else None
    dweight2 = dy.t().mm(active) if wanted[3] else None
    dx = dweight1 = dbias1 = None
    if wanted[0] or wanted[1] or wanted[2]:
        dhidden, dbias1 = activation_backward(dy.mm(weight2), hidden, "gelu", wanted[2], True, plan)
        dweight1 = dhidden.t().mm(input) if wanted[1] else None
        dx = dhidden.mm(weight1) if wanted[0] else None
    return dx, dweight1, dbias1, dweight2, dbias2


def composed_dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    """The same in PyTorch's operators, differentiable any number of times."""
    hidden = functional.linear(input, weight1, bias1)
    return functional.linear(functional.gelu(hidden, approximate="tanh"), weight2, bias2)


def dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    """`input` [..., in] through two dense layers with gelu (the tanh form) between them.

    Under autocast in its dtype.
    """
    check_tensors(input=input)
    dtype = _library.autocast_dtype(input)
    check_dense_gelu_dense(input, weight1, bias1, weight2, bias2, same_dtype=dtype is None)
    arguments: Sequence[Any] = (input, weight1, bias1, weight2, bias2)
    needs_graph = torch.is_grad_enabled()
    elements = input.numel() // max(1, input.shape[-1]) * weight1.shape[0]
    # Without gradients always: there is no node, and fewer operators.
    if not _library.runs_triton(FAMILY, input) or (needs_graph and not is_large(elements, between_layers=True)):
        return composed_dense_gelu_dense(*arguments)
    arguments = cast_like_autocast(dtype, arguments)
    return _apply_node(*arguments) if needs_graph else _infer_dense_gelu_dense(*arguments)


_apply_node = _library.quick_apply(FusedDenseGeluDenseFunc)


def dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input` [..., in] through one dense layer: PyTorch's own operator, which adds the bias within the product."""
    if not fits(input, weight, bias):
        check_tensors(input=input)
        check_layer(input, check_input(input), weight, bias, same_dtype=_library.autocast_dtype(input) is None)
    return functional.linear(input, weight, bias)
