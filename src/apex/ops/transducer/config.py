"""How much a program of the transducer's kernels takes: the rules, with what was measured behind them.

Times are microseconds on an NVIDIA H200, of kernels launched directly:
`benchmarks/results/nvidia_h200-transducer-tuning.txt`.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import _device
from .._device import next_power_of_2 as _power

# 16 bits of a random word are compared with the probability to drop.
WORD = 1 << 16
SUM_BLOCK = 512
SUM_PARTS = 8
WALK_TOKENS = 512
WALK_TOKENS_PER_WARP = 64


class Tile(NamedTuple):
    """What a program of a joint's kernel works on at a time."""

    tokens: int
    features: int
    num_warps: int
    num_stages: int = 1
    frames: int = 1


def joint_forward_tile(tokens: int, features: int, seeded: bool, device: _device.DeviceFacts) -> Tile:
    """4096 elements of each of four frames, 16 bytes a thread in four accesses; wide, to write long stretches.

    Half as many of eight frames where random words are made: a thread holds four of them for each of its elements.
    """
    elements = 2048 if seeded else 4096
    wide = min(1024, _power(features))
    tall = min(_power(tokens), max(1, elements // wide))
    return Tile(tall, wide, _warps(tall * wide, elements // 128, device), frames=8 if seeded else 4)


def joint_backward_tile(tokens: int, features: int, masked: bool, device: _device.DeviceFacts) -> Tile:
    """All tokens of up to 128, so that the sum over them is complete, and 4096 elements; two tiles are loaded ahead.

    Two warps, since fewer exchange less for that sum; four where the mask is loaded beside dh, for their registers.
    float16 16x300x60x512: 87 us, four warps 133; with a mask 170 and 161.
    """
    tall = min(128, _power(tokens))
    wide = min(_power(features), max(16, 4096 // tall))
    return Tile(tall, wide, _warps(tall * wide, 32 if masked else 64, device), num_stages=3)


def _warps(elements: int, per_thread: int, device: _device.DeviceFacts) -> int:
    return max(1, min(8, elements // per_thread // device.warp_size))


def frame_chunks(frames: int, programs: int, per_multiprocessor: int, device: _device.DeviceFacts) -> int:
    """In how many chunks the frames are walked by `programs` each.

    As many programs as a multiprocessor has registers for, in one wave: a few left over would run alone. Each chunk
    costs a float32 copy of g's gradient, written and read, so that a chunk has at least 16 frames.
    """
    return max(1, min(per_multiprocessor * device.multiprocessors // programs, frames // 16))


class WordTile(NamedTuple):
    """What a program of the loss's kernels works on at a time."""

    groups: int
    rows: int
    lanes: int
    num_warps: int = 1


def reading_tile(tokens: int, words: int, element_size: int, device: _device.DeviceFacts) -> WordTile:
    """One warp and 2048 elements: a row is reduced without other warps however the compiler lays out a tile.

    float16 16x300x60x1024 in 155 us; 1024 elements 183, 4096 170, two warps side by side 200. Triton 3.6 spreads the
    groups of a tile of four warps over them and exchanges every element: 5100.
    """
    return _word_tile(tokens, words, element_size, 2048, 1024, device)


def writing_tile(tokens: int, words: int, element_size: int, device: _device.DeviceFacts) -> WordTile:
    """One warp and 512 elements: float16 16x300x60x1024 in 315 us. 1024 elements 365, four warps with as many: 440."""
    return _word_tile(tokens, words, element_size, 512, 512, device)


def _word_tile(
    tokens: int, words: int, element_size: int, elements: int, of_a_row: int, device: _device.DeviceFacts
) -> WordTile:
    lanes = min(_power(words), device.warp_size * 16 // element_size)
    groups = min(_power(-(-words // lanes)), max(1, of_a_row // lanes))
    return WordTile(groups, min(_power(tokens), max(1, elements // (groups * lanes))), lanes)


class Skew(NamedTuple):
    """How the nodes of a lattice lie between the kernels: (t, u) at (t + u) * step + sign * u, of `places` places."""

    places: int
    step: int
    sign: int


def skew(frames: int, tokens: int) -> Skew:
    """A diagonal after the other, each as long as the shorter side: its nodes by token, or by frame."""
    diagonals = frames + tokens - 1
    if tokens <= frames:
        return Skew(diagonals * tokens, tokens, 1)
    return Skew(diagonals * frames, frames + 1, -1)


class WalkTile(NamedTuple):
    """The tokens that a walk takes at once."""

    tokens: int
    num_warps: int


def walk_tile(tokens: int) -> WalkTile:
    """All tokens where they are not too many; neighbours in one warp exchange without a barrier."""
    block = min(WALK_TOKENS, max(2, _power(tokens)))
    return WalkTile(block, max(1, block // WALK_TOKENS_PER_WARP))


class SharesTile(NamedTuple):
    """Nodes of neighbouring diagonals."""

    diagonals: int
    columns: int


def shares_tile(frames: int, tokens: int) -> SharesTile:
    """512 nodes, of whole diagonals where those are shorter."""
    columns = min(512, _power(min(frames, tokens)))
    return SharesTile(512 // columns, columns)
