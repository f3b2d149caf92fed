"""Launch choices of a mixture's experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._device import DeviceFacts, next_power_of_2

# Rows that one program of the sort counts and ranks, by comparing each pair of them.
SORT_CHUNK, SORT_WARPS = 128, 4
SCAN_BLOCK = 1024
PLAN_ELEMENTS = 8192  # tiles x experts that one program of `moe_plan` compares

GROUP = 8  # tiles of rows that go through the columns together
BAND = 8
COMBINE_BLOCK = 1024
UNIT_ROWS, UNIT_COLUMNS = 8, 256  # of the unit's derivative by itself
BIAS_ROWS, BIAS_BLOCK = 32, 64
ROUTER_ROWS, ROUTER_COLUMNS = 16, 128

# Offsets within one expert's matrix, and numbers of rows, have 32 bits; blocks reach a little past the end.
LARGEST_MATRIX = 2**31 - 2**20

# Least rows x hidden size x width of a plain call for `grouped_mm` to compute all products, not the gradients alone.
# Steps on an H200 in bfloat16, in ms, first with the gradients alone, then with all: Qwen3-30B (128 experts of
# 2048 x 768) with 512 tokens 1.87 and 1.97, with 2048 2.42 and 2.33, with 8192 4.8 and 4.3, with 32,768 16.7 and 14.2;
# Mixtral (8 of 4096 x 14336) with 256 tokens 3.48 and 3.66; 8 of 7168 x 2048 with 32,768 rows 16.7 and 15.1. Without
# `grouped_mm` Qwen3 takes 20.7 with 32,768 tokens, and Mixtral 46.4 with 8192, with it for all products 25.9.
LARGE_PRODUCTS = 2**35


class Tile(NamedTuple):
    """Tile of a product, `rows` x `columns`, and the terms of its sums that are multiplied at a time."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def tile_rows(rows: int, experts: int, dtype: torch.dtype, device: DeviceFacts) -> int:
    """Return the rows of a tile: at most 128, fewer if an average expert has fewer rows."""
    most = 32 if device.backend == "interpreter" else 64 if dtype.itemsize == 4 else 128
    return min(most, max(16, next_power_of_2(-(-rows // experts))))


def product_tile(rows: int, inner: int, columns: int, operands: int, dtype: torch.dtype, device: DeviceFacts) -> Tile:
    """Return the tile of a product whose tiles have `rows` rows.

    `operands` is the number of columns of the matrix for each column of the result: 2 before a gated unit. `ops/dense`
    measured tiles of 128 x 256 to be the best. A product with the unit's derivative behind it passes 2, too: with 128
    columns ptxas spills a kilobyte per thread, with 64 nothing, but that product reads half as much again.
    """
    if device.backend == "interpreter":
        return Tile(rows, 32, 32, 4, 1)
    if dtype.itemsize == 4:
        tile = Tile(rows, 64 // operands, 32, 4, 2)
    else:
        wide = device.shared_memory >= 160 * 1024
        tile = Tile(rows, (256 if wide else 128) // operands, 64, 8 if rows == 128 else 4, 3)
    if device.backend == "hip":
        tile = tile._replace(inner=32, num_stages=2)
    return tile._replace(
        columns=min(tile.columns, max(16, next_power_of_2(columns))),
        inner=min(tile.inner, max(16, next_power_of_2(inner))),
    )


def gradient_tile(outs: int, ins: int, dtype: torch.dtype, device: DeviceFacts) -> Tile:
    """Return the tile of a matrix's gradient: `rows` of it by `columns`, over `inner` sorted rows at a time."""
    if device.backend == "interpreter":
        return Tile(32, 32, 32, 4, 1)
    if dtype.itemsize == 4:
        tile = Tile(64, 64, 32, 4, 2)
    else:
        wide = device.shared_memory >= 160 * 1024
        tile = Tile(128, 256 if wide else 128, 64, 8, 3)
    if device.backend == "hip":
        tile = tile._replace(inner=32, num_stages=2)
    sizes = [min(size, max(16, next_power_of_2(limit))) for size, limit in zip(tile[:2], (outs, ins), strict=True)]
    return tile._replace(rows=sizes[0], columns=sizes[1])
