"""Launch rules of the transducer's kernels, with the measurements behind them.

Times are microseconds on an NVIDIA H200, of kernels launched directly.
"""

from __future__ import annotations

from typing import NamedTuple

from .._device import DeviceFacts, next_power_of_2

# 16 bits of a random word are compared with the probability to drop.
WORD = 1 << 16
SUM_BLOCK = 256
SUM_PARTS = 8
WALK_TOKENS = 512
FILL_PROGRAMS = 64


class Tile(NamedTuple):
    """Tile that a program of a joint's kernel works on at a time."""

    tokens: int
    features: int
    num_warps: int
    num_stages: int = 1
    frames: int = 1


def joint_forward_tile(tokens: int, features: int, seeded: bool, device: DeviceFacts) -> Tile:
    """Return a tile of 4096 elements in each of four frames; wide, so that programs write long stretches of memory.

    With a seed the tile has 512 elements in eight frames, because a thread holds four random words per element. float16
    16x300x60x512 in 78; with dropout in 167, with tiles of 1024 elements in 183, of 2048 in 219.
    """
    elements, per_thread = (512, 8) if seeded else (4096, 32)
    wide = min(1024, next_power_of_2(features))
    tall = min(next_power_of_2(tokens), max(1, elements // wide))
    return Tile(tall, wide, _warps(tall * wide, per_thread, device), frames=8 if seeded else 4)


def joint_backward_tile(tokens: int, features: int, element_size: int, device: DeviceFacts) -> Tile:
    """Return a tile of 4096 elements with all tokens, up to 128, whose sum is then complete; loads two tiles ahead.

    It has two warps, since fewer warps exchange less for that sum: float16 16x300x60x512 in 86, with a mask beside dh
    in 153; with four warps 133 and 158. Eight warps if rows do not start at multiples of 16 bytes: their elements are
    loaded singly, and the many addresses do not fit into the registers of fewer warps.
    """
    whole = features * element_size % 16 == 0
    tall = min(128, next_power_of_2(tokens))
    wide = min(next_power_of_2(features), max(16, 4096 // tall))
    return Tile(tall, wide, _warps(tall * wide, 64 if whole else 16, device), num_stages=3)


def _warps(elements: int, per_thread: int, device: DeviceFacts) -> int:
    return max(1, min(8, elements // per_thread // device.warp_size))


def frame_chunks(frames: int, programs: int, masked: bool, device: DeviceFacts) -> int:
    """Return into how many chunks the frames are cut, each walked by `programs` programs.

    Each multiprocessor gets five programs, four with a mask: as many as its registers hold at once, since a few left
    over would run alone (float16 16x300x60x512 in five chunks 86, in seven 109). Each chunk costs a float32 copy of g's
    gradient, written and read, so a chunk has at least 16 frames.
    """
    together = (4 if masked else 5) * device.multiprocessors
    return max(1, min(together // programs, frames // 16))


class WordTile(NamedTuple):
    """Tile that a program of the loss's kernels, one warp, works on at a time."""

    groups: int
    rows: int
    lanes: int


def reading_tile(tokens: int, words: int, element_size: int, device: DeviceFacts) -> WordTile:
    """Return a tile of 4 KiB for one warp, so that a row is reduced within the warp for any layout of the tile.

    float16 16x300x60x1024 took 155 us; tiles of 2 KiB 183, of 8 KiB 170, of two warps side by side 200. Triton 3.6
    spread the groups of a tile of four warps over them and exchanged every element: the forward pass took 5305.
    """
    elements = 4096 // element_size
    return _word_tile(tokens, words, element_size, elements, elements, device)


def writing_tile(tokens: int, words: int, element_size: int, device: DeviceFacts) -> WordTile:
    """Return a tile of 512 elements: of one row, or of two if a row has no more than 2 KiB.

    float16 16x300x60x1024 took 297 us with two rows, 315 with one; with 2048 words 306 and 293. Tiles of 1024 elements
    of one row took 365, four warps with as many each 440.
    """
    of_a_row = 512 if words * element_size > 2048 else 256
    return _word_tile(tokens, words, element_size, 512, of_a_row, device)


def _word_tile(
    tokens: int, words: int, element_size: int, elements: int, of_a_row: int, device: DeviceFacts
) -> WordTile:
    lanes = min(next_power_of_2(words), device.warp_size * 16 // element_size)
    groups = min(next_power_of_2(-(-words // lanes)), max(1, of_a_row // lanes))
    return WordTile(groups, min(next_power_of_2(tokens), max(1, elements // (groups * lanes))), lanes)


def walk_tile(tokens: int, device: DeviceFacts) -> tuple[int, int]:
    """Return the tokens that a walk takes at once, up to a limit, each with its own thread, and its warps.

    60 tokens and 300 frames in 44, in one warp without barriers 51; 200 tokens in 74, two of them a thread 91.
    """
    block = min(WALK_TOKENS, max(2, next_power_of_2(tokens)))
    return block, max(1, block // device.warp_size)


def shares_tile(tokens: int) -> tuple[int, int]:
    """Return the sizes of a tile of 512 nodes: diagonals, and nodes of each; whole diagonals if these are short."""
    columns = min(512, next_power_of_2(tokens))
    return 512 // columns, columns
