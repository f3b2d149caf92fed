"""Cross-entropy of a linear layer's outputs, a chunk of rows at a time: never materialises all logits.

One pass over the chunks gives losses and gradients. The gradient of a chunk's logits overwrites them, and two matrix
products compute the gradients of input and weight from it.

For a mean or a sum the gradients are computed together with the loss, as if the loss's gradient were one. The backward
pass multiplies them by the actual one, which costs nothing if it is one. In float16 a mean's small factor would be lost
in the gradient of the logits; the backward pass multiplies by it, too.
Without a reduction each row has its own gradient, so the backward pass computes the chunks once more, or reads logits
that were kept (`log_probs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import chunks, config, rows
from .head import Head, check_head, localised, make_head, needed_statistics, token_outputs
from .log_probs import LinearRowsFunction, differentiable_gradients, statistics_of_logits
from .op import FAMILY, launch_scale

REDUCTIONS = ("mean", "sum", "none")
SMOOTHINGS = ("torch", "megatron")


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_scaling: bool = False,
    smoothing: str = "torch",
    outputs: Sequence[str] = (),
    keep_logits: str | bool | int = "auto",
    accumulation_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    group: Any = None,
    sequence_parallel: bool = False,
) -> Any:
    """Return `cross_entropy(linear(input, weight, bias), target)` without ever holding all logits.

    `input` is (..., H), `weight` (V, H), `target` (...) with classes or `ignore_index`, `bias` (V). The loss is
    float32 (float64 for float64 inputs): a mean over the rows that are not ignored, a sum, or with "none" the loss of
    each row, zero if it is ignored. Under autocast the matrix products are in autocast's dtype.

    The softmax is taken of softcap * tanh(logit_scale * logits / softcap) / temperature. `class_weight` (V) is the
    `weight` of `torch.nn.functional.cross_entropy`. `z_loss` adds z_loss * logsumexp^2 to each row's loss.
    `token_scaling` multiplies each row's loss by the probability of its target, as a constant. `smoothing="megatron"`
    spreads the smoothing over the classes other than the target.

    With `outputs`, names of fields of `TokenOutputs`, the result is the loss and a `TokenOutputs` without gradients.
    `keep_logits` matters for "none" alone; see `linear_log_probs`.

    `accumulation_dtype` is the dtype of the sum of the weight's gradient over chunks of `chunk_rows` rows. By
    default it is the weight's own, but float32 for float16, and for bfloat16 with more than 16 chunks.

    With a process group, `weight` and `bias` are this rank's consecutive part of the classes; parts may differ in size.
    Targets and class weights are of all classes, and every rank gets the whole loss. With `sequence_parallel` each
    rank has an equal part of the input's rows along the first dimension, and the targets of all rows.
    """
    input, weight, bias, group = localised(input, weight, bias, group)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is not known; use {', '.join(REDUCTIONS)}")
    if smoothing not in SMOOTHINGS:
        raise ValueError(f"smoothing {smoothing!r} is not known; use {', '.join(SMOOTHINGS)}")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss={z_loss} must not be negative")
    options = (ignore_index, logit_scale, softcap, temperature, accumulation_dtype, chunk_rows)
    head = make_head(input, *options, group, sequence_parallel, keep_logits, label_smoothing)
    check_head(input, weight, target, bias, class_weight, outputs, head)
    labels, settings = target.reshape(-1), (float(label_smoothing), float(z_loss), token_scaling, smoothing != "torch")
    tensors = (input.reshape(-1, input.shape[-1]), weight, bias, labels, class_weight)
    is_ignored = labels == ignore_index
    count, z_factor = None, None
    if reduction == "mean":
        count = (~is_ignored).sum(dtype=_library.compute_dtype(input))
        if class_weight is not None:
            number = count
            own, _ = rows.label_weights(class_weight, labels, number.dtype)
            count = own.masked_fill(is_ignored, 0.0).sum()
            z_factor = count / number  # the squares' mean is over all rows that count, as Liger's
    needed = " ".join(needed_statistics(outputs, head.group))
    names = chunks.statistic_names(label_smoothing, class_weight, needed)
    if reduction == "none":
        chosen = " ".join(dict.fromkeys([*names, *needed.split()]))
        table, top, classes = LinearRowsFunction.apply(*tensors, chosen, head)
        loss = _losses(table, names, labels, class_weight, settings, None, classes, ignore_index).reshape(target.shape)
    else:
        loss, table, top = LinearCrossEntropyFunction.apply(*tensors, count, z_factor, (settings, needed, head))
    if not outputs:
        return loss
    return loss, token_outputs(outputs, table.detach(), names, top, target, ignore_index)


def _losses(
    table: Tensor,
    names: Sequence[str],
    labels: Tensor,
    class_weight: Tensor | None,
    settings: Sequence[float],
    z_factor: Tensor | None,
    classes: Any,
    ignore_index: int,
) -> Tensor:
    """Return the loss of each row, differentiable for the table of statistics."""
    own_names = rows.loss_statistics(settings[0], class_weight)
    weights = rows.label_weights(class_weight, labels, table.dtype)
    used = torch.stack([table[names.index(name)] for name in own_names])
    losses, _ = rows.cross_entropy(used, own_names, *weights, settings, z_factor, classes)
    return losses.masked_fill(labels == ignore_index, 0.0)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Autograd node of a mean or a sum; its arguments were checked, and its input has two dimensions."""

    @staticmethod
    def forward(ctx, input, weight, bias, labels, class_weight, count, z_factor, spec):  # type: ignore[override]
        head = spec[-1]
        wanted = ctx.needs_input_grad[:3] if head.differentiable else (False, False, False)
        tensors, row_tensors = (input, weight, bias), (labels, class_weight, count, z_factor)
        losses, gradients, table, top = _pass(tensors, row_tensors, spec, wanted)
        ctx.spec = spec
        ctx.is_compiled = torch.compiler.is_compiling()
        saved = (*tensors, *row_tensors)
        if ctx.is_compiled:
            ctx.save_for_backward(*saved, *gradients)
        else:
            ctx.save_for_backward(*saved)
            # The backward pass hands these on and keeps no second reference, so that autograd need not copy them.
            ctx.gradients = gradients if True in wanted else None
        ctx.mark_non_differentiable(table, top)
        return losses.sum() if count is None else losses.sum() / count, table, top

    @staticmethod
    def backward(ctx, loss_gradient, *_):  # type: ignore[override]
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[:3]
        tensors, row_tensors, count = saved[:3], saved[3:7], saved[5]
        if not ctx.is_compiled and torch.is_grad_enabled():  # create_graph=True
            return *_differentiable(loss_gradient, tensors, row_tensors, ctx.spec, wanted), *[None] * 5
        factor = loss_gradient
        if count is not None and not _divides_at_once(ctx.spec[-1]):
            factor = loss_gradient * _one_by(count)
        gradients: Any = saved[7:]
        if not ctx.is_compiled:
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:  # a second backward pass through a retained graph
                gradients = _pass(tensors, row_tensors, ctx.spec, wanted)[1]
        results = (finished(g, factor, t, ctx.is_compiled) for g, t in zip(gradients, tensors, strict=True))
        return *results, *[None] * 5


def _divides_at_once(head: Head) -> bool:
    """Return whether a mean's factor is part of the gradient of the logits; in float16 it could be lost there."""
    return head.compute != torch.float16


def _one_by(count: Tensor) -> Tensor:
    """Return 1 / count. If every row is ignored, the mean is NaN and the gradients are zero, as in PyTorch."""
    return 1.0 / torch.where(count == 0, 1.0, count)


def _pass(
    given: tuple,
    row_tensors: tuple,
    spec: tuple[Sequence[float], str, Head],
    wanted: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...], Tensor, Tensor]:
    """Run the pass over the chunks in the dtype of the head; `given` are input, weight and bias.

    `row_tensors` are labels, class weights, the number that a mean divides by and the factor of the z-loss.
    """
    settings, outputs, head = spec
    labels, class_weight, count, z_factor = row_tensors
    scale = None if count is None or not _divides_at_once(head) else _one_by(count)
    size, total = config.sizes(labels.shape[0], given[1], head.chunk_rows, head.accumulation_dtype)
    tensors = (*head.cast(*given), labels, class_weight)
    run: Any = torch.ops.apex.linear_xentropy if torch.compiler.is_compiling() else chunks.linear_xentropy
    losses, *gradients, table, top = run(
        *tensors, z_factor, scale, list(map(float, settings)), list(head.transform), head.ignore_index, outputs,
        list(wanted), total, size, head.group, head.sequence_parallel,
    )  # fmt: skip
    found = tuple(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
    return losses, found, table, top


def finished(gradient: Tensor | None, factor: Tensor, like: Tensor | None, is_compiled: bool) -> Tensor | None:
    """Return the gradient times `factor` in the dtype of its tensor; computed in place outside of compiled code."""
    if gradient is None or like is None:
        return None
    if is_compiled:
        return (gradient * factor).to(like.dtype)
    if gradient.dtype == like.dtype:
        if _library.runs_triton(FAMILY, gradient) and gradient.is_contiguous():
            launch_scale(gradient, factor)
            return gradient
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=like.dtype))


def _differentiable(
    loss_gradient: Tensor,
    given: tuple,
    row_tensors: tuple,
    spec: tuple[Sequence[float], str, Head],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again, computed through the logits."""
    (settings, _, head), (labels, class_weight, count, z_factor) = spec, row_tensors
    names = rows.loss_statistics(settings[0], class_weight)

    def loss(*tensors: Any) -> Tensor:
        table = statistics_of_logits(tensors, labels, class_weight, names, head)
        losses = _losses(table, names, labels, class_weight, settings, z_factor, given[1].shape[0], head.ignore_index)
        return losses.sum() if count is None else losses.sum() / count

    return differentiable_gradients(loss, loss_gradient, given, wanted, head)
