"""Triton kernels of a transducer's joint, h = dropout(relu(f + g)).

`spec.py` explains letters and layouts. A tile is TOKENS x FEATURES elements of one frame of one sequence.
"""

import triton
import triton.language as tl

from .._launch import kernel
from .._philox import four_words


@triton.jit
def sequence(f_len, g_len, batch_offset, batch, T, U, MORE: tl.constexpr, PACKED: tl.constexpr):
    """Frames and tokens (g_len + MORE) of a sequence, its first row, and the rows from one frame to the next.

    The first row is -1, and nothing may be read or written, where a packed sequence has not the rows it needs.
    """
    frames = tl.minimum(tl.load(f_len + batch).to(tl.int32), T)
    tokens = tl.minimum(tl.load(g_len + batch).to(tl.int32) + MORE, U)
    if PACKED:
        first = tl.load(batch_offset + batch - 1, mask=batch > 0, other=0).to(tl.int64)
        stride = tokens.to(tl.int64)
        first = tl.where(first + frames * stride > tl.load(batch_offset + batch), -1, first)
    else:
        stride = (tokens * 0 + U).to(tl.int64)
        first = batch * T * stride
    return frames, tokens, first, stride


@triton.jit
def _finish(
    f_row, g_tile, word, noise, h, mask, t, u, c, frames, tokens, first, stride, T, U, H, threshold, scale,
    PACKED: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr, WRITE_MASK: tl.constexpr,
):  # fmt: skip
    """Writes the tile of frame t."""
    exists = (t < frames) & (u < tokens)
    stored = exists & (c < H) if PACKED else (t < T) & (u < U) & (c < H)
    place = (first + t * stride + u) * H + c
    values = f_row + g_tile
    if RELU:
        values = tl.where(values <= 0.0, 0.0, values)
    kept = exists
    if DROPOUT == "seed":
        kept = exists & (word.to(tl.int32) >= threshold)
    elif DROPOUT == "bytes":
        kept = exists & (tl.load(noise + place, mask=stored, other=0) != 0)
    if DROPOUT != "none":
        values = tl.where(kept, values * scale, 0.0)
    values = tl.where(exists, values, -1.0)
    tl.store(h + place, values.to(h.dtype.element_ty), mask=stored)
    if WRITE_MASK:
        bits = values > 0.0 if RELU else kept & (c < H)
        tl.store(mask + place, bits.to(tl.uint8), mask=stored)


@triton.jit
def _four_frames(
    f, g, word_a, word_b, word_c, word_d, noise, h, mask, batch, t, u, c, frames, tokens, first, stride, T, U, H,
    threshold, scale, PACKED: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr, WRITE_MASK: tl.constexpr,
):  # fmt: skip
    """Writes the tiles of the frames t to t + 3."""
    column = (batch * T + t) * H + c
    f_a = tl.load(f + column, mask=(t < frames) & (c < H), other=0.0).to(tl.float32)
    f_b = tl.load(f + column + H, mask=(t + 1 < frames) & (c < H), other=0.0).to(tl.float32)
    f_c = tl.load(f + column + 2 * H, mask=(t + 2 < frames) & (c < H), other=0.0).to(tl.float32)
    f_d = tl.load(f + column + 3 * H, mask=(t + 3 < frames) & (c < H), other=0.0).to(tl.float32)
    # After f: Triton 3.6 needs 140 registers in place of 86 the other way round.
    g_tile = tl.load(g + (batch * U + u) * H + c, mask=(u < tokens) & (c < H), other=0.0).to(tl.float32)
    _finish(f_a, g_tile, word_a, noise, h, mask, t, u, c, frames, tokens, first, stride, T, U, H, threshold, scale,
            PACKED, RELU, DROPOUT, WRITE_MASK)  # fmt: skip
    _finish(f_b, g_tile, word_b, noise, h, mask, t + 1, u, c, frames, tokens, first, stride, T, U, H, threshold, scale,
            PACKED, RELU, DROPOUT, WRITE_MASK)  # fmt: skip
    _finish(f_c, g_tile, word_c, noise, h, mask, t + 2, u, c, frames, tokens, first, stride, T, U, H, threshold, scale,
            PACKED, RELU, DROPOUT, WRITE_MASK)  # fmt: skip
    _finish(f_d, g_tile, word_d, noise, h, mask, t + 3, u, c, frames, tokens, first, stride, T, U, H, threshold, scale,
            PACKED, RELU, DROPOUT, WRITE_MASK)  # fmt: skip


@kernel
@triton.jit
def transducer_joint_forward(
    f, g, f_len, g_len, batch_offset, noise, h, mask, T, U, H, threshold, scale,
    PACKED: tl.constexpr, RELU: tl.constexpr, DROPOUT: tl.constexpr, WRITE_MASK: tl.constexpr,
    FRAMES: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """h of four or eight frames that share a tile of g; padding is -1.

    DROPOUT: "none", by a "seed", or by "bytes", zero where dropped. Of a seed one call of Philox makes four words,
    which decide eight frames: 16 bits are compared with the threshold. Seven rounds are enough for random bits of the
    quality of ten (Salmon et al. 2011).
    """
    program = tl.program_id(0)
    features, blocks = tl.cdiv(H, FEATURES), tl.cdiv(U, TOKENS)
    groups = tl.cdiv(T, FRAMES)
    c = (program % features) * FEATURES + tl.arange(0, FEATURES)[None, :]
    program = program // features
    u = (program % blocks) * TOKENS + tl.arange(0, TOKENS)[:, None]
    first_token = (program % blocks) * TOKENS
    program = program // blocks
    batch = (program // groups).to(tl.int64)
    t = (program % groups) * FRAMES
    frames, tokens, first, stride = sequence(f_len, g_len, batch_offset, batch, T, U, 0, PACKED)
    if PACKED:
        works = (t < frames) & (first_token < tokens) & (first >= 0)
    else:
        works = t < T  # always: padding is written too
    if works:
        if DROPOUT == "seed":
            place = ((batch * groups + t // FRAMES) * U + u) * H + c
            word_a, word_b, word_c, word_d = four_words(tl.load(noise), place, 7)
            _four_frames(f, g, word_a & 0xFFFF, word_b & 0xFFFF, word_c & 0xFFFF, word_d & 0xFFFF, noise, h, mask,
                         batch, t, u, c, frames, tokens, first, stride, T, U, H, threshold, scale,
                         PACKED, RELU, DROPOUT, WRITE_MASK)  # fmt: skip
            _four_frames(f, g, word_a >> 16, word_b >> 16, word_c >> 16, word_d >> 16, noise, h, mask,
                         batch, t + 4, u, c, frames, tokens, first, stride, T, U, H, threshold, scale,
                         PACKED, RELU, DROPOUT, WRITE_MASK)  # fmt: skip
        else:
            _four_frames(f, g, 0, 0, 0, 0, noise, h, mask,
                         batch, t, u, c, frames, tokens, first, stride, T, U, H, threshold, scale,
                         PACKED, RELU, DROPOUT, WRITE_MASK)  # fmt: skip


@kernel
@triton.jit
def transducer_joint_backward(
    dh, kept, f_len, g_len, batch_offset, df, dg, B, T, U, H, chunks, chunk, scale,
    PACKED: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums dh once for both gradients: a program walks a chunk of frames with a tile of dh.

    df is (blocks of tokens) x B x T x H and dg (chunks of frames) x B x U x H: sums to be added up where there are
    several. MASKED: elements whose `kept` is not positive count for nothing.
    """
    program = tl.program_id(0)
    features, blocks = tl.cdiv(H, FEATURES), tl.cdiv(U, TOKENS)
    c_row = (program % features) * FEATURES + tl.arange(0, FEATURES)
    c = c_row[None, :]
    program = program // features
    block = program % blocks
    u = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    program = program // blocks
    part = program % chunks
    batch = (program // chunks).to(tl.int64)
    frames, tokens, first, stride = sequence(f_len, g_len, batch_offset, batch, T, U, 0, PACKED)
    begin = part * chunk
    end = tl.minimum(begin + chunk, T)
    last = tl.maximum(tl.minimum(end, tl.where(first >= 0, frames, 0)), begin)
    counted = (u < tokens) & (c < H)
    tile = (first + u) * H + c
    step = stride * H
    df_rows = df + (block * B + batch) * T * H + c_row
    row = batch * 0 + H
    total = tl.zeros([TOKENS, FEATURES], tl.float32)
    for t in tl.range(begin, last, num_stages=STAGES):
        values = tl.load(dh + (t * step + tile), mask=counted, other=0.0).to(tl.float32)
        if MASKED:
            positive = tl.load(kept + (t * step + tile), mask=counted, other=0).to(tl.float32) > 0.0
            values = tl.where(positive, values, 0.0)
        total += values
        tl.store(df_rows + t * row, (tl.sum(values, 0) * scale).to(df.dtype.element_ty), mask=c_row < H)
    for t in tl.range(last, end):
        tl.store(df_rows + t * row, tl.zeros([FEATURES], df.dtype.element_ty), mask=c_row < H)
    dg_tile = dg + ((part * B + batch) * U + u) * H + c
    tl.store(dg_tile, (total * scale).to(dg.dtype.element_ty), mask=(u < U) & (c < H))


@kernel
@triton.jit
def transducer_joint_sum(parts, result, count, many, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """result = the sum of `many` arrays of `count` elements, PARTS of them in flight together."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, many, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        total += tl.sum(tl.load(parts + (part * count + index), mask=(part < many) & (index < count), other=0.0), 0)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + index, total.to(result.dtype.element_ty), mask=index < count)
