"""Launch rules of the symmetric product."""

from __future__ import annotations

from typing import NamedTuple

from .._device import DeviceFacts

# Largest side of matrices whose product is quicker in PyTorch than half the tiles of ours.
SMALL = 256

# Bytes that the iteration of one batch may take beside its input and output, unless one matrix needs more. With it,
# the 24 matrices of 2048 x 8192 of a GPT of 1.3 billion parameters are two batches in float16, whose symmetric products
# fill 132 processors 12.4 times. Of 256 MiB, each batch would fill them 3.1 times, and leave a quarter of them idle.
WORKSPACE = 1 << 30


def peak_elements(rows: int, columns: int) -> int:
    """Return the most elements that an iteration by any method holds at once for a matrix beside its input.

    A product with X holds X, its factor and its result; one that updates R or Q holds X and four symmetric matrices.
    """
    n, whole = min(rows, columns), rows * columns
    return max(2 * whole + n * n, whole + 4 * n * n)


def matrices_at_once(rows: int, columns: int, element_size: int, copies: int = 0) -> int:
    """Return how many matrices a batch has at most, so that it stays within `WORKSPACE`; at least 1.

    `copies` are copies of the input that the caller makes.
    """
    needed = element_size * (peak_elements(rows, columns) + copies * rows * columns)
    return max(1, WORKSPACE // max(1, needed))


class Tile(NamedTuple):
    """Side of a program's tile, columns of an input that it loads at once, and its warps and stages."""

    side: int
    depth: int
    num_warps: int
    num_stages: int


# Products of at least this many multiplications load their matrices by descriptors: see `loads_by_descriptor`.
DESCRIBED = 6e10


def loads_by_descriptor(device: DeviceFacts, batch: int, n: int, depth: int) -> bool:
    """Return whether programs load tiles by descriptors, with the copy unit of a Hopper GPU.

    On an H200, 11 products of 2048 x 2048 matrices take 0.167 ms, by addresses 0.203; of 2048 x 8192 matrices 0.671 and
    0.780. A launch takes about 0.13 ms of the host's time, so that small products are left out.
    """
    enough = batch * n * n * depth >= DESCRIBED
    return device.capability == (9, 0) and enough and n % 128 == 0 and depth % 64 == 0 and n * n < 2**31


def tile(device: DeviceFacts, described: bool = False) -> Tile:
    """Return the tile of every product.

    On an H200, 12 products of 2048 x 8192 matrices take 0.79 ms, with 3 stages 0.81, with 4 warps 0.84, with 32 columns
    at once 0.90; PyTorch's whole product takes 1.15. For transposed matrices, 8192 x 2048, 3 stages take 1.18 of it.
    With descriptors, two programs of 4 warps and 3 stages share a multiprocessor, and one computes while the other
    stores. Tiles of 128 x 256, one per multiprocessor, take 1.04 to 1.19 of their time.
    """
    if described:
        return Tile(128, 64, 4, 3)
    stages = 4 if device.shared_memory >= 160 * 1024 else 2
    return Tile(128, 64, 8, stages)


# Elements of a matrix that a program of the scaled copy takes, and its warps.
COPY_BLOCK = 4096
COPY_WARPS = 4
