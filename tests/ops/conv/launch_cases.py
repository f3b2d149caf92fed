"""Launches of the kernels behind a convolution, and of a bottleneck's, to compile for every GPU."""

from __future__ import annotations

import torch

from apex.ops.conv.bottleneck import fold, scale_rows
from apex.ops.conv.op import launch_epilogue


def record() -> None:
    """Collects (under `record_launches`) launches with every flag, without scale and mask, and with a mask alone.

    Then three weights with norms and four, and as many with scales alone.
    """
    for dtype, flags in ((torch.float16, True), (torch.float32, False)):
        values = torch.empty(2, 8, 16, 256, dtype=dtype, device="meta").movedim(-1, 1)
        bias = torch.empty(256, dtype=dtype, device="meta")
        mask = torch.empty_like(values, dtype=torch.int8) if flags else None
        launch_epilogue(values, bias if flags else None, bias, mask)
        if mask is not None:
            launch_epilogue(values, None, None, mask)
        shapes = ((64, 256, 1, 1), (64, 64, 3, 3), (256, 64, 1, 1), (256, 256, 1, 1))[: 4 if flags else 3]
        norms = [[torch.empty(shape[0], dtype=dtype, device="meta") for _ in range(4)] for shape in shapes]
        scaled, scales, _ = fold([torch.empty(shape, dtype=dtype, device="meta") for shape in shapes], norms)
        scale_rows(scaled, scales)
