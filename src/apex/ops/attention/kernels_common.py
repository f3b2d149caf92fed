"""What the attention kernels share.

Letters: Z batches (or packed sequences), H heads, M queries, N keys, D the size of a head. A program takes a tile of
queries (forward, gradient of the queries) or of keys (gradients of keys and values), so that no two programs write the
same element.

    logits = scale * q k^T + bias + (mask - 1) * inf        probabilities = softmax(logits)
    out = dropout(probabilities) v

`q_z, q_h, q_m` are strides of q, in elements, for each letter; the innermost dimension of every tensor has stride 1.
`cu` holds the first row of each packed sequence and, last, their end. Logits are kept in units of log 2; `statistics`
has the largest of each row and the reciprocal of the sum of exponentials, or, without mask and bias, the natural
logarithm of the sum of the exponentials of a row's logits, as PyTorch's attentions give it. The loops run twice, over
whole tiles without masks and over what is left with them.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, result, PRECISION: tl.constexpr):
    """result + a b, in float32."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), result)
    return tl.dot(a, b, result, input_precision=PRECISION)


@triton.jit
def _leading(x):
    """The leading digits of float32 numbers, as many as the matrix units take, rounded."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def finite_dot(a, b, result, PRECISION: tl.constexpr):
    """As `dot`, but an infinity in `a` or `b` gives NaN.

    Triton's three passes in float32 look at every sum for the NaN of infinities, a fifth of a loop's instructions.
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
    """A multiple of ALIGN, of which Triton so learns that it is one; by itself it notices multiples of 16 only."""
    return size // ALIGN * ALIGN


@triton.jit
def aligned_strides(z, h, m, ALIGN: tl.constexpr):
    """The strides of batch, head and row, multiples of ALIGN."""
    return aligned(z, ALIGN), aligned(h, ALIGN), aligned(m, ALIGN)


@triton.jit
def mix(x):
    """A bijection of 32-bit numbers that leaves no pattern behind."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def key_of_head(seed, zh):
    """A number for each head, from the 64 bits of the seed."""
    bits = tl.load(seed).to(tl.uint64)
    low = (bits & 0xFFFFFFFF).to(tl.uint32)
    high = (bits >> 32).to(tl.uint32)
    return mix(mix(mix(low) ^ high) ^ zh.to(tl.uint32))


@triton.jit
def is_kept(row_keys, n, threshold):
    """Whether dropout lets elements of rows `row_keys` and columns `n` through; both already have their dimensions.

    The keys of rows are mixed well, so that a single round is enough.
    """
    x = row_keys + n.to(tl.uint32) * 0x9E3779B9
    return (x ^ (x >> 15)) * 0x2C1B3C6D >= threshold.to(tl.uint32) << 1


@triton.jit
def locate(
    program, cu, batch, heads, rows, columns, total, PACKED: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr
):
    """Which tile a program takes: batch, head, first row of the tile, and start, rows and partners of its sequence.

    After the last packed sequence come, if there is a TAIL, rows without partners: their results are zeros. Partners
    are 0 too for a tile beyond the end of its sequence, which so has nothing to do.
    """
    blocks = tl.cdiv(rows, BLOCK)
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
        # Whatever the values are, nothing outside of the rows is read or written.
        start = tl.minimum(tl.maximum(tl.load(cu + z), 0), total).to(tl.int32)
        end = tl.minimum(tl.load(cu + z + 1, mask=z < batch, other=total), total).to(tl.int32)
        count = end - start
        partners = tl.where((z < batch) & (first < count), count, 0)
    return z.to(tl.int64), h.to(tl.int64), first, start.to(tl.int64), count, partners


@triton.jit
def tile(base, left, stride, head_dim, ROWS: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr, FULL_D: tl.constexpr):
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
def store_tile(base, values, left, stride, head_dim, ROWS: tl.constexpr, BD: tl.constexpr):
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    inside = (r[:, None] < left) & (d[None, :] < head_dim)
    tl.store(base + r[:, None] * stride + d[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def key_terms(mask, n, left, inf):
    """What the mask adds to the logits of each key."""
    return (tl.load(mask + n, mask=n < left, other=1.0).to(tl.float32) - 1.0) * (inf * LOG2E)


@triton.jit
def bias_tile(bias, m, n, m_left, n_left, pitch, WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr):
    """The bias of queries `m` and keys `n`, which already have their dimensions, in either order."""
    pointers = bias + m * pitch + n
    if WHOLE_M and WHOLE_N:
        return tl.load(pointers)
    if WHOLE_N:
        return tl.load(pointers, mask=m < m_left, other=0.0)
    return tl.load(pointers, mask=(m < m_left) & (n < n_left), other=0.0)
