"""Launches of the symmetric product that are compiled for every GPU."""

from __future__ import annotations

import torch

from apex.ops.newton_schulz import op


def record() -> None:
    """Launch (under `record_launches`) products of wide, tall and odd matrices, with and without addends; copies."""
    for dtype in (torch.float16, torch.bfloat16):
        for n, depth in ((1024, 4096), (300, 520), (2048, 8192)):
            wide = torch.empty(2, n, depth, dtype=dtype, device="meta")
            square = op.launch(wide, wide, 1.0, None, 0.0)
            op.launch(square, square, 2.0, square, -4.0)
            tall = torch.empty(2, depth, n, dtype=dtype, device="meta").mT
            op.launch(tall, tall, 1.0, None, 0.0)
            op.normalized(wide, 1e-7, torch.float16)
