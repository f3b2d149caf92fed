"""Triton kernels of softmax cross-entropy.

Logits are `rows` x `classes` with `row_stride` elements from one row to the next. A row is read in blocks of
GROUPS x LANES x VECTOR elements: VECTOR neighbours are one 16-byte access of a thread, LANES are the threads of a
program, and a thread's GROUPS accesses are in flight together. Rows of an odd length are not aligned, so blocks begin
at the first multiple of ALIGNMENT elements inside a row (EDGES); the few elements before and behind the blocks, its
edges, are one small separate access. Arithmetic is float32, exponentials are powers of two.
"""

import triton
import triton.language as tl

from .._kernel_functions import mask_if
from .._launch import kernel

LOG2E = tl.constexpr(1.4426950408889634)
# Replaces -inf as the initial maximum, because it can be scaled and subtracted from itself.
LOWEST = tl.constexpr(-1.0e38)
ALIGNMENT = tl.constexpr(16)


@triton.jit
def _block(GROUPS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return the positions of a block's elements, relative to its start."""
    group = tl.arange(0, GROUPS)[:, None, None] * (LANES * VECTOR)
    return group + tl.arange(0, LANES)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def _aligned_part(row_start, classes, EDGES: tl.constexpr):
    """Return the start of a row's blocks, in the tensor and in the row, and the number of their elements."""
    if EDGES:
        body_start = (row_start + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
        head = (body_start - row_start).to(tl.int32)
        length = tl.maximum(classes - head, 0) // ALIGNMENT * ALIGNMENT
    else:
        body_start = row_start
        head = 0
        length = classes
    return body_start, head, length


@triton.jit
def _edges(head, length, classes):
    """Return the positions of the elements outside the blocks, and their mask."""
    index = tl.arange(0, 2 * ALIGNMENT)
    position = tl.where(index < ALIGNMENT, index, index - ALIGNMENT + head + length)
    return position, (position < classes) & ((index >= ALIGNMENT) | (position < head))


@triton.jit
def _accumulate(x, mask, greatest, exponentials, total, SMOOTHED: tl.constexpr):
    """Add one block to each lane's greatest element, sum of 2^(x - greatest) and sum of x, and return these.

    The maximum is taken over a lane's part of the block first, so that an element costs one exponential.
    """
    peak = tl.maximum(greatest, tl.max(tl.max(x, 2), 0))
    power = tl.exp2(x * LOG2E - (peak * LOG2E)[None, :, None])
    exponentials = exponentials * tl.exp2((greatest - peak) * LOG2E) + tl.sum(tl.sum(power, 2), 0)
    if SMOOTHED:
        total += tl.sum(tl.sum(x if mask is None else tl.where(mask, x, 0.0), 2), 0)
    return peak, exponentials, total


@triton.jit
def _slope(x, position, label, log_sum, scale, own, others):
    """Return the derivative of a row's loss, scale * (softmax - target); `own` and `others` are -scale * target."""
    softmax = tl.exp2(x * LOG2E - log_sum * LOG2E)
    return scale * softmax + tl.where(position == label, own, others)


@triton.jit
def _write_gradient(
    source, target, source_start, target_start, classes, label, counted, log_sum, scale, smoothing, first, step,
    EDGES: tl.constexpr, SAME_STRIDE: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Write a row's gradient: the blocks `first`, `first + step`, ... and with block 0 the edges.

    Only `counted` rows are read; the gradient of the others, padding, is zero for any logits. EVICT: the cache policy
    of these reads and writes.
    """
    BLOCK: tl.constexpr = GROUPS * LANES * VECTOR
    label = tl.where((label >= 0) & (label < classes), label, -1).to(tl.int32)
    others = -scale * (smoothing / classes)
    own = others - scale * (1.0 - smoothing)
    body_start, head, length = _aligned_part(target_start, classes, EDGES)
    body_target = target + body_start
    body_source = source + (body_start if SAME_STRIDE else source_start + head)
    offset = _block(GROUPS, LANES, VECTOR)
    zeros = tl.zeros([GROUPS, LANES, VECTOR], target.dtype.element_ty)
    whole = length // BLOCK * BLOCK
    if counted:
        for begin in tl.range(first * BLOCK, whole, step * BLOCK):
            position = begin + offset
            x = tl.load(body_source + position, eviction_policy=EVICT).to(tl.float32)
            slope = _slope(x, position + head, label, log_sum, scale, own, others)
            tl.store(body_target + position, slope.to(target.dtype.element_ty), eviction_policy=EVICT)
    else:
        for begin in tl.range(first * BLOCK, whole, step * BLOCK):
            tl.store(body_target + (begin + offset), zeros)
    if (length > whole) & (whole // BLOCK % step == first):
        position = whole + offset
        mask = position < length
        x = tl.load(body_source + position, mask=mask_if(counted, mask), other=0.0).to(tl.float32)
        slope = _slope(x, position + head, label, log_sum, scale, own, others)
        slope = tl.where(counted, slope.to(target.dtype.element_ty), zeros)
        tl.store(body_target + position, slope, mask=mask)
    if EDGES:
        position, mask = _edges(head, length, classes)
        mask = mask_if(first == 0, mask)
        x = tl.load(source + source_start + position, mask=mask_if(counted, mask), other=0.0).to(tl.float32)
        slope = tl.where(counted, _slope(x, position, label, log_sum, scale, own, others), 0.0)
        tl.store(target + target_start + position, slope.to(target.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def xentropy_forward(
    logits, labels, losses, log_sums, row_scale,
    row_stride, classes, padding_idx, scale_stride, smoothing,
    SMOOTHED: tl.constexpr, EDGES: tl.constexpr, GRADIENT: tl.constexpr, STREAM: tl.constexpr, GROUPS: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute the loss of each row and the log of its sum of exponentials; one program per row.

    Both are zero for padding, which is not read. GRADIENT: overwrites the logits with the gradient of the loss, times
    the row's scale if there is one. STREAM: leaves the cache to rows that are read again.
    """
    BLOCK: tl.constexpr = GROUPS * LANES * VECTOR
    row = tl.program_id(0).to(tl.int64)
    row_start = row * row_stride
    label = tl.load(labels + row)
    counted = label != padding_idx
    readable = tl.where(counted, classes, 0)
    own = tl.load(logits + row_start + label, mask=(label >= 0) & (label < readable), other=float("nan")).to(tl.float32)
    body_start, head, length = _aligned_part(row_start, readable, EDGES)
    body = logits + body_start
    offset = _block(GROUPS, LANES, VECTOR)
    greatest = tl.full([LANES], LOWEST, tl.float32)
    exponentials = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    whole = length // BLOCK * BLOCK
    for begin in tl.range(0, whole, BLOCK):
        x = tl.load(body + (begin + offset)).to(tl.float32)
        greatest, exponentials, total = _accumulate(x, None, greatest, exponentials, total, SMOOTHED)
    if length > whole:
        mask = whole + offset < length
        x = tl.load(body + (whole + offset), mask=mask, other=float("-inf")).to(tl.float32)
        greatest, exponentials, total = _accumulate(x, mask, greatest, exponentials, total, SMOOTHED)
    peak = tl.max(greatest)
    if EDGES:
        position, mask = _edges(head, length, readable)
        x = tl.load(logits + row_start + position, mask=mask, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, tl.max(x))
    row_sum = tl.sum(exponentials * tl.exp2((greatest - peak) * LOG2E))
    row_total = tl.sum(total)
    if EDGES:
        row_sum += tl.sum(tl.exp2((x - peak) * LOG2E))
        row_total += tl.sum(tl.where(mask, x, 0.0))
    log_sum = peak + tl.log(tl.where(counted, row_sum, 1.0))
    loss = log_sum - (1.0 - smoothing) * own
    if SMOOTHED:
        loss -= smoothing / classes * row_total
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    tl.store(log_sums + row, tl.where(counted, log_sum, 0.0))
    if GRADIENT:
        scale = 1.0
        if row_scale is not None:
            scale = tl.load(row_scale + row * scale_stride).to(tl.float32)
        tl.debug_barrier()  # every thread has read its part of the row before another overwrites it
        _write_gradient(
            logits, logits, row_start, row_start, classes, label, counted, log_sum, scale, smoothing, 0, 1,
            EDGES, True, GROUPS, LANES, VECTOR, "evict_first" if STREAM else "",
        )  # fmt: skip


@kernel
@triton.jit
def xentropy_backward(
    loss_gradient, logits, log_sums, labels, gradient,
    splits, row_stride, classes, padding_idx, loss_stride, smoothing,
    EDGES: tl.constexpr, SAME_STRIDE: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits, `classes` elements per row; `splits` neighbouring programs share a row.

    `loss_stride` is 0 if all rows share one gradient of the loss, else 1.
    """
    row = (tl.program_id(0) // splits).to(tl.int64)
    label = tl.load(labels + row)
    log_sum = tl.load(log_sums + row).to(tl.float32)
    scale = tl.load(loss_gradient + row * loss_stride).to(tl.float32)
    _write_gradient(
        logits, gradient, row * row_stride, row * classes, classes, label, label != padding_idx, log_sum, scale,
        smoothing, tl.program_id(0) % splits, splits,
        EDGES, SAME_STRIDE, GROUPS, LANES, VECTOR, "",
    )  # fmt: skip


@kernel
@triton.jit
def xentropy_short_rows(
    logits, labels, losses, log_sums, gradient,
    rows, row_stride, classes, padding_idx, loss_stride, smoothing,
    BACKWARD: tl.constexpr, SMOOTHED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    """Run either pass for few classes: ROWS whole rows per program, held in registers.

    BACKWARD: reads `log_sums`, and the gradient of the losses in place of `losses`; writes `gradient`. The number of
    classes and the stride are multiples of MULTIPLE, which allows accesses of up to 16 bytes.
    """
    row_stride = row_stride // MULTIPLE * MULTIPLE
    classes = classes // MULTIPLE * MULTIPLE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    exists = row < rows
    label = tl.load(labels + row, mask=exists, other=padding_idx)
    counted = label != padding_idx
    mask = counted[:, None] & (column < classes)
    is_own = column == label[:, None]
    x = tl.load(logits + row[:, None] * row_stride + column, mask=mask, other=float("-inf")).to(tl.float32)
    if BACKWARD:
        scale = tl.load(losses + row * loss_stride, mask=counted, other=0.0).to(tl.float32)
        log_sum = tl.load(log_sums + row, mask=counted, other=0.0).to(tl.float32)
        others = -scale * (smoothing / classes)
        own = others - scale * (1.0 - smoothing)
        softmax = tl.exp2(x * LOG2E - (log_sum * LOG2E)[:, None])
        slope = scale[:, None] * softmax + tl.where(is_own, own[:, None], others[:, None])
        slope = tl.where(counted[:, None], slope, 0.0).to(gradient.dtype.element_ty)
        tl.store(gradient + row[:, None] * classes + column, slope, mask=exists[:, None] & (column < classes))
    else:
        peak = tl.maximum(tl.max(x, 1), LOWEST)
        row_sum = tl.sum(tl.exp2(x * LOG2E - (peak * LOG2E)[:, None]), 1)
        log_sum = peak + tl.log(tl.where(counted, row_sum, 1.0))
        own = tl.sum(tl.where(is_own, x, 0.0), 1)
        loss = log_sum - (1.0 - smoothing) * tl.where((label >= 0) & (label < classes), own, float("nan"))
        if SMOOTHED:
            loss -= smoothing / classes * tl.sum(tl.where(mask, x, 0.0), 1)
        tl.store(losses + row, tl.where(counted, loss, 0.0), mask=exists)
        tl.store(log_sums + row, tl.where(counted, log_sum, 0.0), mask=exists)
