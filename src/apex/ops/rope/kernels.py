"""The Triton kernels of rotary position embeddings: of one tensor, or of a query and a key in one launch.

A tensor is tokens x batch x heads x channels, of any strides (the output's channels are adjacent). A program takes a
tile of TOKENS tokens of one batch entry and HEADS heads of each, so that a token's cosines and sines are computed once
for all of these heads. Channels are CHUNKS chunks of HALF. The first ROTATED chunks are rotated, each even one against
the odd one behind it; the others, and REST more channels, are copied. Every chunk is loaded twice, at its own position
and at its partner's: threads then read and write whole rows, and the second load finds the first one's cache lines.
All arithmetic is float32; offsets are 64-bit. The channels of a pair may also be neighbours, in the input, the output
or both: chunk 0 is then the even channels and chunk 1 the odd ones, and chunks that are copied follow.

POSITIONS selects the table row of a token: "index" the row of its index, "packed" of its index in its sequence, "image"
of its row in the image in one table and of its column in another.
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _sequence_start(token, cu_seqlens, sequences, search_steps, TOKENS: tl.constexpr):
    """Return the first token of the sequence that contains each token, and whether no sequence contains it."""
    # Binary search for the last edge that is not beyond the token.
    low = tl.zeros([TOKENS], tl.int32)
    high = low + sequences
    for _ in range(search_steps):
        middle = (low + high + 1) >> 1
        reached = tl.load(cu_seqlens + middle) <= token
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    start = tl.load(cu_seqlens + low)
    return start, (token < start) | (low == sequences)


@triton.jit
def _look_up(table, table_across, offset, known, chunk, POSITIONS: tl.constexpr):
    """Return entries of a table as float32, NaN if not `known`. For images, upper chunks are in the second table."""
    if POSITIONS == "image":
        table = tl.where(chunk < 2, table, table_across)
    return tl.load(table + offset, mask=known, other=float("nan")).to(tl.float32)


@triton.jit
def _channel(chunk, column, NEIGHBOURS: tl.constexpr, HALF: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """Return the channel of a column of a chunk; chunks 0 and 1 alternate if NEIGHBOURS."""
    if not NEIGHBOURS:
        return chunk * HALF + column
    if CHUNKS_BLOCK == 2:
        return chunk + 2 * column
    return tl.where(chunk < 2, chunk + 2 * column, chunk * HALF + column)


@triton.jit
def _rotate(
    input, output, tables, sizes, first_program, own_sizes, strides, out_strides,
    CHANNELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rotate one tile of a tensor whose programs begin with `first_program`."""
    cosines, sines, cosines_across, sines_across, cu_seqlens = tables
    tokens, table_rows, sequences_or_width, search_steps = sizes
    batch, heads = own_sizes
    token_stride, batch_stride, head_stride, channel_stride = strides
    out_token_stride, out_batch_stride, out_head_stride = out_strides
    POSITIONS: tl.constexpr = CHANNELS[0]
    FROM_ANGLES: tl.constexpr = CHANNELS[1]
    INVERSE: tl.constexpr = CHANNELS[2]
    ROTATED: tl.constexpr = CHANNELS[3]
    CHUNKS: tl.constexpr = CHANNELS[4]
    CHUNKS_BLOCK: tl.constexpr = CHANNELS[5]
    HALF: tl.constexpr = CHANNELS[6]
    BLOCK: tl.constexpr = CHANNELS[7]
    REST: tl.constexpr = CHANNELS[8]
    REST_BLOCK: tl.constexpr = CHANNELS[9]
    INPUT_NEIGHBOURS: tl.constexpr = CHANNELS[10]
    OUTPUT_NEIGHBOURS: tl.constexpr = CHANNELS[11]
    TOKENS: tl.constexpr = TILE[0]
    HEADS: tl.constexpr = TILE[1]
    FULL: tl.constexpr = TILE[2]  # no token and no head needs a mask
    UNIT: tl.constexpr = TILE[3]  # unit of the strides
    program = tl.program_id(0) - first_program
    head_blocks = tl.cdiv(heads, HEADS)
    token_block = program // (head_blocks * batch)
    batch_index = ((program // head_blocks) % batch).to(tl.int64)
    token = token_block * TOKENS + tl.arange(0, TOKENS)
    head = (program % head_blocks) * HEADS + tl.arange(0, HEADS)
    wide_token = token.to(tl.int64)[:, None, None, None]
    wide_head = head.to(tl.int64)[None, :, None, None]
    source = input + (batch_index * batch_stride + wide_token * token_stride + wide_head * head_stride) * UNIT
    target = (
        output + (batch_index * out_batch_stride + wide_token * out_token_stride + wide_head * out_head_stride) * UNIT
    )
    chunk = tl.arange(0, CHUNKS_BLOCK)[None, None, :, None]
    column = tl.arange(0, BLOCK)[None, None, None, :]
    rows = (token < tokens)[:, None, None, None] & (head < heads)[None, :, None, None]
    if FULL and HALF == BLOCK and CHUNKS == CHUNKS_BLOCK:
        mask = None
    elif FULL:
        mask = (column < HALF) & (chunk < CHUNKS)
    else:
        mask = rows & (column < HALF) & (chunk < CHUNKS)

    # The tile's loads are issued before the angles are waited for.
    here = _channel(chunk, column, INPUT_NEIGHBOURS, HALF, CHUNKS_BLOCK)
    there = _channel(chunk ^ 1, column, INPUT_NEIGHBOURS, HALF, CHUNKS_BLOCK)
    own = tl.load(source + here.to(tl.int64) * channel_stride, mask=mask)
    if ROTATED == CHUNKS_BLOCK:
        partner = tl.load(source + there.to(tl.int64) * channel_stride, mask=mask)
    else:
        partner_mask = chunk < ROTATED if mask is None else mask & (chunk < ROTATED)
        partner = tl.load(source + there.to(tl.int64) * channel_stride, mask=partner_mask, other=0.0)
    if REST:
        rest = CHUNKS * HALF + tl.arange(0, REST_BLOCK)[None, None, None, :]
        rest_mask = rest < CHUNKS * HALF + REST
        if not FULL:
            rest_mask = rest_mask & rows
        copied = tl.load(source + rest.to(tl.int64) * channel_stride, mask=rest_mask)
        tl.store(target + rest, copied, mask=rest_mask)

    # Cosines and sines are tokens x chunks x columns, so that Triton keeps the layout of the loaded angles, about one
    # per thread, and only then spreads them over the tile. In the tile's layout every thread would compute all the
    # angles it needs.
    part = tl.arange(0, CHUNKS_BLOCK)[None, :, None]
    angle = tl.arange(0, BLOCK)[None, None, :]
    if POSITIONS == "packed":
        start, outside = _sequence_start(token, cu_seqlens, sequences_or_width, search_steps, TOKENS)
        position = tl.where(outside, 0, token - start)[:, None, None]
        # An edge below zero may be so far below that the difference wraps around.
        known = (position >= 0) & (position < table_rows) & (start >= 0)[:, None, None]
    elif POSITIONS == "image":
        index = token[:, None, None]
        position = tl.where(part < 2, index // sequences_or_width, index % sequences_or_width)
        known = index < tokens
    else:
        position = token[:, None, None]
        known = position < tokens
    if HALF != BLOCK:
        known = known & (angle < HALF)
    if ROTATED != CHUNKS_BLOCK:
        known = known & (part < ROTATED)
    WIDTH: tl.constexpr = (2 if POSITIONS == "image" else ROTATED) * HALF  # of a table's row
    row = position.to(tl.int64) * WIDTH + angle
    half = part & 1 if POSITIONS == "image" else part
    cos = _look_up(cosines, cosines_across, row + half * HALF, known, part, POSITIONS)
    if INVERSE:  # a gradient takes the sines of the other half
        half = half ^ 1
    if not FROM_ANGLES:
        sin = _look_up(sines, sines_across, row + half * HALF, known, part, POSITIONS)
    elif INVERSE:
        sin = tl.sin(_look_up(cosines, cosines_across, row + half * HALF, known, part, POSITIONS))
    else:
        sin = tl.sin(cos)
    if FROM_ANGLES:
        cos = tl.cos(cos)
    sin = tl.where((part & 1) == (1 if INVERSE else 0), -sin, sin)
    if POSITIONS == "packed":
        cos = tl.where(outside[:, None, None], 1.0, cos)
    if ROTATED != CHUNKS_BLOCK:
        cos = tl.where(part < ROTATED, cos, 1.0)
        sin = tl.where(part < ROTATED, sin, 0.0)

    turned = partner.to(tl.float32) * sin[:, None]
    if POSITIONS == "packed":
        turned = tl.where(outside[:, None, None, None], 0.0, turned)  # also over NaN
    result = own.to(tl.float32) * cos[:, None] + turned
    goal = _channel(chunk, column, OUTPUT_NEIGHBOURS, HALF, CHUNKS_BLOCK)
    tl.store(target + goal, result.to(output.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def rope(
    query, key, query_output, key_output, cosines, sines, cosines_across, sines_across, cu_seqlens,
    tokens, table_rows, sequences_or_width, search_steps, query_programs,
    query_batch, query_heads, query_token_stride, query_batch_stride, query_head_stride, query_channel_stride,
    query_out_token_stride, query_out_batch_stride, query_out_head_stride,
    key_batch, key_heads, key_token_stride, key_batch_stride, key_head_stride, key_channel_stride,
    key_out_token_stride, key_out_batch_stride, key_out_head_stride,
    CHANNELS: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Rotate a query by the first `query_programs` programs, and a key, if there is one, by the others."""
    tables = (cosines, sines, cosines_across, sines_across, cu_seqlens)
    sizes = (tokens, table_rows, sequences_or_width, search_steps)
    query_sizes = (query_batch, query_heads)
    query_strides = (query_token_stride, query_batch_stride, query_head_stride, query_channel_stride)
    query_out = (query_out_token_stride, query_out_batch_stride, query_out_head_stride)
    key_sizes = (key_batch, key_heads)
    key_strides = (key_token_stride, key_batch_stride, key_head_stride, key_channel_stride)
    key_out = (key_out_token_stride, key_out_batch_stride, key_out_head_stride)
    if key is None or tl.program_id(0) < query_programs:
        _rotate(query, query_output, tables, sizes, 0, query_sizes, query_strides, query_out, CHANNELS, QUERY_TILE)
    else:
        _rotate(key, key_output, tables, sizes, query_programs, key_sizes, key_strides, key_out, CHANNELS, KEY_TILE)
