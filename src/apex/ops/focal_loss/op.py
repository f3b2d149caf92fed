"""Focal loss of a dense detector's classes: the sum over anchors and classes, divided by the number of positives.

Letters: A anchors, C classes, of which the first `classes` are real and the others padding. The backward pass computes
the gradient from the logits. Upstream computes it along with the loss and keeps it, which reads and writes the size of
the logits four times in all, this three times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from .._device import DeviceFacts, facts, launch_rule
from .._op import Op
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")


def check(logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int) -> None:
    """Refuses arguments that do not fit, in clear words; classes where looking at them waits for no device."""
    check_tensors(cls_output=logits, cls_targets_at_level=targets, num_positives_sum=num_positives)
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
    at_hand = type(targets) is Tensor and targets.device.type == "cpu" and not torch.compiler.is_compiling()
    if at_hand and targets.numel() and (highest := int(targets.max())) >= classes:
        raise ValueError(f"cls_targets_at_level has class {highest}, expected less than num_real_classes={classes}")


def loss_and_gradient_of_sum(
    logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the sum of the losses, which is not divided by the number of positives."""
    settings = (classes, alpha, gamma, smoothing)
    (loss,) = FOCAL_LOSS.run(logits, targets, num_positives, *settings)
    one = torch.ones((), dtype=loss.dtype, device=loss.device)  # type: ignore[union-attr]
    (gradient,) = FOCAL_LOSS.run_backward((one,), (logits, targets, one), settings, (True,))
    return loss, gradient  # type: ignore[return-value]


def launch_forward(
    logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    device = logits.device
    sizes, gpu = (logits.numel(), logits.shape[-1], classes), facts(device)
    losses, add_up, programs = _loss_launches(sizes, logits.dtype.itemsize, gamma == 2, gpu)
    partials = torch.empty(programs, dtype=torch.float32, device=device)
    losses((logits, targets, None, partials, None, None), (alpha, gamma, smoothing / 2))
    loss = torch.empty((), dtype=torch.float32, device=device)
    add_up((partials, num_positives, loss))
    return loss


@launch_rule
def _loss_launches(sizes: tuple[int, ...], itemsize: int, square: bool, device: DeviceFacts) -> tuple[Any, Any, int]:
    """The kernel that sums the losses of parts of the logits, the one that adds these up, and how many there are."""
    programs = config.PROGRAMS_PER_MULTIPROCESSOR * device.multiprocessors
    programs = min(programs, max(1, sizes[0] // config.BLOCK))
    add_up = kernels.focal_loss_sum.prepare((1,), (programs,), BLOCK=1024, num_warps=8)
    return _prepare_pass(programs, sizes, itemsize, square, True, device), add_up, programs


def launch_backward(grad_loss: Tensor, *saved: Any) -> Tensor:
    """The gradient of the logits; `saved` is what `FOCAL_LOSS` saves, then its settings."""
    logits, targets, num_positives, classes, alpha, gamma, smoothing, _ = saved
    gradient, sizes = torch.empty_like(logits), (logits.numel(), logits.shape[-1], classes)
    launch = _gradient_launch(sizes, logits.dtype.itemsize, gamma == 2, facts(logits.device))
    launch((logits, targets, gradient, None, grad_loss, num_positives), (alpha, gamma, smoothing / 2))
    return gradient


@launch_rule
def _gradient_launch(sizes: tuple[int, ...], itemsize: int, square: bool, device: DeviceFacts) -> Any:
    return _prepare_pass(max(1, sizes[0] // config.BLOCK), sizes, itemsize, square, False, device)


def _prepare_pass(
    programs: int, sizes: tuple[int, ...], itemsize: int, square: bool, want_loss: bool, device: DeviceFacts
) -> Any:
    """The kernel of one pass over the logits, for the losses or for the gradient."""
    total, all_classes, real = sizes
    vector = config.vector(itemsize, want_loss)
    return kernels.focal_loss_pass.prepare(
        (programs,),
        (total,),
        CLASSES=all_classes,
        REAL=real,
        SQUARE=square,
        GROUPS=config.BLOCK // vector,
        VECTOR=vector,
        FULL=total % config.BLOCK == 0,
        num_warps=config.BLOCK // config.PER_THREAD // device.warp_size,
    )


FAMILY = _library.register_family(
    _library.OpFamily("focal_loss", "focal loss of a detector's classes, forward and backward")
)

FOCAL_LOSS = Op(
    FAMILY,
    "focal_loss(Tensor logits, Tensor targets, Tensor num_positives, int classes, float alpha, float gamma, "
    "float smoothing) -> Tensor",
    reference=reference.forward,
    forward=launch_forward,
    backward=launch_backward,
    fake=lambda logits, *rest: logits.new_empty((), dtype=_library.compute_dtype(logits)),
    saves=("logits", "targets", "num_positives"),
    gradients=("logits",),
    checks=[
        {
            "logits": lambda generator: 3 * torch.randn(30, 24, generator=generator, dtype=torch.float32, device="cpu"),
            "targets": lambda generator: torch.randint(
                -2, 20, (30,), generator=generator, dtype=torch.int64, device="cpu"
            ),
            "num_positives": lambda generator: torch.tensor([5.0], dtype=torch.float32, device="cpu"),
            "classes": 20,
            "alpha": 0.25,
            "gamma": gamma,
            "smoothing": smoothing,
        }
        for gamma, smoothing in ((2.0, 0.0), (1.5, 0.1))
    ],
)
