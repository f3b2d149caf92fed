"""Backward kernels of attention, in Triton; `kernels_common` explains the letters."""

import triton
import triton.language as tl

from .._launch import kernel
from .config import DLOGITS_PITCH
from .kernels_common import (
    LOG2E,
    aligned,
    aligned_strides,
    bias_tile,
    finite_dot,
    is_kept,
    key_of_head,
    key_terms,
    locate,
    mix,
    store_tile,
    tile,
)

PITCH = tl.constexpr(DLOGITS_PITCH)


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
def _queries_tiles(
    result, qs, gs, deltas, largest, reciprocal, k, v, mask, bias, keys, begin, end, partners, m_left, columns,
    head_dim, k_n, v_n, threshold, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr,
    FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the contribution of keys `begin` to `end` to the gradient of a tile of queries."""
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
            ds = tl.where(n[None, :] < left, ds, 0.0)
        result = finite_dot(ds.to(ks.dtype), ks, result, PRECISION)
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
    ALIGN_S: tl.constexpr, ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_D: tl.constexpr, FULL_M: tl.constexpr,
    FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and `delta`, the dot product of each row of `out` with its gradient."""
    rows = aligned(rows, ALIGN_M)
    columns = aligned(columns, ALIGN_N)
    head_dim = aligned(head_dim, ALIGN_D)
    q_z, q_h, q_m = aligned_strides(q_z, q_h, q_m, ALIGN_S)
    k_z, k_h, k_n = aligned_strides(k_z, k_h, k_n, ALIGN_S)
    v_z, v_h, v_n = aligned_strides(v_z, v_h, v_n, ALIGN_S)
    o_z, o_h, o_m = aligned_strides(o_z, o_h, o_m, ALIGN_S)
    g_z, g_h, g_m = aligned_strides(g_z, g_h, g_m, ALIGN_S)
    d_z, d_h, d_m = aligned_strides(d_z, d_h, d_m, ALIGN_S)
    z, h, first, start, count, partners = locate(
        tl.program_id(0), cu, batch, heads, rows, columns, total, PACKED, TAIL, BM
    )
    row = start + first
    left = count - first
    qs = tile(q + z * q_z + h * q_h + row * q_m, left, q_m, head_dim, BM, BD, FULL_M, FULL_D)
    outs = tile(out + z * o_z + h * o_h + row * o_m, left, o_m, head_dim, BM, BD, FULL_M, FULL_D)
    gs = tile(dout + z * g_z + h * g_h + row * g_m, left, g_m, head_dim, BM, BD, FULL_M, FULL_D)
    deltas = tl.sum(outs.to(tl.float32) * gs.to(tl.float32), 1)
    r = tl.arange(0, BM)
    statistics += z * s_z + h * s_h + row
    tl.store(delta + z * s_z + h * s_h + row + r, deltas, mask=r < left)
    largest = tl.load(statistics + r, mask=r < left, other=0.0)
    reciprocal = largest
    if HAS_MASK or HAS_BIAS:
        reciprocal = tl.load(statistics + plane + r, mask=r < left, other=0.0)
    else:
        largest *= LOG2E
    k += z * k_z + h * k_h + start * k_n
    v += z * v_z + h * v_h + start * v_n
    if HAS_MASK:
        mask += (z // mask_group) * columns
    if HAS_BIAS:
        bias += (((z // bias_group) * heads + h) * rows + first) * columns
    keys = r.to(tl.uint32)
    if DROPS:
        keys = mix(key_of_head(seed, z * heads + h) ^ (first + r).to(tl.uint32))
    result = tl.zeros((BM, BD), tl.float32)
    whole = partners // BN * BN
    if FULL_N:
        # At least one tile: if the loop might be empty, the compiler makes the matrix units wait for each product.
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
    store_tile(dq + z * d_z + h * d_h + row * d_m, result * scale, left, d_m, head_dim, BM, BD)


@kernel
@triton.jit
def attention_backward_keys(
    q, k, v, mask, bias, cu, seed, out, dout, statistics, delta, dlogits, dk, dv,
    batch, heads, rows, columns, head_dim, total,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, g_z, g_h, g_m, dk_z, dk_h, dk_n, dv_z, dv_h, dv_n,
    s_z, s_h, plane,
    mask_group, bias_group, threshold, first_batch, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, DROPS: tl.constexpr,
    STORES: tl.constexpr, ALIGN_S: tl.constexpr, ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_D: tl.constexpr,
    FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values. Tiles are transposed: keys by queries.

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
    z, h, first, start, count, partners = locate(
        tl.program_id(0), cu, batch, heads, columns, rows, total, PACKED, TAIL, BN
    )
    if STORES:
        dlogits += ((z * heads + h) * columns + first) * pitch
        z += first_batch
    column = start + first
    left = count - first
    ks = tile(k + z * k_z + h * k_h + column * k_n, left, k_n, head_dim, BN, BD, FULL_N, FULL_D)
    vs = tile(v + z * v_z + h * v_h + column * v_n, left, v_n, head_dim, BN, BD, FULL_N, FULL_D)
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
        terms = key_terms(mask + (z // mask_group) * columns + first, n, left, inf)[:, None]
    if HAS_BIAS:
        bias += ((z // bias_group) * heads + h) * rows * columns + first
        following = bias_tile(bias, r[None, :], n[:, None], partners, left, columns, False, False)
    if DROPS:
        head_key = key_of_head(seed, z * heads + h)
    dks = tl.zeros((BN, BD), tl.float32)
    dvs = tl.zeros((BN, BD), tl.float32)
    for row in range(0, tl.maximum(partners, BM) if FULL_M else partners, BM):
        m_left = partners - row
        qs = tile(q, m_left, q_m, head_dim, BM, BD, FULL_M, FULL_D)
        gs = tile(dout, m_left, g_m, head_dim, BM, BD, FULL_M, FULL_D)
        # An infinite maximum makes the probabilities beyond the last query 0.
        largest = tl.load(statistics + row + r, mask=r < m_left, other=float("inf"))
        reciprocal = largest
        if HAS_MASK or HAS_BIAS:
            reciprocal = tl.load(statistics + plane + row + r, mask=r < m_left, other=0.0)
        else:
            largest *= LOG2E
        if STORES:
            outs = tile(out, m_left, o_m, head_dim, BM, BD, FULL_M, FULL_D)
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
        dp = finite_dot(vs, tl.trans(gs), None, PRECISION)
        ds = dp * kept - deltas[None, :]
        dropped = p
        if DROPS:
            row_keys = mix(head_key ^ (row + r).to(tl.uint32))
            keep = is_kept(row_keys[None, :], (first + n)[:, None], threshold)
            ds = tl.where(keep, ds, -deltas[None, :])
            dropped = tl.where(keep, p, 0.0)
        ds = (p * ds).to(qs.dtype)
        dvs = finite_dot(dropped.to(gs.dtype), gs, dvs, PRECISION)
        if STORES:
            # Zeros beyond the last query.
            inside = (n[:, None] < left) & (r[None, :] < pitch - row)
            tl.store(dlogits + n[:, None] * pitch + (row + r)[None, :], ds, mask=inside)
        dks = finite_dot(ds, qs, dks, PRECISION)
        q += BM * q_m
        dout += BM * g_m
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
