"""Triton kernels of the backward pass of layer norm and RMS norm.

Legend: a tensor is `rows` x `row_length`, contiguous; `saved` is the input, or the output when FROM_OUTPUT;
`statistics` holds rstd, the reciprocal deviation, of each row, then (for layer norm) the mean of each row;
`normalised` = (input - mean) * rstd, which is within +-`limit`, the root of `row_length`; `wdy` = weight * dy. All
arithmetic is float32. ALIGN: see kernels_forward.py.

    dx = rstd * (wdy - normalised * mean(wdy * normalised) - mean(wdy))      the last term for layer norm only
    dweight = sum over rows of dy * normalised                               dbias = sum over rows of dy

If the input is a sum that is used elsewhere too, `dsum` is its gradient from there, which is added to dx; `dadded`,
the sum over rows of dx, is the gradient of a bias that was added to the input.

Each program writes its own rows of `partials` (for the weight first, then for the bias, then for the added bias), which
are summed in a fixed order. Absent tensors, and gradients that are not wanted, are None.
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _load(parameter, column, mask, absent: tl.constexpr):
    return tl.load(parameter + column, mask=mask, other=None if mask is None else absent).to(tl.float32)


@triton.jit
def _normalised(saved, mean, rstd, weight, bias, limit, FROM_OUTPUT: tl.constexpr):
    if FROM_OUTPUT:
        value = saved
        if bias is not None:
            value = value - bias
        if weight is not None:
            # A weight of zero has erased its column from the output: only the bias' rounding, if any, is left there. A
            # weight near zero magnifies that rounding, but no normalised value exceeds `limit`. NaN stays NaN. The
            # inverse of a weight is computed once for many rows; its product with a zero must not be NaN.
            inverse = 1.0 / tl.where(weight == 0, 1.0, weight)
            value = value * tl.minimum(tl.maximum(inverse, -3.0e38), 3.0e38)
            value = tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)
            value = tl.maximum(value, -limit, propagate_nan=tl.PropagateNan.ALL)
    elif mean is not None:
        value = (saved - mean) * rstd
    else:
        value = saved * rstd
    return value


@triton.jit
def _add_pairs(first, second, other_first, other_second):
    return first + other_first, second + other_second


@triton.jit
def _folded(tile, FOLD: tl.constexpr):
    return tl.sum(tile, 0)[None, :] if FOLD else tile


@kernel
@triton.jit(do_not_specialize=["rows"])
def norm_backward_rows(
    dy, saved, weight, bias, statistics, dsum, dx, partials,
    rows, row_length, limit,
    ALIGN: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, FROM_OUTPUT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr, FOLD: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """Differentiate in a persistent grid: each program walks tiles of ROWS whole rows, loading the next tiles ahead.

    FOLD: the rows of a tile are summed at once, since a thread has all of a column; otherwise after the last tile.
    ADDED: partial sums of the gradient of an added bias are written too. A launch of `sum_partials` sums the partials.
    The last programs could do that here, which saves a launch, but took longer on an H200: layer norm bfloat16
    4096x1024 in 13.9 us instead of 10.7, and twice as long to compile.
    """
    row_length = row_length // ALIGN * ALIGN
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    column_mask = None if FULL else column < row_length
    zero = None if FULL else 0.0
    w = None if weight is None else _load(weight, column, column_mask, 1.0)[None, :]
    b = _load(bias, column, column_mask, 0.0)[None, :] if bias is not None and FROM_OUTPUT else None
    if partials is not None:
        dweight = tl.zeros([1 if FOLD else ROWS, BLOCK], tl.float32)
        if bias is not None:
            dbias = tl.zeros([1 if FOLD else ROWS, BLOCK], tl.float32)
        if ADDED:
            dadded = tl.zeros([1 if FOLD else ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        offset = row[:, None] * row_length + column[None, :]
        row_mask = None if FULL else row < rows
        mask = None if FULL else row_mask[:, None] & column_mask[None, :]
        value = tl.load(saved + offset, mask=mask, other=zero).to(tl.float32)
        gradient = tl.load(dy + offset, mask=mask, other=zero).to(tl.float32)
        row_rstd = tl.load(statistics + row, mask=row_mask, other=zero)[:, None]
        row_mean = None
        if SUBTRACT_MEAN and not FROM_OUTPUT:
            row_mean = tl.load(statistics + rows + row, mask=row_mask, other=zero)[:, None]
        normalised = _normalised(value, row_mean, row_rstd, w, b, limit, FROM_OUTPUT)
        # Masked elements of `gradient` are zero, so no sum below sees the values of `normalised` there.
        wdy = gradient if weight is None else gradient * w
        if SUBTRACT_MEAN:
            # In one reduction, so that warps that share rows wait for each other half as often.
            mean_product, mean = tl.reduce((wdy * normalised, wdy), 1, _add_pairs)
            correction = normalised * (mean_product / row_length)[:, None] + (mean / row_length)[:, None]
        else:
            correction = normalised * (tl.sum(wdy * normalised, 1) / row_length)[:, None]
        result = (wdy - correction) * row_rstd
        if dsum is not None:
            result += tl.load(dsum + offset, mask=mask, other=zero).to(tl.float32)
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=mask)
        if partials is not None:
            dweight += _folded(gradient * normalised, FOLD)
            if bias is not None:
                dbias += _folded(gradient, FOLD)
            if ADDED:
                dadded += _folded(result if FULL else tl.where(mask, result, 0.0), FOLD)
    if partials is not None:
        pointers = partials + program.to(tl.int64) * row_length + column
        tl.store(pointers, tl.sum(dweight, 0), mask=column_mask)
        if bias is not None:
            pointers += tl.num_programs(0).to(tl.int64) * row_length
            tl.store(pointers, tl.sum(dbias, 0), mask=column_mask)
        if ADDED:
            pointers += tl.num_programs(0).to(tl.int64) * row_length
            tl.store(pointers, tl.sum(dadded, 0), mask=column_mask)


@triton.jit
def _forgotten(value, NVIDIA: tl.constexpr):
    """Return the same half-precision values, hidden from the compiler, so that it converts them to float32 again.

    Otherwise it would keep them as float32 from their first use to their second, in twice the registers.
    """
    if NVIDIA:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=2)
    return value


@kernel
@triton.jit(do_not_specialize=["rows"])
def norm_backward_held(
    dy, saved, weight, bias, statistics, dx, partials,
    rows, row_length, limit,
    ALIGN: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, FROM_OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr, STAGES: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Differentiate long rows in half precision in a persistent grid: a row is read once and held in its own dtype.

    Weights are read twice per row, from the cache, to leave registers for the weight and bias gradients.
    """
    row_length = row_length // ALIGN * ALIGN
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = None if FULL else column < row_length
    zero = None if FULL else 0.0
    one = None if FULL else 1.0
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(row, tl.int64) * row_length
        row_rstd = tl.load(statistics + row)
        row_mean = tl.load(statistics + rows + row) if SUBTRACT_MEAN and not FROM_OUTPUT else None
        held_value = tl.load(saved + start + column, mask=mask, other=zero)
        held_gradient = tl.load(dy + start + column, mask=mask, other=zero)
        w = None if weight is None else _load(weight, column, mask, 1.0)
        b = _load(bias, column, mask, 0.0) if bias is not None and FROM_OUTPUT else None
        value = held_value.to(tl.float32)
        normalised = _normalised(value, row_mean, row_rstd, w, b, limit, FROM_OUTPUT)
        wdy = held_gradient.to(tl.float32) if weight is None else held_gradient.to(tl.float32) * w
        mean_product = tl.sum(wdy * normalised) / row_length
        mean_sum = tl.sum(wdy) / row_length if SUBTRACT_MEAN else 0.0
        value = _forgotten(held_value, NVIDIA).to(tl.float32)
        gradient = _forgotten(held_gradient, NVIDIA).to(tl.float32)
        if weight is not None:
            w = tl.load(weight + column, mask=mask, other=one, eviction_policy="evict_last").to(tl.float32)
        normalised = _normalised(value, row_mean, row_rstd, w, b, limit, FROM_OUTPUT)
        wdy = gradient if weight is None else gradient * w
        result = (wdy - normalised * mean_product - mean_sum) * row_rstd
        tl.store(dx + start + column, result.to(dx.dtype.element_ty), mask=mask)
        if partials is not None:
            dweight += gradient * normalised
            if bias is not None:
                dbias += gradient
    if partials is not None:
        pointers = partials + program.to(tl.int64) * row_length + column
        tl.store(pointers, dweight, mask=mask)
        if bias is not None:
            tl.store(pointers + tl.num_programs(0).to(tl.int64) * row_length, dbias, mask=mask)


@kernel
@triton.jit(do_not_specialize=["rows"])
def norm_backward_wide(
    dy, saved, weight, bias, statistics, dx, partials,
    rows, row_length, limit,
    ALIGN: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, FROM_OUTPUT: tl.constexpr, CHUNKS: tl.constexpr,
    HELD: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Differentiate rows too long to hold beside their weight gradients: each row is read twice, in CHUNKS.

    The grid is persistent. The gradients of weight and bias stay in registers (a 16384-wide row of float32, its
    gradient and both sums would fill the whole register file). So do the HELD chunks that the first pass reads last and
    the second needs first; the second read of the other chunks comes from the cache.
    """
    row_length = row_length // ALIGN * ALIGN
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    zero = None if FULL else 0.0
    dweight = ()
    dbias = ()
    if partials is not None:
        for _ in tl.static_range(CHUNKS):
            dweight = dweight + (tl.zeros([BLOCK], tl.float32),)
            if bias is not None:
                dbias = dbias + (tl.zeros([BLOCK], tl.float32),)
    for row in tl.range(program, rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * row_length
        row_rstd = tl.load(statistics + row)
        row_mean = tl.load(statistics + rows + row) if SUBTRACT_MEAN and not FROM_OUTPUT else None
        products = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        held_values = ()
        held_gradients = ()
        for step in tl.static_range(CHUNKS):
            position = (step + HELD) % CHUNKS * BLOCK + column
            mask = None if FULL else position < row_length
            if step < CHUNKS - HELD:
                value = tl.load(saved + start + position, mask=mask, other=zero, eviction_policy="evict_last")
                gradient = tl.load(dy + start + position, mask=mask, other=zero, eviction_policy="evict_last")
            else:
                value = tl.load(saved + start + position, mask=mask, other=zero)
                gradient = tl.load(dy + start + position, mask=mask, other=zero)
                held_values = held_values + (value,)
                held_gradients = held_gradients + (gradient,)
            w = None if weight is None else _load(weight, position, mask, 1.0)
            b = _load(bias, position, mask, 0.0) if bias is not None and FROM_OUTPUT else None
            # Multiplied by rstd after the sum: values that differ between the passes are computed twice instead of
            # kept.
            normalised = _normalised(value.to(tl.float32), row_mean, 1.0, w, b, limit, FROM_OUTPUT)
            wdy = gradient.to(tl.float32) if weight is None else gradient.to(tl.float32) * w
            products += wdy * normalised
            if SUBTRACT_MEAN:
                sums += wdy
        mean_product = tl.sum(products) / row_length if FROM_OUTPUT else tl.sum(products) * row_rstd / row_length
        mean_sum = tl.sum(sums) / row_length if SUBTRACT_MEAN else 0.0
        next_dweight = ()
        next_dbias = ()
        for chunk in tl.static_range(CHUNKS):
            position = chunk * BLOCK + column
            mask = None if FULL else position < row_length
            if chunk < HELD:
                value = held_values[chunk]
                gradient = held_gradients[chunk].to(tl.float32)
            else:
                value = tl.load(saved + start + position, mask=mask, other=zero, eviction_policy="evict_first")
                gradient = tl.load(dy + start + position, mask=mask, other=zero, eviction_policy="evict_first")
                gradient = gradient.to(tl.float32)
            w = None if weight is None else _load(weight, position, mask, 1.0)
            b = _load(bias, position, mask, 0.0) if bias is not None and FROM_OUTPUT else None
            normalised = _normalised(value.to(tl.float32), row_mean, row_rstd, w, b, limit, FROM_OUTPUT)
            wdy = gradient if weight is None else gradient * w
            result = (wdy - normalised * mean_product - mean_sum) * row_rstd
            tl.store(dx + start + position, result.to(dx.dtype.element_ty), mask=mask)
            if partials is not None:
                next_dweight = next_dweight + (dweight[chunk] + gradient * normalised,)
                if bias is not None:
                    next_dbias = next_dbias + (dbias[chunk] + gradient,)
        if partials is not None:  # Triton 3.4 fails at loops that assign an empty tuple to one of before
            dweight = next_dweight
            if bias is not None:
                dbias = next_dbias
    if partials is not None:
        for chunk in tl.static_range(CHUNKS):
            position = chunk * BLOCK + column
            pointers = partials + program.to(tl.int64) * row_length + position
            mask = None if FULL else position < row_length
            tl.store(pointers, dweight[chunk], mask=mask)
            if bias is not None:
                tl.store(pointers + tl.num_programs(0).to(tl.int64) * row_length, dbias[chunk], mask=mask)


@kernel
@triton.jit
def norm_backward_row_means(
    dy, saved, weight, bias, statistics, row_means,
    row_length, limit,
    ALIGN: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, FROM_OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute mean(wdy * normalised), then mean(wdy), per row: the first half of the pass for rows of any length."""
    row_length = row_length // ALIGN * ALIGN
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    start = row * row_length
    row_rstd = tl.load(statistics + row)
    row_mean = tl.load(statistics + tl.num_programs(0) + row) if SUBTRACT_MEAN and not FROM_OUTPUT else None
    products = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.range(0, tl.cdiv(row_length, BLOCK)):
        position = chunk * BLOCK + column
        mask = position < row_length
        value = tl.load(saved + start + position, mask=mask, other=0.0).to(tl.float32)
        wdy = tl.load(dy + start + position, mask=mask, other=0.0).to(tl.float32)
        w = None if weight is None else _load(weight, position, mask, 1.0)
        wdy = wdy if weight is None else wdy * w
        b = _load(bias, position, mask, 0.0) if bias is not None and FROM_OUTPUT else None
        products += wdy * _normalised(value, row_mean, row_rstd, w, b, limit, FROM_OUTPUT)
        sums += wdy
    tl.store(row_means + row, tl.sum(products) / row_length)
    if SUBTRACT_MEAN:
        tl.store(row_means + tl.num_programs(0) + row, tl.sum(sums) / row_length)


@kernel
@triton.jit(do_not_specialize=["rows"])
def norm_backward_columns(
    dy, saved, weight, bias, statistics, row_means, dx, partials,
    rows, row_length, limit,
    ALIGN: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, FROM_OUTPUT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the second half for rows of any length: a block of columns per program, walking down a group of rows."""
    row_length = row_length // ALIGN * ALIGN
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    column_mask = column < row_length
    w = None if weight is None else _load(weight, column, column_mask, 1.0)[None, :]
    b = _load(bias, column, column_mask, 0.0)[None, :] if bias is not None and FROM_OUTPUT else None
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(group, tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = row < rows
        mask = row_mask[:, None] & column_mask[None, :]
        offset = row[:, None] * row_length + column[None, :]
        value = tl.load(saved + offset, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        row_rstd = tl.load(statistics + row, mask=row_mask, other=0.0)[:, None]
        row_mean = None
        if SUBTRACT_MEAN and not FROM_OUTPUT:
            row_mean = tl.load(statistics + rows + row, mask=row_mask, other=0.0)[:, None]
        normalised = _normalised(value, row_mean, row_rstd, w, b, limit, FROM_OUTPUT)
        wdy = gradient if weight is None else gradient * w
        correction = normalised * tl.load(row_means + row, mask=row_mask, other=0.0)[:, None]
        if SUBTRACT_MEAN:
            correction += tl.load(row_means + rows + row, mask=row_mask, other=0.0)[:, None]
        tl.store(dx + offset, ((wdy - correction) * row_rstd).to(dx.dtype.element_ty), mask=mask)
        if partials is not None:
            dweight += gradient * normalised
            if bias is not None:
                dbias += gradient
    if partials is not None:
        pointers = partials + group.to(tl.int64) * row_length + column
        tl.store(pointers, tl.sum(dweight, 0), mask=column_mask)
        if bias is not None:
            tl.store(pointers + tl.num_programs(1).to(tl.int64) * row_length, tl.sum(dbias, 0), mask=column_mask)
