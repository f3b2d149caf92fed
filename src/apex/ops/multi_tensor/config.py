"""Launch rules of the multi-tensor kernels."""

from __future__ import annotations

from .._device import DeviceFacts

# Elements per program. On an H200, AdamW on 1.3 billion bfloat16 parameters with float32 masters takes 8798 us with
# 1024, 8911 with 2048, 9495 with 4096; in float32 8689, 8678, 8842. A pass over a single list gains from more: a norm
# takes 1294, 1189, 1180.
BLOCK = 1024
SINGLE_LIST_BLOCK = 4096
# Small enough that the interpreter sees tensors of several blocks in tests.
INTERPRETER_BLOCK = 128
WARPS = 4
# Elements per thread of lists with codes of 8 bits, which a thread then loads 16 bytes at a time. Compiled for an H200,
# AdamW with int8 state takes 64 instructions per element, 72 with 8 elements per thread, because a thread computes
# addresses and shares a group's largest number with others only once.
CODES_PER_THREAD = 16

# Consecutive blocks of a program for lists with codes, and pipeline stages of its loads. On an H200, AdamW on 1.3
# billion parameters takes 3.43 ms with stochastic rounding and int8 state, 4.67 with float8, 4.09 with int8 and masters
# of 24 bits; with one block 4.04, 4.90 and 4.06; with 8 blocks 3.50, 4.67 and 4.10; 8 in 3 stages 3.96, 4.57, 4.19.
CODED_BLOCKS = 16
CODED_STAGES = 2

# A measuring program writes one partial sum per quantity. If there would be more programs than this, each walks over
# several blocks, so that the sums of any model take less than a megabyte.
MEASURING_PROGRAMS = 1 << 16
# Counting a program at its end takes time: on an H200, LARS's norms of ResNet-50 take 91 us with 25,000 programs, 62
# with an eighth of them. So a measuring program walks over this many elements, of all lists together, unless there
# would be too few programs.
WALK = 16384
ENOUGH_PROGRAMS = 2048

# The most partial sums that the last program of a launch loads at once.
MOST_AT_ONCE = 4096

REDUCE_BLOCK = 1024
REDUCE_WARPS = 4

# Bytes of state in host memory that are copied to the GPU at a time, at most, and how many pieces less state is cut
# into. The first piece's way to the GPU and the last one's way back overlap with nothing; every piece takes 20 us more,
# and 0.1 ms of the host's time. On an H200, AdamW with 4.1 GB of int8 state takes 91.7 ms in pieces of 16 MiB, 89.4 in
# pieces of 32, 88.2 of 64, 89.3 of 128.
PIECE = 64 << 20
PIECES = 32
# Pieces in the GPU's memory at the same time: one arrives, one is updated, one leaves. With 4 nothing is gained.
PIECES_AT_ONCE = 3
# Bytes of state below which kernels read and write host memory themselves: they take 1.75 ms for 65 MB, pieces 1.82 or
# more. For the 4.1 GB they take 100.9 ms, and for 15.8 GB of float32 state 377, pieces 320.
STAGED = 512 << 20


def piece(total: int) -> int:
    """Return the bytes of a piece of `total` bytes of state; 0 if kernels read and write it over the bus."""
    return 0 if total < STAGED else min(PIECE, -(-total // PIECES))


def block(facts: DeviceFacts, lists: int, largest: int = 0) -> int:
    """Return the elements of each of the `lists` that one program handles.

    The number is doubled if one program then covers the `largest` tensor. If each tensor has one program, no table of
    programs is read: one tensor of 948 elements takes 4.4 us instead of 4.9.
    """
    usual = SINGLE_LIST_BLOCK if lists == 1 else BLOCK
    if facts.backend == "interpreter":
        usual = INTERPRETER_BLOCK
    return 2 * usual if usual < largest <= 2 * usual else usual


def warps(facts: DeviceFacts, block: int, has_codes: bool) -> int:
    """Return the warps of a program that updates `block` elements; `has_codes`: a list has codes of 8 bits.

    To compare launches, replace `block` and this function in this module before an optimizer's first step.
    """
    return max(1, block // (CODES_PER_THREAD * facts.warp_size)) if has_codes else WARPS


def blocks_per_program(facts: DeviceFacts, blocks: int, elements: int) -> int:
    """Return how many of the `blocks` a measuring program walks over, a power of two.

    A block has `elements` elements in all lists together.
    """
    if facts.backend == "interpreter":
        return 2  # so that tests see a loop
    least = 1 << max(0, (blocks - 1) // MEASURING_PROGRAMS).bit_length()
    wanted = min(WALK // elements, blocks // ENOUGH_PROGRAMS)
    return max(least, 1 << max(0, wanted.bit_length() - 1))


def walk(facts: DeviceFacts, blocks: int, has_codes: bool) -> tuple[int, int]:
    """Return how many of the `blocks` a program that measures nothing walks over, and the stages of its loads."""
    if facts.backend == "interpreter":
        return (2, 2) if has_codes else (1, 1)  # so that tests cover programs with and without a loop
    is_long = blocks >= CODED_BLOCKS * ENOUGH_PROGRAMS
    return (CODED_BLOCKS, CODED_STAGES) if has_codes and is_long and facts.backend == "cuda" else (1, 1)


def sum_block(partials: int) -> int:
    """Return how many partial sums the program that adds them up loads at once."""
    return min(MOST_AT_ONCE, max(128, 1 << max(0, partials - 1).bit_length()))
