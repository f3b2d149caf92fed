"""Focal loss of a RetinaNet's anchors; forward and backward are separate cases."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...contrib.focal_loss import focal_loss
from ...ops.focal_loss import reference
from ..directions import Random, exact, long_name, passes, prepare, times, with_peers
from ..registry import Case, Family, Prepared, register

ALPHA, GAMMA = 0.25, 2.0
DTYPES = (torch.bfloat16, torch.float32)
# Images, anchors of a 640-pixel image, classes.
GPU_SHAPES = ((8, 76725, 80), (8, 76725, 91))
CPU_SHAPES = ((1, 4096, 80),)
# The sum of many losses over the number of positives is of order one.
SUMMED = 100


def _eager(logits: Tensor, targets: Tensor, positives: Tensor) -> Tensor:
    """Compute the loss as detectors write it: one-hot targets, cross-entropy, both weights, in float32."""
    wide = logits.float()
    right = functional.one_hot(targets.clamp(min=0), logits.shape[-1]) * (targets >= 0)[..., None]
    one_hot = right.to(wide.dtype)
    probability = wide.sigmoid()
    cross_entropy = functional.binary_cross_entropy_with_logits(wide, one_hot, reduction="none")
    of_right = probability * one_hot + (1 - probability) * (1 - one_hot)
    losses = (ALPHA * one_hot + (1 - ALPHA) * (1 - one_hot)) * (1 - of_right) ** GAMMA * cross_entropy
    return (losses * (targets != reference.IGNORED)[..., None]).sum() / positives


def _ours(logits: Tensor, targets: Tensor, positives: Tensor) -> Tensor:
    return focal_loss(logits, targets, positives, logits.shape[-1], ALPHA, GAMMA)


def _exact(logits: Tensor, targets: Tensor, positives: Tensor) -> Tensor:
    return reference.forward(logits, targets, positives, logits.shape[-1], ALPHA, GAMMA, 0.0)


def _prepare(dtype: torch.dtype, shape: tuple[int, int, int], direction: str, device: torch.device) -> Prepared:
    random = Random(device)
    logits = (random.normal(*shape) - 3).to(dtype).requires_grad_()
    targets = random.integers(0, shape[-1], *shape[:-1])
    chance = random.uniform(*shape[:-1])
    targets[chance < 0.97] = -1
    targets[chance < 0.05] = reference.IGNORED
    positives = (targets >= 0).sum().float()
    arguments = (logits, targets, positives)
    # The gradient undoes the division by the number of positives, so that the tolerance is meaningful.
    expected = exact(_exact, arguments, positives, direction, torch.float32, (SUMMED, 1))
    return prepare(with_peers(_ours, _eager, device), arguments, positives, direction, expected)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return cases with numbers of classes that fill vector loads and that do not; a CPU gets fewer anchors."""
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    rows = []
    for dtype in DTYPES[:1] if quick else DTYPES:
        for shape in shapes[:1] if quick else shapes:
            images, anchors, classes = shape
            logits, targets = images * anchors * classes * dtype.itemsize, images * anchors * torch.int64.itemsize
            moved = {"fwd": logits + targets, "bwd": 2 * logits + targets}
            rows += passes(f"focal_loss {long_name(dtype)} {times(shape)}", moved, _prepare, dtype, shape)
    return rows


register(Family("focal_loss", "focal loss of a detector's classes", cases))
