"""Triton kernels of a transducer's joint, h = dropout(relu(f + g)), and a kernel that fills the end of packed tensors.

`op_joint.py` explains letters and layouts. A tile is TOKENS x FEATURES elements of one frame of one sequence.
"""

import triton
import triton.language as tl

from .._kernel_functions import mask_if, random_words
from .._launch import kernel


@triton.jit
def sequence(f_len, g_len, batch_offset, batch, T, U, MORE: tl.constexpr):
    """Return frames and tokens (g_len + MORE) of a sequence, its first row, and the rows from one frame to the next.

    The first row is -1 if a packed sequence does not have the rows it needs; nothing may then be read or written.
    """
    frames = tl.minimum(tl.load(f_len + batch).to(tl.int32), T)
    tokens = tl.minimum(tl.load(g_len + batch).to(tl.int32) + MORE, U)
    if batch_offset is not None:
        first = tl.load(batch_offset + batch - 1, mask=batch > 0, other=0).to(tl.int64)
        stride = tokens.to(tl.int64)
        first = tl.where(first + frames * stride > tl.load(batch_offset + batch), -1, first)
    else:
        stride = (tokens * 0 + U).to(tl.int64)
        first = batch * T * stride
    return frames, tokens, first, stride


@triton.jit
def _write_frame(f_row, g_tile, word, tensors, lengths, sizes, t, u, c, PACKED: tl.constexpr, RELU: tl.constexpr):
    """Write the tile of frame t."""
    noise, h, mask = tensors
    frames, tokens, first, stride = lengths
    T, U, H, threshold, scale = sizes
    exists = mask_if(t < frames, u < tokens)
    stored = exists & (c < H) if PACKED else mask_if(t < T, (u < U) & (c < H))
    offset = (first + t * stride + u) * H + c
    values = f_row + g_tile
    if RELU:
        values = tl.where(values <= 0.0, 0.0, values)
    kept = exists
    if noise is not None:
        if noise.dtype.element_ty == tl.int64:
            kept = exists & (word.to(tl.int32) >= threshold)
        else:
            kept = exists & (tl.load(noise + offset, mask=stored, other=0) != 0)
        values = tl.where(kept, values * scale, 0.0)
    values = tl.where(exists, values, -1.0)
    tl.store(h + offset, values.to(h.dtype.element_ty), mask=stored)
    if mask is not None:
        bits = values > 0.0 if RELU else kept & (c < H)
        tl.store(mask + offset, bits.to(tl.uint8), mask=stored)


@triton.jit
def _four_frames(f, g, words, tensors, batch, lengths, sizes, t, u, c, PACKED: tl.constexpr, RELU: tl.constexpr):
    """Write the tiles of the frames t to t + 3."""
    word_a, word_b, word_c, word_d = words
    frames, tokens = lengths[0], lengths[1]
    T, U, H = sizes[0], sizes[1], sizes[2]
    column = (batch * T + t) * H + c
    f_a = tl.load(f + column, mask=mask_if(t < frames, c < H), other=0.0).to(tl.float32)
    f_b = tl.load(f + column + H, mask=mask_if(t + 1 < frames, c < H), other=0.0).to(tl.float32)
    f_c = tl.load(f + column + 2 * H, mask=mask_if(t + 2 < frames, c < H), other=0.0).to(tl.float32)
    f_d = tl.load(f + column + 3 * H, mask=mask_if(t + 3 < frames, c < H), other=0.0).to(tl.float32)
    # After f: in the other order Triton 3.6 needs 140 registers in place of 86.
    g_tile = tl.load(g + (batch * U + u) * H + c, mask=(u < tokens) & (c < H), other=0.0).to(tl.float32)
    _write_frame(f_a, g_tile, word_a, tensors, lengths, sizes, t, u, c, PACKED, RELU)
    _write_frame(f_b, g_tile, word_b, tensors, lengths, sizes, t + 1, u, c, PACKED, RELU)
    _write_frame(f_c, g_tile, word_c, tensors, lengths, sizes, t + 2, u, c, PACKED, RELU)
    _write_frame(f_d, g_tile, word_d, tensors, lengths, sizes, t + 3, u, c, PACKED, RELU)


@kernel
@triton.jit
def transducer_joint_forward(
    f, g, f_len, g_len, batch_offset, noise, h, mask, T, U, H, threshold, scale,
    RELU: tl.constexpr, FRAMES: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute h of four or eight frames that share a tile of g; padding is -1.

    `noise` is None without dropout; else an int64 seed, or a byte per element, zero if it is dropped. With a seed, one
    call of Philox makes four words, which decide eight frames: 16 bits are compared with the threshold. Seven rounds
    are enough for random bits of the quality of ten (Salmon et al. 2011).
    """
    PACKED: tl.constexpr = batch_offset is not None
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
    frames, tokens, first, stride = sequence(f_len, g_len, batch_offset, batch, T, U, 0)
    if PACKED:
        works = (t < frames) & (first_token < tokens) & (first >= 0)
    else:
        works = t < T  # always true: padding is written too
    tensors = (noise, h, mask)
    lengths = (frames, tokens, first, stride)
    sizes = (T, U, H, threshold, scale)
    if works:
        if FRAMES == 8:  # noise is a seed
            counter = ((batch * groups + t // FRAMES) * U + u) * H + c
            word_a, word_b, word_c, word_d = random_words(tl.load(noise), counter, 7)
            words = (word_a & 0xFFFF, word_b & 0xFFFF, word_c & 0xFFFF, word_d & 0xFFFF)
            _four_frames(f, g, words, tensors, batch, lengths, sizes, t, u, c, PACKED, RELU)
            words = (word_a >> 16, word_b >> 16, word_c >> 16, word_d >> 16)
            _four_frames(f, g, words, tensors, batch, lengths, sizes, t + 4, u, c, PACKED, RELU)
        else:
            _four_frames(f, g, (0, 0, 0, 0), tensors, batch, lengths, sizes, t, u, c, PACKED, RELU)


@kernel
@triton.jit
def transducer_joint_backward(
    dh, kept, f_len, g_len, batch_offset, df, dg, B, T, U, H, chunks, chunk, scale,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum dh for both gradients in one read: a program walks a chunk of frames with a tile of dh.

    df is (blocks of tokens) x B x T x H and dg (chunks of frames) x B x U x H: partial sums if there are several blocks
    or chunks. Elements whose `kept`, if given, is not positive are not counted.
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
    frames, tokens, first, stride = sequence(f_len, g_len, batch_offset, batch, T, U, 0)
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
        if kept is not None:
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
def transducer_fill_rest(
    batch_offset, target, last, high, low, value, COLUMNS: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr
):
    """Write `value` behind the last sequence, whose end is `batch_offset[last]`, up to high * 2**LOW + low elements.

    Usually there is nothing to write, but the host does not know how much there is. Numbers are passed as floats, so
    that one compiled launch serves all numbers of rows.
    """
    total = (tl.cast(high, tl.int64) << LOW) + tl.cast(low, tl.int64)
    end = tl.load(batch_offset + tl.cast(last, tl.int64)).to(tl.int64) * COLUMNS
    at = end + tl.program_id(0) * BLOCK
    fill = tl.zeros([BLOCK], tl.float32) + value
    while at < total:
        element = at + tl.arange(0, BLOCK)
        tl.store(target + element, fill.to(target.dtype.element_ty), mask=element < total)
        at += tl.num_programs(0) * BLOCK
