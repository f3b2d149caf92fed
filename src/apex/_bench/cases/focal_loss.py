"""Focal loss of a RetinaNet's anchors, forward and backward apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...contrib.focal_loss import focal_loss
from ...ops.focal_loss import reference
from ..compiling import compiled
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

ALPHA, GAMMA = 0.25, 2.0
DTYPES = (torch.bfloat16, torch.float32)
# Images, anchors of an image of 640 pixels, classes.
GPU_SHAPES = ((8, 76725, 80), (8, 76725, 91))
CPU_SHAPES = ((1, 4096, 80),)
# The sum of many losses over the number of positives is of order one.
SUMMED = 100

Loss = Callable[[Tensor], Tensor]


def _eager(logits: Tensor, targets: Tensor, positives: Tensor) -> Tensor:
    """What detectors write: one-hot targets, cross-entropy, both weights; in float32, as under autocast."""
    wide = logits.float()
    right = functional.one_hot(targets.clamp(min=0), logits.shape[-1]) * (targets >= 0)[..., None]
    wanted = right.to(wide.dtype)
    probability = wide.sigmoid()
    cross_entropy = functional.binary_cross_entropy_with_logits(wide, wanted, reduction="none")
    of_right = probability * wanted + (1 - probability) * (1 - wanted)
    losses = (ALPHA * wanted + (1 - ALPHA) * (1 - wanted)) * (1 - of_right) ** GAMMA * cross_entropy
    return (losses * (targets != reference.IGNORED)[..., None]).sum() / positives


def _call(make: Callable[[], Loss], logits: Tensor, gradient: Tensor, direction: str) -> Call:
    loss = make()
    if direction == "fwd":
        return lambda: (loss(logits),)
    value = loss(logits)
    return lambda: torch.autograd.grad(value, logits, gradient, retain_graph=True)


def _prepare(dtype: torch.dtype, shape: tuple[int, int, int], direction: str, device: torch.device) -> Prepared:
    generator = torch.Generator(device).manual_seed(0)
    classes = shape[-1]
    logits = (torch.randn(shape, generator=generator, device=device) - 3).to(dtype).requires_grad_()
    targets = torch.randint(classes, shape[:-1], generator=generator, device=device)
    chance = torch.rand(shape[:-1], generator=generator, device=device)
    targets[chance < 0.97] = -1
    targets[chance < 0.05] = reference.IGNORED
    positives = (targets >= 0).sum().float()
    makers: dict[str, Callable[[], Loss]] = {
        OURS: lambda: lambda logits: focal_loss(logits, targets, positives, classes, ALPHA, GAMMA),
        "torch": lambda: lambda logits: _eager(logits, targets, positives),
    }
    if device.type == "cuda":
        makers["compile"] = lambda: _compiled(targets, positives, device)
    wide = logits.detach().double().requires_grad_()
    loss = reference.forward(wide, targets, positives.double(), classes, ALPHA, GAMMA, 0.0)
    if direction == "fwd":
        expected = [Expected(loss.detach(), torch.float32, SUMMED)]
    else:  # as large as if it were not divided, so that the tolerance means something
        expected = [Expected(torch.autograd.grad(loss, wide, positives.double())[0], dtype)]
    calls = {name: functools.partial(_call, make, logits, positives, direction) for name, make in makers.items()}
    return Prepared(calls, expected)


def _compiled(targets: Tensor, positives: Tensor, device: torch.device) -> Loss:
    function = compiled(_eager, device)
    return lambda logits: function(logits, targets, positives)


def _case(dtype: torch.dtype, shape: tuple[int, int, int], direction: str) -> Case:
    images, anchors, classes = shape
    tensors = 1 if direction == "fwd" else 2
    moved = images * anchors * (tensors * classes * dtype.itemsize + torch.int64.itemsize)
    name = f"focal_loss {str(dtype).removeprefix('torch.')} {images}x{anchors}x{classes} {direction}"
    return Case(name, moved, functools.partial(_prepare, dtype, shape, direction))


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Classes that fill vectors and classes that do not; a processor gets fewer anchors."""
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    dtypes: Sequence[torch.dtype] = DTYPES
    if quick:
        shapes, dtypes = shapes[:1], DTYPES[:1]
    return [_case(dtype, shape, way) for dtype in dtypes for shape in shapes for way in ("fwd", "bwd")]


register(Family("focal_loss", "focal loss of a detector's classes", cases))
