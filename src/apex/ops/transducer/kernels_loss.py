"""Triton kernels of the transducer loss.

`spec.py` explains letters and layouts, `reference_loss.py` alpha and beta. Rows of logits are read in tiles of
GROUPS x ROWS x LANES elements: LANES neighbours are the threads of a warp with 16 bytes each, so that a warp has a row
of its own and reduces it without the others, and a thread's GROUPS accesses are in flight together. The ROWS are
neighbouring tokens of one frame.
"""

import triton
import triton.language as tl

from .._launch import kernel
from .kernels_joint import sequence

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Stands for -inf as the greatest element seen so far: it can be subtracted from itself.
LOWEST = tl.constexpr(-1.0e38)
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _node(program, T, U, ROWS: tl.constexpr):
    """Sequence, frame and first token of a program."""
    blocks = tl.cdiv(U, ROWS)
    token = (program % blocks) * ROWS
    program = program // blocks
    return (program // T).to(tl.int64), program % T, token


@triton.jit
def _next_labels(label, batch, u, tokens, U, V):
    """The labels of tokens that have one, and which those are."""
    has_label = u < tokens - 1
    labels = tl.load(label + batch * (U - 1) + u, mask=has_label, other=0).to(tl.int32)
    return labels, has_label & (labels >= 0) & (labels < V)


@kernel
@triton.jit
def transducer_loss_words(
    x, label, f_len, y_len, batch_offset, sums, of_blank, of_label, T, U, V, blank,
    PACKED: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Per node: the logarithm of the sum of exponentials, and the log-probabilities of blank and of the next label.

    Zero where there is no node. Without NORMALIZE x has log-probabilities, and only those two are read.
    """
    batch, t, token = _node(tl.program_id(0), T, U, ROWS)
    frames, tokens, first, stride = sequence(f_len, y_len, batch_offset, batch, T, U, 1, PACKED)
    u = token + tl.arange(0, ROWS)
    node = (batch * T + t) * U + u
    if (t < frames) & (token < tokens):
        exists = u < tokens
        row = (first + t * stride + u) * V
        labels, has_label = _next_labels(label, batch, u, tokens, U, V)
        blank_score = tl.load(x + row + blank, mask=exists, other=0.0).to(tl.float32)
        label_score = tl.load(x + row + labels, mask=has_label, other=NEVER).to(tl.float32)
        if NORMALIZE:
            word = tl.arange(0, GROUPS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
            start = x + row[None, :, None]
            peak = tl.full([ROWS], LOWEST, tl.float32)
            powers = tl.zeros([ROWS, LANES], tl.float32)
            for begin in tl.range(0, V, GROUPS * LANES):
                inside = exists[None, :, None] & (begin + word < V)
                values = tl.load(start + (begin + word), mask=inside, other=NEVER).to(tl.float32)
                higher = tl.maximum(peak, tl.max(tl.max(values, 0), 1))
                power = tl.exp2(values * LOG2E - (higher * LOG2E)[None, :, None])
                powers = powers * tl.exp2((peak - higher) * LOG2E)[:, None] + tl.sum(power, 0)
                peak = higher
            log_sum = peak + tl.log(tl.sum(powers, 1))
            tl.store(sums + node, tl.where(exists, log_sum, 0.0), mask=u < U)
            blank_score -= log_sum
            label_score -= log_sum
        tl.store(of_blank + node, tl.where(exists, blank_score, 0.0), mask=u < U)
        tl.store(of_label + node, tl.where(exists, label_score, 0.0), mask=u < U)
    else:
        zeros = tl.zeros([ROWS], tl.float32)
        if NORMALIZE:
            tl.store(sums + node, zeros, mask=u < U)
        tl.store(of_blank + node, zeros, mask=u < U)
        tl.store(of_label + node, zeros, mask=u < U)


@triton.jit
def _log_add(a, b):
    """log2(2^a + 2^b), also where both are -inf."""
    high = tl.maximum(a, b)
    low = tl.minimum(a, b)
    return high + tl.log2(1.0 + tl.exp2(tl.where(high == low, 0.0, low - high)))


@triton.jit
def _chain(label_a, reached_a, label_b, reached_b):
    """Two neighbouring stretches of a frame: the score of all their labels, and of reaching their last token."""
    return label_a + label_b, _log_add(reached_a + label_b, reached_b)


@triton.jit
def _arrivals(of_blank, of_label, step, i, u, frames, tokens, U, back):
    """The scores, in powers of two, of coming to the tokens of a frame by blank, and by label.

    Walking on from the start a node is reached from the one before it; walking back, its own words lead out of it.
    """
    t = tl.where(back == 1, frames - 1 - step, step)
    here = (i < tokens) & (step < frames)
    by_blank = tl.load(of_blank + (t - 1 + back) * U + u, mask=here & (t + back > 0), other=0.0)
    by_label = tl.load(of_label + t * U + u - 1 + back, mask=here & (i > 0), other=NEVER)
    return by_blank * LOG2E, by_label * LOG2E


@kernel
@triton.jit
def transducer_loss_walk(
    of_blank, of_label, f_len, y_len, scores, losses, B, T, U,
    ALPHA: tl.constexpr, MANY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """alpha and beta (2 x B x T x U, zero where there is no node) or beta alone, and the losses.

    A program walks the frames of one sequence in one direction. A frame's tokens are reached from the frame before by
    blank and from the token before by label, a linear recurrence in the semiring of log-add and sum, hence a scan. With
    MANY blocks of tokens each walks all frames, and is entered from what the block before has written.
    """
    program = tl.program_id(0)
    if ALPHA:
        batch, back = (program // 2).to(tl.int64), program % 2
        out = scores + (back * B + batch) * T * U
    else:
        batch, back = program.to(tl.int64), program * 0 + 1
        out = scores + batch * T * U
    of_blank += batch * T * U
    of_label += batch * T * U
    frames = tl.minimum(tl.load(f_len + batch).to(tl.int32), T)
    tokens = tl.minimum(tl.load(y_len + batch).to(tl.int32) + 1, U)
    for begin in tl.range(0, U, TOKENS):
        i = begin + tl.arange(0, TOKENS)
        u = tl.where(back == 1, tokens - 1 - i, i)
        column = tl.where(i < tokens, u, i)
        reached = tl.where(i == 0, 0.0, NEVER)
        by_blank, by_label = _arrivals(of_blank, of_label, 0, i, u, frames, tokens, U, back)
        next_blank, next_label = _arrivals(of_blank, of_label, 1, i, u, frames, tokens, U, back)
        for step in tl.range(0, frames):
            t = tl.where(back == 1, frames - 1 - step, step)
            # Two frames ahead: a walk waits for nothing but its own chain.
            third_blank, third_label = _arrivals(of_blank, of_label, step + 2, i, u, frames, tokens, U, back)
            reached += by_blank
            if MANY:
                before = tl.where(back == 1, tokens - begin, begin - 1)
                entry = tl.load(out + t * U + before, mask=(begin > 0) & (begin < tokens), other=NEVER) * LOG2E
                reached = tl.where(i == begin, _log_add(reached, entry + by_label), reached)
            _, reached = tl.associative_scan((by_label, reached), 0, _chain)
            tl.store(out + t * U + column, tl.where(i < tokens, reached * LN2, 0.0), mask=i < U)
            by_blank, by_label = next_blank, next_label
            next_blank, next_label = third_blank, third_label
        for t in tl.range(frames, T):
            tl.store(out + t * U + i, tl.zeros([TOKENS], tl.float32), mask=i < U)
        loss = tl.where(frames > 0, -reached * LN2, float("inf"))
        tl.store(losses + batch + 0 * i, loss.to(losses.dtype.element_ty), mask=(i == tokens - 1) & (back == 1))
        if MANY:
            tl.debug_barrier()


@kernel
@triton.jit
def transducer_loss_backward(
    grad, x, label, f_len, y_len, batch_offset, scores, sums, of_blank, of_label, dx, B, T, U, V, blank,
    PACKED: tl.constexpr, SOFTMAX: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits, or without SOFTMAX of the log-probabilities; zero where there is no node."""
    batch, t, token = _node(tl.program_id(0), T, U, ROWS)
    frames, tokens, first, stride = sequence(f_len, y_len, batch_offset, batch, T, U, 1, PACKED)
    if PACKED:
        works = (t < frames) & (token < tokens)
    else:
        works = t < T  # always: padding is written too
    if works:
        u = token + tl.arange(0, ROWS)
        exists = (u < tokens) & (t < frames)
        stored = exists if PACKED else u < U
        labels, has_label = _next_labels(label, batch, u, tokens, U, V)
        node = (batch * T + t) * U + u
        beta = scores + (batch * 0 + B) * T * U
        factor = tl.load(grad + batch).to(tl.float32)
        total = tl.load(beta + batch * T * U)
        here = tl.load(scores + node, mask=exists, other=0.0) - total
        below = tl.load(beta + node + U, mask=exists & (t < frames - 1), other=0.0)
        beside = tl.load(beta + node + 1, mask=exists & (u < tokens - 1), other=0.0)
        blank_score = tl.load(of_blank + node, mask=exists, other=0.0)
        label_score = tl.load(of_label + node, mask=exists & has_label, other=NEVER)
        goes_on = exists & ((t < frames - 1) | (u == tokens - 1))
        by_blank = tl.where(goes_on, tl.exp(here + blank_score + below) * factor, 0.0)
        by_label = tl.where(exists & has_label, tl.exp(here + label_score + beside) * factor, 0.0)
        every = by_blank + by_label
        log_sum = tl.zeros([ROWS], tl.float32)
        if sums is not None:
            log_sum = tl.load(sums + node, mask=exists, other=0.0)
        log_sum = (log_sum * LOG2E)[None, :, None]
        by_blank, by_label, every = by_blank[None, :, None], by_label[None, :, None], every[None, :, None]
        labels = labels[None, :, None]
        row = ((first + t * stride + u) * V)[None, :, None]
        exists, stored = exists[None, :, None], stored[None, :, None]
        word = tl.arange(0, GROUPS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
        for begin in tl.range(0, V, GROUPS * LANES):
            w = begin + word
            slope = tl.zeros([GROUPS, ROWS, LANES], tl.float32)
            if SOFTMAX:
                values = tl.load(x + (row + w), mask=exists & (w < V), other=0.0).to(tl.float32)
                slope = tl.exp2(values * LOG2E - log_sum) * every
            slope -= tl.where(w == blank, by_blank, 0.0)
            slope -= tl.where(w == labels, by_label, 0.0)
            slope = tl.where(exists, slope, 0.0)
            tl.store(dx + (row + w), slope.to(dx.dtype.element_ty), mask=stored & (w < V))
