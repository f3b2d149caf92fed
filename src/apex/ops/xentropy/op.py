"""Softmax cross-entropy of whole logits: checks, dispatch and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from . import native, reference
from .launches import Plan, plan, with_whole_rows
from .reference import NO_PADDING
from .self_check import self_check

FAMILY = _library.register_family(
    _library.OpFamily("xentropy", "softmax cross-entropy, also of a linear layer's outputs", self_check)
)

# Positions within a row are 32-bit in the kernels.
MOST_CLASSES = 2**31 - 2**16


def check_logits(logits: Tensor, labels: Tensor, smoothing: float) -> None:
    """Refuses arguments that do not fit together, in clear words."""
    if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
        check_tensors(logits=logits, labels=labels)
    shape = logits.shape
    if not (
        labels.shape == shape[:-1]
        and shape
        and logits.is_floating_point()
        and 1 <= shape[-1] <= MOST_CLASSES
        and labels.device == logits.device
    ):
        _explain(logits, labels)
    check_labels(labels, logits.device, smoothing)


def _explain(logits: Tensor, labels: Tensor) -> None:
    """Raises the error that says which argument does not fit."""
    shape = list(logits.shape)
    if not shape or list(labels.shape) != shape[:-1]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, expected one for each row of logits of shape {shape}"
        )
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating-point, got {logits.dtype}")
    if not 1 <= shape[-1] <= MOST_CLASSES:
        raise ValueError(f"logits of shape {shape} have {shape[-1]} classes, expected 1 to {MOST_CLASSES}")
    raise ValueError(f"labels are on {labels.device}, the logits on {logits.device}")


def check_labels(labels: Tensor, device: torch.device, smoothing: float) -> None:
    if labels.dtype is not torch.int64 and labels.dtype is not torch.int32:
        raise TypeError(f"labels must be int64 or int32, got {labels.dtype}")
    if labels.device != device:
        raise ValueError(f"labels are on {labels.device}, the logits on {device}")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label smoothing {smoothing} is not between 0 and 1")


def xentropy_forward(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = NO_PADDING
) -> tuple[Tensor, Tensor]:
    """The loss of each row and the logarithm of its sum of exponentials, in float32 (float64 for float64 logits).

    Without autograd. Rows whose label is `padding_idx` get zeros.
    """
    check_logits(logits, labels, smoothing)
    if logits.numel() and _library.runs_triton(FAMILY, logits):
        rows, flat_labels, chosen = _planned(logits, labels, smoothing, padding_idx)
        losses, log_sums = chosen.forward(rows, flat_labels)
    else:
        rows, flat_labels = _rows(logits), _flat(labels)
        implementation = native if _on_processor(logits) else reference
        losses, log_sums = implementation.forward(rows, flat_labels, smoothing, padding_idx)
    if labels.dim() == 1:
        return losses, log_sums
    return losses.view(labels.shape), log_sums.view(labels.shape)


def xentropy_backward(
    loss_gradient: Tensor,
    logits: Tensor,
    log_sums: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    padding_idx: int = NO_PADDING,
) -> Tensor:
    """The gradient of the logits, contiguous, from `loss_gradient` and the second result of `xentropy_forward`."""
    check_logits(logits, labels, smoothing)
    for name, tensor in (("loss_gradient", loss_gradient), ("log_sums", log_sums)):
        if tensor.shape != labels.shape or tensor.device != logits.device:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} on {tensor.device}, expected {list(labels.shape)} as the "
                f"labels, on {logits.device}"
            )
    slopes, sums = loss_gradient.reshape(-1), log_sums.reshape(-1)
    if logits.numel() and _library.runs_triton(FAMILY, logits):
        rows, flat_labels, chosen = _planned(logits, labels, smoothing, padding_idx)
        gradient = chosen.backward(slopes, rows, sums.float().contiguous(), flat_labels)
    else:
        rows, flat_labels = _rows(logits), _flat(labels)
        implementation = native if _on_processor(logits) else reference
        gradient = implementation.backward(slopes, rows, sums, flat_labels, smoothing, padding_idx)
    return gradient if logits.dim() == 2 else gradient.view(logits.shape)


def _planned(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor, Plan]:
    """Rows and labels as the kernels take them, and the plan for them."""
    rows = with_whole_rows(logits if logits.dim() == 2 else _rows(logits))
    flat_labels = labels if labels.dim() == 1 and labels.is_contiguous() else labels.reshape(-1).contiguous()
    if flat_labels.dtype is not torch.int64:
        flat_labels = flat_labels.long()
    return rows, flat_labels, plan(rows, smoothing, padding_idx)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])


def _flat(labels: Tensor) -> Tensor:
    labels = labels if labels.dim() == 1 else labels.reshape(-1)
    return labels if labels.dtype is torch.int64 else labels.long()


def _on_processor(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def forward_and_save(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> Tensor:
    """The forward of an autograd Function: the loss of each row."""
    ctx.plan = None
    if not isinstance(logits, Tensor):
        check_tensors(logits=logits)
    if torch.compiler.is_compiling():
        losses, log_sums = torch.ops.apex.xentropy_forward(logits, labels, smoothing, padding_idx)
        ctx.save_for_backward(logits, labels, log_sums)
    elif logits.dim() == 2 and logits.numel() and _library.runs_triton(FAMILY, logits):
        check_logits(logits, labels, smoothing)
        rows, flat_labels, ctx.plan = _planned(logits, labels, smoothing, padding_idx)
        losses, log_sums = ctx.plan.forward(rows, flat_labels)
        # With what the backward pass needs, whose thread runs Python at 0.6 times the speed.
        ctx.save_for_backward(logits, flat_labels, log_sums, None if rows is logits else rows)
    elif _on_processor(logits) and (found := _losses_at_once(logits, labels, smoothing, padding_idx)) is not None:
        losses, own_log_softmax = found
        ctx.save_for_backward(logits, labels, None, own_log_softmax)
    else:
        losses, log_sums = xentropy_forward(logits, labels, smoothing, padding_idx)
        ctx.save_for_backward(logits, labels, log_sums)
    ctx.smoothing, ctx.padding_idx = smoothing, padding_idx
    return losses


def _losses_at_once(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor] | None:
    """Losses without what only the backward pass needs of each row; None where rows have to be looked at apart."""
    check_logits(logits, labels, smoothing)
    if logits.dim() != 2 or not native.fits_at_once(logits) or _library.runs_triton(FAMILY, logits):
        return None
    try:
        return native.losses_at_once(logits, _flat(labels), smoothing, padding_idx)
    except RuntimeError:  # a label that is no class
        return None


def backward_from_saved(ctx: Any, loss_gradient: Tensor) -> Tensor:
    """The backward of an autograd Function: the gradient of the logits."""
    logits, labels, log_sums, *rows = ctx.saved_tensors
    if ctx.plan is not None and not torch.is_grad_enabled():
        return ctx.plan.backward(loss_gradient, logits if rows[0] is None else rows[0], log_sums, labels)
    smoothing, padding_idx = ctx.smoothing, ctx.padding_idx
    if log_sums is None:
        log_sums = native.log_sums_of(logits, _flat(labels), rows[0], padding_idx)
    if torch.compiler.is_compiling():
        return torch.ops.apex.xentropy_backward(loss_gradient, logits, log_sums, labels, smoothing, padding_idx)
    if torch.is_grad_enabled():  # create_graph=True: the gradient itself must be differentiable
        wide = _rows(logits)
        log_sums = torch.logsumexp(wide.to(reference.compute_dtype(wide)), 1)
        slopes, flat_labels = loss_gradient.reshape(-1), _flat(labels)
        gradient = reference.backward(slopes, wide, log_sums, flat_labels, smoothing, padding_idx)
        return gradient.reshape(logits.shape)
    return xentropy_backward(loss_gradient, logits, log_sums, labels, smoothing, padding_idx)
