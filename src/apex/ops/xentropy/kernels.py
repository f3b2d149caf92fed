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
def _tanh(x, APPROXIMATE: tl.constexpr):
    """Return tanh(x): a polynomial near zero, where the quotient of exponentials would cancel.

    APPROXIMATE: by NVIDIA's instruction, whose relative error of 2^-11 is a quarter of the error of bfloat16 logits. It
    saves two special functions per element: with them, a step of 8192x2304x256000 took 1.06 times as long as without a
    cap.
    """
    if APPROXIMATE:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    square = x * x
    near_zero = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    return tl.where(square < 0.0625, near_zero, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E))))


@triton.jit
def _transform(x, inner, outer, TRANSFORM: tl.constexpr):
    """Return the logits that the softmax sees: x, inner * x (TRANSFORM 1) or outer * tanh(inner * x) (2, 3)."""
    if TRANSFORM >= 2:
        return outer * _tanh(x * inner, TRANSFORM == 3)
    if TRANSFORM == 1:
        return x * inner
    return x


@triton.jit
def _accumulate(
    x, mask, position, weights, greatest, exponentials, total, weighted, products, squares, index,
    TOTAL: tl.constexpr, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Add one block to each lane's statistics, and return these.

    Statistics are the greatest element and, with TOP, its `index`. With e = 2^(x' - greatest'), where x' is x in units
    of log 2, they are also the sum of e, with ENTROPY the sum of e * (x' - greatest'), with SQUARES the sum of e * e.
    With TOTAL they are the sum of x, and the sum of x * weights if there are weights. The maximum is taken over a
    lane's part of the block first, so that an element costs one exponential.
    """
    highest = tl.max(tl.max(x, 2), 0)
    peak = tl.maximum(greatest, highest)
    if TOP:
        candidate = tl.where(x == highest[None, :, None], position, 2147483647)
        index = tl.where(highest > greatest, tl.min(tl.min(candidate, 2), 0), index)
    exponent = x * LOG2E - (peak * LOG2E)[None, :, None]
    power = tl.exp2(exponent)
    shift = (greatest - peak) * LOG2E
    rescale = tl.exp2(shift)
    if ENTROPY:
        product = tl.where(power > 0.0, power * exponent, 0.0)  # not 0 * -inf
        products = (products + shift * exponentials) * rescale + tl.sum(tl.sum(product, 2), 0)
    if SQUARES:
        squares = squares * rescale * rescale + tl.sum(tl.sum(power * power, 2), 0)
    exponentials = exponentials * rescale + tl.sum(tl.sum(power, 2), 0)
    if TOTAL:
        total += tl.sum(tl.sum(x if mask is None else tl.where(mask, x, 0.0), 2), 0)
    if weights is not None:
        weighted += tl.sum(tl.sum(weights * x if mask is None else tl.where(mask, weights * x, 0.0), 2), 0)
    return peak, exponentials, total, weighted, products, squares, index


@triton.jit
def _slope(
    x, position, weights, label, log_sum, of_softmax, of_product, of_all, of_own, inner, outer,
    TRANSFORM: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Return the derivative of a row's loss with respect to its logits x.

    With z = transform(x) and p = softmax(z) it is p * (of_softmax + of_product * z) + weights * of_all, plus of_own at
    the label. These four coefficients include the transform's constant factor; the slope of tanh is multiplied here.
    """
    curve = 1.0
    if TRANSFORM >= 2:
        bent = _tanh(x * inner, TRANSFORM == 3)
        z = outer * bent
        curve = 1.0 - bent * bent
    else:
        z = _transform(x, inner, outer, TRANSFORM)
    softmax = tl.exp2(z * LOG2E - log_sum * LOG2E)
    if ENTROPY:
        slope = softmax * (of_softmax + of_product * tl.maximum(z, LOWEST))
    else:
        slope = of_softmax * softmax
    if weights is None:
        slope += tl.where(position == label, of_own + of_all, of_all)
    else:
        slope += weights * of_all + tl.where(position == label, of_own, 0.0)
    if TRANSFORM >= 2:
        slope *= curve
    return slope


@triton.jit
def _write_gradient(
    source, target, class_weight, source_start, target_start, classes, label, counted,
    log_sum, of_softmax, of_product, of_all, of_own, inner, outer, first, step,
    TRANSFORM: tl.constexpr, ENTROPY: tl.constexpr, EDGES: tl.constexpr, SAME_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, EVICT: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write a row's gradient: the blocks `first`, `first + step`, ... and with block 0 the edges.

    Only `counted` rows are read; the gradient of padding is zero for any logits. EVICT: the cache policy of these reads
    and writes. REVERSE: counts blocks from the end of the row, which is still in the cache if the program has just read
    the row: bfloat16 2048x131072 in 363 us, else 383, 4096x50257 in 329, else 369. `_slope` explains the coefficients.
    """
    BLOCK: tl.constexpr = GROUPS * LANES * VECTOR
    label = tl.where((label >= 0) & (label < classes), label, -1).to(tl.int32)
    body_start, head, length = _aligned_part(target_start, classes, EDGES)
    body_target = target + body_start
    body_source = source + (body_start if SAME_STRIDE else source_start + head)
    offset = _block(GROUPS, LANES, VECTOR)
    zeros = tl.zeros([GROUPS, LANES, VECTOR], target.dtype.element_ty)
    whole = length // BLOCK * BLOCK
    if counted:
        for begin in tl.range(first * BLOCK, whole, step * BLOCK):
            position = (whole - BLOCK - begin if REVERSE else begin) + offset
            x = tl.load(body_source + position, eviction_policy=EVICT).to(tl.float32)
            weights = None
            if class_weight is not None:
                weights = tl.load(class_weight + head + position).to(tl.float32)
            slope = _slope(
                x, position + head, weights, label, log_sum, of_softmax, of_product, of_all, of_own, inner, outer,
                TRANSFORM, ENTROPY,
            )  # fmt: skip
            tl.store(body_target + position, slope.to(target.dtype.element_ty), eviction_policy=EVICT)
    else:
        for begin in tl.range(first * BLOCK, whole, step * BLOCK):
            tl.store(body_target + (begin + offset), zeros)
    if (length > whole) & (whole // BLOCK % step == first):
        position = whole + offset
        mask = position < length
        x = tl.load(body_source + position, mask=mask_if(counted, mask), other=0.0).to(tl.float32)
        weights = None
        if class_weight is not None:
            weights = tl.load(class_weight + head + position, mask=mask, other=0.0).to(tl.float32)
        slope = _slope(
            x, position + head, weights, label, log_sum, of_softmax, of_product, of_all, of_own, inner, outer,
            TRANSFORM, ENTROPY,
        )  # fmt: skip
        slope = tl.where(counted, slope.to(target.dtype.element_ty), zeros)
        tl.store(body_target + position, slope, mask=mask)
    if EDGES:
        position, mask = _edges(head, length, classes)
        mask = mask_if(first == 0, mask)
        x = tl.load(source + source_start + position, mask=mask_if(counted, mask), other=0.0).to(tl.float32)
        weights = None
        if class_weight is not None:
            weights = tl.load(class_weight + position, mask=mask, other=0.0).to(tl.float32)
        slope = _slope(
            x, position, weights, label, log_sum, of_softmax, of_product, of_all, of_own, inner, outer,
            TRANSFORM, ENTROPY,
        )  # fmt: skip
        slope = tl.where(counted, slope, 0.0)
        tl.store(target + target_start + position, slope.to(target.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def xentropy_forward(
    logits, labels, scale, losses, log_sums, class_weight,
    owns, totals, weighted_totals, entropies, squares, peaks, tops,
    row_stride, classes, padding_idx, smoothing, z_loss, inner, outer,
    SMOOTHED: tl.constexpr, TRANSFORM: tl.constexpr, EDGES: tl.constexpr, GRADIENT: tl.constexpr,
    STREAM: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute the log of each row's sum of exponentials, and the statistics whose tensors are given; a program per row.

    Statistics are the loss, the label's logit, the sum of the logits, the sum of the logits times `class_weight`, the
    entropy, the sum of squared probabilities, the greatest logit and its first index. They belong to the logits that
    `_transform` returns, and are zero for padding, which is not read. GRADIENT: overwrites the logits with the gradient
    of the loss, times the number `scale` if there is one. STREAM: leaves the cache to rows that are read again.
    """
    BLOCK: tl.constexpr = GROUPS * LANES * VECTOR
    TOTAL: tl.constexpr = SMOOTHED or totals is not None
    ENTROPY: tl.constexpr = entropies is not None
    SQUARES: tl.constexpr = squares is not None
    TOP: tl.constexpr = tops is not None
    row = tl.program_id(0).to(tl.int64)
    row_start = row * row_stride
    label = tl.load(labels + row)
    counted = label != padding_idx
    readable = tl.where(counted, classes, 0)
    own = tl.load(logits + row_start + label, mask=(label >= 0) & (label < readable), other=float("nan")).to(tl.float32)
    own = _transform(own, inner, outer, TRANSFORM)
    body_start, head, length = _aligned_part(row_start, readable, EDGES)
    body = logits + body_start
    offset = _block(GROUPS, LANES, VECTOR)
    greatest = tl.full([LANES], LOWEST, tl.float32)
    exponentials = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    products = tl.zeros([LANES], tl.float32)
    square_sums = tl.zeros([LANES], tl.float32)
    index = tl.zeros([LANES], tl.int32)
    whole = length // BLOCK * BLOCK
    for begin in tl.range(0, whole, BLOCK):
        position = begin + offset
        x = _transform(tl.load(body + position).to(tl.float32), inner, outer, TRANSFORM)
        weights = None
        if class_weight is not None:
            weights = tl.load(class_weight + head + position).to(tl.float32)
        greatest, exponentials, total, weighted, products, square_sums, index = _accumulate(
            x, None, position + head, weights, greatest, exponentials, total, weighted, products, square_sums, index,
            TOTAL, ENTROPY, SQUARES, TOP,
        )  # fmt: skip
    if length > whole:
        position = whole + offset
        mask = position < length
        x = tl.load(body + position, mask=mask, other=float("-inf")).to(tl.float32)
        if TRANSFORM:
            x = tl.where(mask, _transform(x, inner, outer, TRANSFORM), float("-inf"))
        weights = None
        if class_weight is not None:
            weights = tl.load(class_weight + head + position, mask=mask, other=0.0).to(tl.float32)
        greatest, exponentials, total, weighted, products, square_sums, index = _accumulate(
            x, mask, position + head, weights, greatest, exponentials, total, weighted, products, square_sums, index,
            TOTAL, ENTROPY, SQUARES, TOP,
        )  # fmt: skip
    peak = tl.max(greatest)
    if TOP:
        top = tl.min(tl.where(greatest == peak, index, 2147483647))
    if EDGES:
        position, mask = _edges(head, length, readable)
        x = tl.load(logits + row_start + position, mask=mask, other=float("-inf")).to(tl.float32)
        if TRANSFORM:
            x = tl.where(mask, _transform(x, inner, outer, TRANSFORM), float("-inf"))
        highest = tl.max(x)
        if TOP:
            first = tl.min(tl.where(x == highest, position, 2147483647))
            earlier = (highest > peak) | ((highest == peak) & (first < top))
            top = tl.where(earlier, first, top)
        peak = tl.maximum(peak, highest)
    shift = (greatest - peak) * LOG2E
    rescale = tl.exp2(shift)
    row_sum = tl.sum(exponentials * rescale)
    row_total = tl.sum(total)
    row_weighted = tl.sum(weighted)
    row_products = tl.sum((products + shift * exponentials) * rescale)
    row_squares = tl.sum(square_sums * rescale * rescale)
    if EDGES:
        exponent = (x - peak) * LOG2E
        power = tl.exp2(exponent)
        row_sum += tl.sum(power)
        row_total += tl.sum(tl.where(mask, x, 0.0))
        row_products += tl.sum(tl.where(power > 0.0, power * exponent, 0.0))
        row_squares += tl.sum(power * power)
        if class_weight is not None:
            weights = tl.load(class_weight + position, mask=mask, other=0.0).to(tl.float32)
            row_weighted += tl.sum(tl.where(mask, weights * x, 0.0))
    row_sum = tl.where(counted, row_sum, 1.0)
    log_sum = peak + tl.log(row_sum)
    tl.store(log_sums + row, tl.where(counted, log_sum, 0.0))
    if losses is not None:
        loss = log_sum - (1.0 - smoothing) * own + z_loss * log_sum * log_sum
        if SMOOTHED:
            loss -= smoothing / classes * row_total
        tl.store(losses + row, tl.where(counted, loss, 0.0))
    if owns is not None:
        tl.store(owns + row, tl.where(counted, own, 0.0))
    if totals is not None:
        tl.store(totals + row, tl.where(counted, row_total, 0.0))
    if weighted_totals is not None:
        tl.store(weighted_totals + row, tl.where(counted, row_weighted, 0.0))
    if entropies is not None:
        tl.store(entropies + row, tl.where(counted, tl.log(row_sum) - row_products / (row_sum * LOG2E), 0.0))
    if squares is not None:
        tl.store(squares + row, tl.where(counted, row_squares / (row_sum * row_sum), 0.0))
    if peaks is not None:
        tl.store(peaks + row, tl.where(counted, peak, 0.0))
    if tops is not None:
        tl.store(tops + row, tl.where(counted, top, 0).to(tl.int64))
    if GRADIENT:
        factor = 1.0
        if TRANSFORM == 1:
            factor = inner
        if TRANSFORM >= 2:
            factor = inner * outer
        if scale is not None:
            factor *= tl.load(scale).to(tl.float32)
        tl.debug_barrier()  # every thread has read its part of the row before another overwrites it
        _write_gradient(
            logits, logits, None, row_start, row_start, classes, label, counted,
            log_sum, factor * (1.0 + 2.0 * z_loss * log_sum), 0.0, -factor * (smoothing / classes),
            -factor * (1.0 - smoothing), inner, outer, 0, 1,
            TRANSFORM, False, EDGES, True, GROUPS, LANES, VECTOR, "evict_first" if STREAM else "", True,
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
        logits, gradient, None, row * row_stride, row * classes, classes, label, label != padding_idx,
        log_sum, scale, 0.0, -scale * (smoothing / classes), -scale * (1.0 - smoothing), 1.0, 1.0,
        tl.program_id(0) % splits, splits,
        0, False, EDGES, SAME_STRIDE, GROUPS, LANES, VECTOR, "", False,
    )  # fmt: skip


@kernel
@triton.jit
def row_gradient(
    logits, labels, log_sums, coefficients, class_weight, gradient,
    rows, splits, row_stride, target_stride, classes, padding_idx, inner, outer,
    TRANSFORM: tl.constexpr, ENTROPY: tl.constexpr, EDGES: tl.constexpr, SAME_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits from four coefficients per row, which `_slope` explains: [4, rows].

    `splits` neighbouring programs share a row. The gradient may overwrite the logits.
    """
    row = (tl.program_id(0) // splits).to(tl.int64)
    label = tl.load(labels + row)
    of_softmax = tl.load(coefficients + row)
    of_product = tl.load(coefficients + rows + row)
    of_all = tl.load(coefficients + 2 * rows + row)
    of_own = tl.load(coefficients + 3 * rows + row)
    _write_gradient(
        logits, gradient, class_weight, row * row_stride, row * target_stride, classes, label, label != padding_idx,
        tl.load(log_sums + row), of_softmax, of_product, of_all, of_own, inner, outer,
        tl.program_id(0) % splits, splits,
        TRANSFORM, ENTROPY, EDGES, SAME_STRIDE, GROUPS, LANES, VECTOR, "", False,
    )  # fmt: skip


@kernel
@triton.jit
def scale_in_place(values, factor, count, programs, BLOCK: tl.constexpr):
    """Multiply values by one number in place; returns at once if the number is one."""
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for begin in tl.range(first, count, programs * BLOCK):
            index = begin + tl.arange(0, BLOCK)
            value = tl.load(values + index, mask=index < count).to(tl.float32)
            tl.store(values + index, (value * scale).to(values.dtype.element_ty), mask=index < count)


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
