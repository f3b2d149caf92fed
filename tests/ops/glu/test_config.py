"""The launch rules over a grid of shapes: tiles fit registers and shared memory, and there are programs for all."""

from __future__ import annotations

import itertools

import pytest

from apex.ops._compile_ahead import GPUS
from apex.ops.glu.config import backward_groups, backward_tile, forward_tile

WIDTHS = (1, 45, 63, 97, 333, 787, 1024, 1160, 1544, 5504, 7000, 11008, 24000)


@pytest.mark.parametrize("gpu", list(GPUS))
def test_tiles_fit(gpu: str) -> None:
    device = GPUS[gpu].facts
    for rows, width, size, bias_grad in itertools.product((1, 7, 500, 60000), WIDTHS, (2, 4), (False, True)):
        backward = backward_tile(rows, width, size, bias_grad, device)
        for tile, most in ((forward_tile(rows, width, size, device), 8), (backward, 16)):
            threads = tile.num_warps * device.warp_size
            assert threads <= 512
            assert tile.rows * tile.block <= max(most * threads, 1024)
            assert tile.rows < 2 * rows
            assert tile.block < 2 * width or tile.block == 1
            # What is loaded ahead, of three tensors, leaves room for a second program.
            assert (tile.num_stages - 1) * 3 * tile.rows * tile.block * size <= device.shared_memory // 2
        tiles, blocks = -(-rows // backward.rows), -(-width // backward.block)
        programs = blocks * backward_groups(tiles, blocks, device)
        assert programs >= min(device.multiprocessors, tiles * blocks)
