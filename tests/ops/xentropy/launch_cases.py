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
    row_statistics = dict.fromkeys(("lse", "own", "mean", "weighted", "entropy", "squares", "peak"), losses)
    row_statistics["top"] = labels
    padded = logits[:, :50257]
    neutral, capped = (1.0, 0.0, 1.0), (1.0, 30.0, 0.8)
    for rows, transform, found, weights, smoothing in (
        (logits, neutral, {}, None, 0.1),
        (padded, capped, {}, None, 0.0),
        (logits, (2.0, 0.0, 1.0), {"entropy": losses}, None, 0.0),
    ):
        op.launch_rows(
            rows,
            labels,
            transform,
            -100,
            found,
            weights,
            losses=losses,
            scale=losses,
            smoothing=smoothing,
            gradient=True,
        )
    op.launch_scale(logits, losses)
    coefficients = torch.empty(4, 1024, device="meta")
    for rows, transform, weights, entropy in ((logits, neutral, None, True), (padded, capped, losses, True)):
        op.launch_rows(rows, labels, transform, -100, row_statistics, losses)
        op.launch_row_gradient(rows, labels, losses, coefficients, weights, transform, -100, entropy, rows)
    op.launch_row_gradient(logits, labels, losses, coefficients, None, capped, -100, False, logits)
    op.launch_backward(losses.to(_BF16), padded, losses, labels, 0.0, -100, (True,))
