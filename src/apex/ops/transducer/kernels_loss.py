"""Triton kernels of the transducer loss.

`op_joint.py` explains letters and layouts, `reference.py` alpha and beta. Three kernels make a loss: `words` reads the
logits once, `walk` goes over the lattices, `shares` combines alpha and beta for the backward pass.

Rows of logits are read in tiles of GROUPS x ROWS x LANES elements: LANES neighbours are the threads of a warp with 16
bytes each, so that a warp has a row of its own and reduces it without the others, and a thread's GROUPS accesses are in
flight together. The ROWS are neighbouring tokens of one frame.

Between the kernels a probability is an int64: its exponent of two above 32 bits of a float32 mantissa from 1 to 2, or 0
with an exponent below all others. Nothing underflows, and a product of hundreds of words keeps seven digits, where a
float32 logarithm of the order of a thousand has four behind the point. The nodes of a lattice are stored diagonal after
diagonal, node (t, u) at index (t + u) * U + u of `_places`, so that a diagonal is contiguous.
"""

import triton
import triton.language as tl

from .._kernel_functions import mask_if
from .._launch import kernel
from .kernels_joint import sequence

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Replaces -inf as the initial maximum, because it can be subtracted from itself.
LOWEST = tl.constexpr(-1.0e38)
NEVER = tl.constexpr(float("-inf"))
# Exponents of zero, and the least of all. A word with a probability below 2^SMALLEST counts as impossible.
ZERO_EXPONENT = tl.constexpr(-(1 << 28))
LEAST_EXPONENT = tl.constexpr(-(1 << 29))
SMALLEST = tl.constexpr(-float(1 << 27))
ZERO = tl.constexpr(-(1 << 60))
ONE = tl.constexpr(0x3F800000)


@triton.jit
def _pack(mantissa, exponent):
    low = mantissa.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (exponent.to(tl.int64) << 32) | low


@triton.jit
def _mantissa(packed):
    return packed.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(packed):
    return (packed >> 32).to(tl.int32)


@triton.jit
def _packed_power(logarithm):
    """Return e^logarithm, packed; NaN stays NaN."""
    bits = logarithm * LOG2E
    impossible = bits < SMALLEST
    bits = tl.where(impossible, 0.0, bits)
    whole = tl.floor(bits)
    mantissa = tl.where(impossible, 0.0, tl.exp2(bits - whole))
    return _pack(mantissa, tl.where(impossible, ZERO_EXPONENT, whole.to(tl.int32)))


@triton.jit
def _packed_logarithm(packed):
    mantissa = _mantissa(packed)
    logarithm = (_exponent(packed).to(tl.float32) + tl.log2(tl.where(mantissa == 0.0, 1.0, mantissa))) * LN2
    return tl.where(mantissa == 0.0, NEVER, logarithm)


@triton.jit
def _power_of_two(exponent):
    """Return 2^exponent for an exponent that is not positive; zero below 2^-126."""
    return ((tl.maximum(exponent, -127) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sum_of_products(a, b, c, d):
    """Return a * b + c * d of packed numbers."""
    first, second = _exponent(a) + _exponent(b), _exponent(c) + _exponent(d)
    top = tl.maximum(first, second)
    total = _mantissa(a) * _mantissa(b) * _power_of_two(first - top)
    total += _mantissa(c) * _mantissa(d) * _power_of_two(second - top)
    bits = total.to(tl.int32, bitcast=True)
    exponent = tl.maximum(top + ((bits >> 23) - 127), LEAST_EXPONENT)
    scaled = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return _pack(tl.where(total > 0.0, scaled, total), exponent)


@triton.jit
def _node(program, T, U, ROWS: tl.constexpr):
    """Return sequence, frame and first token of a program."""
    blocks = tl.cdiv(U, ROWS)
    token = (program % blocks) * ROWS
    program = program // blocks
    return (program // T).to(tl.int64), program % T, token


@triton.jit
def _places(batch, T, U):
    """Return the number of stored nodes of a lattice, as int64 like `batch`."""
    return (batch * 0 + T + U - 1) * U


@triton.jit
def _next_labels(label, batch, u, tokens, U, V):
    """Return the next label of each token, which tokens have one, and which labels are words."""
    has_label = u < tokens - 1
    labels = tl.load(label + batch * (U - 1) + u, mask=has_label, other=0)
    is_word = (labels >= 0) & (labels < V)
    return labels.to(tl.int32), has_label, is_word


@kernel
@triton.jit
def transducer_loss_words(
    x, label, f_len, y_len, batch_offset, sums, words, B, T, U, V, blank,
    WHOLE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute for each node the log of the sum of exponentials, and the probabilities of blank and of the next label.

    The logs are zero for nodes that do not exist; their probabilities (2 x B x places, packed) are not written. Without
    `sums`, x has log-probabilities, and only those two are read. WHOLE: a row is one tile. Labels that are no words and
    packed sequences without the rows they need get NaN as probability, and so as loss.
    """
    batch, t, token = _node(tl.program_id(0), T, U, ROWS)
    frames, tokens, first, stride = sequence(f_len, y_len, batch_offset, batch, T, U, 1)
    u = token + tl.arange(0, ROWS)
    node = (batch * T + t) * U + u
    if (t < frames) & (token < tokens):
        exists = u < tokens
        present = mask_if(first >= 0, exists)
        row = (first + t * stride + u) * V
        labels, has_label, is_word = _next_labels(label, batch, u, tokens, U, V)
        blank_score = tl.load(x + row + blank, mask=present, other=float("nan")).to(tl.float32)
        label_score = tl.load(x + row + labels, mask=present & has_label & is_word, other=float("nan")).to(tl.float32)
        label_score = tl.where(has_label, label_score, NEVER)
        if sums is not None:
            word = tl.arange(0, GROUPS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
            start = x + row[None, :, None]
            if WHOLE:
                inside = present[None, :, None] & (word < V)
                values = tl.load(start + word, mask=inside, other=NEVER).to(tl.float32)
                peak = tl.maximum(tl.max(tl.max(values, 0), 1), LOWEST)
                power = tl.exp2(values * LOG2E - (peak * LOG2E)[None, :, None])
                total = tl.sum(tl.sum(power, 0), 1)
            else:
                # Each lane accumulates on its own; lanes exchange values once, at the end.
                peaks = tl.full([ROWS, LANES], LOWEST, tl.float32)
                powers = tl.zeros([ROWS, LANES], tl.float32)
                for begin in tl.range(0, V, GROUPS * LANES):
                    inside = present[None, :, None] & (begin + word < V)
                    values = tl.load(start + (begin + word), mask=inside, other=NEVER).to(tl.float32)
                    higher = tl.maximum(peaks, tl.max(values, 0))
                    power = tl.exp2(values * LOG2E - (higher * LOG2E)[None, :, :])
                    powers = powers * tl.exp2((peaks - higher) * LOG2E) + tl.sum(power, 0)
                    peaks = higher
                peak = tl.max(peaks, 1)
                total = tl.sum(powers * tl.exp2((peaks - peak[:, None]) * LOG2E), 1)
            log_sum = peak + tl.log(tl.where(exists, total, 1.0))
            tl.store(sums + node, tl.where(exists, log_sum, 0.0), mask=u < U)
            blank_score -= log_sum
            label_score -= log_sum
        places = _places(batch, T, U)
        pointers = words + batch * places + (t + u).to(tl.int64) * U + u
        tl.store(pointers, _packed_power(blank_score), mask=exists)
        tl.store(pointers + B * places, _packed_power(label_score), mask=exists)
    elif sums is not None:
        tl.store(sums + node, tl.zeros([ROWS], tl.float32), mask=u < U)


@triton.jit
def _within(s, limit):
    """Return 0 <= s < limit, in one comparison."""
    return s.to(tl.uint32, bitcast=True) < limit.to(tl.uint32, bitcast=True)


@triton.jit
def _leading_words(blank_at, label_at, s, blank_limit, label_limit):
    """Return the words that lead to a diagonal's nodes: blank from the frame before, label from the token before."""
    blank = tl.load(blank_at, mask=_within(s - 1, blank_limit), other=ZERO)
    return blank, tl.load(label_at, mask=_within(s, label_limit), other=ZERO)


@triton.jit
def _words_of_four(blank_at, label_at, hop, s, blank_limit, label_limit):
    """Return the leading words of four diagonals."""
    blank_a, label_a = _leading_words(blank_at, label_at, s, blank_limit, label_limit)
    blank_b, label_b = _leading_words(blank_at + hop, label_at + hop, s + 1, blank_limit, label_limit)
    blank_c, label_c = _leading_words(blank_at + 2 * hop, label_at + 2 * hop, s + 2, blank_limit, label_limit)
    blank_d, label_d = _leading_words(blank_at + 3 * hop, label_at + 3 * hop, s + 3, blank_limit, label_limit)
    return blank_a, label_a, blank_b, label_b, blank_c, label_c, blank_d, label_d


@triton.jit
def _next_diagonal(reached, blank, label, out, entry, s, limit, label_limit, MANY: tl.constexpr, TOKENS: tl.constexpr):
    """Return a diagonal from the one before it; `entry` points to the node before the first of a block of tokens."""
    lane = tl.arange(0, TOKENS)
    left = tl.gather(reached, tl.maximum(lane - 1, 0), 0)
    if MANY:
        entered = (lane == 0) & _within(s, label_limit)
        left = tl.where(lane == 0, tl.load(entry, mask=entered, other=ZERO), left)
    reached = _sum_of_products(reached, blank, left, label)
    tl.store(out, reached, mask=_within(s, limit))
    return reached


@kernel
@triton.jit
def transducer_loss_walk(
    words, f_len, y_len, states, losses, B, T, U,
    ALPHA: tl.constexpr, MANY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute alpha and beta (2 x B x places, packed), or beta alone, and the losses.

    A program walks the diagonals of one sequence from one end. With i tokens and s frames behind it, a node is reached
    from node i of the diagonal before by blank and from node i - 1 by label. Words are loaded four diagonals ahead, so
    that a walk waits only for its own chain; eight are no faster. With MANY blocks of tokens, each block walks all
    diagonals it has nodes on, and starts from the values that the block before has written.
    """
    program = tl.program_id(0)
    if ALPHA:
        batch, back = (program // 2).to(tl.int64), program % 2
        places = _places(batch, T, U)
        states += (back * B + batch) * places
    else:
        batch, back = program.to(tl.int64), program * 0 + 1
        places = _places(batch, T, U)
        states += batch * places
    words += batch * places
    frames = tl.maximum(tl.minimum(tl.load(f_len + batch).to(tl.int32), T), 0)
    tokens = tl.minimum(tl.load(y_len + batch).to(tl.int32) + 1, U)
    last = frames + tokens - 2
    hop = tl.where(back == 1, -U, U).to(tl.int64)
    before = tl.where(back == 1, 1, -1)
    for begin in tl.range(0, U, TOKENS):
        i = begin + tl.arange(0, TOKENS)
        u = tl.where(back == 1, tokens - 1 - i, i)
        limit = tl.where(i < tokens, frames, 0)
        blank_limit = tl.maximum(limit - 1, 0)
        label_limit = tl.where(i > 0, limit, 0)
        # The first node: probability 1, or walking back the last blank.
        start = (i == 0) & (limit > 0)
        corner = u + tl.where(back == 1, last, 0).to(tl.int64) * U
        end = tl.load(words + corner, mask=mask_if(back == 1, start), other=ONE)
        reached = tl.where(start, end, ZERO)
        tl.store(states + corner, reached, mask=start)
        first = tl.maximum(begin, 1)
        s = first - i
        out = states + corner + first * hop
        # Walking forwards, words lead from the nodes of the diagonal before; walking back, from the nodes themselves.
        blank_at = words + corner + (first - 1 + back) * hop
        label_at = blank_at + B * places + tl.where(back == 1, 0, before)
        blank_a, label_a, blank_b, label_b, blank_c, label_c, blank_d, label_d = _words_of_four(
            blank_at, label_at, hop, s, blank_limit, label_limit
        )
        for _ in tl.range(first, last + 1, 4):
            blank_at += 4 * hop
            label_at += 4 * hop
            blank_e, label_e, blank_f, label_f, blank_g, label_g, blank_h, label_h = _words_of_four(
                blank_at, label_at, hop, s + 4, blank_limit, label_limit
            )
            at = out - hop + before
            reached = _next_diagonal(reached, blank_a, label_a, out, at, s, limit, label_limit, MANY, TOKENS)
            at, out = at + hop, out + hop
            reached = _next_diagonal(reached, blank_b, label_b, out, at, s + 1, limit, label_limit, MANY, TOKENS)
            at, out = at + hop, out + hop
            reached = _next_diagonal(reached, blank_c, label_c, out, at, s + 2, limit, label_limit, MANY, TOKENS)
            at, out = at + hop, out + hop
            reached = _next_diagonal(reached, blank_d, label_d, out, at, s + 3, limit, label_limit, MANY, TOKENS)
            out += hop
            s += 4
            blank_a, blank_b, blank_c, blank_d = blank_e, blank_f, blank_g, blank_h
            label_a, label_b, label_c, label_d = label_e, label_f, label_g, label_h
        tl.debug_barrier()
    if back == 1:
        total = tl.load(states, mask=frames > 0, other=ZERO)
        tl.store(losses + batch, (-_packed_logarithm(total)).to(losses.dtype.element_ty))


@triton.jit
def _share(alpha, word, beta, total):
    """Return alpha * word * beta / total."""
    mantissa = _mantissa(alpha) * _mantissa(word) * _mantissa(beta) / _mantissa(total)
    exponent = _exponent(alpha) + _exponent(word) + _exponent(beta) - _exponent(total)
    return mantissa * tl.exp2(tl.minimum(tl.maximum(exponent, -200), 100).to(tl.float32))


@kernel
@triton.jit
def transducer_loss_shares(
    words, states, f_len, y_len, shares, scores, B, T, U,
    DIAGONALS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute for each node the share of all right alignments that continue by blank, and by label (2 x B x T x U).

    `scores`, if given, receive the logs of alpha and beta. Nodes that do not exist get zero. Works diagonal by
    diagonal, so that reads are contiguous.
    """
    blocks, rows = tl.cdiv(U, COLUMNS), tl.cdiv(T + U - 1, DIAGONALS)
    program = tl.program_id(0)
    u = (program % blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    program = program // blocks
    diagonal = (program % rows) * DIAGONALS + tl.arange(0, DIAGONALS)[:, None]
    batch = (program // rows).to(tl.int64)
    t = diagonal - u
    frames = tl.minimum(tl.load(f_len + batch).to(tl.int32), T)
    tokens = tl.minimum(tl.load(y_len + batch).to(tl.int32) + 1, U)
    inside = (t >= 0) & (t < T) & (u < U)
    exists = inside & (t < frames) & (u < tokens)
    places = _places(batch, T, U)
    offset = batch * places + diagonal.to(tl.int64) * U + u
    second = B * places
    beta = states + second
    total = tl.load(beta + batch * places)
    here = tl.load(states + offset, mask=exists, other=ZERO)
    blank = tl.load(words + offset, mask=exists, other=ZERO)
    label = tl.load(words + second + offset, mask=exists & (u < tokens - 1), other=ZERO)
    below = tl.load(beta + offset + U, mask=exists & (t < frames - 1), other=ZERO)
    below = tl.where((t == frames - 1) & (u == tokens - 1), ONE, below)
    beside = tl.load(beta + offset + U + 1, mask=exists & (u < tokens - 1), other=ZERO)
    node = (batch * T + t) * U + u
    nodes = (batch * 0 + B) * T * U
    tl.store(shares + node, tl.where(exists, _share(here, blank, below, total), 0.0), mask=inside)
    tl.store(shares + nodes + node, tl.where(exists, _share(here, label, beside, total), 0.0), mask=inside)
    if scores is not None:
        tl.store(scores + node, tl.where(exists, _packed_logarithm(here), 0.0), mask=inside)
        back = tl.load(beta + offset, mask=exists, other=ZERO)
        tl.store(scores + nodes + node, tl.where(exists, _packed_logarithm(back), 0.0), mask=inside)


@kernel
@triton.jit
def transducer_loss_backward(
    grad, x, label, f_len, y_len, batch_offset, sums, shares, dx, B, T, U, V, blank,
    SOFTMAX: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits, or without SOFTMAX of the log-probabilities; zero for absent nodes."""
    batch, t, token = _node(tl.program_id(0), T, U, ROWS)
    frames, tokens, first, stride = sequence(f_len, y_len, batch_offset, batch, T, U, 1)
    if batch_offset is not None:
        works = (t < frames) & (token < tokens) & (first >= 0)
    else:
        works = t < T  # always true: padding is written too
    if works:
        u = token + tl.arange(0, ROWS)
        exists = mask_if(t < frames, u < tokens)
        stored = exists if batch_offset is not None else u < U
        labels, has_label, _ = _next_labels(label, batch, u, tokens, U, V)
        node = (batch * T + t) * U + u
        factor = tl.load(grad + batch).to(tl.float32)
        by_blank = tl.load(shares + node, mask=exists, other=0.0) * factor
        by_label = tl.load(shares + (batch * 0 + B) * T * U + node, mask=exists & has_label, other=0.0) * factor
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
