"""Launches of the kernel behind a convolution to compile for every GPU."""

from __future__ import annotations

import torch

from apex.ops.conv.op import launch_epilogue


def record() -> None:
    """Collects (under `recording`) launches with every flag, without scale and mask, and with a mask alone."""
    for dtype, flags in ((torch.float16, True), (torch.float32, False)):
        values = torch.empty(2, 8, 16, 256, dtype=dtype, device="meta").movedim(-1, 1)
        bias = torch.empty(256, dtype=dtype, device="meta")
        mask = torch.empty_like(values, dtype=torch.int8) if flags else None
        launch_epilogue(values, bias if flags else None, bias, mask)
        if mask is not None:
            launch_epilogue(values, None, None, mask)
