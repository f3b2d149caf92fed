"""Focal loss of a dense detector's classes: the sum over anchors and classes, divided by the number of positives.

Letters: A anchors, C classes; the first `classes` are real and the others padding. The backward pass computes the
gradient from the logits. Upstream computes the gradient along with the loss and keeps it: four passes over memory of
the logits' size, against three here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import at_hand, check_tensors, integer
from .._device import facts
from .._op import Derivative, Kernels, Op, Saved
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")


def check(logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int) -> None:
    """Raise for arguments that do not fit together; check the targets' values only if no device must be waited for."""
    check_tensors(cls_output=logits, cls_targets_at_level=targets, num_positives_sum=num_positives)
    integer("num_real_classes", classes)
    if logits.dim() != targets.dim() + 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"cls_output has shape {list(logits.shape)} and cls_targets_at_level {list(targets.shape)}; the first must "
            "have one more dimension, the classes"
        )
    if not logits.dtype.is_floating_point:
        raise TypeError(f"cls_output must be floating-point, got {logits.dtype}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"cls_targets_at_level must be int64 or int32, got {targets.dtype}")
    if num_positives.numel() != 1:
        raise ValueError(f"num_positives_sum must have one element, its shape is {list(num_positives.shape)}")
    if not 1 <= classes <= logits.shape[-1]:
        raise ValueError(
            f"num_real_classes={classes} must be between 1 and the last dimension of cls_output, whose shape is "
            f"{list(logits.shape)}"
        )
    if not logits.device == targets.device == num_positives.device:
        raise ValueError(
            f"cls_output is on {logits.device}, cls_targets_at_level on {targets.device}, num_positives_sum on "
            f"{num_positives.device}"
        )
    if at_hand(targets) and targets.numel() and (highest := int(targets.max())) >= classes:
        raise ValueError(f"cls_targets_at_level has class {highest}, expected less than num_real_classes={classes}")


def loss_and_gradient_of_sum(
    logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the gradient of the sum of the losses before the division by the number of positives."""
    settings = (classes, alpha, gamma, smoothing)
    (loss,) = FOCAL_LOSS.run(logits, targets, num_positives, *settings)
    one = torch.ones((), dtype=loss.dtype, device=loss.device)  # type: ignore[union-attr]
    (gradient,) = FOCAL_LOSS.run_backward((one,), (logits, targets, one), settings, (True,))
    return loss, gradient  # type: ignore[return-value]


def launch_forward(
    logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    device = facts(logits.device)
    programs = config.PROGRAMS_PER_MULTIPROCESSOR * device.multiprocessors
    programs = min(programs, max(1, logits.numel() // config.BLOCK))
    partials = torch.empty(programs, dtype=torch.float32, device=logits.device)
    _launch_pass(programs, (logits, targets, None, partials, None, None), classes, alpha, gamma, smoothing)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    kernels.focal_loss_sum((1,), (partials, num_positives, loss), (programs,), BLOCK=1024, num_warps=8)
    return loss


def launch_backward(grad_loss: Tensor, *saved: Any) -> Tensor:
    """Return the gradient of the logits; `saved` is the saved tensors of `FOCAL_LOSS`, its settings and `wanted`."""
    logits, targets, num_positives, *settings, _ = saved
    gradient = torch.empty_like(logits)
    programs = max(1, logits.numel() // config.BLOCK)
    _launch_pass(programs, (logits, targets, gradient, None, grad_loss, num_positives), *settings)
    return gradient


def _launch_pass(
    programs: int, tensors: tuple[Any, ...], classes: int, alpha: float, gamma: float, smoothing: float
) -> None:
    """Launch one pass over the logits, for the losses or for the gradient, which is the third tensor."""
    logits, _, gradient, *_ = tensors
    vector = config.vector(logits.dtype.itemsize, want_loss=gradient is None)
    kernels.focal_loss_pass(
        (programs,),
        tensors,
        (logits.numel(),),
        (alpha, gamma, smoothing / 2),
        CLASSES=logits.shape[-1],
        REAL=classes,
        SQUARE=gamma == 2,
        GROUPS=config.BLOCK // vector,
        VECTOR=vector,
        FULL=logits.numel() % config.BLOCK == 0,
        num_warps=config.BLOCK // config.PER_THREAD // facts(logits.device).warp_size,
    )


FAMILY = _library.register_family(
    _library.OpFamily("focal_loss", "focal loss of a detector's classes, forward and backward")
)

FOCAL_LOSS = Op(
    FAMILY,
    "focal_loss(Tensor logits, Tensor targets, Tensor num_positives, int classes, float alpha, float gamma, "
    "float smoothing) -> Tensor",
    reference=reference.forward,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=lambda logits, *rest: logits.new_empty((), dtype=_library.compute_dtype(logits)),
    saved=Saved("logits", "targets", "num_positives"),
    derivative=Derivative(of=("logits",)),
)
