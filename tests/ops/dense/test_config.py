"""The tiles of activations' gradients over a grid of shapes."""

from __future__ import annotations

import itertools

from apex.ops import _library
from apex.ops._compile_ahead import GPUS
from apex.ops.dense.config import SMALL_BETWEEN_LAYERS, SMALL_MATRIX, activation_tile, takes_node

ROWS, COLUMNS = (1, 26, 200, 380, 1038, 2453, 8192), (1, 17, 36, 141, 300, 327, 1301, 4096)


def test_tiles_fit_and_keep_the_device_busy() -> None:
    device = GPUS["sm_90"].facts
    for rows, columns, active, size in itertools.product(ROWS, COLUMNS, (False, True), (2, 4)):
        tile = activation_tile(rows, columns, active, size, device)
        per_thread = tile.rows * tile.block // (tile.num_warps * device.warp_size)
        assert per_thread <= 16
        programs = -(-columns // tile.block) * min(tile.groups, -(-rows // tile.rows))
        few = rows <= 256 or programs >= min(device.multiprocessors, rows * columns // 2048)
        in_one_launch = tile.groups == 1
        assert in_one_launch or few
        if in_one_launch:
            assert rows * columns <= SMALL_MATRIX
        if size == 4 and columns % 4 and rows > 256:
            assert not in_one_launch, "many rows that are loaded value by value"


def test_few_features_and_odd_widths_between_layers_are_left_to_pytorch() -> None:
    """The backward kernel would take longer than PyTorch's operators; a request for kernels is met."""
    widths = (1, 2, 2048, 2049, 3072, 4004, 4006, 4007, 4008, 16384)
    for rows, features, width in itertools.product((1, 2048, 6965, 16384), (22, 256, 768, 4096), widths):
        suits = width % 4 == 0 and features > width / 8
        assert takes_node(rows, features, width) == (rows * width >= SMALL_BETWEEN_LAYERS and suits)
        with _library.implementation("triton"):
            assert takes_node(rows, features, width)
    assert takes_node(8192, 768, 3072)  # GPT-2 small
