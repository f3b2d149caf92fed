"""Attention with a mask, a bias, packed sequences and dropout, for Triton.

Letters: Z batches (or packed sequences), H heads, M queries, N keys, D the size of a head. A program takes a tile of
queries (forward, gradient of the queries) or of keys (gradients of keys and values), so that no two programs write the
same element.

    logits = scale * q k^T + bias + (mask - 1) * inf        probabilities = softmax(logits)
    out = dropout(probabilities) v

`q_z, q_h, q_m` are strides of q, in elements, for each letter; the innermost dimension of every tensor has stride 1.
`cu` holds the first row of each packed sequence and, last, their end. Logits are kept in units of log 2; `statistics`
has the largest of each row and the reciprocal of the sum of exponentials, or, without mask and bias, the logarithm of
that sum. The loops run twice, over whole tiles without masks and over what is left with them.
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
def _head_key(seed, zh):
    """A number for each head, from the 64 bits of the seed."""
    bits = tl.load(seed).to(tl.uint64)
    low = (bits & 0xFFFFFFFF).to(tl.uint32)
    high = (bits >> 32).to(tl.uint32)
    return _mix(_mix(_mix(low) ^ high) ^ zh.to(tl.uint32))


@triton.jit
def _is_kept(row_keys, n, threshold):
    """Whether dropout lets elements of rows `row_keys` and columns `n` through; both already have their dimensions.

    The keys of rows are mixed well, so that a single round is enough.
    """
    x = row_keys + n.to(tl.uint32) * 0x9E3779B9
    return (x ^ (x >> 15)) * 0x2C1B3C6D >= threshold.to(tl.uint32) << 1


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
def _tile(
    base, left, stride, head_dim, ROWS: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr, FULL_D: tl.constexpr
):
    """Rows 0 to ROWS of a matrix; zeros from row `left` on, unless the tile is known to be WHOLE."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    pointers = base + r[:, None] * stride + d[None, :]
    if WHOLE:
        if FULL_D:
            return tl.load(pointers)
        return tl.load(pointers, mask=d[None, :] < head_dim, other=0.0)
    if FULL_D:
        return tl.load(pointers, mask=r[:, None] < left, other=0.0)
    return tl.load(pointers, mask=(r[:, None] < left) & (d[None, :] < head_dim), other=0.0)


@triton.jit
def _store_tile(base, values, left, stride, head_dim, ROWS: tl.constexpr, BD: tl.constexpr):
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    inside = (r[:, None] < left) & (d[None, :] < head_dim)
    tl.store(base + r[:, None] * stride + d[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _key_terms(mask, n, left, inf):
    """What the mask adds to the logits of each key."""
    return (tl.load(mask + n, mask=n < left, other=1.0).to(tl.float32) - 1.0) * (inf * _LOG2E)


@triton.jit
def _bias_tile(bias, m, n, m_left, n_left, columns, WHOLE: tl.constexpr):
    """The bias of queries `m` and keys `n`, which already have their dimensions, in either order."""
    if WHOLE:
        return tl.load(bias + m * columns + n)
    return tl.load(bias + m * columns + n, mask=(m < m_left) & (n < n_left), other=0.0)


@triton.jit
def _forward_tiles(
    result, largest, norm, qs, k, v, mask, bias, keys, begin, end, partners, m_left, columns, head_dim, k_n, v_n,
    threshold, scale, inf,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr,
    FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Adds keys `begin` to `end` to what one tile of queries has seen so far."""
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k += begin.to(tl.int64) * k_n
    v += begin.to(tl.int64) * v_n
    for column in range(begin, end, BN):
        left = partners - column
        ks = _tile(k, left, k_n, head_dim, BN, BD, WHOLE_N, FULL_D)
        products = _dot(qs, tl.trans(ks), None, PRECISION)
        if HAS_MASK or HAS_BIAS:
            logits = products * (scale * _LOG2E)
            if HAS_BIAS:
                biases = _bias_tile(bias + column, r[:, None], n[None, :], m_left, left, columns, WHOLE_M and WHOLE_N)
                logits += biases.to(tl.float32) * _LOG2E
            if HAS_MASK:
                logits += _key_terms(mask + column, n, left, inf)[None, :]
            if not WHOLE_N:
                logits = tl.where(n[None, :] < left, logits, float("-inf"))
            new = tl.maximum(largest, tl.max(logits, 1))
            if HAS_BIAS:
                new = tl.where(new == float("-inf"), 0.0, new)  # a bias may hold -inf for whole tiles
            p = tl.exp2(logits - new[:, None])
        else:
            if not WHOLE_N:
                products = tl.where(n[None, :] < left, products, float("-inf"))
            # The scale is positive: multiplied in one instruction with the subtraction.
            new = tl.maximum(largest, tl.max(products, 1) * (scale * _LOG2E))
            p = tl.exp2(products * (scale * _LOG2E) - new[:, None])
        correction = tl.exp2(largest - new)
        norm = norm * correction + tl.sum(p, 1)
        result = result * correction[:, None]
        if DROPS:
            p = tl.where(_is_kept(keys[:, None], (column + n)[None, :], threshold), p, 0.0)
        vs = _tile(v, left, v_n, head_dim, BN, BD, WHOLE_N, FULL_D)
        result = _dot(p.to(vs.dtype), vs, result, PRECISION)
        largest = new
        k += BN * k_n
        v += BN * v_n
    return result, largest, norm


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
    qs = _tile(q + z * q_z + h * q_h + row * q_m, left, q_m, head_dim, BM, BD, FULL_M, FULL_D)
    k += z * k_z + h * k_h + start * k_n
    v += z * v_z + h * v_h + start * v_n
    if HAS_MASK:
        mask += (z // mask_group) * columns
    if HAS_BIAS:
        bias += (((z // bias_group) * heads + h) * rows + first) * columns
    r = tl.arange(0, BM)
    keys = r.to(tl.uint32)
    if DROPS:
        keys = _mix(_head_key(seed, z * heads + h) ^ (first + r).to(tl.uint32))
    largest = tl.full((BM,), float("-inf"), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, BD), tl.float32)
    whole = partners // BN * BN
    if FULL_N:
        # At least one: where a compiler must expect none, it makes the matrix units wait for each product.
        whole = tl.maximum(whole, BN)
    result, largest, norm = _forward_tiles(
        result, largest, norm, qs, k, v, mask, bias, keys, whole * 0, whole, partners, left, columns, head_dim, k_n,
        v_n, threshold, scale, inf, HAS_MASK, HAS_BIAS, DROPS, FULL_M, True, FULL_D, PRECISION, BM, BN, BD,
    )  # fmt: skip
    if not FULL_N:
        result, largest, norm = _forward_tiles(
            result, largest, norm, qs, k, v, mask, bias, keys, whole, partners, partners, left, columns, head_dim, k_n,
            v_n, threshold, scale, inf, HAS_MASK, HAS_BIAS, DROPS, FULL_M, False, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
    reciprocal = 1.0 / norm
    if PACKED:
        reciprocal = tl.where(partners > 0, reciprocal, 0.0)
    weight = reciprocal * kept if DROPS else reciprocal
    _store_tile(out + z * o_z + h * o_h + row * o_m, result * weight[:, None], left, o_m, head_dim, BM, BD)
    if SAVES:
        statistics += z * s_z + h * s_h + row
        if HAS_MASK or HAS_BIAS:
            tl.store(statistics + r, largest, mask=r < left)
            tl.store(statistics + plane + r, reciprocal, mask=r < left)
        else:
            tl.store(statistics + r, largest + tl.log2(norm), mask=r < left)


@triton.jit
def _probabilities(products, biases, terms, largest, reciprocal, scale, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """From products of queries and keys and the statistics of the forward pass."""
    if HAS_BIAS:
        # In the order of the forward pass, and never above the largest: in a row of biases like -1e9 the rest is lost
        # to rounding, and what is lost must be lost here too.
        logits = products * (scale * _LOG2E)
        logits += biases.to(tl.float32) * _LOG2E
        logits = tl.minimum(logits - largest, 0.0) if not HAS_MASK else logits - largest
    else:
        logits = products * (scale * _LOG2E) - largest
    if HAS_MASK:
        logits += terms
    if HAS_MASK or HAS_BIAS:
        return tl.exp2(logits) * reciprocal
    return tl.exp2(logits)


@triton.jit
def _queries_tiles(
    result, qs, gs, deltas, largest, reciprocal, k, v, mask, bias, keys, begin, end, partners, m_left, columns,
    head_dim, k_n, v_n, threshold, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr,
    FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Adds the part of keys `begin` to `end` to the gradient of a tile of queries."""
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k += begin.to(tl.int64) * k_n
    v += begin.to(tl.int64) * v_n
    for column in range(begin, end, BN):
        left = partners - column
        ks = _tile(k, left, k_n, head_dim, BN, BD, WHOLE_N, FULL_D)
        products = _dot(qs, tl.trans(ks), None, PRECISION)
        biases = products
        terms = products
        if HAS_BIAS:
            biases = _bias_tile(bias + column, r[:, None], n[None, :], m_left, left, columns, WHOLE_M and WHOLE_N)
        if HAS_MASK:
            terms = _key_terms(mask + column, n, left, inf)[None, :]
        p = _probabilities(
            products, biases, terms, largest[:, None], reciprocal[:, None], scale, HAS_MASK, HAS_BIAS
        )  # fmt: skip
        vs = _tile(v, left, v_n, head_dim, BN, BD, WHOLE_N, FULL_D)
        ds = _dot(gs, tl.trans(vs), None, PRECISION) * kept - deltas[:, None]
        if DROPS:
            ds = tl.where(_is_kept(keys[:, None], (column + n)[None, :], threshold), ds, -deltas[:, None])
        ds = p * ds
        if not WHOLE_N:
            ds = tl.where(n[None, :] < left, ds, 0.0)
        result = _dot(ds.to(ks.dtype), ks, result, PRECISION)
        k += BN * k_n
        v += BN * v_n
    return result


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
    qs = _tile(q + z * q_z + h * q_h + row * q_m, left, q_m, head_dim, BM, BD, FULL_M, FULL_D)
    outs = _tile(out + z * o_z + h * o_h + row * o_m, left, o_m, head_dim, BM, BD, FULL_M, FULL_D)
    gs = _tile(dout + z * g_z + h * g_h + row * g_m, left, g_m, head_dim, BM, BD, FULL_M, FULL_D)
    deltas = tl.sum(outs.to(tl.float32) * gs.to(tl.float32), 1)
    r = tl.arange(0, BM)
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
    keys = r.to(tl.uint32)
    if DROPS:
        keys = _mix(_head_key(seed, z * heads + h) ^ (first + r).to(tl.uint32))
    result = tl.zeros((BM, BD), tl.float32)
    whole = partners // BN * BN
    if FULL_N:
        # At least one: where a compiler must expect none, it makes the matrix units wait for each product.
        whole = tl.maximum(whole, BN)
    result = _queries_tiles(
        result, qs, gs, deltas, largest, reciprocal, k, v, mask, bias, keys, whole * 0, whole, partners, left, columns,
        head_dim, k_n, v_n, threshold, scale, inf, kept,
        HAS_MASK, HAS_BIAS, DROPS, FULL_M, True, FULL_D, PRECISION, BM, BN, BD,
    )  # fmt: skip
    if not FULL_N:
        result = _queries_tiles(
            result, qs, gs, deltas, largest, reciprocal, k, v, mask, bias, keys, whole, partners, partners, left,
            columns, head_dim, k_n, v_n, threshold, scale, inf, kept,
            HAS_MASK, HAS_BIAS, DROPS, FULL_M, False, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
    _store_tile(dq + z * d_z + h * d_h + row * d_m, result * scale, left, d_m, head_dim, BM, BD)


@kernel
@triton.jit
def attention_backward_keys(
    q, k, v, mask, bias, cu, seed, out, dout, statistics, delta, dlogits, dk, dv,
    batch, heads, rows, columns, head_dim, total,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, g_z, g_h, g_m, dk_z, dk_h, dk_n, dv_z, dv_h, dv_n,
    s_z, s_h, plane,
    mask_group, bias_group, threshold, scale, inf, kept, first_batch,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, DROPS: tl.constexpr,
    STORES: tl.constexpr, FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. Tiles are transposed: keys by queries.

    STORES: `dlogits` [batches, H, N, M], of batches from `first_batch` on, gets the gradient of the logits, from which
    those of queries and bias follow. `delta` is not there yet then, and computed from `out`.
    """
    z, h, first, start, count, partners = _locate(cu, batch, heads, columns, rows, total, PACKED, TAIL, BN)
    if STORES:
        dlogits += ((z * heads + h) * columns + first) * rows
        z += first_batch
    column = start + first
    left = count - first
    ks = _tile(k + z * k_z + h * k_h + column * k_n, left, k_n, head_dim, BN, BD, FULL_N, FULL_D)
    vs = _tile(v + z * v_z + h * v_h + column * v_n, left, v_n, head_dim, BN, BD, FULL_N, FULL_D)
    q += z * q_z + h * q_h + start * q_m
    dout += z * g_z + h * g_h + start * g_m
    statistics += z * s_z + h * s_h + start
    if STORES:
        out += z * o_z + h * o_h + start * o_m
    else:
        delta += z * s_z + h * s_h + start
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    terms = tl.zeros((BN, 1), tl.float32)
    if HAS_MASK:
        terms = _key_terms(mask + (z // mask_group) * columns + first, n, left, inf)[:, None]
    if HAS_BIAS:
        bias += ((z // bias_group) * heads + h) * rows * columns + first
        following = _bias_tile(bias, r[None, :], n[:, None], partners, left, columns, False)
    if DROPS:
        head_key = _head_key(seed, z * heads + h)
    dks = tl.zeros((BN, BD), tl.float32)
    dvs = tl.zeros((BN, BD), tl.float32)
    for row in range(0, tl.maximum(partners, BM) if FULL_M else partners, BM):
        m_left = partners - row
        qs = _tile(q, m_left, q_m, head_dim, BM, BD, FULL_M, FULL_D)
        gs = _tile(dout, m_left, g_m, head_dim, BM, BD, FULL_M, FULL_D)
        # Beyond the last query nothing is probable.
        largest = tl.load(statistics + row + r, mask=r < m_left, other=float("inf"))
        reciprocal = largest
        if HAS_MASK or HAS_BIAS:
            reciprocal = tl.load(statistics + plane + row + r, mask=r < m_left, other=0.0)
        if STORES:
            outs = _tile(out, m_left, o_m, head_dim, BM, BD, FULL_M, FULL_D)
            deltas = tl.sum(outs.to(tl.float32) * gs.to(tl.float32), 1)
            out += BM * o_m
        else:
            deltas = tl.load(delta + row + r, mask=r < m_left, other=0.0)
        products = _dot(ks, tl.trans(qs), None, PRECISION)
        biases = products
        if HAS_BIAS:
            # Loaded a step ahead by hand: the pipeliner does not take transposed tiles.
            biases = following
            bias += BM * columns
            following = _bias_tile(bias, r[None, :], n[:, None], m_left - BM, left, columns, False)
        p = _probabilities(
            products, biases, terms, largest[None, :], reciprocal[None, :], scale, HAS_MASK, HAS_BIAS
        )  # fmt: skip
        dp = _dot(vs, tl.trans(gs), None, PRECISION)
        ds = dp * kept - deltas[None, :]
        dropped = p
        if DROPS:
            row_keys = _mix(head_key ^ (row + r).to(tl.uint32))
            keep = _is_kept(row_keys[None, :], (first + n)[:, None], threshold)
            ds = tl.where(keep, ds, -deltas[None, :])
            dropped = tl.where(keep, p, 0.0)
        ds = (p * ds).to(qs.dtype)
        dvs = _dot(dropped.to(gs.dtype), gs, dvs, PRECISION)
        if STORES:
            inside = (n[:, None] < left) & (r[None, :] < m_left)
            tl.store(dlogits + n[:, None] * rows + (row + r)[None, :], ds, mask=inside)
        dks = _dot(ds, qs, dks, PRECISION)
        q += BM * q_m
        dout += BM * g_m
    _store_tile(dk + z * dk_z + h * dk_h + column * dk_n, dks * scale, left, dk_n, head_dim, BN, BD)
    _store_tile(dv + z * dv_z + h * dv_h + column * dv_n, dvs * kept, left, dv_n, head_dim, BN, BD)


@kernel
@triton.jit
def attention_backward_stored(
    dlogits, k, dq,
    heads, rows, columns, head_dim, k_z, k_h, k_n, d_z, d_h, d_m, scale, first_batch,
    FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries from that of the logits, as `attention_backward_keys` stores it."""
    blocks = tl.cdiv(rows, BM)
    program = tl.program_id(0)
    zh = (program // blocks).to(tl.int64)
    first = (program % blocks) * BM
    z = zh // heads + first_batch
    h = zh % heads
    dlogits += zh * columns * rows + first
    k += z * k_z + h * k_h
    left = rows - first
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    result = tl.zeros((BM, BD), tl.float32)
    for column in range(0, columns, BN):
        pointers = dlogits + n[:, None] * rows + r[None, :]
        if FULL_M and FULL_N:
            ds = tl.load(pointers)
        else:
            ds = tl.load(pointers, mask=(n[:, None] < columns - column) & (r[None, :] < left), other=0.0)
        ks = _tile(k, columns - column, k_n, head_dim, BN, BD, FULL_N, FULL_D)
        result = _dot(tl.trans(ds), ks, result, PRECISION)
        k += BN * k_n
        dlogits += tl.cast(BN, tl.int64) * rows
    _store_tile(dq + z * d_z + h * d_h + first.to(tl.int64) * d_m, result * scale, left, d_m, head_dim, BM, BD)
