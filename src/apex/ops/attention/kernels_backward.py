"""Backward kernels of attention, in Triton; `kernels_common` explains the letters."""

import triton
import triton.language as tl

from .._launch import kernel
from .config import DLOGITS_PITCH, ROW_TERMS_ALIGNMENT
from .kernels_common import (
    LOG2E,
    aligned,
    aligned_strides,
    bias_tile,
    finite_dot,
    is_kept,
    key_of_head,
    key_terms,
    keys_in_sight,
    locate,
    mix,
    sees,
    store_tile,
    tile,
)

PITCH = tl.constexpr(DLOGITS_PITCH)
ROW_TERMS = tl.constexpr(ROW_TERMS_ALIGNMENT)


@triton.jit
def _probabilities(products, biases, terms, largest, reciprocal, scale, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the probabilities from products of queries and keys and the statistics of the forward pass."""
    if HAS_BIAS:
        # In the order of the forward pass, and never above the largest: in a row of biases like -1e9 the low digits are
        # lost to rounding, and the same digits must be lost here.
        logits = products * (scale * LOG2E)
        logits += biases.to(tl.float32) * LOG2E
        logits = tl.minimum(logits - largest, 0.0) if not HAS_MASK else logits - largest
    else:
        logits = products * (scale * LOG2E) - largest
    if HAS_MASK:
        logits += terms
    if HAS_MASK or HAS_BIAS:
        return tl.exp2(logits) * reciprocal
    return tl.exp2(logits)


@triton.jit
def row_terms_per_head(total, batch):
    """Return the elements of `delta` per head and kind of row term, with gaps between the packed sequences."""
    return tl.cast(total // ROW_TERMS + batch + 1, tl.int64) * ROW_TERMS


@triton.jit
def row_terms_start(start, z):
    """Return the index in a head's part of `delta` where packed sequence z begins; its first row is `start`."""
    return (start // ROW_TERMS + z) * ROW_TERMS


@triton.jit
def _queries_tiles(
    result, qs, gs, deltas, largest, reciprocal, k, v, mask, bias, keys, begin, end, partners, m_left, position,
    options, columns, head_dim, k_n, v_n,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPS: tl.constexpr,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the contribution of keys `begin` to `end` to the gradient of a tile of queries."""
    threshold, w_left, w_right, scale, inf, kept = options
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k += begin.to(tl.int64) * k_n
    v += begin.to(tl.int64) * v_n
    for column in range(begin, end, BN):
        left = partners - column
        ks = tile(k, left, k_n, head_dim, BN, BD, WHOLE_N, FULL_D)
        products = finite_dot(qs, tl.trans(ks), None, PRECISION)
        biases = products
        terms = products
        if HAS_BIAS:
            biases = bias_tile(bias + column, r[:, None], n[None, :], m_left, left, columns, WHOLE_M, WHOLE_N)
        if HAS_MASK:
            terms = key_terms(mask + column, n, left, inf)[None, :]
        p = _probabilities(
            products, biases, terms, largest[:, None], reciprocal[:, None], scale, HAS_MASK, HAS_BIAS
        )  # fmt: skip
        vs = tile(v, left, v_n, head_dim, BN, BD, WHOLE_N, FULL_D)
        ds = finite_dot(gs, tl.trans(vs), None, PRECISION) * kept - deltas[:, None]
        if DROPS:
            ds = tl.where(is_kept(keys[:, None], (column + n)[None, :], threshold), ds, -deltas[:, None])
        ds = p * ds
        if not WHOLE_N:
            inside = sees((position - column + r)[:, None], n[None, :], left, w_left, w_right, LEFT, RIGHT)
            ds = tl.where(inside, ds, 0.0)
        result = finite_dot(ds.to(ks.dtype), ks, result, PRECISION)
        k += BN * k_n
        v += BN * v_n
    return result


@kernel
@triton.jit
def attention_backward_queries(
    q, k, v, mask, bias, cu, cu_k, seed, out, dout, statistics, delta, dq,
    batch, heads, rows, columns, head_dim, total, total_k,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, g_z, g_h, g_m, d_z, d_h, d_m, s_z, s_h, plane,
    mask_group, bias_group, threshold, w_left, w_right, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPS: tl.constexpr, ALIGN_S: tl.constexpr, ALIGN_M: tl.constexpr,
    ALIGN_N: tl.constexpr, ALIGN_D: tl.constexpr, FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and `delta`, the dot product of each row of `out` with its gradient.

    For packed sequences `delta` holds two terms of each row, [2, H, rows with gaps]: the negative log of its sum of
    exponentials, divided by the scale, and its negative dot product. Sequences begin at multiples of ROW_TERMS there,
    so that `attention_backward_keys` loads two terms at a time, which took 16 loads of a step instead of 32.
    """
    rows = aligned(rows, ALIGN_M)
    columns = aligned(columns, ALIGN_N)
    head_dim = aligned(head_dim, ALIGN_D)
    q_z, q_h, q_m = aligned_strides(q_z, q_h, q_m, ALIGN_S)
    k_z, k_h, k_n = aligned_strides(k_z, k_h, k_n, ALIGN_S)
    v_z, v_h, v_n = aligned_strides(v_z, v_h, v_n, ALIGN_S)
    o_z, o_h, o_m = aligned_strides(o_z, o_h, o_m, ALIGN_S)
    g_z, g_h, g_m = aligned_strides(g_z, g_h, g_m, ALIGN_S)
    d_z, d_h, d_m = aligned_strides(d_z, d_h, d_m, ALIGN_S)
    z, h, first, start, count, start_k, partners = locate(
        tl.program_id(0), cu, cu_k, batch, heads, rows, columns, total, total_k, PACKED, TAIL, BM
    )
    row = start + first
    left = count - first
    qs = tile(q + z * q_z + h * q_h + row * q_m, left, q_m, head_dim, BM, BD, FULL_M, FULL_D)
    outs = tile(out + z * o_z + h * o_h + row * o_m, left, o_m, head_dim, BM, BD, FULL_M, FULL_D)
    gs = tile(dout + z * g_z + h * g_h + row * g_m, left, g_m, head_dim, BM, BD, FULL_M, FULL_D)
    deltas = tl.sum(outs.to(tl.float32) * gs.to(tl.float32), 1)
    r = tl.arange(0, BM)
    statistics += z * s_z + h * s_h + row
    largest = tl.load(statistics + r, mask=r < left, other=0.0)
    reciprocal = largest
    if PACKED:
        per_head = row_terms_per_head(total, batch)
        row_terms = delta + h * per_head + row_terms_start(start, z) + first + r
        tl.store(row_terms, largest * (-1.0 / scale), mask=r < left)
        tl.store(row_terms + heads * per_head, -deltas, mask=r < left)
    else:
        tl.store(delta + z * s_z + h * s_h + row + r, deltas, mask=r < left)
    if HAS_MASK or HAS_BIAS:
        reciprocal = tl.load(statistics + plane + r, mask=r < left, other=0.0)
    else:
        largest *= LOG2E
    k += z * k_z + (h // GROUP) * k_h + start_k * k_n
    v += z * v_z + (h // GROUP) * v_h + start_k * v_n
    if HAS_MASK:
        mask += (z // mask_group) * columns
    if HAS_BIAS:
        bias += (((z // bias_group) * heads + h) * rows + first) * columns
    keys = r.to(tl.uint32)
    if DROPS:
        keys = mix(key_of_head(seed, z * heads + h) ^ (first + r).to(tl.uint32))
    result = tl.zeros((BM, BD), tl.float32)
    position = first + partners - count
    begin, whole_begin, whole_end, end = keys_in_sight(position, partners, w_left, w_right, LEFT, RIGHT, BM, BN)
    options = (threshold, w_left, w_right, scale, inf, kept)
    if FULL_N:
        # At least one tile: if the loop might be empty, the compiler makes the matrix units wait for each product.
        whole_end = tl.maximum(whole_end, BN)
    if LEFT:
        result = _queries_tiles(
            result, qs, gs, deltas, largest, reciprocal, k, v, mask, bias, keys, begin, whole_begin, partners, left,
            position, options, columns, head_dim, k_n, v_n,
            HAS_MASK, HAS_BIAS, LEFT, RIGHT, DROPS, FULL_M, False, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
    result = _queries_tiles(
        result, qs, gs, deltas, largest, reciprocal, k, v, mask, bias, keys, whole_begin, whole_end, partners, left,
        position, options, columns, head_dim, k_n, v_n,
        HAS_MASK, HAS_BIAS, LEFT, RIGHT, DROPS, FULL_M, True, FULL_D, PRECISION, BM, BN, BD,
    )  # fmt: skip
    if not FULL_N:
        result = _queries_tiles(
            result, qs, gs, deltas, largest, reciprocal, k, v, mask, bias, keys, whole_end, end, partners, left,
            position, options, columns, head_dim, k_n, v_n,
            HAS_MASK, HAS_BIAS, LEFT, RIGHT, DROPS, FULL_M, False, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
    store_tile(dq + z * d_z + h * d_h + row * d_m, result * scale, left, d_m, head_dim, BM, BD)


@triton.jit
def _keys_tiles(
    dks, dvs, ks, vs, terms, pointers, begin, end, partners, left, options, sizes, strides,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, STORES: tl.constexpr, WHOLE_M: tl.constexpr, FULL_D: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the contribution of queries `begin` to `end` to the gradients of a tile of keys and values of a batch."""
    q, out, dout, bias, statistics, delta, dlogits = pointers
    scale, kept = options
    columns, head_dim, pitch, plane = sizes
    q_m, o_m, g_m = strides
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    q += begin.to(tl.int64) * q_m
    dout += begin.to(tl.int64) * g_m
    if HAS_BIAS:
        following = bias_tile(bias, r[None, :], n[:, None], partners, left, columns, False, False)
    for row in range(begin, end, BM):
        m_left = partners - row
        qs = tile(q, m_left, q_m, head_dim, BM, BD, WHOLE_M, FULL_D)
        gs = tile(dout, m_left, g_m, head_dim, BM, BD, WHOLE_M, FULL_D)
        # An infinite maximum makes the probabilities beyond the last query 0.
        largest = tl.load(statistics + row + r, mask=r < m_left, other=float("inf"))
        reciprocal = largest
        if HAS_MASK or HAS_BIAS:
            reciprocal = tl.load(statistics + plane + row + r, mask=r < m_left, other=0.0)
        else:
            largest *= LOG2E
        if STORES:
            outs = tile(out, m_left, o_m, head_dim, BM, BD, WHOLE_M, FULL_D)
            deltas = tl.sum(outs.to(tl.float32) * gs.to(tl.float32), 1)
            out += BM * o_m
        else:
            deltas = tl.load(delta + row + r, mask=r < m_left, other=0.0)
        products = finite_dot(ks, tl.trans(qs), None, PRECISION)
        biases = products
        if HAS_BIAS:
            # Loaded a step ahead by hand: the pipeliner does not support transposed tiles.
            biases = following
            bias += BM * columns
            following = bias_tile(bias, r[None, :], n[:, None], m_left - BM, left, columns, False, False)
        p = _probabilities(
            products, biases, terms, largest[None, :], reciprocal[None, :], scale, HAS_MASK, HAS_BIAS
        )  # fmt: skip
        ds = finite_dot(vs, tl.trans(gs), None, PRECISION) * kept - deltas[None, :]
        ds = (p * ds).to(qs.dtype)
        dvs = finite_dot(p.to(gs.dtype), gs, dvs, PRECISION)
        if STORES:
            # Zeros beyond the last query.
            inside = (n[:, None] < left) & (r[None, :] < pitch - row)
            tl.store(dlogits + n[:, None] * pitch + (row + r)[None, :], ds, mask=inside)
        dks = finite_dot(ds, qs, dks, PRECISION)
        q += BM * q_m
        dout += BM * g_m
    return dks, dvs


@triton.jit
def _packed_keys_tiles(
    dks, dvs, ks, vs, pointers, begin, gap_begin, gap_end, end, partners, first, position, options, strides,
    GROUP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPS: tl.constexpr, WHOLE_M: tl.constexpr,
    FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the contribution of GROUP heads of queries to the gradients of a tile of keys and values.

    It covers queries `begin` to `end` except those from `gap_begin` to `gap_end`. One loop runs over all heads, because
    a loop has to wait for its first loads. `position` belongs to the first query of the sequence, and is counted from
    the first key of the tile.
    """
    q, dout, row_terms, seed = pointers
    threshold, w_left, w_right, scale, kept, first_head, head_dim = options
    q_h, q_m, g_h, g_m, per_head, plane = strides
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    steps = tl.cdiv(tl.maximum(gap_begin - begin, 0), BM) + tl.cdiv(tl.maximum(end - gap_end, 0), BM)
    begin = tl.where(begin < gap_begin, begin, gap_end)
    row = begin
    head = begin * 0
    q += begin.to(tl.int64) * q_m
    dout += begin.to(tl.int64) * g_m
    row_terms += tl.multiple_of(begin, BM)
    for _ in range(steps * GROUP):
        m_left = partners - row
        qs = tile(q, m_left, q_m, head_dim, BM, BD, WHOLE_M, FULL_D)
        gs = tile(dout, m_left, g_m, head_dim, BM, BD, WHOLE_M, FULL_D)
        terms = row_terms + r
        if WHOLE_M:
            shifts = tl.load(terms)
            deltas = tl.load(terms + plane)
        else:
            # -inf makes the probabilities of rows after the last query 0.
            shifts = tl.load(terms, mask=r < m_left, other=float("-inf"))
            deltas = tl.load(terms + plane, mask=r < m_left, other=0.0)
        # Sums of products begin with what would be subtracted from them, which takes no registers of its own: heads of
        # 128 then need no memory for registers in this loop, where 93 loads and 57 stores were in a step.
        shifts = tl.broadcast_to(shifts[None, :], (BN, BM))
        p = tl.exp2(finite_dot(ks, tl.trans(qs), shifts, PRECISION) * (scale * LOG2E))
        if (LEFT or RIGHT) and not WHOLE_M:
            p = tl.where(sees((position + row + r)[None, :], n[:, None], BN, w_left, w_right, LEFT, RIGHT), p, 0.0)
        dropped = p
        if DROPS:
            row_keys = mix(key_of_head(seed, first_head + head) ^ (row + r).to(tl.uint32))
            keep = is_kept(row_keys[None, :], (first + n)[:, None], threshold)
            ds = finite_dot(vs, tl.trans(gs), None, PRECISION) * kept + deltas[None, :]
            ds = tl.where(keep, ds, deltas[None, :])
            dropped = tl.where(keep, p, 0.0)
        else:
            ds = finite_dot(vs, tl.trans(gs), None, PRECISION) + deltas[None, :]
        ds = (p * ds).to(qs.dtype)
        dvs = finite_dot(dropped.to(gs.dtype), gs, dvs, PRECISION)
        dks = finite_dot(ds, qs, dks, PRECISION)
        advanced = row + BM
        if not WHOLE_M:
            advanced = tl.where(advanced == gap_begin, gap_end, advanced)
        ends = advanced >= end
        move = tl.multiple_of(tl.where(ends, begin, advanced) - row, BM)
        row += move
        q += move.to(tl.int64) * q_m + tl.where(ends, q_h, 0)
        dout += move.to(tl.int64) * g_m + tl.where(ends, g_h, 0)
        row_terms += move + tl.where(ends, per_head, 0)
        if DROPS:
            head += ends.to(tl.int32)
    return dks, dvs


@kernel
@triton.jit
def attention_backward_keys(
    q, k, v, mask, bias, cu, cu_k, seed, out, dout, statistics, delta, dlogits, dk, dv,
    batch, heads, rows, columns, head_dim, total, total_k,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, g_z, g_h, g_m, dk_z, dk_h, dk_n, dv_z, dv_h, dv_n,
    s_z, s_h, plane,
    mask_group, bias_group, threshold, w_left, w_right, first_batch, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPS: tl.constexpr, STORES: tl.constexpr, ALIGN_S: tl.constexpr,
    ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_D: tl.constexpr, FULL_M: tl.constexpr, FULL_N: tl.constexpr,
    FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values. Tiles are transposed: keys by queries.

    A program sums the gradients from all GROUP heads of queries that share its head of keys, so that no two programs
    add to the same element.

    With STORES, the gradient of the logits is stored in `dlogits` [batches, H, N, pitch of M] for batches from
    `first_batch` on; the gradients of queries and bias are computed from it. `delta` is then computed here from `out`.
    """
    rows = aligned(rows, ALIGN_M)
    columns = aligned(columns, ALIGN_N)
    head_dim = aligned(head_dim, ALIGN_D)
    q_z, q_h, q_m = aligned_strides(q_z, q_h, q_m, ALIGN_S)
    k_z, k_h, k_n = aligned_strides(k_z, k_h, k_n, ALIGN_S)
    v_z, v_h, v_n = aligned_strides(v_z, v_h, v_n, ALIGN_S)
    o_z, o_h, o_m = aligned_strides(o_z, o_h, o_m, ALIGN_S)
    g_z, g_h, g_m = aligned_strides(g_z, g_h, g_m, ALIGN_S)
    dk_z, dk_h, dk_n = aligned_strides(dk_z, dk_h, dk_n, ALIGN_S)
    dv_z, dv_h, dv_n = aligned_strides(dv_z, dv_h, dv_n, ALIGN_S)
    pitch = tl.cdiv(rows, PITCH) * PITCH
    bounds = cu
    bounds_q = cu_k
    total_rows = total
    if cu_k is not None:
        bounds = cu_k
        bounds_q = cu
        total_rows = total_k
    z, h, first, start, count, start_q, partners = locate(
        tl.program_id(0), bounds, bounds_q, batch, heads // GROUP, columns, rows, total_rows, total, PACKED, TAIL, BN
    )
    if STORES:
        dlogits += ((z * heads + h) * columns + first) * pitch
        z += first_batch
    column = start + first
    left = count - first
    ks = tile(k + z * k_z + h * k_h + column * k_n, left, k_n, head_dim, BN, BD, FULL_N, FULL_D)
    vs = tile(v + z * v_z + h * v_h + column * v_n, left, v_n, head_dim, BN, BD, FULL_N, FULL_D)
    n = tl.arange(0, BN)
    terms = tl.zeros((BN, 1), tl.float32)
    if HAS_MASK:
        terms = key_terms(mask + (z // mask_group) * columns + first, n, left, inf)[:, None]
    if HAS_BIAS:
        bias += ((z // bias_group) * heads + h) * rows * columns + first
    dks = tl.zeros((BN, BD), tl.float32)
    dvs = tl.zeros((BN, BD), tl.float32)
    # The first query's position, counted from the tile's first key; the last query has the last key's position.
    position = count - partners - first
    begin = partners * 0
    end = tl.maximum(partners, BM) if FULL_M else partners
    whole_begin = begin
    whole_end = partners // BM * BM
    if RIGHT:
        begin = tl.maximum(-position - w_right, 0) // BM * BM
        whole_begin = tl.cdiv(tl.maximum(BN - 1 - position - w_right, 0), BM) * BM
    if LEFT:
        end = tl.minimum(partners, tl.maximum(BN - position + w_left, 0))
        whole_end = tl.minimum(whole_end, tl.maximum(1 - position + w_left, 0) // BM * BM)
    whole_end = tl.maximum(whole_end, begin)
    whole_begin = tl.minimum(whole_begin, whole_end)
    if PACKED:
        head = h * GROUP
        per_head = row_terms_per_head(total, batch)
        packed = (
            q + head * q_h + start_q * q_m,
            dout + head * g_h + start_q * g_m,
            delta + head * per_head + row_terms_start(start_q, z),
            seed,
        )
        options = (threshold, w_left, w_right, scale, kept, z * heads + head, head_dim)
        strides = (tl.cast(q_h, tl.int64), q_m, tl.cast(g_h, tl.int64), g_m, per_head, heads * per_head)
        dks, dvs = _packed_keys_tiles(
            dks, dvs, ks, vs, packed, begin, whole_begin, whole_end, end, partners, first, position, options, strides,
            GROUP, LEFT, RIGHT, DROPS, False, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
        dks, dvs = _packed_keys_tiles(
            dks, dvs, ks, vs, packed, whole_begin, whole_end, whole_end, whole_end, partners, first, position, options,
            strides,
            GROUP, LEFT, RIGHT, DROPS, True, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
    else:
        row_offset = z * s_z + h * s_h
        row_delta = statistics  # not read with STORES; Triton 3.6 takes no variable that is None into a tuple
        if not STORES:
            row_delta = delta + row_offset
        pointers = (
            q + z * q_z + h * q_h,
            out + z * o_z + h * o_h,
            dout + z * g_z + h * g_h,
            bias,
            statistics + row_offset,
            row_delta,
            dlogits,
        )
        dks, dvs = _keys_tiles(
            dks, dvs, ks, vs, terms, pointers, begin, end, partners, left, (scale, kept),
            (columns, head_dim, pitch, plane), (q_m, o_m, g_m),
            HAS_MASK, HAS_BIAS, STORES, FULL_M, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
    store_tile(dk + z * dk_z + h * dk_h + column * dk_n, dks * scale, left, dk_n, head_dim, BN, BD)
    store_tile(dv + z * dv_z + h * dv_h + column * dv_n, dvs * kept, left, dv_n, head_dim, BN, BD)


@triton.jit
def _sum_of_batches(
    dlogits, dbias, program, plane, group, first_group, rows, pitch,
    ADDS: tl.constexpr, BATCHES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Sum ELEMENTS of the gradient of a bias that `group` batches share; a batch's gradients of logits are a plane."""
    blocks = tl.cdiv(plane, ELEMENTS)
    group_index = program // blocks
    e = (program % blocks) * ELEMENTS + tl.arange(0, ELEMENTS)
    z = tl.arange(0, BATCHES)
    dbias += (first_group + group_index) * plane + e
    inside = (e < plane) & (e % pitch < rows)
    pointers = dlogits + (group_index * group + z[:, None]) * plane + e[None, :]
    # Each element of a block has a sum of its own, so that threads need not wait for each other in the loop.
    own_sums = tl.zeros((BATCHES, ELEMENTS), tl.float32)
    for batch in range(0, group, BATCHES):
        values = tl.load(pointers, mask=(z[:, None] < group - batch) & (e[None, :] < plane), other=0.0)
        own_sums += values.to(tl.float32)
        pointers += BATCHES * plane
    sums = tl.sum(own_sums, 0)
    if ADDS:
        sums += tl.load(dbias, mask=inside, other=0.0)
    tl.store(dbias, sums.to(dbias.dtype.element_ty), mask=inside)


@kernel
@triton.jit
def attention_backward_stored(
    dlogits, k, dq, dbias,
    heads, rows, columns, head_dim, k_z, k_h, k_n, d_z, d_h, d_m, first_batch, programs, group, first_group, scale,
    SUMS: tl.constexpr, ADDS: tl.constexpr, ALIGN_S: tl.constexpr, ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr,
    ALIGN_D: tl.constexpr, FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BATCHES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries from the gradient of the logits that `attention_backward_keys` stored.

    With SUMS, programs from `programs` on sum the gradients of logits of the `group` batches that share a bias into
    `dbias` [groups, H, N, pitch of M]. With ADDS, they add to the values already in `dbias`.
    """
    pitch = tl.cdiv(aligned(rows, ALIGN_M), PITCH) * PITCH
    columns = aligned(columns, ALIGN_N)
    head_dim = aligned(head_dim, ALIGN_D)
    k_z, k_h, k_n = aligned_strides(k_z, k_h, k_n, ALIGN_S)
    d_z, d_h, d_m = aligned_strides(d_z, d_h, d_m, ALIGN_S)
    program = tl.program_id(0)
    if program >= programs:
        if SUMS:
            plane = tl.cast(heads, tl.int64) * columns * pitch
            _sum_of_batches(
                dlogits, dbias, program - programs, plane, group, first_group, rows, pitch, ADDS, BATCHES, ELEMENTS
            )
    else:
        blocks = tl.cdiv(rows, BM)
        zh = (program // blocks).to(tl.int64)
        first = (program % blocks) * BM
        z = zh // heads + first_batch
        h = zh % heads
        dlogits += zh * columns * pitch + first
        k += z * k_z + h * k_h
        left = rows - first
        r = tl.arange(0, BM)
        n = tl.arange(0, BN)
        result = tl.zeros((BM, BD), tl.float32)
        for column in range(0, columns, BN):
            pointers = dlogits + n[:, None] * pitch + r[None, :]
            if FULL_M and FULL_N:
                ds = tl.load(pointers)
            else:
                ds = tl.load(pointers, mask=(n[:, None] < columns - column) & (r[None, :] < pitch - first), other=0.0)
            ks = tile(k, columns - column, k_n, head_dim, BN, BD, FULL_N, FULL_D)
            result = finite_dot(tl.trans(ds), ks, result, PRECISION)
            k += BN * k_n
            dlogits += tl.cast(BN, tl.int64) * pitch
        store_tile(dq + z * d_z + h * d_h + first.to(tl.int64) * d_m, result * scale, left, d_m, head_dim, BM, BD)
