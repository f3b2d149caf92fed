"""Launch rules of batch norms for devices that are not here."""

from __future__ import annotations

import itertools

from apex.ops._device import DeviceFacts
from apex.ops.batch_norm import config

LARGE = DeviceFacts("large", "cuda", 132, 32, 227 << 10)


def test_paces_of_passes_that_sum() -> None:
    """No thread holds more values than it has registers for, programs fit a multiprocessor, and copies are allowed."""
    for backward, last, size in itertools.product((False, True), (False, True), (2, 4)):
        for channels, positions in itertools.product((9, 65, 74, 75, 76, 178, 256, 1411, 2048), (49, 196, 3136, 12544)):
            chosen = config.pace(1 if last else 64, positions, channels, last, backward, size, LARGE)
            values = chosen.elements // (32 * chosen.num_warps)
            assert chosen.unroll * values <= 64
            tensors = 2 if backward else 1
            assert chosen.stages * chosen.elements * size * tensors * chosen.programs <= LARGE.shared_memory
            if chosen.stages > 1:
                assert (channels if last else positions) * size % 8 == 0  # Triton copies four bytes or more
                assert chosen.unroll == 1
            tiles = config.tiling(config.Geometry(1 if last else 64, positions, channels, last), chosen.elements)
            assert tiles.constants["R"] * tiles.constants["C_BLOCK"] <= chosen.elements
            programs = config.measure_programs(tiles.units, tiles.channel_blocks, LARGE.multiprocessors, chosen)
            assert 1 <= programs <= tiles.units
