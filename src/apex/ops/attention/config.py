"""Tiles of the attention kernels: small rules from the size of a head and of an element.

Times are microseconds on an H200. "75 (128 queries: 81)" is the time of the chosen tile, then of an alternative.
"Biased" is 256 batches of 4 heads, 256 long and 32 wide, with mask and bias; "packed" is
56 sequences of 16 heads in float16, 512 long and 64 wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._device import DeviceFacts, launch_rule, next_power_of_2
from .._tuned import tunable

# Tiles of larger heads do not fit into shared memory; PyTorch's operator takes them.
LARGEST_HEAD = 256
# The shared memory that the tiles below were chosen for, in bytes; desktop GPUs have 99 KiB.
LARGE_SHARED_MEMORY = 160 << 10
# Most bytes of gradients of logits that are stored at a time, unless a single batch, and so its bias, has more.
STORED_BYTES = 512 << 20

# The stored gradients of a key's logits begin at a multiple of this many elements, so that any number of queries can be
# stored and loaded 16 bytes at a time: the gradients of 3 float32 batches of one head, 488 long and 32 wide, took 170
# when single values were stored, PyTorch's operators 85.
DLOGITS_PITCH = 16

# Row terms of a packed sequence begin at a multiple of this many elements, so that kernels can load two at a time.
ROW_TERMS_ALIGNMENT = 16

# A bias with odd rows is copied first if at least this many batches share it, and there are this many logits.
PADDED_GROUP = 4
PADDED_LOGITS = 1 << 21

# Elements of the blocks that are summed for the gradient of a bias: 64 for each of the 128 threads of a program.
SUMMED_ELEMENTS = 8192

# Elements of the result that one program of `attention_merge` computes: 32 for each of its 128 threads.
MERGED_ELEMENTS = 4096

# Programs of the launch that repairs rows after cuDNN's attention: as many as run at the same time, because usually
# there is nothing to repair.
REPAIRS_PER_MULTIPROCESSOR = 3

# Limits for trying cuDNN's attention first: lengths, and elements of the output; larger outputs were not measured.
# Forward times in float16 with 16 heads, for the kernel alone and for cuDNN with the repairing launch behind it: 56
# sequences of 512 rows, heads of 64: 192 and 167; 56 of 256: 67 and 56; 112 of 128: 51 and 42; 16 of 512, heads of 128:
# 112 and 75; 4 of 512: 20 and 22. The launch behind cuDNN takes 3 us of them, and the host is busy for 45 more.
CUDNN_SHORTEST = 128
CUDNN_FEWEST_ELEMENTS = 1 << 23
CUDNN_MOST_ELEMENTS = 1 << 29


class Tile(NamedTuple):
    """Tile of an attention kernel: its queries and keys, the warps of a program, and the stages of its pipeline."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# A rule that returns a tile for the size of a head and of an element, queries, keys, the kind of attention and a
# device. Kinds ("mask bias", "packed") matter only to tuned launches: tensors loaded beside the keys take shared
# memory.
TileRule = Callable[[int, int, int, int, str, DeviceFacts], Tile]


def head_block(head_dim: int) -> int:
    """Return the smallest block that holds a head; matrix units need at least 16."""
    return max(16, next_power_of_2(head_dim))


def precision(dtype: torch.dtype, device: DeviceFacts) -> str:
    """Return how matrix products are computed; sums are always in float32."""
    if dtype == torch.float32 and device.backend == "cuda":
        return "tf32x3"  # three passes of the matrix units, which lose no digits
    if dtype == torch.bfloat16 and device.backend == "interpreter":
        return "widened"  # the interpreter would multiply the bits of bfloat16 numbers as integers
    return "ieee"


def _is_long_window(block: int, element_size: int, rows: int, columns: int, kind: str, device: DeviceFacts) -> bool:
    """Return whether the tiles for long windows apply.

    Times of these tiles are milliseconds for 16 documents of 512 to 8192 rows, 65,536 in all, with 32 heads of queries
    and 8 of keys, 128 wide, in bfloat16, causal with a window of 4096, on an H200. Other GPUs keep the tiles of packed
    sequences, because nothing was measured on them.
    """
    size = block == 128 and element_size == 2 and min(rows, columns) >= 128
    return size and "window" in kind and device.capability == (9, 0)


def _is_wide_packed(block: int, element_size: int, rows: int, columns: int, kind: str, device: DeviceFacts) -> bool:
    """Return whether the backward tiles for packed sequences with heads of 65 to 128 elements apply.

    Times of these tiles are milliseconds for the documents of `_is_long_window` with a window of 4096, with a causal
    mask and without one, then for 16 sequences of 512 rows with 16 heads in float16.
    """
    size = block == 128 and element_size == 2 and min(rows, columns) >= 128
    return size and "packed" in kind and device.capability == (9, 0)


def largest_head(element_size: int, device: DeviceFacts) -> int:
    """Return the largest head whose tiles fit into shared memory."""
    scarce = device.backend == "cuda" and device.shared_memory < LARGE_SHARED_MEMORY
    return LARGEST_HEAD // 2 if scarce and element_size == 4 else LARGEST_HEAD


@tunable(lambda tile: tile._fields)
def forward_tile(head_dim: int, element_size: int, rows: int, columns: int, kind: str, device: DeviceFacts) -> Tile:
    block = head_block(head_dim)
    # Biased: 75 (128 queries: 81), in float32 243 (64 queries: 270). Packed: 189 (8 warps: 187, 64 queries: 200); 16
    # sequences with heads of 128: 108 (128 queries: 112). With a bias, 83 batches of 2 heads, 103 long and 32 wide: 14
    # (64 keys: 38).
    if element_size == 4:
        tile = Tile(128, 32, 4, 2) if block <= 32 else Tile(64, 32, 4, 2) if block <= 64 else Tile(32, 32, 4, 1)
    elif _is_long_window(block, element_size, rows, columns, kind, device):
        # 6.10, and 6.46 without an end of the window (64 by 64 in 4 warps: 6.61 and 7.48; 128 by 64: 6.12 and 6.86).
        # Takes 224 of 227 KiB of shared memory.
        tile = Tile(128, 128, 8, 3)
    elif block <= 128:
        tile = Tile(128, 64, 4, 3) if block == 64 else Tile(64, 64, 4, 3)
        if block <= 32 and "bias" in kind and columns % 2:  # single values of an odd bias are loaded
            tile = tile._replace(keys=32)
    else:
        tile = Tile(64, 32, 4, 2)
    return _fitted(tile, rows, columns, block, element_size, device)


@tunable(lambda tile: tile._fields)
def queries_tile(head_dim: int, element_size: int, rows: int, columns: int, kind: str, device: DeviceFacts) -> Tile:
    """Return the tile for the gradient of the queries."""
    block = head_block(head_dim)
    # Biased: 104 (128 queries: 113), in float32 326 (32 keys: 342). Packed: 299 (128 queries: 311); 16 sequences with
    # heads of 128: 151 (128 queries: 178); 16 in float32, both gradients: 1500 (by 64 queries and 32 keys: 1520).
    if element_size == 4:
        tile = Tile(64, 64, 4, 2) if block <= 32 else Tile(32, 32, 4, 2 if block <= 64 else 1)
    elif _is_wide_packed(block, element_size, rows, columns, kind, device):
        # 6.80, 7.35, 13.6 and 0.151 (128 by 128: 7.83, 8.58, 16.2 and 0.178; 64 by 64: 7.81, 8.93, 16.7 and 0.161).
        tile = Tile(128, 64, 8, 3)
    elif block == 64 and "packed" in kind:
        tile = Tile(64, 64, 4, 3)  # 228 (2 stages: 283, 128 queries: 244)
    else:
        tile = Tile(64, 64, 4, 2) if block <= 128 else Tile(32, 32, 4, 2)
    return _fitted(tile, rows, columns, block, element_size, device)


@tunable(lambda tile: tile._fields)
def keys_tile(head_dim: int, element_size: int, rows: int, columns: int, kind: str, device: DeviceFacts) -> Tile:
    """Return the tile for the gradients of keys and values."""
    block = head_block(head_dim)
    # Two accumulators: larger tiles run out of registers. Packed: 372 (64 keys: 392);
    # 16 sequences with heads of 128: 208 (128 keys: 251, 32 keys: 414). All gradients with a bias
    # of 58 batches of 2 heads, 576 long and 64 wide: 207 (128 keys, where threads keep 296 bytes outside of registers:
    # 398), of 310 batches of one, 336 long and 8 wide: 182 (2 stages: 189, 128 keys: 192). In float32 of 23 batches of
    # 4, 736 long and 32 wide: 605 (64 queries: 740, 128 keys in 8 warps: 652), of 102 of 2, 546 long and 64 wide: 1498
    # (2 stages: 1578, 16 by 64: 1566, 128 keys in 8 warps: 1419, but of 24 of 4, 302 long, 292 in place of 253).
    if element_size == 4:
        tile = Tile(32, 64, 4, 1) if block <= 32 else Tile(32, 32, 4, 1)
    elif _is_wide_packed(block, element_size, rows, columns, kind, device):
        # 8.66, 10.6, 20.0 and 0.193 (2 stages: 9.81, 11.7, 24.8 and 0.224; 64 by 64: 11.1, 14.4, 27.2 and 0.253).
        tile = Tile(64, 128, 8, 3)
    elif block == 64 and "packed" in kind:
        tile = Tile(64, 64, 4, 3)  # 408 (2 stages: 486, 32 by 128: 469, 64 by 128 in 8 warps: 487)
    elif block <= 64 and "bias" not in kind:
        tile = Tile(32, 128, 4, 2)
    elif block <= 128:
        tile = Tile(32, 64, 4, 3 if block <= 32 else 2)
    else:
        tile = Tile(32, 32, 4, 2)
    return _fitted(tile, rows, columns, block, element_size, device)


@tunable(lambda tile: tile._fields)
def stored_tile(head_dim: int, element_size: int, rows: int, columns: int, kind: str, device: DeviceFacts) -> Tile:
    """Return the tile for the gradient of the queries from the stored gradient of the logits."""
    block = head_block(head_dim)
    # All gradients of 57 float32 batches of 8 heads, 144 long and 8 wide: 121 (64 by 64: 134, 32 by 32: 129, one stage:
    # 124), of 102 of 2 heads, 546 long and 64 wide: 1384 (64 by 32: 1496, 64 by 64: 1435, 128 by 64 in 8 warps: 1450).
    if element_size == 4:
        tile = Tile(128, 32, 4, 1) if block == 64 else Tile(64, 32, 4, 2 if block <= 128 else 1)
    else:
        tile = Tile(128, 64, 4, 3) if block <= 128 else Tile(64, 32, 4, 2)
    return _fitted(tile, rows, columns, block, element_size, device)


def _fitted(tile: Tile, rows: int, columns: int, block: int, element_size: int, device: DeviceFacts) -> Tile:
    """Return the tile shrunk to the size of the problem, to at least 16 for the matrix units, and to shared memory."""
    queries = min(tile.queries, head_block(rows))
    keys = min(tile.keys, head_block(columns))
    warps = _warps(queries, keys, element_size, tile.num_warps)
    stages = tile.num_stages
    if device.backend == "hip":
        stages = min(stages, 2)
    elif device.shared_memory < LARGE_SHARED_MEMORY:
        queries, keys, stages = min(queries, 64), min(keys, 64), min(stages, 2) if block <= 64 else 1
    return Tile(queries, keys, warps, stages)


def _warps(queries: int, keys: int, element_size: int, most: int) -> int:
    """Return two warps for small tiles, except in float32, where two warps of `keys_tile` spill 864 bytes a thread."""
    return most if queries * keys * element_size >= 4096 else min(most, 2)


@launch_rule
def spread(
    tile: Tile, split: str, rows: int, columns: int, heads: int, head_dim: int, element_size: int, device: DeviceFacts
) -> Tile:
    """Return a smaller tile if few heads would leave multiprocessors without a program.

    Each program takes a tile of the queries or keys, as `split` says, for one of `heads` heads of all batches. Narrow
    tiles of keys have more queries, because a step takes long even for little work. Times of all gradients: a
    float32 batch of one head, 197 long and 32 wide, by 64 queries and 16 keys: 24 (32 by 32: 55, 16 by 32: 49); 2
    float16 batches, 560 long: 26 (32 by 32: 35, 64 by 32: 40); one batch with 4 heads, 584 long and 8 wide, by 64 and
    32: 32 (64 by 16, for heads that are not padded to 32: 35, 32 by 32: 40).
    """
    block, length = (tile.queries, rows) if split == "queries" else (tile.keys, columns)
    head, enough = head_block(head_dim), device.multiprocessors
    floor = 16 if split == "keys" and head <= 32 else 32
    # Skip tiles of 32 keys for heads of 32: a warp takes 16 keys, so two of four warps would repeat the others' work.
    # Threads of float32 spill 320 bytes, threads of float16 use all 255 registers: 2 batches of 4 heads, 648 long, took
    # 74.
    skips = split == "keys" and (element_size == 4 or head == 32)
    if split == "keys" and element_size == 4:
        # Four times as many programs read the queries four times as often: 19 batches of one head, 451 long, take 104
        # either way.
        enough //= 2
    while block > floor and heads * -(-length // block) < enough:
        block = floor if skips and block <= 64 else block // 2
        tile = tile._replace(num_warps=min(tile.num_warps, 4))
    if split == "keys" and block < min(64, tile.keys) and (floor == 16 or element_size == 2):
        return tile._replace(queries=max(tile.queries, min(64, head_block(rows))), keys=block)
    tile = tile._replace(**{split: block})
    return tile._replace(num_warps=_warps(tile.queries, tile.keys, element_size, tile.num_warps))


@launch_rule
def tile_constants(
    tile: Tile, rows: int, columns: int, head_dim: int, packed: bool, dtype: torch.dtype, device: DeviceFacts
) -> dict[str, Any]:
    """Return a kernel's compile-time constants: alignments, whether masks are needed, precision, sizes, warps, stages.

    ALIGN_M, ALIGN_N and ALIGN_D tell Triton how wide loads may be, because it detects only multiples of 16. Without
    ALIGN_N it loaded a bias with 72 keys as single values, and the forward pass of 231 batches of 8 bfloat16 heads, 32
    wide, took 254 us, PyTorch's attention 124. Without ALIGN_D it loaded heads that are 8 wide as single values.

    Heads are padded to 32 if a tile has 16 keys of more: four warps cannot share a 16 by 16 gradient of the keys, so
    that each would compute all of it. For float32 heads that are 8 wide, padding takes a step from 2046 instructions
    with 200 spilled bytes to 854 without spills (sm_90).
    """
    block = head_block(head_dim)
    if tile.keys == 16 < columns:
        block = max(block, 32)
    return {
        "ALIGN_M": math.gcd(rows, 16),
        "ALIGN_N": math.gcd(columns, 16),
        "ALIGN_D": math.gcd(head_dim, 16),
        "FULL_M": not packed and rows % tile.queries == 0,
        "FULL_N": not packed and columns % tile.keys == 0,
        "FULL_D": head_dim == block,
        "PRECISION": precision(dtype, device),
        "BM": tile.queries,
        "BN": tile.keys,
        "BD": block,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def pitch(rows: int) -> int:
    """Return the elements from one key's stored gradients of logits to the next key's."""
    return -(-rows // DLOGITS_PITCH) * DLOGITS_PITCH


def padded_bias(batches: int, heads: int, rows: int, columns: int, group: int, element_size: int) -> int:
    """Return the pitch of a copy of the bias that the forward pass reads instead of the bias, 0 if none is needed.

    Half-precision rows with an odd number of keys are loaded as single values and sorted by shuffles: 18 batches of 4
    heads, 503 long and 8 wide, took 235 us; PyTorch's attention, which also copies the bias, 195.
    """
    odd = element_size == 2 and columns % 2 == 1
    worth = group >= PADDED_GROUP and batches * heads * rows * columns >= PADDED_LOGITS
    return -(-columns // 8) * 8 if odd and worth else 0


@launch_rule
def sum_block(plane: int, group: int, device: DeviceFacts) -> tuple[int, int]:
    """Return the block size, batches by elements, of a program that sums `plane` elements over a group's batches.

    If there are few elements in all, a program gets few of them, so that more programs share the work.
    """
    elements = 1024
    while elements > 64 and plane < elements * device.multiprocessors:
        elements //= 2
    return min(next_power_of_2(group), SUMMED_ELEMENTS // elements), elements


def batches_at_once(batches: int, batch_bytes: int, group: int) -> int:
    """Return the number of batches whose gradients of logits are stored at a time.

    They are whole groups of batches that share a bias, or equal parts of a group.
    """
    fitting = max(1, STORED_BYTES // batch_bytes)
    if fitting >= group:
        return min(batches, fitting // group * group)
    return -(-group // -(-group // fitting))


def parts_of_batches(batches: int, at_once: int, group: int) -> list[tuple[int, int]]:
    """Return the parts of the batches whose gradients of logits are stored together, as (first batch, number) pairs."""
    if at_once >= group:
        return [(first, min(at_once, batches - first)) for first in range(0, batches, at_once)]
    return [
        (start + first, min(at_once, group - first))
        for start in range(0, batches, group)
        for first in range(0, group, at_once)
    ]


_USUAL = DeviceFacts("H200", "cuda", multiprocessors=132, warp_size=32, shared_memory=227 * 1024)


def usual_tile(rows: int, head_dim: int, *, forward: bool) -> tuple[int, int, int, int]:
    """Return queries, keys, warps and stages that half-precision self-attention of this size uses on an H200."""
    return (forward_tile if forward else keys_tile)(head_dim, 2, rows, rows, "mask bias", _USUAL)
