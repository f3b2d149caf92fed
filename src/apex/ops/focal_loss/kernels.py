"""Triton kernels of the focal loss: one pass over the logits for loss, gradient or both, and the sum of partial losses.

Logits are read as one row of `total` elements, in blocks of GROUPS x VECTOR; there is one target per CLASSES elements.
All arithmetic is float32.
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _log1p(x):
    """Return log(1 + x) for x from 0 to 1, to 3e-7 of its value, by a polynomial: half the instructions of a log."""
    p = 0.005232624243944883
    p = p * x - 0.029504956677556038
    p = p * x + 0.07822549343109131
    p = p * x - 0.1366320699453354
    p = p * x + 0.1910598874092102
    p = p * x - 0.2484297752380371
    p = p * x + 0.3331909477710724
    p = p * x - 0.4999949336051941
    p = p * x + 0.9999999403953552
    return p * x


@triton.jit
def _block(
    logits, targets, grad, base, total, scale, alpha, gamma, half_smoothing,
    CLASSES: tl.constexpr, REAL: tl.constexpr, SQUARE: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return the losses of one block that begins at element `base`; store its gradient if `grad` is given.

    Arithmetic is the limit, not memory, so values that a group of VECTOR elements shares are computed once.
    """
    group = tl.arange(0, GROUPS)[:, None] * VECTOR
    lane = tl.arange(0, VECTOR)[None, :]
    first_anchor = base // CLASSES
    first_class = (base - first_anchor * CLASSES).to(tl.int32)
    offset = base + group + lane
    mask = offset < total if MASKED else None
    # The class of each element is `start` + `step`; a group has one anchor if groups divide the classes.
    if CLASSES % VECTOR == 0:
        local = first_class + group
        step = lane
        label_mask = base + group < total if MASKED else None
    else:
        local = first_class + group + lane
        step = tl.zeros([1, VECTOR], tl.int32)
        label_mask = mask
    anchor = local // CLASSES
    start = local - anchor * CLASSES
    label = tl.load(targets + first_anchor + anchor, mask=label_mask).to(tl.int32)
    right = label - start == step
    counted = label != -2
    if REAL != CLASSES:
        counted = counted & (start + step < REAL)
    if MASKED:
        counted = counted & mask
    x = tl.load(logits + offset, mask=mask).to(tl.float32)

    # The loss of the right class is the loss of a wrong class with the opposite sign of the logit.
    z = tl.where(right, -x, x)
    decay = tl.exp(-tl.abs(x))
    root = tl.rsqrt(1.0 + decay)
    large = root * root  # 1 / (1 + decay), in fewer instructions than a quotient
    small = decay * large
    wrong = tl.where(z >= 0, large, small)
    log_term = _log1p(decay)
    cross_entropy = tl.maximum(z, 0.0) + log_term - half_smoothing * z
    if SQUARE:
        power = wrong * wrong
    else:
        power = tl.exp(gamma * (tl.minimum(z, 0.0) - log_term))
    if grad is not None:
        slope = power * (gamma * tl.where(z >= 0, small, large) * cross_entropy + (wrong - half_smoothing))
        slope = tl.where(right, -alpha * scale, (1.0 - alpha) * scale) * slope
        tl.store(grad + offset, tl.where(counted, slope, 0.0).to(grad.dtype.element_ty), mask=mask)
    return tl.where(counted, tl.where(right, alpha, 1.0 - alpha) * (power * cross_entropy), 0.0)


@kernel
@triton.jit
def focal_loss_pass(
    logits, targets, grad, partials, grad_loss, num_positives,
    total, alpha, gamma, half_smoothing,
    CLASSES: tl.constexpr, REAL: tl.constexpr, SQUARE: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Process every block of this program: store its gradient if there is `grad`, otherwise sum its losses.

    FULL: the blocks divide the elements. Otherwise the last program takes the remainder.
    """
    program = tl.program_id(0)
    size = tl.full([], GROUPS * VECTOR, tl.int64)
    scale = 1.0
    if grad is not None:
        scale = tl.load(grad_loss).to(tl.float32) / tl.load(num_positives).to(tl.float32)
    losses = tl.zeros([GROUPS, VECTOR], tl.float32)
    for block in tl.range(program, total // (GROUPS * VECTOR), tl.num_programs(0)):
        found = _block(
            logits, targets, grad, block * size, total, scale, alpha, gamma, half_smoothing,
            CLASSES, REAL, SQUARE, GROUPS, VECTOR, False,
        )  # fmt: skip
        if partials is not None:
            losses += found
    if not FULL:
        if program == tl.num_programs(0) - 1:
            found = _block(
                logits, targets, grad, total // (GROUPS * VECTOR) * size, total, scale, alpha, gamma, half_smoothing,
                CLASSES, REAL, SQUARE, GROUPS, VECTOR, True,
            )  # fmt: skip
            if partials is not None:
                losses += found
    if partials is not None:
        tl.store(partials + program, tl.sum(losses))


@kernel
@triton.jit
def focal_loss_sum(partials, num_positives, loss, count, BLOCK: tl.constexpr):
    """Divide the sum of `count` partial losses by the number of positives, in one program."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        total += tl.load(partials + index, mask=index < count, other=0.0)
    tl.store(loss, tl.sum(total) / tl.load(num_positives).to(tl.float32))
