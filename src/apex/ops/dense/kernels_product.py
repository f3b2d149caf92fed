"""A Triton matrix product with gelu in its epilogue, forward and backward.

cuBLAS keeps the input of gelu beside its output too, but not through PyTorch. Tiles are read and written by tensor
descriptors, which the hardware of Hopper executes; they clip what lies outside. Rows must be multiples of 16 bytes.
All arithmetic is float32. Run-time arguments first, constants last.
"""

import triton
import triton.language as tl

from .._launch import kernel
from .kernels import gelu_slope


@triton.jit
def _finish_forward(values, row, column, columns, bias, hidden, active, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr):
    if HAS_BIAS:
        place = column + tl.arange(0, values.shape[1])
        values += tl.load(bias + place, mask=place < columns, other=0.0).to(tl.float32)[None, :]
    if KEEP:
        hidden.store([row, column], values.to(hidden.dtype))
    gate = tl.sigmoid(1.5957691216057308 * values * (1.0 + 0.044715 * values * values))
    active.store([row, column], (values * gate).to(active.dtype))


@triton.jit
def _finish_backward(gradient, row, column, columns, tile_row, partials, hidden, output, BIAS_GRAD: tl.constexpr):
    gradient = gradient * gelu_slope(hidden.load([row, column]).to(tl.float32))
    output.store([row, column], gradient.to(output.dtype))
    if BIAS_GRAD:
        place = column + tl.arange(0, gradient.shape[1])
        tl.store(partials + tile_row.to(tl.int64) * columns + place, tl.sum(gradient, 0), mask=place < columns)


@kernel
@triton.jit
def gelu_product(
    left,
    right,
    bias,
    hidden,
    output,
    rows,
    columns,
    depth,
    BACKWARD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Forward: `output` = gelu(`hidden`), `hidden` = `left` [rows, depth] `right` [columns, depth]^T + `bias`.

    `hidden` is written where KEEP. Backward: `output` = (`left` [rows, depth] `right` [depth, columns]) times the
    derivative of gelu at `hidden`; `bias` is where its sums over the rows of each tile go. HAS_BIAS: there is one.

    A persistent grid of PROGRAMS walks the tiles in bands of BAND tile rows, so that programs share what they read, and
    finishes each in two halves of its columns, which need fewer registers. WIDEN: for Triton's interpreter, which takes
    bfloat16 for integers in a product.
    """
    HALF: tl.constexpr = BLOCK_COLUMNS // 2
    left_tiles = tl.make_tensor_descriptor(left, [rows, depth], [depth, 1], [BLOCK_ROWS, BLOCK_DEPTH])
    if BACKWARD:
        right_tiles = tl.make_tensor_descriptor(right, [depth, columns], [columns, 1], [BLOCK_DEPTH, BLOCK_COLUMNS])
    else:
        right_tiles = tl.make_tensor_descriptor(right, [columns, depth], [depth, 1], [BLOCK_COLUMNS, BLOCK_DEPTH])
    output_tiles = tl.make_tensor_descriptor(output, [rows, columns], [columns, 1], [BLOCK_ROWS, HALF])
    if KEEP or BACKWARD:
        hidden_tiles = tl.make_tensor_descriptor(hidden, [rows, columns], [columns, 1], [BLOCK_ROWS, HALF])
    else:
        hidden_tiles = output_tiles
    tiles_down = tl.cdiv(rows, BLOCK_ROWS)
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, PROGRAMS, flatten=True):
        band = tile // (BAND * tiles_across)
        height = tl.minimum(tiles_down - band * BAND, BAND)
        within = tile % (BAND * tiles_across)
        tile_row = band * BAND + within % height
        row = tile_row * BLOCK_ROWS
        column = (within // height) * BLOCK_COLUMNS
        product = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in tl.range(0, depth, BLOCK_DEPTH):
            a = left_tiles.load([row, start])
            if BACKWARD:
                b = right_tiles.load([start, column])
            else:
                b = right_tiles.load([column, start]).T
            if WIDEN:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            product = tl.dot(a, b, product)
        first, second = tl.split(tl.permute(tl.reshape(product, (BLOCK_ROWS, 2, HALF)), (0, 2, 1)))
        if BACKWARD:
            _finish_backward(first, row, column, columns, tile_row, bias, hidden_tiles, output_tiles, HAS_BIAS)
            _finish_backward(second, row, column + HALF, columns, tile_row, bias, hidden_tiles, output_tiles, HAS_BIAS)
        else:
            _finish_forward(first, row, column, columns, bias, hidden_tiles, output_tiles, HAS_BIAS, KEEP)
            _finish_forward(second, row, column + HALF, columns, bias, hidden_tiles, output_tiles, HAS_BIAS, KEEP)
