"""Launches of the cross-entropy kernels to compile for every GPU: each flag, aligned and odd vocabularies."""

from __future__ import annotations

import torch

from apex.ops.xentropy import op

_BF16, _F32, _HALF = torch.bfloat16, torch.float32, torch.float16


def record() -> None:
    """Plans and (under `record_launches`) collects forward and backward of every shape."""
    for rows, classes, dtype, smoothing in (
        (8192, 32000, _BF16, 0.1),
        (16384, 50257, _F32, 0.0),
        (128, 1000, _HALF, 0.1),
    ):
        logits = torch.empty(rows, classes, dtype=dtype, device="meta")
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        losses, log_sums = op.launch_forward(logits, labels, smoothing, 0)
        op.launch_backward(losses, logits, log_sums, labels, smoothing, 0, (True,))
    logits, labels = torch.empty(1024, 131072, dtype=_BF16, device="meta"), torch.empty(1024, device="meta").long()
    losses = torch.empty(1024, device="meta")
    op.launch_in_place(logits, labels, losses, losses, 0.1, -100)
    padded = logits[:, :50257]
    op.launch_in_place(padded, labels, losses, None, 0.0, -100)
    op.launch_backward(losses.to(_BF16), padded, losses, labels, 0.0, -100, (True,))
