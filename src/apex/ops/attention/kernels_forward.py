"""Forward kernel of attention, in Triton; `kernels_common` explains the letters."""

import triton
import triton.language as tl

from .._launch import kernel
from .kernels_common import (
    LN2,
    LOG2E,
    aligned,
    aligned_strides,
    bias_tile,
    dot,
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


@triton.jit
def _forward_tiles(
    result, largest, norm, qs, k, v, mask, bias, keys, begin, end, partners, m_left, position, options, head_dim, k_n,
    v_n,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPS: tl.constexpr,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Update the running result, maximum and sum of one tile of queries with keys `begin` to `end`."""
    _, _, threshold, w_left, w_right, pitch, scale, inf, _ = options
    r = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k += begin.to(tl.int64) * k_n
    v += begin.to(tl.int64) * v_n
    for column in range(begin, end, BN):
        left = partners - column
        ks = tile(k, left, k_n, head_dim, BN, BD, WHOLE_N, FULL_D)
        products = dot(qs, tl.trans(ks), None, PRECISION)
        if HAS_MASK or HAS_BIAS:
            logits = products * (scale * LOG2E)
            if HAS_BIAS:
                # The rows of the bias are as long as their pitch, so tiles may be loaded up to the pitch.
                inside = pitch - column
                biases = bias_tile(bias + column, r[:, None], n[None, :], m_left, inside, pitch, WHOLE_M, WHOLE_N)
                logits += biases.to(tl.float32) * LOG2E
            if HAS_MASK:
                logits += key_terms(mask + column, n, left, inf)[None, :]
            if not WHOLE_N:
                logits = tl.where(n[None, :] < left, logits, float("-inf"))
            new = tl.maximum(largest, tl.max(logits, 1))
            if HAS_BIAS:
                new = tl.where(new == float("-inf"), 0.0, new)  # a bias may hold -inf for whole tiles
            p = tl.exp2(logits - new[:, None])
            correction = tl.exp2(largest - new)
        else:
            if not WHOLE_N:
                inside = sees((position - column + r)[:, None], n[None, :], left, w_left, w_right, LEFT, RIGHT)
                products = tl.where(inside, products, float("-inf"))
            # The scale is positive, so the maximum may be taken first; one instruction then multiplies and subtracts.
            new = tl.maximum(largest, tl.max(products, 1) * (scale * LOG2E))
            if (LEFT or RIGHT) and not WHOLE_N:
                shift = tl.where(new == float("-inf"), 0.0, new)  # a row may see no key so far
            else:
                shift = new
            p = tl.exp2(products * (scale * LOG2E) - shift[:, None])
            correction = tl.exp2(largest - shift)
        norm = norm * correction + tl.sum(p, 1)
        result = result * correction[:, None]
        if DROPS:
            p = tl.where(is_kept(keys[:, None], (column + n)[None, :], threshold), p, 0.0)
        vs = tile(v, left, v_n, head_dim, BN, BD, WHOLE_N, FULL_D)
        result = dot(p.to(vs.dtype), vs, result, PRECISION)
        largest = new
        k += BN * k_n
        v += BN * v_n
    return result, largest, norm


@triton.jit
def _forward_program(
    program, tensors, sizes, strides, options,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPS: tl.constexpr, SAVES: tl.constexpr, FULL_M: tl.constexpr,
    FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    q, k, v, mask, bias, cu, cu_k, seed, out, statistics = tensors
    batch, heads, rows, columns, head_dim, total, total_k = sizes
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, s_z, s_h, plane = strides
    mask_group, bias_group, _, w_left, w_right, pitch, _, _, kept = options
    z, h, first, start, count, start_k, partners = locate(
        program, cu, cu_k, batch, heads, rows, columns, total, total_k, PACKED, TAIL, BM
    )
    row = start + first
    left = count - first
    qs = tile(q + z * q_z + h * q_h + row * q_m, left, q_m, head_dim, BM, BD, FULL_M, FULL_D)
    k += z * k_z + (h // GROUP) * k_h + start_k * k_n
    v += z * v_z + (h // GROUP) * v_h + start_k * v_n
    if HAS_MASK:
        mask += (z // mask_group) * columns
    if HAS_BIAS:
        bias += (((z // bias_group) * heads + h) * rows + first) * pitch
    r = tl.arange(0, BM)
    keys = r.to(tl.uint32)
    if DROPS:
        keys = mix(key_of_head(seed, z * heads + h) ^ (first + r).to(tl.uint32))
    largest = tl.full((BM,), float("-inf"), tl.float32)
    norm = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, BD), tl.float32)
    position = first + partners - count
    begin, whole_begin, whole_end, end = keys_in_sight(position, partners, w_left, w_right, LEFT, RIGHT, BM, BN)
    if FULL_N:
        # At least one tile: if the loop might be empty, the compiler makes the matrix units wait for each product.
        whole_end = tl.maximum(whole_end, BN)
    if LEFT:
        result, largest, norm = _forward_tiles(
            result, largest, norm, qs, k, v, mask, bias, keys, begin, whole_begin, partners, left, position, options,
            head_dim, k_n, v_n,
            HAS_MASK, HAS_BIAS, LEFT, RIGHT, DROPS, FULL_M, False, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
    result, largest, norm = _forward_tiles(
        result, largest, norm, qs, k, v, mask, bias, keys, whole_begin, whole_end, partners, left, position, options,
        head_dim, k_n, v_n,
        HAS_MASK, HAS_BIAS, LEFT, RIGHT, DROPS, FULL_M, True, FULL_D, PRECISION, BM, BN, BD,
    )  # fmt: skip
    if not FULL_N:
        result, largest, norm = _forward_tiles(
            result, largest, norm, qs, k, v, mask, bias, keys, whole_end, end, partners, left, position, options,
            head_dim, k_n, v_n,
            HAS_MASK, HAS_BIAS, LEFT, RIGHT, DROPS, FULL_M, False, FULL_D, PRECISION, BM, BN, BD,
        )  # fmt: skip
    reciprocal = 1.0 / norm
    if PACKED:
        reciprocal = tl.where(norm == 0.0, 0.0, reciprocal)  # rows that see no key
    weight = reciprocal * kept if DROPS else reciprocal
    store_tile(out + z * o_z + h * o_h + row * o_m, result * weight[:, None], left, o_m, head_dim, BM, BD)
    if SAVES:
        statistics += z * s_z + h * s_h + row
        if HAS_MASK or HAS_BIAS:
            tl.store(statistics + r, largest, mask=r < left)
            tl.store(statistics + plane + r, reciprocal, mask=r < left)
        else:
            tl.store(statistics + r, (largest + tl.log2(norm)) * LN2, mask=r < left)


@kernel
@triton.jit
def attention_forward(
    q, k, v, mask, bias, cu, cu_k, seed, out, statistics,
    batch, heads, rows, columns, head_dim, total, total_k,
    q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, s_z, s_h, plane,
    mask_group, bias_group, threshold, w_left, w_right, pitch, scale, inf, kept,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPS: tl.constexpr, SAVES: tl.constexpr, REPAIRS: tl.constexpr,
    ALIGN_P: tl.constexpr, ALIGN_S: tl.constexpr, ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_D: tl.constexpr,
    FULL_M: tl.constexpr, FULL_N: tl.constexpr, FULL_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute output and statistics, one tile of queries per program. `pitch` is the row stride of the bias.

    With REPAIRS, the output already holds the result for packed sequences that fill all rows. A few programs then end
    at once if the sequences fill all rows, or compute all tiles if they do not.
    """
    sizes = (
        batch,
        heads,
        aligned(rows, ALIGN_M),
        aligned(columns, ALIGN_N),
        aligned(head_dim, ALIGN_D),
        total,
        total_k,
    )
    q_z, q_h, q_m = aligned_strides(q_z, q_h, q_m, ALIGN_S)
    k_z, k_h, k_n = aligned_strides(k_z, k_h, k_n, ALIGN_S)
    v_z, v_h, v_n = aligned_strides(v_z, v_h, v_n, ALIGN_S)
    o_z, o_h, o_m = aligned_strides(o_z, o_h, o_m, ALIGN_S)
    strides = (q_z, q_h, q_m, k_z, k_h, k_n, v_z, v_h, v_n, o_z, o_h, o_m, s_z, s_h, plane)
    options = (mask_group, bias_group, threshold, w_left, w_right, aligned(pitch, ALIGN_P), scale, inf, kept)
    tensors = (q, k, v, mask, bias, cu, cu_k, seed, out, statistics)
    if REPAIRS:
        filled = tl.load(cu + batch) == total
        tiles = batch * heads * tl.cdiv(rows, BM)
        tiles = tl.where(filled, 0, tiles)
        for program in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _forward_program(
                program, tensors, sizes, strides, options,
                HAS_MASK, HAS_BIAS, PACKED, TAIL, GROUP, LEFT, RIGHT, DROPS, SAVES, FULL_M, FULL_N, FULL_D, PRECISION,
                BM, BN, BD,
            )  # fmt: skip
    else:
        _forward_program(
            tl.program_id(0), tensors, sizes, strides, options,
            HAS_MASK, HAS_BIAS, PACKED, TAIL, GROUP, LEFT, RIGHT, DROPS, SAVES, FULL_M, FULL_N, FULL_D, PRECISION,
            BM, BN, BD,
        )  # fmt: skip
