"""The kernel of the multi-tensor ops, which applies an update rule to lists of tensors.

table       int64 [tensors, ROWS]            number of elements, then the address in every list except the gradients;
                                             a list with a codec is followed by its companions (scales, remainders)
moving      int64 [tensors]                  addresses of the gradients, which move from step to step
programs    int32 [programs, 2]              tensor and block of each program; None if each tensor has one program
noop        number [1]                       nothing is done unless it is 0
grad_scale  float32 [1]                      multiplies the gradients
scalars     float32 [scalars on the device]  values of the scalars, and of the seed, that ON_DEVICE names
whole       float32 [tensors, 2]             the two numbers of each tensor
partials    float32 [programs, QUANTITIES]   results of a measuring rule in each block
overflow    number [1]                       becomes 1 if a checked value is infinite or NaN
nonfinite_counts  int32 [tensors, 2]         how many elements of checked slots 0 and 1 are infinite, and how many NaN
noise_places  int64 [tensors, 4]             positions of shards in whole tensors, see `codecs.NoisePlace`; or None
bounds      int32 [tensors + 1]              the programs of each tensor
tickets     int32 [tensors] or [1]           0; they count the programs that have stored their measurements
out         float32 [tensors, COLUMNS]       the sums of the measurements
factor      float32 [1]                      see `reduce_partials`, as for limit, margin and share

CONSTANTS, the values that a launch is compiled for besides its rule, is a tuple of

    FLAGS       FLAG_COUNT bools  the rule's own
    ON_DEVICE   SCALARS + 1 ints  index in `scalars` of each number of the rule, and of the seed; negative if it is a
                                  kernel argument
    READS       SLOTS bools       slots whose values the rule reads
    WRITES      SLOTS bools       slots whose values it changes
    CHECKS      SLOTS bools       slots that are checked for infinities and NaN; slot 0 stands for the first measurement
                                  or, if nothing is measured, for values written to slot 0 that are not finite
                                  although the values of slots 1 and 2 are
    QUANTITIES  int               how many quantities the rule measures
    MAXIMUM     bool              they are maximised, not summed
    ROWS        int               numbers in a row of `table`
    ALIGNED     bool              every tensor starts at a multiple of 16 bytes
    STOCHASTIC  bool              slot 0 is rounded stochastically
    CODECS      SLOTS ints        how numbers are stored, see `codecs.NUMBERS`; 0: as numbers of the list's type

and TYPES has the types of the lists, None without one; the last type is of the list that gets a copy of slot 0.
`kernels_reductions.py` sums the measurements.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import triton
import triton.language as tl

from .._kernel_functions import is_last_block
from .._launch import kernel
from .kernels_codecs import (
    BFLOAT16,
    PLAIN,
    REMAINDER8,
    REMAINDER16,
    decoded,
    noise_bits,
    round_stochastically,
    store_encoded,
)
from .kernels_reductions import reduce_rows
from .rule import Rule


@functools.cache
def compiled(rule: Rule) -> Any:
    """Return the rule's function as a `triton.jit` function: its own code, with `triton.language` as its `tl`."""
    namespace: dict[str, Any] = {"tl": tl}
    for helper in rule.helpers:
        namespace[helper.__name__] = _jit(helper, namespace)
    return _jit(rule.function, namespace)


def _jit(function: Any, namespace: dict[str, Any]) -> Any:
    copy = types.FunctionType(function.__code__, namespace, function.__name__)
    copy.__module__ = function.__module__
    return triton.jit(copy)


@triton.jit
def _pointer(at, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(at).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointer, offset, mask, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    if MASKED:
        x = tl.load(pointer + offset + tl.arange(0, BLOCK), mask=mask, other=0.0)
    else:
        x = tl.load(pointer + offset + tl.arange(0, BLOCK))
    return x.to(tl.float32)


@triton.jit
def _slot(table, entry, TYPE: tl.constexpr, CODEC: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a slot's pointer and companions, and the index of the next slot's address in the table."""
    pointer = entry
    companions = entry
    if TYPE is not None:
        if CODEC == PLAIN:
            pointer = _pointer(table + entry, TYPE, ALIGNED)
            entry += 1
        else:
            if CODEC == REMAINDER8:
                pointer = _pointer(table + entry, tl.int16, ALIGNED)
                companions = _pointer(table + entry + 1, tl.int8, ALIGNED)
            elif CODEC == REMAINDER16:
                pointer = _pointer(table + entry, tl.int16, ALIGNED)
                companions = _pointer(table + entry + 1, tl.int16, ALIGNED)
            else:
                pointer = _pointer(table + entry, TYPE, ALIGNED)
                if CODEC != BFLOAT16:
                    companions = _pointer(table + entry + 1, tl.float32, ALIGNED)
            entry += 1
            if CODEC != BFLOAT16:
                entry += 1
    return pointer, companions, entry


@triton.jit
def _slots(table, moving, tensor, TYPES: tl.constexpr, CONSTANTS: tl.constexpr):
    """Return a tensor's pointers in slots 0 to 4, those of companions in slots 0, 2, 3, 4, and that of its copy."""
    WRITES: tl.constexpr = CONSTANTS[3]
    ROWS: tl.constexpr = CONSTANTS[7]
    ALIGNED: tl.constexpr = CONSTANTS[8]
    CODECS: tl.constexpr = CONSTANTS[10]
    p0, c0, entry = _slot(table, tensor * ROWS + 1, TYPES[0], CODECS[0], ALIGNED)
    p1, _, _ = _slot(moving, tensor, TYPES[1], 0, ALIGNED)
    p2, c2, entry = _slot(table, entry, TYPES[2], CODECS[2], ALIGNED)
    p3, c3, entry = _slot(table, entry, TYPES[3], CODECS[3], ALIGNED)
    p4, c4, entry = _slot(table, entry, TYPES[4], CODECS[4], ALIGNED)
    copy, _, _ = _slot(table, entry, TYPES[5] if WRITES[0] else None, 0, ALIGNED)
    return (p0, p1, p2, p3, p4), (c0, c2, c3, c4), copy


@triton.jit
def _values(
    pointer, companions, offset, size, mask,
    TYPE: tl.constexpr, CODEC: tl.constexpr, READS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a slot's values in a block; 0, which no rule uses, if the slot is not read or has no list."""
    x = 0.0
    if TYPE is not None and READS:
        if CODEC == PLAIN:
            x = _load(pointer, offset, mask, MASKED, BLOCK)
        else:
            x = decoded(pointer, companions, offset, size, mask, CODEC, MASKED, BLOCK)
    return x


@triton.jit
def _store_slot(
    pointer, companions, at, x, mask, seed, tensor,
    SLOT: tl.constexpr, TYPE: tl.constexpr, CODEC: tl.constexpr, WRITES: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a slot's values, if the rule writes them, by the slot's codec if it has one."""
    if WRITES:
        offset, size, noise_places = at
        if CODEC == PLAIN:
            _store(pointer, offset, x, mask, TYPE, True, MASKED, BLOCK)
        else:
            number, index = _noise_place(noise_places, tensor, offset + tl.arange(0, BLOCK))
            noise = noise_bits(seed, number, index, SLOT)  # unused by most, and then removed
            store_encoded(pointer, companions, offset, size, x, mask, noise, CODEC, MASKED, BLOCK)


@triton.jit
def _store(
    pointer, offset, x, mask, TYPE: tl.constexpr, WRITES: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    if WRITES:
        if MASKED:
            tl.store(pointer + offset + tl.arange(0, BLOCK), x.to(TYPE), mask=mask)
        else:
            tl.store(pointer + offset + tl.arange(0, BLOCK), x.to(TYPE))


@triton.jit
def _number(value, scalars, POSITION: tl.constexpr):
    """Return a number of the rule: the kernel's argument, or its value on the device."""
    if POSITION >= 0:
        value = tl.load(scalars + POSITION)
    return value


@triton.jit
def _noise_place(noise_places, tensor, index):
    """Return the inputs of the noise: the tensor's number, and the index of each element in the whole tensor."""
    number = tensor
    if noise_places is not None:
        at = noise_places + 4 * tensor
        number = tl.load(at)
        run = tl.load(at + 2)
        index = tl.load(at + 1) + index // run * tl.load(at + 3) + index % run
    return number, index


@triton.jit
def _has_nonfinite(x):
    return tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, axis=0)


@triton.jit
def _flag_nonfinite(x, overflow, nonfinite_counts, tensor):
    """Set the overflow flag if a number is not finite, and count the infinite and NaN elements."""
    if _has_nonfinite(x) != 0:
        tl.store(overflow, 1)
        if nonfinite_counts is not None:
            # Sums of integers do not depend on their order.
            infinite = (tl.abs(x) == float("inf")).to(tl.int32)
            tl.atomic_add(nonfinite_counts + 2 * tensor, tl.sum(infinite, axis=0))
            unknown = tl.where(x == x, 0, 1)
            tl.atomic_add(nonfinite_counts + 2 * tensor + 1, tl.sum(unknown, axis=0))


@triton.jit
def _measure(terms, before, mask, WANTED: tl.constexpr, MAXIMUM: tl.constexpr, MASKED: tl.constexpr):
    """Return a quantity's sum (or maximum) so far, `before`, updated with the `terms` of a block if it is WANTED."""
    if WANTED:
        if MASKED:
            terms = tl.where(mask, terms, 0.0)
        if MAXIMUM:
            # tl.max and tl.maximum do not guarantee that NaN propagates.
            unknown = tl.sum(tl.where(terms == terms, 0.0, terms), axis=0) + tl.where(before == before, 0.0, before)
            before = tl.maximum(tl.max(terms, axis=0), before) + unknown
        else:
            before = before + tl.sum(terms, axis=0)
    return before


@triton.jit
def _block(
    tensors, slots, numbers, tensor, offset, size, measured,
    RULE: tl.constexpr, TYPES: tl.constexpr, CONSTANTS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Apply the rule to one block; return the measurements `measured`, updated with the block's."""
    FLAGS: tl.constexpr = CONSTANTS[0]
    READS: tl.constexpr = CONSTANTS[2]
    WRITES: tl.constexpr = CONSTANTS[3]
    CHECKS: tl.constexpr = CONSTANTS[4]
    QUANTITIES: tl.constexpr = CONSTANTS[5]
    MAXIMUM: tl.constexpr = CONSTANTS[6]
    STOCHASTIC: tl.constexpr = CONSTANTS[9]
    CODECS: tl.constexpr = CONSTANTS[10]
    overflow, nonfinite_counts, noise_places, grad_scale = tensors
    pointers, companions, copy = slots
    p0, p1, p2, p3, p4 = pointers
    c0, c2, c3, c4 = companions
    scalars, seed, whole, scale = numbers

    mask = tl.arange(0, BLOCK) < size - offset
    x0 = _values(p0, c0, offset, size, mask, TYPES[0], CODECS[0], READS[0], MASKED, BLOCK)
    x1 = _values(p1, p1, offset, size, mask, TYPES[1], 0, READS[1], MASKED, BLOCK)
    x2 = _values(p2, c2, offset, size, mask, TYPES[2], CODECS[2], READS[2], MASKED, BLOCK)
    x3 = _values(p3, c3, offset, size, mask, TYPES[3], CODECS[3], READS[3], MASKED, BLOCK)
    x4 = _values(p4, c4, offset, size, mask, TYPES[4], CODECS[4], READS[4], MASKED, BLOCK)

    if CHECKS[1]:
        _flag_nonfinite(x1, overflow, nonfinite_counts, tensor)
    if CHECKS[2]:
        if _has_nonfinite(x2) != 0:
            tl.store(overflow, 1)
    if CHECKS[0] and QUANTITIES == 0:
        known = (tl.abs(x1) < float("inf")) & (tl.abs(x2) < float("inf"))
    if grad_scale is not None:
        x1 = x1 * scale

    values = (x0, x1, x2, x3, x4)
    q0, q1, q2, q3 = measured
    if QUANTITIES > 0:
        values, terms = RULE(values, whole, scalars, FLAGS)
        q0 = _measure(terms[0], q0, mask, True, MAXIMUM, MASKED)
        q1 = _measure(terms[1], q1, mask, QUANTITIES > 1, MAXIMUM, MASKED)
        q2 = _measure(terms[2], q2, mask, QUANTITIES > 2, MAXIMUM, MASKED)
        q3 = _measure(terms[3], q3, mask, QUANTITIES > 3, MAXIMUM, MASKED)
    else:
        values = RULE(values, whole, scalars, FLAGS)

    x0, x1, x2, x3, x4 = values
    if CHECKS[0] and QUANTITIES == 0:
        _flag_nonfinite(tl.where(known, x0.to(TYPES[0]).to(tl.float32), 0.0), overflow, nonfinite_counts, tensor)
    if WRITES[0]:
        if TYPES[5] is not None:
            _store(copy, offset, x0, mask, TYPES[5], True, MASKED, BLOCK)
        if STOCHASTIC:
            number, index = _noise_place(noise_places, tensor, offset + tl.arange(0, BLOCK))
            x0 = round_stochastically(x0, noise_bits(seed, number, index, 0))
    at = (offset, size, noise_places)
    _store_slot(p0, c0, at, x0, mask, seed, tensor, 0, TYPES[0], CODECS[0], WRITES[0], MASKED, BLOCK)
    _store(p1, offset, x1, mask, TYPES[1], WRITES[1], MASKED, BLOCK)
    _store_slot(p2, c2, at, x2, mask, seed, tensor, 2, TYPES[2], CODECS[2], WRITES[2], MASKED, BLOCK)
    _store_slot(p3, c3, at, x3, mask, seed, tensor, 3, TYPES[3], CODECS[3], WRITES[3], MASKED, BLOCK)
    _store_slot(p4, c4, at, x4, mask, seed, tensor, 4, TYPES[4], CODECS[4], WRITES[4], MASKED, BLOCK)
    return q0, q1, q2, q3


@triton.jit
def _block_or_end(
    tensors, slots, numbers, tensor, offset, size, measured,
    RULE: tl.constexpr, TYPES: tl.constexpr, CONSTANTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Loads under a mask are not vectorised, which costs 60% on large tensors: only a tensor's last block uses one.
    if offset + BLOCK <= size:
        q0, q1, q2, q3 = _block(
            tensors, slots, numbers, tensor, offset, size, measured, RULE, TYPES, CONSTANTS, BLOCK, MASKED=False
        )
    else:
        CODECS: tl.constexpr = CONSTANTS[10]
        q0, q1, q2, q3 = measured
        if CODECS[0] + CODECS[2] + CODECS[3] + CODECS[4] == 0:
            q0, q1, q2, q3 = _block(
                tensors, slots, numbers, tensor, offset, size, measured, RULE, TYPES, CONSTANTS, BLOCK, MASKED=True
            )
        else:
            # In parts: else these many loads take more registers than whole blocks, 148 per thread in place of 64 for
            # float8, and fewer programs fit on a multiprocessor.
            PART: tl.constexpr = BLOCK // 4 if BLOCK >= 256 else 64
            while offset < size:
                q0, q1, q2, q3 = _block(
                    tensors, slots, numbers, tensor, offset, size, (q0, q1, q2, q3), RULE, TYPES, CONSTANTS, PART,
                    MASKED=True,
                )  # fmt: skip
                offset += PART
    return q0, q1, q2, q3


@triton.jit
def _store_sums(partials, program, measured, overflow, CONSTANTS: tl.constexpr):
    """Store the quantities that this program has measured; set the overflow flag if the first is not finite."""
    CHECKS: tl.constexpr = CONSTANTS[4]
    QUANTITIES: tl.constexpr = CONSTANTS[5]
    at = partials + program * QUANTITIES
    tl.store(at, measured[0])
    if CHECKS[0]:
        if not (tl.abs(measured[0]) < float("inf")):
            tl.store(overflow, 1)
    if QUANTITIES > 1:
        tl.store(at + 1, measured[1])
    if QUANTITIES > 2:
        tl.store(at + 2, measured[2])
    if QUANTITIES > 3:
        tl.store(at + 3, measured[3])


@kernel
@triton.jit
def apply_rule(
    table, moving, programs, noop, grad_scale, scalars, whole, overflow, nonfinite_counts, noise_places, partials,
    bounds, tickets, out, factor, s0, s1, s2, s3, s4, s5, s6, s7, seed, limit, margin, share,
    RULE: tl.constexpr, TYPES: tl.constexpr, CONSTANTS: tl.constexpr, FINISH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Apply `RULE` to up to BLOCKS consecutive blocks of the tensors at one index of the lists.

    With STAGES above 1, later blocks are loaded into shared memory during the computation.

    FINISH is None or (PER_TENSOR, ROOT, AVERAGE, COLUMNS, block size). With it, this launch also does the work of
    `reduce_partials`: the last program to finish, of each tensor if PER_TENSOR or else of all, sums the measurements.
    With PER_TENSOR no tensor may be empty.
    """
    if noop is not None:
        if tl.load(noop) != 0:
            return
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.program_id(0)
    offset = program * 0
    if programs is not None:
        tensor = tl.load(programs + 2 * program)
        offset = tl.load(programs + 2 * program + 1).to(tl.int64) * (BLOCK * BLOCKS)
    # Values that all blocks share are loaded before the first branch, so that the loads overlap.
    size = tl.load(table + tensor * CONSTANTS[7])
    slots = _slots(table, moving, tensor, TYPES, CONSTANTS)
    ON_DEVICE: tl.constexpr = CONSTANTS[1]
    s0 = _number(s0, scalars, ON_DEVICE[0])
    s1 = _number(s1, scalars, ON_DEVICE[1])
    s2 = _number(s2, scalars, ON_DEVICE[2])
    s3 = _number(s3, scalars, ON_DEVICE[3])
    s4 = _number(s4, scalars, ON_DEVICE[4])
    s5 = _number(s5, scalars, ON_DEVICE[5])
    s6 = _number(s6, scalars, ON_DEVICE[6])
    s7 = _number(s7, scalars, ON_DEVICE[7])
    seed = _number(seed, scalars, ON_DEVICE[8])
    w0 = 0.0
    w1 = 0.0
    if whole is not None:
        w0 = tl.load(whole + 2 * tensor)
        w1 = tl.load(whole + 2 * tensor + 1)
    scale = 1.0
    if grad_scale is not None:
        scale = tl.load(grad_scale)
    numbers = ((s0, s1, s2, s3, s4, s5, s6, s7), seed, (w0, w1), scale)
    tensors = (overflow, nonfinite_counts, noise_places, grad_scale)
    q0 = tl.full((), 0.0, tl.float32)
    q1 = tl.full((), 0.0, tl.float32)
    q2 = tl.full((), 0.0, tl.float32)
    q3 = tl.full((), 0.0, tl.float32)
    if BLOCKS == 1:
        q0, q1, q2, q3 = _block_or_end(
            tensors, slots, numbers, tensor, offset, size, (q0, q1, q2, q3), RULE, TYPES, CONSTANTS, BLOCK
        )
    else:
        # A run-time bound: a loop with a constant number of steps would be unrolled until registers spill.
        end = tl.minimum(size, offset + BLOCK * BLOCKS)
        if STAGES > 1:
            for _ in tl.range(((end - offset) // BLOCK).to(tl.int32), num_stages=STAGES):
                q0, q1, q2, q3 = _block(
                    tensors, slots, numbers, tensor, offset, size, (q0, q1, q2, q3), RULE, TYPES, CONSTANTS, BLOCK,
                    MASKED=False,
                )  # fmt: skip
                offset += BLOCK
        while offset < end:
            q0, q1, q2, q3 = _block_or_end(
                tensors, slots, numbers, tensor, offset, size, (q0, q1, q2, q3), RULE, TYPES, CONSTANTS, BLOCK
            )
            offset += BLOCK
    QUANTITIES: tl.constexpr = CONSTANTS[5]
    if QUANTITIES > 0:
        _store_sums(partials, program, (q0, q1, q2, q3), overflow, CONSTANTS)
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
