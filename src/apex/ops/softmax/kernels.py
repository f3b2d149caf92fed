"""Triton kernels of scaled, masked softmax with dropout, forward and backward.

Input and output are `groups` x `queries` x `keys`, contiguous; a group is one head of one batch. A program takes ROWS
queries of one group: if HELD, with their keys in registers; else one query of any length, in chunks of BLOCK keys.
All arithmetic is float32. Run-time arguments come first, constants last.

MASK: 0 none, 1 causal, 2 nonzero hides, 3 is added. NOISE: 0 no dropout, 1 a Philox seed, 2 one byte per element,
nonzero for kept elements. FULL: no query and no key needs a bound. ALIGN: a power of two up to 16 that divides `keys`,
which is given as `keys_by_align` times ALIGN: bounds that are multiples of ALIGN let loads and stores be that wide.

Functions take two tuples: `at` is the queries of a program, the position of their rows among all, and the numbers of
queries and keys; `drop` is the noise, the probability to drop, and the scale of kept elements.
"""

import triton
import triton.language as tl

from .._launch import kernel

CAUSAL = tl.constexpr(1)
HIDES = tl.constexpr(2)
ADDED = tl.constexpr(3)
SEED = tl.constexpr(1)


@triton.jit
def _rows(queries, blocks, ROWS: tl.constexpr, PAIRED: tl.constexpr):
    """Return the group of this program, its queries, and the position of their rows among all.

    PAIRED: the first queries alternate with the last, so that programs that read little run beside others that read
    much.
    """
    program = tl.program_id(0)
    group = program // blocks
    block = program % blocks
    if PAIRED:
        block = tl.where(block % 2 == 0, block // 2, blocks - 1 - block // 2)
    query = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return group, query, group.to(tl.int64) * queries + query


@triton.jit
def _read_bound(query, column, queries, keys, seen, MASK: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr):
    """Return a mask of the elements to read: causally hidden ones are left out as far as loads stay wide."""
    end = keys
    if MASK == CAUSAL:
        end = (seen + (ALIGN - 1)) // ALIGN * ALIGN
    bound = column < end
    if not FULL:
        bound = bound & (query < queries)
    return bound


@triton.jit
def _load(pointer, bound, other, BOUNDED: tl.constexpr):
    if BOUNDED:
        value = tl.load(pointer, mask=bound, other=other)
    else:
        value = tl.load(pointer)
    return value


@triton.jit
def _logits(
    input, mask, query, column, queries, keys, seen, scale, MASK: tl.constexpr, FULL: tl.constexpr, ALIGN: tl.constexpr
):
    """Return the scaled and masked input; -inf for hidden elements."""
    BOUNDED: tl.constexpr = MASK == CAUSAL or not FULL
    bound = _read_bound(query, column, queries, keys, seen, MASK, FULL, ALIGN)
    index = column
    if ALIGN == 1 and MASK != CAUSAL and not FULL:
        # Loads the last key again instead of nothing: with a bound for each load, ptxas lets one wait for the other.
        # With bounds bfloat16 48x941x941 took 151 us; its backward pass, which reads twice as much, took 78.
        index = tl.minimum(column, keys - 1)
        bound = query < queries
    x = _load(input + index, bound, 0.0, BOUNDED).to(tl.float32) * scale
    if MASK == ADDED:
        x += _load(mask + index, bound, 0.0, BOUNDED).to(tl.float32)
    if MASK == HIDES:
        hidden = _load(mask + index, bound, 1, BOUNDED)
        x = tl.where(hidden != 0, float("-inf"), x)
    elif MASK == CAUSAL:
        x = tl.where(column < seen, x, float("-inf"))
    if not FULL and MASK != CAUSAL:
        x = tl.where(column < keys, x, float("-inf"))
    return x


@triton.jit
def _kept(drop, at, start, NOISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Return which of the BLOCK keys from `start` on dropout keeps, independent of how programs share rows and keys.

    Philox counts rows and groups of four keys; its four results serve the four keys.
    """
    noise, dropout, _ = drop
    query, row, queries, keys = at
    if NOISE == SEED:
        none = tl.zeros([ROWS, BLOCK // 4], tl.int32)
        four = none + (start // 4 + tl.arange(0, BLOCK // 4)[None, :])
        a, b, c, d = tl.philox(tl.load(noise), four, none + row.to(tl.int32), none + (row >> 32).to(tl.int32), none)
        bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, BLOCK])
        kept = tl.uint_to_uniform_float(bits) >= dropout
    else:
        column = start + tl.arange(0, BLOCK)[None, :]
        bound = _read_bound(query, column, queries, keys, keys, 0, FULL, 1)
        kept = _load(noise + row * keys + column, bound, 0, not FULL) != 0
    return kept


@triton.jit
def _store_output(
    output, probabilities, y, drop, at, start,
    NOISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    if NOISE != 0:
        _store(probabilities, y, at, start, BLOCK, FULL)
        y = tl.where(_kept(drop, at, start, NOISE, ROWS, BLOCK, FULL), y * drop[2], 0.0)
    _store(output, y, at, start, BLOCK, FULL)


@triton.jit
def _store(output, y, at, start, BLOCK: tl.constexpr, FULL: tl.constexpr):
    query, row, queries, keys = at
    column = start + tl.arange(0, BLOCK)[None, :]
    pointer = output + row * keys + column
    if FULL:
        tl.store(pointer, y.to(output.dtype.element_ty))
    else:
        tl.store(pointer, y.to(output.dtype.element_ty), mask=(query < queries) & (column < keys))


@kernel
@triton.jit
def softmax_forward(
    input, mask, noise, output, probabilities,
    queries, keys_by_align, blocks, heads, mask_batch_stride, mask_head_stride, mask_query_stride, scale, dropout,
    kept_scale,
    MASK: tl.constexpr, NOISE: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    keys = keys_by_align * ALIGN
    group, query, row = _rows(queries, blocks, ROWS, False)
    seen = (query + (keys - queries) + 1).to(tl.int32)  # number of keys that a causal query sees
    if MASK == HIDES or MASK == ADDED:
        batch = (group // heads).to(tl.int64)
        head = (group % heads).to(tl.int64)
        mask += batch * mask_batch_stride + head * mask_head_stride
        mask += query * mask_query_stride
    at, drop = (query, row, queries, keys), (noise, dropout, kept_scale)
    input += row * keys
    columns = tl.arange(0, BLOCK)[None, :]
    if HELD:
        x = _logits(input, mask, query, columns, queries, keys, seen, scale, MASK, FULL, ALIGN)
        # Not exp2 of logits times log2(e): the lowest finite numbers, which models use to hide keys, would overflow.
        top = tl.max(x, 1, keep_dims=True)
        x = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        y = x * _inverse(tl.sum(x, 1, keep_dims=True), MASK)
        _store_output(output, probabilities, y, drop, at, 0, NOISE, ROWS, BLOCK, FULL)
    else:
        # One maximum for the row and one sum per lane, so that an element costs a single exponential.
        end = keys
        if MASK == CAUSAL:
            end = tl.max(seen)
        top = tl.full([ROWS, 1], float("-inf"), tl.float32)
        finite_top = tl.zeros([ROWS, 1], tl.float32)
        lane_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.range(0, end, BLOCK):
            x = _logits(input, mask, query, start + columns, queries, keys, seen, scale, MASK, FULL, ALIGN)
            new_top = tl.maximum(top, tl.max(x, 1, keep_dims=True))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            lane_sum = lane_sum * tl.exp(top - finite_top) + tl.exp(x - finite_top)
            top = new_top
        inverse = _inverse(tl.sum(lane_sum, 1, keep_dims=True), MASK)
        for start in tl.range(0, keys, BLOCK):
            y = tl.zeros([ROWS, BLOCK], tl.float32)
            if start < end:
                x = _logits(input, mask, query, start + columns, queries, keys, seen, scale, MASK, FULL, ALIGN)
                y = tl.exp(x - finite_top) * inverse
            _store_output(output, probabilities, y, drop, at, start, NOISE, ROWS, BLOCK, FULL)


@triton.jit
def _inverse(total, MASK: tl.constexpr):
    """Return 1 / the sum of a row; zero if a mask hides the whole row."""
    if MASK != 0:
        total = tl.where(total == 0.0, float("inf"), total)
    return 1.0 / total


@triton.jit
def _gradient(
    dy, probabilities, drop, at, start, seen,
    MASK: tl.constexpr, NOISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the probabilities, and the probabilities; zero for hidden elements."""
    query, row, queries, keys = at
    BOUNDED: tl.constexpr = MASK == CAUSAL or not FULL
    column = start + tl.arange(0, BLOCK)[None, :]
    bound = _read_bound(query, column, queries, keys, seen, MASK, FULL, ALIGN)
    y = _load(probabilities + row * keys + column, bound, 0.0, BOUNDED).to(tl.float32)
    gradient = _load(dy + row * keys + column, bound, 0.0, BOUNDED).to(tl.float32)
    if MASK == CAUSAL and ALIGN > 1:  # the few loaded elements beyond causality may have any value
        gradient = tl.where(column < seen, gradient, 0.0)
        y = tl.where(column < seen, y, 0.0)
    if NOISE != 0:
        gradient = tl.where(_kept(drop, at, start, NOISE, ROWS, BLOCK, FULL), gradient * drop[2], 0.0)
    return gradient, y


@kernel
@triton.jit
def softmax_backward(
    dy, probabilities, noise, dx,
    queries, keys_by_align, blocks, scale, dropout, kept_scale,
    MASK: tl.constexpr, NOISE: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient. MASK is 0 or 1: other masks made the probabilities zero, and so the gradient."""
    keys = keys_by_align * ALIGN
    # Causal bfloat16 in pairs: 64x2048x2048 in 263 us on an H200 (in order: 266), 16x8192x8192 in 1066 (1106).
    _group, query, row = _rows(queries, blocks, ROWS, HELD and MASK == CAUSAL)
    seen = (query + (keys - queries) + 1).to(tl.int32)
    at, drop = (query, row, queries, keys), (noise, dropout, kept_scale)
    if HELD:
        gradient, y = _gradient(dy, probabilities, drop, at, 0, seen, MASK, NOISE, ROWS, BLOCK, FULL, ALIGN)
        inner = tl.sum(gradient * y, 1, keep_dims=True)
        _store(dx, y * (gradient - inner) * scale, at, 0, BLOCK, FULL)
    else:
        end = keys
        if MASK == CAUSAL:
            end = tl.max(seen)
        lane_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.range(0, end, BLOCK):
            gradient, y = _gradient(dy, probabilities, drop, at, start, seen, MASK, NOISE, ROWS, BLOCK, FULL, ALIGN)
            lane_sum += gradient * y
        inner = tl.sum(lane_sum, 1, keep_dims=True)
        for start in tl.range(0, keys, BLOCK):
            result = tl.zeros([ROWS, BLOCK], tl.float32)
            if start < end:
                gradient, y = _gradient(dy, probabilities, drop, at, start, seen, MASK, NOISE, ROWS, BLOCK, FULL, ALIGN)
                result = y * (gradient - inner) * scale
            _store(dx, result, at, start, BLOCK, FULL)
