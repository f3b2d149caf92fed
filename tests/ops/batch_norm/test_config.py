"""Launch rules of batch norms for devices that are not here."""

from __future__ import annotations

import itertools

import pytest
import torch

from apex.ops._device import DeviceFacts
from apex.ops.batch_norm import config, kernel_passes

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


@pytest.mark.parametrize("channel_dim", [1, -1])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (2, 3, 4, 5), (2, 3, 1, 1), (1, 1, 4, 5), (2, 3, 2, 4, 5)])
def test_geometry_is_that_of_dense_tensors(shape: tuple[int, ...], channel_dim: int) -> None:
    """Channels are last where they are contiguous; what skips elements must be copied first."""
    geometry = lambda x: kernel_passes._geometry(x.shape, x.stride(), channel_dim)  # noqa: E731
    x = torch.empty(shape)
    channels, values = shape[channel_dim], x.numel() // shape[channel_dim]
    last = config.Geometry(1, values, channels, True)
    first = last if channel_dim == -1 or values == shape[0] else (shape[0], values // shape[0], channels, False)
    assert geometry(x) == first
    channels_last = x.movedim(1, -1).contiguous().movedim(-1, 1)
    if channel_dim == 1:
        assert geometry(channels_last) in (last, first if channels_last.is_contiguous() else last)
    else:
        assert (geometry(channels_last) is None) == (not channels_last.is_contiguous())
    for strided in (x.repeat_interleave(2, -1)[..., ::2], torch.empty(1).expand(shape)):
        assert strided.is_contiguous() or geometry(strided) is None
        assert geometry(kernel_passes.dense(strided, channel_dim)) is not None
