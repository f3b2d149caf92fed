"""Cross-entropy of a linear layer's outputs, a chunk of rows at a time: never materialises all logits.

One pass over the chunks gives losses and gradients. The gradient of a chunk's logits overwrites them, and two matrix
products compute the gradients of input and weight from it.

For a mean or a sum the gradients are computed together with the loss, as if the loss's gradient were one. The backward
pass multiplies them by the actual one: a mean's small factor would be lost in the float16 gradient of the logits.
Without a reduction each row has its own gradient, so the backward pass computes the chunks once more.

Letters: N rows, H features, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._checks import check_floats, check_optional_tensors, check_parameters, check_tensors
from . import config, reference
from .op import FAMILY, check_labels, launch_forward, launch_in_place

REDUCTIONS = ("mean", "sum", "none")


class LinearSpec(NamedTuple):
    """Settings of the loss; `compute` is the dtype of input and weight in matrix products."""

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
    """Return `cross_entropy(linear(input, weight, bias), target)` without ever holding all logits.

    `input` is (..., H), `weight` (V, H), `target` (...) with classes or `ignore_index`, `bias` (V). The loss is
    float32 (float64 for float64 inputs): a mean over the rows that are not ignored, a sum, or with "none" the loss of
    each row, zero if it is ignored. Under autocast the matrix products are in autocast's dtype.

    `accumulation_dtype` is the dtype of the sum of the weight's gradient over chunks of `chunk_rows` rows. By
    default it is the weight's own, but float32 for float16, and for bfloat16 with more than 16 chunks.
    """
    check_tensors(input=input, weight=weight, target=target)
    check_optional_tensors(bias=bias)
    compute = _library.autocast_dtype(input) or input.dtype
    if input.dtype == torch.float64:
        compute = torch.float64
    settings = (float(label_smoothing), ignore_index, reduction, compute, accumulation_dtype, chunk_rows)
    spec = LinearSpec(*settings, differentiable=torch.is_grad_enabled())
    _check(input, weight, target, bias, spec)
    rows = input.reshape(-1, input.shape[-1])
    loss = LinearCrossEntropyFunction.apply(rows, weight, bias, target.reshape(-1), spec)
    return loss.reshape(target.shape) if reduction == "none" else loss


def _check(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, spec: LinearSpec) -> None:
    if spec.reduction not in REDUCTIONS:
        raise ValueError(f"reduction {spec.reduction!r} is not known; use {', '.join(REDUCTIONS)}")
    if spec.chunk_rows is not None and spec.chunk_rows < 1:
        raise ValueError(f"chunk_rows={spec.chunk_rows} must be at least 1")
    if spec.accumulation_dtype is not None and not spec.accumulation_dtype.is_floating_point:
        raise TypeError(f"accumulation_dtype must be floating-point, got {spec.accumulation_dtype}")
    if input.dim() < 1 or weight.dim() != 2 or weight.shape[1] != input.shape[-1] or not weight.shape[0]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, expected [classes, {input.shape[-1] if input.dim() else '?'}] for "
            f"input of shape {list(input.shape)}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target has shape {list(target.shape)}, expected {list(input.shape[:-1])} as the input's rows"
        )
    check_labels(target, input.device, spec.smoothing)
    check_floats(input=input)
    check_parameters(input, weight.shape, weight=weight)
    check_parameters(input, weight.shape[:1], bias=bias)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype != input.dtype and _library.autocast_dtype(input) is None:
            raise TypeError(f"{name} is {parameter.dtype}, the input {input.dtype}; outside autocast they must agree")


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Autograd node of `linear_cross_entropy`; its arguments were checked, and its input has two dimensions."""

    @staticmethod
    def forward(ctx, input, weight, bias, labels, spec):  # type: ignore[override]
        at_once = spec.differentiable and spec.reduction != "none"
        wanted = ctx.needs_input_grad[:3] if at_once else (False, False, False)
        losses, *gradients = _pass((input, weight, bias), labels, None, spec, wanted)
        count = (labels != spec.ignore_index).sum() if spec.reduction == "mean" else None
        ctx.spec = spec
        ctx.is_compiled = torch.compiler.is_compiling()
        if ctx.is_compiled:
            ctx.save_for_backward(input, weight, bias, labels, count, *gradients)
        else:
            ctx.save_for_backward(input, weight, bias, labels, count)
            # The backward pass hands these on and keeps no second reference, so that autograd need not copy them.
            ctx.gradients = gradients if True in wanted else None
        return _reduced(losses, count, spec.reduction)

    @staticmethod
    def backward(ctx, loss_gradient):  # type: ignore[override]
        input, weight, bias, labels, count, *gradients = ctx.saved_tensors
        tensors, spec, wanted = (input, weight, bias), ctx.spec, ctx.needs_input_grad[:3]
        if not ctx.is_compiled and torch.is_grad_enabled():  # create_graph=True
            return *_differentiable_gradients(loss_gradient, tensors, labels, count, spec, wanted), None, None
        if spec.reduction == "none":
            _, *gradients = _pass(tensors, labels, loss_gradient.contiguous(), spec, wanted)
            factor = None
        else:
            # If every row is ignored, the mean is NaN and the gradients are zero, as in PyTorch.
            factor = loss_gradient if count is None else loss_gradient / count.clamp(min=1)
            if not ctx.is_compiled:
                gradients, ctx.gradients = ctx.gradients, None
                if gradients is None:  # a second backward pass through a retained graph
                    _, *gradients = _pass(tensors, labels, None, spec, wanted)
        return *(_finished(g, factor, t, ctx.is_compiled) for g, t in zip(gradients, tensors, strict=True)), None, None


def _reduced(losses: Tensor, count: Tensor | None, reduction: str) -> Tensor:
    """Return the losses, or their sum, divided by `count` if that is given."""
    if reduction == "none":
        return losses
    return losses.sum() if count is None else losses.sum() / count


def _pass(
    given: tuple, labels: Tensor, row_scale: Tensor | None, spec: LinearSpec, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Run the pass over the chunks in the dtype of `spec.compute`; `given` are input, weight and bias."""
    input, weight, bias = given
    rows, classes = input.shape[0], weight.shape[0]
    size = config.chunk_size(rows, classes, spec.chunk_rows)
    total = config.sum_dtype(weight.dtype, -(-rows // size), spec.accumulation_dtype)
    compute = spec.compute
    tensors = (input.to(compute), weight.to(compute), None if bias is None else bias.to(compute), labels, row_scale)
    settings = (spec.smoothing, spec.ignore_index, wanted, total, size)
    run: Any = torch.ops.apex.linear_xentropy if torch.compiler.is_compiling() else linear_xentropy
    losses, *gradients = run(*tensors, *settings)
    found = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
    return losses, *found


def _finished(gradient: Tensor | None, factor: Tensor | None, like: Tensor | None, is_compiled: bool) -> Tensor | None:
    """Return the gradient times `factor` in the dtype of its tensor; computed in place outside of compiled code."""
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
    loss_gradient: Tensor, given: tuple, labels: Tensor, count: Tensor | None, spec: LinearSpec, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again, computed through the logits."""
    compute = spec.compute
    # Aliases: the input may have been computed from the weight, as in tied embeddings; that dependence is not this
    # loss's to differentiate.
    tensors = [None if tensor is None else tensor.view_as(tensor) for tensor in given]
    logits = functional.linear(*(None if tensor is None else tensor.to(compute) for tensor in tensors))  # type: ignore[arg-type]
    losses, _ = reference.forward(logits, labels, spec.smoothing, spec.ignore_index)
    chosen: list[Any] = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
    loss = _reduced(losses, count, spec.reduction)
    gradients = iter(torch.autograd.grad(loss, chosen, loss_gradient, create_graph=True))
    return [next(gradients) if want else None for want in wanted]


def linear_xentropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_scale: Tensor | None,
    smoothing: float,
    ignore_index: int,
    wanted: Sequence[bool],
    accumulation_dtype: torch.dtype,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses (N), and the gradients of sum(losses * row_scale) for input (N x H), weight (V x H) and bias (V).

    Runs without autograd. Input, weight and bias have one dtype; the gradients of the last two have
    `accumulation_dtype`. Gradients that are not `wanted` have no elements.
    """
    rows, features = input.shape
    classes, device = weight.shape[0], input.device
    losses = torch.empty(rows, dtype=_library.compute_dtype(input), device=device)
    allocate = torch.empty if rows else torch.zeros
    input_gradient = torch.empty((rows, features) if wanted[0] else 0, dtype=input.dtype, device=device)
    weight_gradient = allocate((classes, features) if wanted[1] else 0, dtype=accumulation_dtype, device=device)
    bias_gradient = torch.zeros(classes if wanted[2] else 0, dtype=losses.dtype, device=device)
    stride = -(-classes // config.STRIDE_MULTIPLE) * config.STRIDE_MULTIPLE
    storage = torch.empty((min(chunk_rows, rows), stride), dtype=input.dtype, device=device)
    parts = config.parts_of_products(classes, input.dtype, _library.on_gpu(input))
    labels = labels.long().contiguous()
    with _library.autocast_off(input):
        for begin in range(0, rows, chunk_rows):
            part = slice(begin, begin + chunk_rows)
            x = input[part]
            logits = storage[: x.shape[0], :classes]
            for chosen in parts:
                if bias is None:
                    torch.mm(x, weight[chosen].t(), out=logits[:, chosen])
                else:
                    torch.addmm(bias[chosen], x, weight[chosen].t(), out=logits[:, chosen])
            scale = None if row_scale is None else row_scale[part]
            _losses_and_gradient(logits, labels[part], losses[part], scale, smoothing, ignore_index, True in wanted)
            if wanted[0]:
                # The remainder comes first: the large product adds to it before it rounds.
                for chosen in reversed(parts):
                    _add_product(input_gradient[part], logits[:, chosen], weight[chosen], first=chosen is parts[-1])
            if wanted[1]:
                for chosen in parts:
                    _add_product(weight_gradient[chosen], logits[:, chosen].t(), x, first=begin == 0)
            if wanted[2]:
                bias_gradient += logits.sum(0, dtype=bias_gradient.dtype)
    return losses, input_gradient, weight_gradient, bias_gradient.to(accumulation_dtype)


def _losses_and_gradient(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    row_scale: Tensor | None,
    smoothing: float,
    ignore_index: int,
    gradient: bool,
) -> None:
    """Write the losses and, if the gradient is wanted, overwrite the logits with it."""
    if _library.runs_triton(FAMILY, logits):
        if gradient:
            launch_in_place(logits, labels, losses, row_scale, smoothing, ignore_index)
        else:
            losses.copy_(launch_forward(logits, labels, smoothing, ignore_index)[0])
        return
    new_losses, log_sums = reference.forward(logits, labels, smoothing, ignore_index)
    losses.copy_(new_losses)
    if gradient:
        scale = torch.ones_like(losses) if row_scale is None else row_scale
        logits.copy_(reference.backward(scale, logits, log_sums, labels, smoothing, ignore_index))


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Compute total += left @ right in place; with `first`, total = left @ right."""
    if total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            torch.addmm(total, left, right, out=total)
    elif total.dtype == torch.float32 and _adds_to_float32(left):
        if first:
            torch.mm(left, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        for begin in range(0, total.shape[0], config.CLASSES_AT_A_TIME):
            part = slice(begin, begin + config.CLASSES_AT_A_TIME)
            product = torch.mm(left[part], right)
            if first:
                total[part] = product
            else:
                total[part] += product


def _adds_to_float32(half: Tensor) -> bool:
    """Return whether a half-precision product can be added to float32: since PyTorch 2.8, on NVIDIA GPUs."""
    return half.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out")


def _fake(input, weight, bias, labels, row_scale, smoothing, ignore_index, wanted, accumulation_dtype, chunk_rows):  # type: ignore[no-untyped-def]
    losses = input.new_empty(labels.shape, dtype=_library.compute_dtype(input))
    like = ((input.shape, input.dtype), (weight.shape, accumulation_dtype), (weight.shape[:1], accumulation_dtype))
    gradients = (
        input.new_empty(shape if want else 0, dtype=dtype) for (shape, dtype), want in zip(like, wanted, strict=True)
    )
    return losses, *gradients


_library.register_op(
    "linear_xentropy(Tensor input, Tensor weight, Tensor? bias, Tensor labels, Tensor? row_scale, float smoothing, "
    "int ignore_index, bool[] wanted, ScalarType accumulation_dtype, SymInt chunk_rows) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    linear_xentropy,
    _fake,
)
