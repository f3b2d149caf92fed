"""Launches of the float8 kernels to compile for every GPU: each kernel and flag, at real and odd sizes."""

from __future__ import annotations

import torch

from apex.ops import _device
from apex.ops.float8 import blocks, config, op

# rows, columns, dtype, one scale per row
_SHAPES = [
    (8192, 4096, torch.bfloat16, False),
    (8192, 4096, torch.bfloat16, True),
    (4096, 16384, torch.float32, False),
    (48, 80, torch.float16, True),
]


def record() -> None:
    """Plans and (under `record_launches`) collects the largest magnitudes and the casts of every shape."""
    facts = _device.facts(torch.device("meta"))
    without_infinity = facts.name == "gfx942"
    formats = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz) if without_infinity else op.DTYPES[:2]
    for square in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            input = torch.empty(1024, 2048, dtype=dtype, device="meta")
            left, _, inverse, _ = blocks.cast_blocks(input, False, square, formats[0])
            right, _, right_inverse, _ = blocks.cast_blocks(input, square, square, formats[0])
            blocks.block_product(left, right, inverse, right_inverse, dtype)
            gradient, _, gradient_inverse, _ = blocks.cast_blocks(input, False, square, formats[1])
            blocks.block_product(gradient, right, gradient_inverse, right_inverse, dtype)
    for rows, columns, dtype, by_row in _SHAPES:
        input = torch.empty(rows, columns, dtype=dtype, device="meta")
        op.write_amax(input, torch.empty(config.WRITE_PARTIALS, dtype=torch.int32, device="meta"))
        largest = op.amax(input, by_row)
        for number in formats:
            op.cast_both(input, largest, by_row, number)
