"""The Triton kernel of rotary position embeddings: one tensor, or a query and a key in one launch.

A tensor is tokens x batch x heads x channels, of any strides (the output's channels are adjacent). A program takes a
tile of TOKENS tokens of one batch entry and HEADS heads of each, so that a token's cosines and sines are computed once
for all of these heads. Channels are CHUNKS chunks of HALF, of which the first ROTATED are rotated, each even one
against the odd one behind it; others, and REST more channels, are copied. Every chunk is loaded twice, where it belongs
and where its partner belongs: threads then read and write whole rows, and the second load finds the first one's lines.
All arithmetic is float32; offsets are 64-bit. Run-time arguments first, constants last.
"""

import triton
import triton.language as tl

from .._launch import kernel

# What decides which row of the tables belongs to a token.
BY_INDEX: tl.constexpr = tl.constexpr(0)  # its own index
PACKED: tl.constexpr = tl.constexpr(1)  # its index in its sequence
IMAGE: tl.constexpr = tl.constexpr(2)  # one table by its row in the image, another by its column


@triton.jit
def _look_up(table, table_across, offset, known, chunk, POSITIONS: tl.constexpr):
    """Entries of a table as float32; NaN where they are not known. Of images, upper chunks are in the second table."""
    if POSITIONS == IMAGE:
        table = tl.where(chunk < 2, table, table_across)
    return tl.load(table + offset, mask=known, other=float("nan")).to(tl.float32)


@triton.jit
def _cos_sin(
    token,
    cosines,
    sines,
    cosines_across,
    sines_across,
    cu_seqlens,
    tokens,
    table_rows,
    sequences_or_width,
    search_steps,
    POSITIONS: tl.constexpr,
    FROM_ANGLES: tl.constexpr,
    INVERSE: tl.constexpr,
    ROTATED: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Factors of a chunk and of its partner: tokens x 1 x chunks x columns; and which tokens belong to no sequence.

    They are computed in three dimensions, so that Triton keeps the layout in which angles are loaded, about one per
    thread, and only then spreads them over the tile: in its layout every thread would compute all that it needs.
    """
    WIDTH: tl.constexpr = (2 if POSITIONS == IMAGE else ROTATED) * HALF  # of a table
    chunk = tl.arange(0, CHUNKS_BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    if POSITIONS == PACKED:
        # The last edge that is not beyond the token.
        low = tl.zeros([TOKENS], tl.int32)
        high = low + sequences_or_width
        for _ in range(search_steps):
            middle = (low + high + 1) >> 1
            reached = tl.load(cu_seqlens + middle) <= token
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
        start = tl.load(cu_seqlens + low)
        outside = (token < start) | (low == sequences_or_width)
        position = tl.where(outside, 0, token - start)[:, None, None]
        # An edge below zero may be so far below that the difference wraps around.
        known = (position >= 0) & (position < table_rows) & (start >= 0)[:, None, None]
    elif POSITIONS == IMAGE:
        index = token[:, None, None]
        position = tl.where(chunk < 2, index // sequences_or_width, index % sequences_or_width)
        known = index < tokens
    else:
        position = token[:, None, None]
        known = position < tokens
    if HALF != BLOCK:
        known = known & (column < HALF)
    if ROTATED != CHUNKS_BLOCK:
        known = known & (chunk < ROTATED)
    row = position.to(tl.int64) * WIDTH + column
    half = chunk & 1 if POSITIONS == IMAGE else chunk
    cos = _look_up(cosines, cosines_across, row + half * HALF, known, chunk, POSITIONS)
    if INVERSE:  # a gradient takes the sines of the other half
        half = half ^ 1
    if not FROM_ANGLES:
        sin = _look_up(sines, sines_across, row + half * HALF, known, chunk, POSITIONS)
    elif INVERSE:
        sin = tl.sin(_look_up(cosines, cosines_across, row + half * HALF, known, chunk, POSITIONS))
    else:
        sin = tl.sin(cos)
    if FROM_ANGLES:
        cos = tl.cos(cos)
    sin = tl.where((chunk & 1) == (1 if INVERSE else 0), -sin, sin)
    if POSITIONS == PACKED:
        cos = tl.where(outside[:, None, None], 1.0, cos)
    else:
        outside = token < 0
    if ROTATED != CHUNKS_BLOCK:
        cos = tl.where(chunk < ROTATED, cos, 1.0)
        sin = tl.where(chunk < ROTATED, sin, 0.0)
    return cos[:, None], sin[:, None], outside


@triton.jit
def _tile(
    program,
    input,
    output,
    cosines,
    sines,
    cosines_across,
    sines_across,
    cu_seqlens,
    tokens,
    table_rows,
    sequences_or_width,
    search_steps,
    batch,
    heads,
    token_stride,
    batch_stride,
    head_stride,
    channel_stride,
    out_token_stride,
    out_batch_stride,
    out_head_stride,
    POSITIONS: tl.constexpr,
    FROM_ANGLES: tl.constexpr,
    INVERSE: tl.constexpr,
    ROTATED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    FULL: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Rotates one tile. FULL: no token and no head needs a mask. UNIT: what strides are counted in."""
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

    # The tile is asked for before angles are waited for.
    here = chunk * HALF + column
    there = (chunk ^ 1) * HALF + column
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
    cos, sin, outside = _cos_sin(
        token,
        cosines,
        sines,
        cosines_across,
        sines_across,
        cu_seqlens,
        tokens,
        table_rows,
        sequences_or_width,
        search_steps,
        POSITIONS,
        FROM_ANGLES,
        INVERSE,
        ROTATED,
        CHUNKS_BLOCK,
        HALF,
        BLOCK,
        TOKENS,
    )
    turned = partner.to(tl.float32) * sin
    if POSITIONS == PACKED:
        turned = tl.where(outside[:, None, None, None], 0.0, turned)  # whatever lies there, NaN too
    result = own.to(tl.float32) * cos + turned
    tl.store(target + here, result.to(output.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def rope(
    input,
    output,
    cosines,
    sines,
    cosines_across,
    sines_across,
    cu_seqlens,
    tokens,
    table_rows,
    sequences_or_width,
    search_steps,
    batch,
    heads,
    token_stride,
    batch_stride,
    head_stride,
    channel_stride,
    out_token_stride,
    out_batch_stride,
    out_head_stride,
    POSITIONS: tl.constexpr,
    FROM_ANGLES: tl.constexpr,
    INVERSE: tl.constexpr,
    ROTATED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    FULL: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One tensor."""
    _tile(
        tl.program_id(0),
        input,
        output,
        cosines,
        sines,
        cosines_across,
        sines_across,
        cu_seqlens,
        tokens,
        table_rows,
        sequences_or_width,
        search_steps,
        batch,
        heads,
        token_stride,
        batch_stride,
        head_stride,
        channel_stride,
        out_token_stride,
        out_batch_stride,
        out_head_stride,
        POSITIONS,
        FROM_ANGLES,
        INVERSE,
        ROTATED,
        CHUNKS,
        CHUNKS_BLOCK,
        HALF,
        BLOCK,
        REST,
        REST_BLOCK,
        TOKENS,
        HEADS,
        FULL,
        UNIT,
    )


@kernel
@triton.jit
def rope_pair(
    query,
    key,
    query_output,
    key_output,
    cosines,
    sines,
    cosines_across,
    sines_across,
    cu_seqlens,
    tokens,
    table_rows,
    sequences_or_width,
    search_steps,
    query_programs,
    query_batch,
    query_heads,
    query_token_stride,
    query_batch_stride,
    query_head_stride,
    query_channel_stride,
    query_out_token_stride,
    query_out_batch_stride,
    query_out_head_stride,
    key_batch,
    key_heads,
    key_token_stride,
    key_batch_stride,
    key_head_stride,
    key_channel_stride,
    key_out_token_stride,
    key_out_batch_stride,
    key_out_head_stride,
    POSITIONS: tl.constexpr,
    FROM_ANGLES: tl.constexpr,
    INVERSE: tl.constexpr,
    ROTATED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    QUERY_FULL: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_FULL: tl.constexpr,
    KEY_UNIT: tl.constexpr,
):
    """A query by the first `query_programs` programs, a key by the others."""
    program = tl.program_id(0)
    if program < query_programs:
        _tile(
            program,
            query,
            query_output,
            cosines,
            sines,
            cosines_across,
            sines_across,
            cu_seqlens,
            tokens,
            table_rows,
            sequences_or_width,
            search_steps,
            query_batch,
            query_heads,
            query_token_stride,
            query_batch_stride,
            query_head_stride,
            query_channel_stride,
            query_out_token_stride,
            query_out_batch_stride,
            query_out_head_stride,
            POSITIONS,
            FROM_ANGLES,
            INVERSE,
            ROTATED,
            CHUNKS,
            CHUNKS_BLOCK,
            HALF,
            BLOCK,
            REST,
            REST_BLOCK,
            QUERY_TOKENS,
            QUERY_HEADS,
            QUERY_FULL,
            QUERY_UNIT,
        )
    else:
        _tile(
            program - query_programs,
            key,
            key_output,
            cosines,
            sines,
            cosines_across,
            sines_across,
            cu_seqlens,
            tokens,
            table_rows,
            sequences_or_width,
            search_steps,
            key_batch,
            key_heads,
            key_token_stride,
            key_batch_stride,
            key_head_stride,
            key_channel_stride,
            key_out_token_stride,
            key_out_batch_stride,
            key_out_head_stride,
            POSITIONS,
            FROM_ANGLES,
            INVERSE,
            ROTATED,
            CHUNKS,
            CHUNKS_BLOCK,
            HALF,
            BLOCK,
            REST,
            REST_BLOCK,
            KEY_TOKENS,
            KEY_HEADS,
            KEY_FULL,
            KEY_UNIT,
        )
