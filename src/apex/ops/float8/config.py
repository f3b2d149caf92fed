"""Launch choices of the float8 casts."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Tile that one program casts: `rows` x `columns` elements."""

    rows: int
    columns: int
    num_warps: int


# Times for 8192x4096 bfloat16 numbers on an H200, in microseconds, by rows x columns; the floor is 32.
# 64x128 40.0, 32x256 40.0, 128x64 43.4, 128x128 46.0, 64x64 55.0, 64x128 with 8 warps 67.6; one scale per row 42.8.
CAST_TILE = Tile(64, 128, 4)

# Times for the largest magnitudes of rows and columns, stored once per tile; the floor is 16. 128x64 23.7,
# 256x64 with 8 warps 27.8, 128x128 28.6, 64x64 32.8.
AMAX_TILE = Tile(128, 64, 4)

# Times for the largest magnitude of a matrix: 512 programs with blocks of 8192 19.7, of 4096 32.4; 264 programs 26.8.
# Every program of the cast reads all partial results, so that fewer are better.
AMAX_BLOCK, AMAX_WARPS, MOST_PARTIALS = 8192, 4, 512

# Launch of `float8_amax_from_end`, which is not followed by a cast. Times if the kernel before it wrote the input, of
# 12.6, 50 and 824 MB of float16: 1584 programs with blocks of 4096 3.5, 10.7 and 182; 2112 programs 3.5, 12.8 and 191;
# 1056 programs 3.7, 11.5 and 185; `float8_amax` 3.7, 17.6 and 200.
WRITE_BLOCK, WRITE_WARPS, WRITE_PARTIALS = 4096, 4, 1584

# Warps of a program that casts a tile of 128 x 128: with a scale per row and column, and with one scale. Times for
# 8192x16384 bfloat16 numbers, by warps; the floor is 127. Scales of rows: 4 172, 8 196, 16 346. One scale: 143.
BLOCK_WARPS, SQUARE_WARPS = 4, 8

# Launch of the matrix product with a scale per block, for GPUs where cuBLASLt lacks it: the tile of a program, the rows
# of tiles that run together, and the stages of the pipeline.
PRODUCT_TILE, PRODUCT_GROUP, PRODUCT_STAGES = Tile(128, 128, 8), 8, 3
