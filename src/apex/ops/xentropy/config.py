"""Launch choices of softmax cross-entropy, and the sizes of a linear layer's chunks.

Unless stated otherwise, times are microseconds on an H200, of kernels launched directly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._device import DeviceFacts, next_power_of_2
from .._tuned import tunable

# The kernels' blocks begin at multiples of this many elements (`kernels.ALIGNMENT`).
ALIGNMENT = 16
# Rows up to this length are held in registers, several per program.
SHORT_ROW = 1024

# For rows of at least this many bytes, the gradient that overwrites a row bypasses the cache, which keeps the rows that
# are read again: bfloat16 768x128256 in 142, else 158, 1664x50257 in 113, else 119, but 2816x32000 in 121, else 118.
STREAMED_ROW = 3 << 15

# A chunk has half of all logits, but at least and at most this many (192 and 512 MiB in half precision).
# Every chunk reads and writes the weight's gradient, and smaller ones make slower matrix products: 4096x4096x128256 in
# 23.2 ms in chunks of 704 rows, 21.6 of 1024, 20.7 of 2048, 20.3 in one; 8192x4096x50257 in 16.7 of 2752, 15.4 of 2048,
# 15.6 of 4096; 16384x2048x131072 in 44.6 of 1536, 44.3 of 2048, 43.3 of 4096.
CHUNK_ELEMENTS = (3 << 25, 1 << 28)
CHUNKS = 2
# Chunks have a multiple of this many rows, half a tile of a matrix product: 8192x768x50304 takes 2.96 ms in chunks of
# 2752 rows, 2.95 in chunks of 2816, which need 6 MiB more.
ROW_MULTIPLE = 64
# Most chunks whose sum may be rounded to bfloat16 each time: 0.3% in the mean square, a single rounding being 0.1%.
MOST_ROUNDINGS = 16
# Rows of logits begin at multiples of this many elements, which makes matrix products and kernels quicker.
STRIDE_MULTIPLE = 64
# On a GPU half-precision matrix products take a multiple of this many classes, 16 bytes, and the remainder separately:
# with 50257 classes and 4096 features cuBLAS's products took four times as long as torch.compile's, which are padded.
CLASS_MULTIPLE = 8
# Elements at a time, and programs per multiprocessor, of the kernel that multiplies gradients by one number.
SCALE_BLOCK, SCALE_PROGRAMS = 8192, 4
# Classes whose gradients are added at a time if a product cannot add to float32 itself.
CLASSES_AT_A_TIME = 1 << 14


class BlockConfig(NamedTuple):
    """Blocks of `groups` accesses of 16 bytes by each of `lanes` threads; `splits` programs share a row."""

    groups: int
    lanes: int
    num_warps: int
    splits: int = 1


class ShortConfig(NamedTuple):
    """Launch choices for whole rows of up to `block` elements, `rows_per_program` of them."""

    rows_per_program: int
    block: int
    num_warps: int


@tunable(lambda config: ("groups", "lanes", "num_warps"))
def forward_config(rows: int, classes: int, element_size: int, gradient: bool, device: DeviceFacts) -> BlockConfig:
    few = rows < 4 * device.multiprocessors
    if gradient:
        # The row is read again, best from the cache: the longer it is, the fewer at a time. bfloat16 1664x50304 in 112,
        # with 512 threads 126, when 53 MB of rows are in use, but 2816x32000 in 121 and 113. Half-precision rows that
        # are no whole number of blocks take 48 registers, too many for two such programs: 1664x50257 in 138, and in 113
        # with two accesses of 512 threads.
        odd = element_size == 2 and classes % ALIGNMENT != 0
        lanes = 1024 if few or (classes * element_size >= STREAMED_ROW and not odd) else 512
        return _fitted(classes, element_size, groups=1 + odd, lanes=lanes, device=device)
    # Two accesses in flight: bfloat16 8192x131072 in 484, with four 523, with eight 854; 16384x50257 in 389, with four
    # 472. More threads do better if there are too few rows for every multiprocessor to have several (64x131072 in
    # 18, with 256 threads 28).
    return _fitted(classes, element_size, groups=2, lanes=1024 if few else 256, device=device)


@tunable(lambda config: ("groups", "lanes", "num_warps", "splits"))
def backward_config(rows: int, classes: int, element_size: int, device: DeviceFacts) -> BlockConfig:
    # One access of many threads: float32 8192x131072 in 2154, of fewer 2229, four accesses 2601. Four programs share a
    # row that is not whole blocks, and so its remainder: bfloat16 16384x50257 in 877, else 1016. In half precision half
    # the warps, with two accesses each, are quicker for such rows: in another run 814, else 852.
    config = _fitted(classes, element_size, groups=1, lanes=512, device=device)
    splits = 4 if classes % ALIGNMENT else 1
    if splits > 1 and element_size == 2 and config.num_warps > 1:
        config = config._replace(num_warps=config.num_warps // 2)
    splits = max(splits, -(-4 * device.multiprocessors // rows))
    blocks = -(-classes * element_size // (16 * config.lanes))
    return config._replace(splits=min(splits, blocks))


@tunable(lambda config: ("rows_per_program", "num_warps"))
def short_config(rows: int, classes: int, element_size: int, device: DeviceFacts) -> ShortConfig:
    block = next_power_of_2(classes)
    if block == SHORT_ROW and element_size == 2:
        return ShortConfig(1, block, 1)  # bfloat16 65536x1000 in 50, four rows by four warps in 64
    per_program = max(1, 4096 // max(16, block))
    while per_program > 1 and rows // per_program < 4 * device.multiprocessors:
        per_program //= 2
    return ShortConfig(per_program, block, max(1, min(128, per_program * block // 8) // device.warp_size))


def _fitted(classes: int, element_size: int, groups: int, lanes: int, device: DeviceFacts) -> BlockConfig:
    """Return blocks of `groups` by `lanes` vectors, or smaller ones for rows that would not fill them."""
    vector = 16 // element_size
    while groups > 1 and groups * lanes * vector > classes:
        groups //= 2
    while lanes > device.warp_size and lanes * vector > classes:
        lanes //= 2
    return BlockConfig(groups, lanes, lanes // device.warp_size)


def chunk_size(rows: int, classes: int, asked: int | None = None) -> int:
    """Return the rows per chunk: `asked`, or else nearly equal chunks within the limits `CHUNK_ELEMENTS`."""
    if asked is not None:
        return max(1, min(asked, rows))
    fewest, most = CHUNK_ELEMENTS
    most = max(1, min(most, max(fewest, rows * classes // CHUNKS)) // classes)
    if rows <= most:
        return max(1, rows)
    chunks = -(-rows // most)
    return min(most, -(-rows // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE)


def sum_dtype(weight_dtype: torch.dtype, chunks: int, asked: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of the sums of the gradients of weight and bias over the chunks."""
    if asked is not None:
        return asked
    # Sums over all rows, not divided by their number yet, may be too large for float16.
    if weight_dtype == torch.float16 or (weight_dtype == torch.bfloat16 and chunks > MOST_ROUNDINGS):
        return torch.float32
    return weight_dtype


def sizes(
    rows: int, weight: torch.Tensor, chunk_rows: int | None, asked: torch.dtype | None
) -> tuple[int, torch.dtype]:
    """Return the rows per chunk and the dtype of the sums of the weight's gradient over the chunks."""
    size = chunk_size(rows, weight.shape[0], chunk_rows)
    return size, sum_dtype(weight.dtype, -(-rows // size), asked)


def parts_of_products(classes: int, dtype: torch.dtype, on_gpu: bool) -> list[slice]:
    """Return the slices of classes that matrix products take at a time."""
    whole = classes // CLASS_MULTIPLE * CLASS_MULTIPLE
    if not on_gpu or dtype.itemsize != 2 or whole in (0, classes):
        return [slice(0, classes)]
    return [slice(0, whole), slice(whole, classes)]
