"""The kernel of the multi-tensor ops, which applies a rule to lists of tensors.

table       int64 [tensors, ROWS]            number of elements, then the address in every list but the gradients
moving      int64 [tensors]                  addresses of the gradients, which move from step to step
programs    int32 [programs, 2]              which tensor, and which block of it
noop        number [1]                       nothing is done unless it is 0
grad_scale  float32 [1]                      multiplies the gradients
scalars     float32 [scalars on the device]  in place of those scalars that ON_DEVICE names
whole       float32 [tensors, 2]             the two numbers of each tensor
partials    float32 [programs, QUANTITIES]   what a measuring rule found in each block
overflow    number [1]                       becomes 1 where a checked value is infinite or NaN
nonfinite_counts  int32 [tensors, 2]         how many elements of checked slots 0 and 1 are infinite, and how many NaN
bounds      int32 [tensors + 1]              the programs of each tensor
tickets     int32 [tensors] or [1]           0; they count the programs that have stored what they measured
out         float32 [tensors, COLUMNS]       what was measured, added up
factor      float32 [1]                      see `reduce_partials`, as limit, margin and share

`kernels_blocks.py` says what TYPES and CONSTANTS are; `kernels_reductions.py` adds up what was measured.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import triton
import triton.language as tl

from .._kernel_functions import is_last_block
from .._launch import kernel
from .kernels_blocks import walk
from .kernels_reductions import reduce_rows
from .rule import Rule


@functools.cache
def compiled(rule: Rule) -> Any:
    """The rule's function as a `triton.jit` function: the same code, with `triton.language` as its `tl`."""
    namespace: dict[str, Any] = {"tl": tl}
    for helper in rule.helpers:
        namespace[helper.__name__] = _jit(helper, namespace)
    return _jit(rule.function, namespace)


def _jit(function: Any, namespace: dict[str, Any]) -> Any:
    copy = types.FunctionType(function.__code__, namespace, function.__name__)
    copy.__module__ = function.__module__
    return triton.jit(copy)


@triton.jit
def _leave(partials, program, found, overflow, CONSTANTS: tl.constexpr):
    """Stores what this program measured."""
    CHECKS: tl.constexpr = CONSTANTS[4]
    QUANTITIES: tl.constexpr = CONSTANTS[5]
    at = partials + program * QUANTITIES
    tl.store(at, found[0])
    if CHECKS[0]:
        if not (tl.abs(found[0]) < float("inf")):
            tl.store(overflow, 1)
    if QUANTITIES > 1:
        tl.store(at + 1, found[1])
    if QUANTITIES > 2:
        tl.store(at + 2, found[2])
    if QUANTITIES > 3:
        tl.store(at + 3, found[3])


@kernel
@triton.jit
def apply_rule(
    table, moving, programs, noop, grad_scale, scalars, whole, overflow, nonfinite_counts, partials, bounds, tickets,
    out, factor, s0, s1, s2, s3, s4, s5, s6, s7, seed, limit, margin, share,
    RULE: tl.constexpr, TYPES: tl.constexpr, CONSTANTS: tl.constexpr, FINISH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """`RULE` on up to BLOCKS blocks, one after the other, of one tensor of each list.

    With FINISH, which is PER_TENSOR, ROOT, AVERAGE, COLUMNS and a block size, what was measured is added up by the
    program that is the last of each tensor's if PER_TENSOR, where no tensor may be empty; else by the last of all. That
    is what `reduce_partials` does, in the same launch.
    """
    if noop is not None:
        if tl.load(noop) != 0:
            return
    program, tensor, q0, q1, q2, q3 = walk(
        (table, moving, grad_scale, scalars, whole, overflow, nonfinite_counts), programs,
        (s0, s1, s2, s3, s4, s5, s6, s7), seed,
        RULE, TYPES, CONSTANTS, BLOCK, BLOCKS,
    )  # fmt: skip
    QUANTITIES: tl.constexpr = CONSTANTS[5]
    if QUANTITIES > 0:
        _leave(partials, program, (q0, q1, q2, q3), overflow, CONSTANTS)
    if FINISH is not None:
        MAXIMUM: tl.constexpr = CONSTANTS[6]
        if FINISH[0]:
            start = tl.load(bounds + tensor)
            stop = tl.load(bounds + tensor + 1)
        else:
            tensor = 0
            start = 0
            stop = tl.num_programs(0)
        if is_last_block(tickets + tensor, stop - start):
            for quantity in tl.static_range(QUANTITIES):
                reduce_rows(
                    (partials, grad_scale, out + tensor * FINISH[3] + quantity, factor), (limit, margin, share),
                    start, stop, quantity,
                    QUANTITIES, MAXIMUM, FINISH[1], FINISH[2], FINISH[4],
                )  # fmt: skip
