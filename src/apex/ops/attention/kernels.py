"""Attention with a mask, a bias that has a gradient, packed sequences and dropout, for Triton.

Letters: Z batches (or packed sequences), H heads, M queries, N keys, D the size of a head. A program takes a tile of
queries (forward, gradient of the queries), of keys (gradient of keys and values) or of the bias (its gradient), so that
no two programs write the same element. Logits are kept in units of log 2.

    logits = scale * q k^T + bias + (mask - 1) * inf        probabilities = softmax(logits)
    out = dropout(probabilities) v

`q_z, q_h, q_m` are strides of q, in elements, for each letter; the innermost dimension of every tensor has stride 1.
`cu` holds the first row of each packed sequence and, last, their end; `statistics` has the largest logit of a row and
the reciprocal of the sum of its exponentials, or, without mask and bias, the logarithm of that sum.
"""

import triton
import triton.language as tl

from .._launch import kernel

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, result, PRECISION: tl.constexpr):
    """result + a b, in float32."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), result)
    return tl.dot(a, b, result, input_precision=PRECISION)


@triton.jit
def _mix(x):
    """A bijection of 32-bit numbers that leaves no pattern behind."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _row_keys(seed, zh, m):
    """A number for each row of each head, from the 64 bits of the seed."""
    bits = tl.load(seed).to(tl.uint64)
    low = (bits & 0xFFFFFFFF).to(tl.uint32)
    high = (bits >> 32).to(tl.uint32)
    of_head = _mix(_mix(_mix(low) ^ high) ^ zh.to(tl.uint32))
    return _mix(of_head ^ m.to(tl.uint32))


@triton.jit
def _is_kept(row_keys, n, threshold):
    """Whether dropout lets elements of rows `row_keys` and columns `n` through; both already have their dimensions."""
    return (_mix(row_keys + n.to(tl.uint32) * 0x9E3779B9) >> 1).to(tl.int32) >= threshold


@triton.jit
def _locate(cu, batch, heads, rows, columns, total, PACKED: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr):
    """Which tile this program takes: batch, head, first row of the tile, and start, rows and partners of its sequence.

    After the last packed sequence come, if there is a TAIL, rows without partners: their results are zeros. Partners
    are 0 too for a tile beyond the end of its sequence, which so has nothing to do.
    """
    blocks = tl.cdiv(rows, BLOCK)
    program = tl.program_id(0)
    start = program * 0
    count = rows
    partners = columns
    zh = program // blocks
    first = (program % blocks) * BLOCK
    z = zh // heads
    h = zh % heads
    if PACKED:
        if TAIL:
            tail_blocks = tl.cdiv(total, BLOCK)
            beyond = program - batch * heads * blocks
            if beyond >= 0:
                z = batch
                h = beyond // tail_blocks
                first = (beyond % tail_blocks) * BLOCK
        start = tl.load(cu + z).to(tl.int32)
        end = tl.load(cu + z + 1, mask=z < batch, other=total).to(tl.int32)
        count = end - start
        partners = tl.where((z < batch) & (first < count), count, 0)
    return z.to(tl.int64), h.to(tl.int64), first, start.to(tl.int64), count, partners


@triton.jit
def _tile(base, count, stride, head_dim, ROWS: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, FULL_D: tl.constexpr):
    """Rows 0 to ROWS of a matrix, zeros from row `count` on."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    pointers = base + r[:, None] * stride + d[None, :]
    if MASKED:
        if FULL_D:
            return tl.load(pointers, mask=r[:, None] < count, other=0.0)
        return tl.load(pointers, mask=(r[:, None] < count) & (d[None, :] < head_dim), other=0.0)
    if FULL_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=d[None, :] < head_dim, other=0.0)


@triton.jit
def _store_tile(base, values, count, stride, head_dim, ROWS: tl.constexpr, BD: tl.constexpr):
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    inside = (r[:, None] < count) & (d[None, :] < head_dim)
    tl.store(base + r[:, None] * stride + d[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _key_terms(mask, n, columns, inf):
    """What the mask adds to the logits of each key."""
    return (tl.load(mask + n, mask=n < columns, other=1.0).to(tl.float32) - 1.0) * (inf * _LOG2E)


@triton.jit
def _bias_tile(base, m, n, rows, columns, left, FULL: tl.constexpr):
    """The bias of queries `m` and keys `n`, which already have their dimensions, in either order.

    `columns` is the length of a row, of which `left` are left.
    """
    pointers = base + m * columns + n
    if FULL:
        return tl.load(pointers).to(tl.float32) * _LOG2E
    return tl.load(pointers, mask=(m < rows) & (n < left), other=0.0).to(tl.float32) * _LOG2E


@kernel
@triton.jit
def attention_forward(
    q, k, v, mask, bias, cu, seed, out, statistics,
    batch, heads, rows, columns, head_dim, total,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, s_z, s_h, plane,
    mask_group, bias_group, threshold, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, DROPS: tl.constexpr,
    SAVES: tl.constexpr, FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    z, h, first, start, count, partners = _locate(cu, batch, heads, rows, columns, total, PACKED, TAIL, BM)
    row = start + first
    left = count - first
    qs = _tile(q + z * q_z + h * q_h + row * q_m, left, q_m, head_dim, BM, BD, not FULL_M, FULL_D)
    k += z * k_z + h * k_h + start * k_n
    v += z * v_z + h * v_h + start * v_n
    if HAS_MASK:
        mask += (z // mask_group) * columns
    if HAS_BIAS:
        bias += (((z // bias_group) * heads + h) * rows + first) * columns
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    if DROPS:
        keys = _row_keys(seed, z * heads + h, first + r)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, BD), tl.float32)
    for column in range(0, partners, BN):
        ks = _tile(k, partners - column, k_n, head_dim, BN, BD, not FULL_N, FULL_D)
        logits = _dot(qs, tl.trans(ks), None, PRECISION) * (scale * _LOG2E)
        if HAS_BIAS:
            bias_tile = bias + column
            logits += _bias_tile(bias_tile, r[:, None], n[None, :], left, columns, columns - column, FULL_M and FULL_N)
        if HAS_MASK:
            logits += _key_terms(mask + column, n, columns - column, inf)[None, :]
        if not FULL_N:
            logits = tl.where((n < partners - column)[None, :], logits, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, 1))
        if HAS_BIAS:
            new = tl.where(new == float("-inf"), 0.0, new)  # a bias may hold -inf for whole blocks
        p = tl.exp2(logits - new[:, None])
        correction = tl.exp2(largest - new)
        norm = norm * correction + tl.sum(p, 1)
        result = result * correction[:, None]
        if DROPS:
            p = tl.where(_is_kept(keys[:, None], (column + n)[None, :], threshold), p, 0.0)
        vs = _tile(v, partners - column, v_n, head_dim, BN, BD, not FULL_N, FULL_D)
        result = _dot(p.to(vs.dtype), vs, result, PRECISION)
        largest = new
        k += BN * k_n
        v += BN * v_n
    reciprocal = 1.0 / norm
    if PACKED:
        reciprocal = tl.where(partners > 0, reciprocal, 0.0)
    weight = reciprocal * kept if DROPS else reciprocal
    out += z * o_z + h * o_h + row * o_m
    _store_tile(out, result * weight[:, None], left, o_m, head_dim, BM, BD)
    if SAVES:
        statistics += z * s_z + h * s_h + row
        if HAS_MASK or HAS_BIAS:
            tl.store(statistics + r, largest, mask=r < left)
            tl.store(statistics + plane + r, reciprocal, mask=r < left)
        else:
            tl.store(statistics + r, largest + tl.log2(norm), mask=r < left)


@triton.jit
def _probabilities(logits, largest, reciprocal, TWO_STATISTICS: tl.constexpr):
    if TWO_STATISTICS:
        return tl.exp2(logits - largest) * reciprocal
    return tl.exp2(logits - largest)


@kernel
@triton.jit
def attention_backward_queries(
    q, k, v, mask, bias, cu, seed, out, dout, statistics, delta, dq,
    batch, heads, rows, columns, head_dim, total,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, g_z, g_h, g_m, d_z, d_h, d_m, s_z, s_h, plane,
    mask_group, bias_group, threshold, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, DROPS: tl.constexpr,
    FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries, and `delta`, the product of every row of `out` with its gradient."""
    z, h, first, start, count, partners = _locate(cu, batch, heads, rows, columns, total, PACKED, TAIL, BM)
    row = start + first
    left = count - first
    qs = _tile(q + z * q_z + h * q_h + row * q_m, left, q_m, head_dim, BM, BD, not FULL_M, FULL_D)
    outs = _tile(out + z * o_z + h * o_h + row * o_m, left, o_m, head_dim, BM, BD, not FULL_M, FULL_D)
    gs = _tile(dout + z * g_z + h * g_h + row * g_m, left, g_m, head_dim, BM, BD, not FULL_M, FULL_D)
    deltas = tl.sum(outs.to(tl.float32) * gs.to(tl.float32), 1)
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    statistics += z * s_z + h * s_h + row
    tl.store(delta + z * s_z + h * s_h + row + r, deltas, mask=r < left)
    largest = tl.load(statistics + r, mask=r < left, other=0.0)
    reciprocal = largest
    if HAS_MASK or HAS_BIAS:
        reciprocal = tl.load(statistics + plane + r, mask=r < left, other=0.0)
    k += z * k_z + h * k_h + start * k_n
    v += z * v_z + h * v_h + start * v_n
    if HAS_MASK:
        mask += (z // mask_group) * columns
    if HAS_BIAS:
        bias += (((z // bias_group) * heads + h) * rows + first) * columns
    if DROPS:
        keys = _row_keys(seed, z * heads + h, first + r)
    result = tl.zeros((BM, BD), tl.float32)
    for column in range(0, partners, BN):
        ks = _tile(k, partners - column, k_n, head_dim, BN, BD, not FULL_N, FULL_D)
        logits = _dot(qs, tl.trans(ks), None, PRECISION) * (scale * _LOG2E)
        if HAS_BIAS:
            bias_tile = bias + column
            logits += _bias_tile(bias_tile, r[:, None], n[None, :], left, columns, columns - column, FULL_M and FULL_N)
        if HAS_MASK:
            logits += _key_terms(mask + column, n, columns - column, inf)[None, :]
        if not FULL_N:
            logits = tl.where((n < partners - column)[None, :], logits, float("-inf"))
        p = _probabilities(logits, largest[:, None], reciprocal[:, None], HAS_MASK or HAS_BIAS)
        vs = _tile(v, partners - column, v_n, head_dim, BN, BD, not FULL_N, FULL_D)
        dp = _dot(gs, tl.trans(vs), None, PRECISION)
        if DROPS:
            dp = tl.where(_is_kept(keys[:, None], (column + n)[None, :], threshold), dp * kept, 0.0)
        ds = p * (dp - deltas[:, None])
        result = _dot(ds.to(ks.dtype), ks, result, PRECISION)
        k += BN * k_n
        v += BN * v_n
    _store_tile(dq + z * d_z + h * d_h + row * d_m, result * scale, left, d_m, head_dim, BM, BD)


@kernel
@triton.jit
def attention_backward_keys(
    q, k, v, mask, bias, cu, seed, dout, statistics, delta, dk, dv,
    batch, heads, rows, columns, head_dim, total,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, g_z, g_h, g_m, dk_z, dk_h, dk_n, dv_z, dv_h, dv_n, s_z, s_h, plane,
    mask_group, bias_group, threshold, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, DROPS: tl.constexpr,
    FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. Tiles are transposed: keys by queries."""
    z, h, first, start, count, partners = _locate(cu, batch, heads, columns, rows, total, PACKED, TAIL, BN)
    column = start + first
    left = count - first
    ks = _tile(k + z * k_z + h * k_h + column * k_n, left, k_n, head_dim, BN, BD, not FULL_N, FULL_D)
    vs = _tile(v + z * v_z + h * v_h + column * v_n, left, v_n, head_dim, BN, BD, not FULL_N, FULL_D)
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    q += z * q_z + h * q_h + start * q_m
    dout += z * g_z + h * g_h + start * g_m
    statistics += z * s_z + h * s_h + start
    delta += z * s_z + h * s_h + start
    if HAS_MASK:
        terms = _key_terms(mask + (z // mask_group) * columns + first, n, left, inf)
    if HAS_BIAS:
        bias += ((z // bias_group) * heads + h) * rows * columns + first
    dks = tl.zeros((BN, BD), tl.float32)
    dvs = tl.zeros((BN, BD), tl.float32)
    for row in range(0, partners, BM):
        inside = r < partners - row
        qs = _tile(q, partners - row, q_m, head_dim, BM, BD, not FULL_M, FULL_D)
        # Beyond the last query nothing is probable.
        largest = tl.load(statistics + row + r, mask=inside, other=float("inf"))
        reciprocal = largest
        if HAS_MASK or HAS_BIAS:
            reciprocal = tl.load(statistics + plane + row + r, mask=inside, other=0.0)
        deltas = tl.load(delta + row + r, mask=inside, other=0.0)
        logits = _dot(ks, tl.trans(qs), None, PRECISION) * (scale * _LOG2E)
        if HAS_BIAS:
            logits += _bias_tile(bias, r[None, :], n[:, None], partners - row, columns, left, FULL_M and FULL_N)
            bias += BM * columns
        if HAS_MASK:
            logits += terms[:, None]
        p = _probabilities(logits, largest[None, :], reciprocal[None, :], HAS_MASK or HAS_BIAS)
        gs = _tile(dout, partners - row, g_m, head_dim, BM, BD, not FULL_M, FULL_D)
        dp = _dot(vs, tl.trans(gs), None, PRECISION)
        if DROPS:
            keys = _row_keys(seed, z * heads + h, row + r)
            keep = _is_kept(keys[None, :], (first + n)[:, None], threshold)
            dp = tl.where(keep, dp * kept, 0.0)
            dvs = _dot(tl.where(keep, p * kept, 0.0).to(gs.dtype), gs, dvs, PRECISION)
        else:
            dvs = _dot(p.to(gs.dtype), gs, dvs, PRECISION)
        ds = p * (dp - deltas[None, :])
        dks = _dot(ds.to(qs.dtype), qs, dks, PRECISION)
        q += BM * q_m
        dout += BM * g_m
    _store_tile(dk + z * dk_z + h * dk_h + column * dk_n, dks * scale, left, dk_n, head_dim, BN, BD)
    _store_tile(dv + z * dv_z + h * dv_h + column * dv_n, dvs, left, dv_n, head_dim, BN, BD)


@kernel
@triton.jit
def attention_backward_bias(
    q, k, v, mask, bias, dout, statistics, delta, dbias,
    groups, heads, rows, columns, head_dim,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, g_z, g_h, g_m, s_z, s_h, plane,
    mask_group, bias_group, splits, scale, inf,
    HAS_MASK: tl.constexpr, FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradient of the bias: summed over a part of the batches that share it, one of `splits`."""
    row_blocks = tl.cdiv(rows, BM)
    column_blocks = tl.cdiv(columns, BN)
    program = tl.program_id(0)
    first_column = (program % column_blocks) * BN
    program = program // column_blocks
    first = (program % row_blocks) * BM
    program = program // row_blocks
    h = (program % heads).to(tl.int64)
    program = program // heads
    split = program % splits
    group = (program // splits).to(tl.int64)
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    left = rows - first
    left_columns = columns - first_column
    share = tl.cdiv(bias_group, splits)
    begin = tl.minimum(split * share, bias_group)
    z = group * bias_group + begin
    q += z * q_z + h * q_h + first.to(tl.int64) * q_m
    dout += z * g_z + h * g_h + first.to(tl.int64) * g_m
    k += z * k_z + h * k_h + first_column.to(tl.int64) * k_n
    v += z * v_z + h * v_h + first_column.to(tl.int64) * v_n
    statistics += z * s_z + h * s_h + first
    delta += z * s_z + h * s_h + first
    corner = ((group * heads + h) * rows + first) * columns + first_column
    inside = r < left
    biases = _bias_tile(bias + corner, r[:, None], n[None, :], left, columns, left_columns, FULL_M and FULL_N)
    result = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.minimum(share, bias_group - begin)):
        qs = _tile(q, left, q_m, head_dim, BM, BD, not FULL_M, FULL_D)
        ks = _tile(k, left_columns, k_n, head_dim, BN, BD, not FULL_N, FULL_D)
        logits = _dot(qs, tl.trans(ks), None, PRECISION) * (scale * _LOG2E) + biases
        if HAS_MASK:
            logits += _key_terms(mask + ((z + step) // mask_group) * columns + first_column, n, left_columns, inf)[None, :]
        largest = tl.load(statistics + r, mask=inside, other=0.0)
        reciprocal = tl.load(statistics + plane + r, mask=inside, other=0.0)
        deltas = tl.load(delta + r, mask=inside, other=0.0)
        p = _probabilities(logits, largest[:, None], reciprocal[:, None], True)
        gs = _tile(dout, left, g_m, head_dim, BM, BD, not FULL_M, FULL_D)
        vs = _tile(v, left_columns, v_n, head_dim, BN, BD, not FULL_N, FULL_D)
        dp = _dot(gs, tl.trans(vs), None, PRECISION)
        result += p * (dp - deltas[:, None])
        q += q_z
        k += k_z
        v += v_z
        dout += g_z
        statistics += s_z
        delta += s_z
    dbias += split.to(tl.int64) * groups * heads * rows * columns + corner
    inside = (r[:, None] < left) & (n[None, :] < left_columns)
    tl.store(dbias + r[:, None] * columns + n[None, :], result.to(dbias.dtype.element_ty), mask=inside)
