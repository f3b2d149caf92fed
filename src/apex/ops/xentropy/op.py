"""Softmax cross-entropy of whole logits: checks, dispatch and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import native, reference
from .launches import triton_backward, triton_forward
from .self_check import self_check

FAMILY = _library.register_family(
    _library.OpFamily("xentropy", "softmax cross-entropy, also of a linear layer's outputs", self_check)
)

# A label that nobody uses: no row is padding.
NO_PADDING = -(1 << 31)
# Positions within a row are 32-bit in the kernels.
MOST_CLASSES = 2**31 - 2**16


def check_logits(logits: Tensor, labels: Tensor, smoothing: float) -> None:
    """Refuses arguments that do not fit together, in clear words."""
    if logits.dim() < 1 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, expected one for each row of logits of shape {list(logits.shape)}"
        )
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating-point, got {logits.dtype}")
    if not 1 <= logits.shape[-1] <= MOST_CLASSES:
        raise ValueError(f"logits of shape {list(logits.shape)} have {logits.shape[-1]} classes, expected at least one")
    check_labels(labels, logits.device, smoothing)


def check_labels(labels: Tensor, device: torch.device, smoothing: float) -> None:
    if labels.dtype not in (torch.int64, torch.int32):
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
    rows, flat_labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if not flat_labels.numel():
        empty = torch.empty(labels.shape, dtype=reference.compute_dtype(logits), device=logits.device)
        return empty, empty.clone()
    if _library.runs_triton(FAMILY, logits):
        found = triton_forward(rows, flat_labels, smoothing, padding_idx)
    else:
        torch_forward = native.forward if _on_processor(logits) else reference.forward
        found = torch_forward(rows, flat_labels.long(), smoothing, padding_idx)
    if labels.dim() == 1:
        return found
    return found[0].reshape(labels.shape), found[1].reshape(labels.shape)


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
    if not logits.numel():
        return torch.empty_like(logits)
    rows = logits.reshape(-1, logits.shape[-1])
    flat = (loss_gradient.reshape(-1), rows, log_sums.reshape(-1))
    if _library.runs_triton(FAMILY, logits):
        gradient = triton_backward(*flat, labels.reshape(-1), smoothing, padding_idx)
    else:
        torch_backward = native.backward if _on_processor(logits) else reference.backward
        gradient = torch_backward(*flat, labels.reshape(-1).long(), smoothing, padding_idx)
    return gradient.reshape(logits.shape)


def _on_processor(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def forward_and_save(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> Tensor:
    """The forward of an autograd Function: the loss of each row."""
    compute = torch.ops.apex.xentropy_forward if torch.compiler.is_compiling() else xentropy_forward
    losses, log_sums = compute(logits, labels, smoothing, padding_idx)
    ctx.save_for_backward(logits, labels, log_sums)
    ctx.smoothing, ctx.padding_idx = smoothing, padding_idx
    return losses


def backward_from_saved(ctx: Any, loss_gradient: Tensor) -> Tensor:
    """The backward of an autograd Function: the gradient of the logits."""
    logits, labels, log_sums = ctx.saved_tensors
    arguments = (labels, ctx.smoothing, ctx.padding_idx)
    if torch.compiler.is_compiling():
        return torch.ops.apex.xentropy_backward(loss_gradient, logits, log_sums, *arguments)
    if torch.is_grad_enabled():  # create_graph=True: the gradient itself must be differentiable
        rows, flat_labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
        log_sums = torch.logsumexp(rows.to(reference.compute_dtype(rows)), 1)
        flat = reference.backward(loss_gradient.reshape(-1), rows, log_sums, flat_labels, *arguments[1:])
        return flat.reshape(logits.shape)
    return xentropy_backward(loss_gradient, logits, log_sums, *arguments)
