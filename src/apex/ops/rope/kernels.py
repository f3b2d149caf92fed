"""The Triton kernel of rotary position embeddings: one tensor, or a query and a key in one launch.

A tensor is tokens x batch x heads x channels, of any strides (the output's channels are adjacent). A program takes a
tile of TOKENS tokens of one batch entry and HEADS heads of each, so that an angle's cosine and sine are computed once
for all of these heads. The rotated channels are PARTS times (HALF, HALF): the first half is rotated into the second.
REST more channels are copied. All arithmetic is float32; offsets are 64-bit. Run-time arguments first, constants last.
"""

import triton
import triton.language as tl

from .._launch import kernel

# What decides which row of the tables belongs to a token.
BY_INDEX: tl.constexpr = tl.constexpr(0)  # its own index
PACKED: tl.constexpr = tl.constexpr(1)  # its index in its sequence
IMAGE: tl.constexpr = tl.constexpr(2)  # one table by its row in the image, another by its column

# Entries of cu_seqlens that are compared at a time: as many as a warp has lanes, so that warps need not talk.
_EDGES: tl.constexpr = tl.constexpr(32)


@triton.jit
def _cos_sin(cosines, sines, offset, mask, FROM_ANGLES: tl.constexpr):
    """Cosine and sine of a tile of table entries; NaN where `mask` says that the table has none."""
    cos = tl.load(cosines + offset, mask=mask, other=float("nan")).to(tl.float32)
    if FROM_ANGLES:
        sin = tl.sin(cos)
        cos = tl.cos(cos)
    else:
        sin = tl.load(sines + offset, mask=mask, other=float("nan")).to(tl.float32)
    return cos, sin


@triton.jit
def _rotate(
    first,
    second,
    output,
    mask,
    cosines,
    sines,
    position,
    outside,
    table_rows,
    POSITIONS: tl.constexpr,
    FROM_ANGLES: tl.constexpr,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Rotates `first` against `second` and stores both halves."""
    column = tl.arange(0, BLOCK)[None, :, None]
    half = tl.arange(0, 2)[None, None, :]
    offset = position.to(tl.int64)[:, None, None] * (2 * HALF) + half * HALF + column
    known = (position < table_rows)[:, None, None] & (column < HALF)
    cos, sin = _cos_sin(cosines, sines, offset, known, FROM_ANGLES)
    if POSITIONS == PACKED:
        as_is = outside[:, None, None]
        cos, sin = tl.where(as_is, 1.0, cos), tl.where(as_is, 0.0, sin)
    cos_first, cos_second = tl.split(cos)
    sin_first, sin_second = tl.split(sin)
    if INVERSE:
        # The transpose of the rotation, which is the rotation back where both halves have the same angles.
        sin_first, sin_second = -sin_second, -sin_first
    cos_first, cos_second = cos_first[:, None, :], cos_second[:, None, :]
    sin_first, sin_second = sin_first[:, None, :], sin_second[:, None, :]
    x, y = first.to(tl.float32), second.to(tl.float32)
    dtype: tl.constexpr = output.dtype.element_ty
    tl.store(output, (x * cos_first - y * sin_first).to(dtype), mask=mask, cache_modifier=STREAM)
    tl.store(output + HALF, (y * cos_second + x * sin_second).to(dtype), mask=mask, cache_modifier=STREAM)


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
    table_rows_across,
    sequences_or_width,
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
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    FULL: tl.constexpr,
    UNIT: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Rotates one tile. FULL: no token and no head needs a mask. UNIT: what strides are counted in."""
    head_blocks = tl.cdiv(heads, HEADS)
    token_block = program // (head_blocks * batch)
    entry = ((program // head_blocks) % batch).to(tl.int64)
    token = token_block * TOKENS + tl.arange(0, TOKENS)
    head = (program % head_blocks) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)[None, None, :]
    wide_token = token.to(tl.int64)[:, None, None]
    wide_head = head.to(tl.int64)[None, :, None]
    source = input + (entry * batch_stride + wide_token * token_stride + wide_head * head_stride) * UNIT
    target = output + (entry * out_batch_stride + wide_token * out_token_stride + wide_head * out_head_stride) * UNIT
    if FULL:
        rows = None
    else:
        rows = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
    if HALF == BLOCK:
        mask = rows
    elif FULL:
        mask = column < HALF
    else:
        mask = rows & (column < HALF)

    # Everything is asked for before anything is waited for.
    channel = source + column * channel_stride
    first = tl.load(channel, mask=mask)
    second = tl.load(channel + HALF * channel_stride, mask=mask)
    if PARTS == 2:
        third = tl.load(channel + 2 * HALF * channel_stride, mask=mask)
        fourth = tl.load(channel + 3 * HALF * channel_stride, mask=mask)
    if REST:
        beyond = tl.arange(0, REST_BLOCK)[None, None, :]
        if REST == REST_BLOCK:
            rest_mask = rows
        elif FULL:
            rest_mask = beyond < REST
        else:
            rest_mask = rows & (beyond < REST)
        copied = tl.load(source + (beyond + 2 * PARTS * HALF) * channel_stride, mask=rest_mask)
        tl.store(target + 2 * PARTS * HALF + beyond, copied, mask=rest_mask, cache_modifier=STREAM)

    outside = None
    if POSITIONS == PACKED:
        start = tl.full([TOKENS], -1, tl.int32)
        for edge in range(0, sequences_or_width + 1, _EDGES):
            index = edge + tl.arange(0, _EDGES)
            edges = tl.load(cu_seqlens + index, mask=index <= sequences_or_width, other=-1).to(tl.int32)[None, :]
            start = tl.maximum(start, tl.max(tl.where(edges <= token[:, None], edges, -1), 1))
        end = tl.load(cu_seqlens + sequences_or_width).to(tl.int32)
        outside = (start < 0) | (token >= end)
        position = tl.where(outside, 0, token - start)
    elif POSITIONS == IMAGE:
        position = token // sequences_or_width
    else:
        position = token

    target_channel = target + column
    _rotate(
        first,
        second,
        target_channel,
        mask,
        cosines,
        sines,
        position,
        outside,
        table_rows,
        POSITIONS,
        FROM_ANGLES,
        INVERSE,
        HALF,
        BLOCK,
        STREAM,
    )
    if PARTS == 2:
        _rotate(
            third,
            fourth,
            target_channel + 2 * HALF,
            mask,
            cosines_across,
            sines_across,
            token % sequences_or_width,
            outside,
            table_rows_across,
            POSITIONS,
            FROM_ANGLES,
            INVERSE,
            HALF,
            BLOCK,
            STREAM,
        )


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
    table_rows_across,
    sequences_or_width,
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
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    STREAM: tl.constexpr,
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
        table_rows_across,
        sequences_or_width,
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
        PARTS,
        HALF,
        BLOCK,
        REST,
        REST_BLOCK,
        TOKENS,
        HEADS,
        FULL,
        UNIT,
        STREAM,
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
    table_rows_across,
    sequences_or_width,
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
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    STREAM: tl.constexpr,
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
            table_rows_across,
            sequences_or_width,
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
            PARTS,
            HALF,
            BLOCK,
            REST,
            REST_BLOCK,
            QUERY_TOKENS,
            QUERY_HEADS,
            QUERY_FULL,
            QUERY_UNIT,
            STREAM,
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
            table_rows_across,
            sequences_or_width,
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
            PARTS,
            HALF,
            BLOCK,
            REST,
            REST_BLOCK,
            KEY_TOKENS,
            KEY_HEADS,
            KEY_FULL,
            KEY_UNIT,
            STREAM,
        )
