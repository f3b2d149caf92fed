"""Functions that the attention kernels share, and the letters and formulas of all of them.

Letters: Z batches (or packed sequences), H heads, M queries, N keys, D the size of a head. A program takes a tile of
queries (forward, gradient of the queries) or of keys (gradients of keys and values), so that no two programs write the
same element.

    logits = scale * q k^T + bias + (mask - 1) * inf        probabilities = softmax(logits)
    out = dropout(probabilities) v

`q_z, q_h, q_m` are strides of q, in elements, for each letter; the innermost dimension of every tensor has stride 1.
`cu` holds the first row of each packed sequence of queries, then the end of the last one. `cu_k` holds the rows of
keys, or is None if queries and keys have the same bounds. GROUP heads of the queries share a head of keys and values.
The last query of a sequence has the position of its last key. With RIGHT, a query sees keys up to `w_right` after its
own position, so that causal attention is RIGHT with `w_right` 0. With LEFT, it sees keys from `w_left` before it on.

Logits are kept in units of log 2. With a mask or bias, `statistics` holds the largest logit of each row and the
reciprocal of its sum of exponentials. Without both it holds the natural logarithm of a row's sum of exponentials, as
PyTorch's attentions return it. The loops run twice: over whole tiles without masks, then over the remainder with masks.
With LEFT, masked tiles come first, too.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Bounds of packed sequences that a program reads at a time when it looks for its own.
SEARCHED = tl.constexpr(256)


@triton.jit
def dot(a, b, result, PRECISION: tl.constexpr):
    """Return result + a b, in float32."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), result)
    return tl.dot(a, b, result, input_precision=PRECISION)


@triton.jit
def _leading(x):
    """Return float32 numbers rounded to the leading digits that the matrix units take."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def finite_dot(a, b, result, PRECISION: tl.constexpr):
    """Return `dot(a, b, result)`, except that an infinity in `a` or `b` gives NaN.

    Triton's own three passes in float32 test every sum for NaN from infinities, a fifth of a loop's instructions.
    """
    if PRECISION == "tf32x3":
        a_leading = _leading(a)
        b_leading = _leading(b)
        products = tl.dot(a - a_leading, b_leading, input_precision="tf32")
        products = tl.dot(a_leading, b - b_leading, products, input_precision="tf32")
        products = tl.dot(a_leading, b_leading, products, input_precision="tf32")
        return products if result is None else result + products
    return dot(a, b, result, PRECISION)


@triton.jit
def aligned(size, ALIGN: tl.constexpr):
    """Return `size`, marked as a multiple of ALIGN; by itself Triton notices only multiples of 16."""
    return size // ALIGN * ALIGN


@triton.jit
def aligned_strides(z, h, m, ALIGN: tl.constexpr):
    """Return the strides of batch, head and row, marked as multiples of ALIGN."""
    return aligned(z, ALIGN), aligned(h, ALIGN), aligned(m, ALIGN)


@triton.jit
def mix(x):
    """Return a hash of 32-bit numbers: a bijection that leaves no pattern behind."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def key_of_head(seed, zh):
    """Return a dropout key for each head, from the 64 bits of the seed."""
    bits = tl.load(seed).to(tl.uint64)
    low = (bits & 0xFFFFFFFF).to(tl.uint32)
    high = (bits >> 32).to(tl.uint32)
    return mix(mix(mix(low) ^ high) ^ zh.to(tl.uint32))


@triton.jit
def is_kept(row_keys, n, threshold):
    """Return whether dropout keeps the elements of rows `row_keys` and columns `n`, which broadcast against each other.

    The keys of rows are well mixed, so that a single round of mixing is enough.
    """
    x = row_keys + n.to(tl.uint32) * 0x9E3779B9
    return (x ^ (x >> 15)) * 0x2C1B3C6D >= threshold.to(tl.uint32) << 1


@triton.jit
def _bounds(cu, z, batch, total):
    """Return the first row and the number of rows of packed sequence z; past the last sequence, of the remaining rows.

    Both are clamped, so that no value of `cu` makes a kernel read or write outside of the rows.
    """
    start = tl.minimum(tl.maximum(tl.load(cu + z), 0), total).to(tl.int32)
    end = tl.minimum(tl.load(cu + z + 1, mask=z < batch, other=total), total).to(tl.int32)
    return start, end - start


@triton.jit
def _find(cu, number, batch, BLOCK: tl.constexpr):
    """Return the packed sequence z of tile `number`, and the first row of the tile in the sequence.

    Rows after the last sequence count as one more sequence. The tiles of z begin at number cu[z] // BLOCK + z. Each
    sequence has at most one tile too many, so that few programs are idle, and no prefix sum over lengths is needed.
    """
    i = tl.arange(0, SEARCHED)
    begun = tl.zeros((SEARCHED,), tl.int32)
    for base in range(0, batch + 1, SEARCHED):
        start = tl.load(cu + base + i, mask=base + i <= batch, other=0).to(tl.int32)
        begun += ((base + i <= batch) & (start // BLOCK + base + i <= number)).to(tl.int32)
    z = tl.maximum(tl.sum(begun, 0) - 1, 0)
    return z, tl.maximum(number - (tl.load(cu + z).to(tl.int32) // BLOCK + z), 0) * BLOCK


@triton.jit
def locate(
    program, cu, cu_other, batch, heads, rows, columns, total, total_other,
    PACKED: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a program's tile (batch, head, first row) and its sequence (start, rows, start of partners, partners).

    Partners are the keys of queries, or the queries of keys.
    With TAIL, rows after the last packed sequence have no partners: their results are zeros. A tile beyond the end of
    its sequence also has 0 partners, and so nothing to do.
    """
    blocks = tl.cdiv(rows, BLOCK)
    start = program * 0
    other_start = start
    count = rows
    partners = columns
    zh = program // blocks
    first = (program % blocks) * BLOCK
    z = zh // heads
    h = zh % heads
    if PACKED:
        if TAIL:
            tiles = total // BLOCK + batch + 1
            h = program // tiles
            z, first = _find(cu, program % tiles, batch, BLOCK)
        start, count = _bounds(cu, z, batch, total)
        other_start = start
        partners = count
        if cu_other is not None:
            other_start, partners = _bounds(cu_other, z, batch, total_other)
        partners = tl.where((z < batch) & (first < count), partners, 0)
    return z.to(tl.int64), h.to(tl.int64), first, start.to(tl.int64), count, other_start.to(tl.int64), partners


@triton.jit
def keys_in_sight(
    position, partners, w_left, w_right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return where the keys of a tile of queries begin, where its whole tiles begin and end, and where keys end.

    All but the last are multiples of BN. `position` is the first query's position among the keys. A tile of keys is
    whole if every query of the tile sees every key of it.
    """
    begin = partners * 0
    end = partners
    whole_end = partners // BN * BN
    if RIGHT:
        end = tl.minimum(partners, tl.maximum(position + BM + w_right, 0))
        whole_end = tl.minimum(whole_end, tl.maximum(position + w_right + 1, 0) // BN * BN)
    whole_begin = begin
    if LEFT:
        begin = tl.maximum(position - w_left, 0) // BN * BN
        whole_end = tl.maximum(whole_end, begin)
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(position + BM - 1 - w_left, 0), BN) * BN, whole_end)
    return begin, whole_begin, whole_end, end


@triton.jit
def sees(position, n, left, w_left, w_right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Return whether queries at `position` see keys `n`; `left` keys exist, and `position` and `n` broadcast."""
    inside = n < left
    if RIGHT:
        inside = inside & (n <= position + w_right)
    if LEFT:
        inside = inside & (n >= position - w_left)
    return inside


@triton.jit
def tile(base, left, stride, head_dim, ROWS: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr, FULL_D: tl.constexpr):
    """Return rows 0 to ROWS of a matrix, with zeros from row `left` on unless the tile is known to be WHOLE."""
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
def store_tile(base, values, left, stride, head_dim, ROWS: tl.constexpr, BD: tl.constexpr):
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    inside = (r[:, None] < left) & (d[None, :] < head_dim)
    tl.store(base + r[:, None] * stride + d[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def key_terms(mask, n, left, inf):
    """Return the terms that the mask adds to the logits of each key."""
    return (tl.load(mask + n, mask=n < left, other=1.0).to(tl.float32) - 1.0) * (inf * LOG2E)


@triton.jit
def bias_tile(bias, m, n, m_left, n_left, pitch, WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr):
    """Return the bias of queries `m` and keys `n`, which broadcast against each other, in either order."""
    pointers = bias + m * pitch + n
    if WHOLE_M and WHOLE_N:
        return tl.load(pointers)
    if WHOLE_N:
        return tl.load(pointers, mask=m < m_left, other=0.0)
    return tl.load(pointers, mask=(m < m_left) & (n < n_left), other=0.0)
