"""Launches of the focal loss kernels to compile for every GPU: each flag, class counts even and odd."""

from __future__ import annotations

import torch

from apex.ops.focal_loss import op

# anchors, classes, real classes, dtype, gamma
_SHAPES = [
    (8 * 76725, 80, 80, torch.bfloat16, 2.0),
    (76725, 91, 90, torch.float32, 1.5),
]


def record() -> None:
    """Plans and (under `record_launches`) collects loss and gradient of every shape."""
    for anchors, columns, classes, dtype, gamma in _SHAPES:
        logits = torch.empty(anchors, columns, dtype=dtype, device="meta")
        targets = torch.empty(anchors, dtype=torch.int64, device="meta")
        positives = torch.empty(1, device="meta")
        settings = (classes, 0.25, gamma, 0.0)
        loss = op.launch_forward(logits, targets, positives, *settings)
        op.launch_backward(loss, logits, targets, positives, *settings, (True,))
