"""Examples of the focal loss of a RetinaNet's anchors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._examples import Example, Make, Public, Random, Row, Sizes
from . import reference
from .op import FOCAL_LOSS, check

_DTYPES = (torch.bfloat16, torch.float32)


def _call(
    logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    check(logits, targets, num_positives, classes)
    return FOCAL_LOSS(logits, targets, num_positives, classes, alpha, gamma, smoothing)


def _torch(
    logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    """Compute the loss as detectors write it: one-hot targets, cross-entropy, both weights, in float32."""
    wide = logits[..., :classes].to(torch.promote_types(logits.dtype, torch.float32))
    one_hot = (functional.one_hot(targets.clamp(min=0), classes) * (targets >= 0)[..., None]).to(wide.dtype)
    wanted = one_hot * (1 - smoothing) + smoothing / 2
    probability = wide.sigmoid()
    cross_entropy = functional.binary_cross_entropy_with_logits(wide, wanted, reduction="none")
    of_right = probability * one_hot + (1 - probability) * (1 - one_hot)
    losses = (alpha * one_hot + (1 - alpha) * (1 - one_hot)) * (1 - of_right) ** gamma * cross_entropy
    return ((losses * (targets != reference.IGNORED)[..., None]).sum() / num_positives).reshape(())


def _draw(random: Random) -> Sizes:
    classes, images = random.choice((1, 2, 20, 80, 90, 91, random.size(2, 400))), random.choice((1, 2, 4, 8, 16))
    return images, random.size(64, min(200_000, random.most // (images * classes))), classes


def _example(name: str, gamma: float, smoothing: float, padded: int, **others: Any) -> Example:
    def arguments(make: Make, images: int, anchors: int, classes: int) -> dict[str, Any]:
        logits, real = make.normal(images, anchors, classes), max(1, classes - padded)
        targets, chance = make.integers(0, real, images, anchors), make.uniform(images, anchors)
        targets = torch.where(chance < 0.9, -1, targets).where(chance >= 0.05, reference.IGNORED)
        positives = (targets >= 0).sum().clamp(min=1).to(torch.float32)
        return {"logits": logits, "targets": targets, "num_positives": positives, "classes": real, "alpha": 0.25,
                "gamma": gamma, "smoothing": smoothing}  # fmt: skip

    return Example(
        name,
        _call,
        arguments,
        torch=_torch,
        sizes="images x anchors x classes",
        small=[(2, 15, 24), (1, 300, 91)],
        draw=_draw,
        strided=True,
        accepts_integers=frozenset({"num_positives"}),
        **others,
    )


EXAMPLES = [
    _example(
        "focal_loss",
        2.0,
        0.0,
        0,
        large=[(2, 76725, 80), (2, 76725, 91)],
        listed=[
            *(Row("cuda", dtype, (8, 76725, classes)) for dtype in _DTYPES for classes in (80, 91)),
            *(Row("cpu", dtype, (1, 4096, 80)) for dtype in _DTYPES),
        ],
        public=[
            Public("contrib.focal_loss:focal_loss", "logits", "targets", "num_positives", "classes", "alpha", "gamma"),
        ],
        extensions=["focal_loss_cuda"],
    ),
    _example("smoothed_focal_loss", 1.5, 0.1, 4),
]
