"""`linear_cross_entropy`: checks and autograd around the pass over chunks.

For a mean or a sum the gradients are computed together with the loss, as if its gradient were one, and multiplied by
what it is in the backward pass: a mean's small factor would be lost in the float16 gradient of the logits. Without a
reduction each row has its own gradient, so that the chunks are computed once more in the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .._checks import check_optional_tensors, check_tensors
from .._library import autocast_dtype
from . import reference
from .linear_chunks import Wanted, chunk_size, linear_xentropy, sum_dtype
from .op import check_labels

REDUCTIONS = ("mean", "sum", "none")


class LinearSpec(NamedTuple):
    """What is computed, beside the tensors; `compute` is the dtype of input and weight in matrix products."""

    smoothing: float
    ignore_index: int
    reduction: str
    compute: torch.dtype
    accumulation_dtype: torch.dtype | None
    chunk_rows: int | None
    differentiable: bool


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    accumulation_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(input, weight, bias), target)` without ever holding all logits.

    `input` is (..., H), `weight` (V, H), `target` (...) with classes or `ignore_index`, `bias` (V). The loss is
    float32 (float64 for float64 inputs): a mean over the rows that are not ignored, a sum, or with "none" the loss of
    each row, zero where it is ignored. Under autocast the matrix products are in its dtype.

    `accumulation_dtype` is the one in which the gradient of the weight is summed over chunks of `chunk_rows` rows. By
    default that is the weight's own, but float32 for float16, and for bfloat16 from more than 16 chunks on.
    """
    _check(input, weight, target, bias, label_smoothing, reduction, accumulation_dtype, chunk_rows)
    compute = autocast_dtype(input) or input.dtype
    if input.dtype == torch.float64:
        compute = torch.float64
    spec = LinearSpec(
        label_smoothing, ignore_index, reduction, compute, accumulation_dtype, chunk_rows, torch.is_grad_enabled()
    )
    rows = input.reshape(-1, input.shape[-1])
    loss = LinearCrossEntropyFunction.apply(rows, weight, bias, target.reshape(-1), spec)
    return loss.reshape(target.shape) if reduction == "none" else loss


def _check(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    smoothing: float,
    reduction: str,
    accumulation_dtype: torch.dtype | None,
    chunk_rows: int | None,
) -> None:
    check_tensors(input=input, weight=weight, target=target)
    check_optional_tensors(bias=bias)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is not known; use {', '.join(REDUCTIONS)}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} must be at least 1")
    if accumulation_dtype is not None and not accumulation_dtype.is_floating_point:
        raise TypeError(f"accumulation_dtype must be floating-point, got {accumulation_dtype}")
    if input.dim() < 1 or weight.dim() != 2 or weight.shape[1] != input.shape[-1] or not weight.shape[0]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, expected [classes, {input.shape[-1] if input.dim() else '?'}] for "
            f"input of shape {list(input.shape)}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target has shape {list(target.shape)}, expected {list(input.shape[:-1])} as the input's rows"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}, expected [{weight.shape[0]}]")
    check_labels(target, input.device, smoothing)
    autocast = autocast_dtype(input) is not None
    for name, parameter in (("input", input), ("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.device != input.device:
            raise ValueError(f"{name} is on {parameter.device}, the input on {input.device}")
        if not parameter.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {parameter.dtype}")
        if parameter.dtype != input.dtype and not autocast:
            raise TypeError(f"{name} is {parameter.dtype}, the input {input.dtype}; outside autocast they must agree")


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The autograd node behind `linear_cross_entropy`; its arguments were checked, and its input has two dimensions."""

    @staticmethod
    def forward(ctx, input, weight, bias, labels, spec):  # type: ignore[override]
        wanted = Wanted(*ctx.needs_input_grad[:3])
        if not spec.differentiable or spec.reduction == "none":
            wanted = Wanted(False, False, False)
        losses, *gradients = _pass(input, weight, bias, labels, None, spec, wanted)
        count = (labels != spec.ignore_index).sum() if spec.reduction == "mean" else None
        ctx.spec = spec
        ctx.is_compiled = torch.compiler.is_compiling()
        if ctx.is_compiled:
            ctx.save_for_backward(input, weight, bias, labels, count, *gradients)
        else:
            ctx.save_for_backward(input, weight, bias, labels, count)
            # Handed on by the backward pass, which then holds no second reference: autograd need not copy them.
            ctx.gradients = gradients if True in wanted else None
        if spec.reduction == "none":
            return losses
        return losses.sum() if count is None else losses.sum() / count

    @staticmethod
    def backward(ctx, loss_gradient):  # type: ignore[override]
        input, weight, bias, labels, count, *gradients = ctx.saved_tensors
        spec, wanted = ctx.spec, Wanted(*ctx.needs_input_grad[:3])
        if not ctx.is_compiled and torch.is_grad_enabled():  # create_graph=True
            return *_differentiable_gradients(loss_gradient, input, weight, bias, labels, spec, wanted), None, None
        if spec.reduction == "none":
            scale = loss_gradient.contiguous()
            _, *gradients = _pass(input, weight, bias, labels, scale, spec, wanted)
            factor = None
        else:
            factor = loss_gradient if count is None else loss_gradient / count
            if not ctx.is_compiled:
                gradients, ctx.gradients = ctx.gradients, None
                if gradients is None:  # a second backward pass through a retained graph
                    _, *gradients = _pass(input, weight, bias, labels, None, spec, wanted)
        like = (input, weight, bias)
        return *(_finished(g, factor, t, ctx.is_compiled) for g, t in zip(gradients, like, strict=True)), None, None


def _pass(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_scale: Tensor | None,
    spec: LinearSpec,
    wanted: Wanted,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The pass over the chunks in the dtype of `spec.compute`."""
    rows, classes = input.shape[0], weight.shape[0]
    size = chunk_size(rows, classes, spec.chunk_rows)
    total = sum_dtype(weight.dtype, -(-rows // size), spec.accumulation_dtype)
    compute = spec.compute
    tensors = (input.to(compute), weight.to(compute), None if bias is None else bias.to(compute), labels, row_scale)
    settings = (spec.smoothing, spec.ignore_index, wanted, total, size)
    if not torch.compiler.is_compiling():
        return linear_xentropy(*tensors, *settings)
    losses, *gradients = torch.ops.apex.linear_xentropy(*tensors, *settings)
    found = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
    return losses, *found


def _finished(gradient: Tensor | None, factor: Tensor | None, like: Tensor | None, is_compiled: bool) -> Tensor | None:
    """The gradient times `factor` in the dtype of its tensor; in place where nothing else sees it."""
    if gradient is None or like is None:
        return None
    if factor is None:
        return gradient.to(like.dtype)
    if is_compiled:
        return (gradient * factor).to(like.dtype)
    if gradient.dtype == like.dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=like.dtype))


def _differentiable_gradients(
    loss_gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    spec: LinearSpec,
    wanted: Wanted,
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, by way of the logits."""
    compute = spec.compute
    logits = functional.linear(input.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
    losses, _ = reference.forward(logits, labels.long(), spec.smoothing, spec.ignore_index)
    loss: Any = losses
    if spec.reduction != "none":
        loss = losses.sum()
    if spec.reduction == "mean":
        loss = loss / (labels != spec.ignore_index).sum()
    tensors = (input, weight, bias)
    chosen = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want and tensor is not None]
    found = iter(torch.autograd.grad(loss, chosen, loss_gradient, create_graph=True))
    return [next(found) if want else None for want in wanted]
