"""Triton's interpreter, made quick for the tests, computes what it would compute otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from . import quick_arithmetic, quick_interpreter

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted on machines without a GPU"),
    pytest.mark.skipif(not quick_interpreter.can_install(), reason="the interpreter is left as Triton has it"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from apex.ops._kernel_functions import mask_if  # noqa: E402


@triton.jit
def several(X, Y, OUT, factor, SIZE: tl.constexpr):
    """Operations that occur twice, with other tensors and other numbers of the same types."""
    index = tl.arange(0, SIZE)
    inside = index < SIZE - 1
    x = tl.load(X + index)
    y = tl.load(Y + index, mask=inside, other=-1.0)
    first = tl.load(X + 0 * tl.program_id(0))
    second = tl.load(Y + 1)
    if first > second:
        picked = first
    else:
        picked = second
    low = x.to(tl.bfloat16).to(tl.float32)
    shifted = (index - 2) >> 1
    unsigned = (index - 2).to(tl.uint32, bitcast=True) >> 31
    outer = tl.sum(x[:, None] * y[None, :], axis=0)
    tl.store(OUT + index, x * x)
    tl.store(OUT + SIZE + index, x * y)
    tl.store(OUT + 2 * SIZE + index, y * y)
    tl.store(OUT + 3 * SIZE + index, picked + factor * x)
    tl.store(OUT + 4 * SIZE + index, low)
    tl.store(OUT + 5 * SIZE + index, outer)
    tl.store(OUT + 6 * SIZE + index, shifted)
    tl.store(OUT + 7 * SIZE + index, unsigned)
    tl.store(OUT + 8 * SIZE + index, 1 / tl.where(inside, 0.0, -0.0), mask=inside)
    tl.store(OUT + 8 * SIZE + index, 1 / tl.where(inside, -0.0, 0.0), mask=index == SIZE - 1)


@pytest.mark.parametrize("size", [1, 8])
def test_operations_follow_their_arguments_every_time(size: int) -> None:
    for factor in (2.0, 2.0, -0.5):
        x, y = torch.randn(2, size + 1)
        out = torch.full((9, size), math.nan)
        several[(1,)](x, y, out, factor, size)
        seen = torch.where(torch.arange(size) < size - 1, y[:size], -1.0)
        x = x[:size]
        expected = [x * x, x * seen, seen * seen, torch.maximum(x[0], y[1]) + factor * x]
        assert torch.equal(out[:4], torch.stack(expected))
        assert ((out[4] - x).abs() <= x.abs() / 128).all()
        assert torch.equal(out[4].bfloat16().float(), out[4])
        torch.testing.assert_close(out[5], x.sum() * seen)
        index = torch.arange(size)
        assert out[6].tolist() == ((index - 2) // 2).tolist()
        assert out[7].tolist() == (index < 2).int().tolist()
        assert out[8].tolist() == [math.inf] * size


@triton.jit
def halves(X, OUT, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x = tl.load(X + index)
    tl.store(OUT + index, x.to(tl.float32))
    tl.store(OUT + SIZE + index, tl.load(X + index, mask=index > 2, other=5.0).to(tl.float32))


def test_every_bfloat16_number_is_widened_exactly() -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(2, x.numel())
    halves[(1,)](x, out, x.numel())
    assert torch.equal(out[0].view(torch.int32), x.float().view(torch.int32))
    assert torch.equal(out[1, 3:].nan_to_num(), x[3:].float().nan_to_num())
    assert out[1, :3].tolist() == [5.0] * 3


@triton.jit
def of_positive_numbers(X, OUT, count, SIZE: tl.constexpr, WIDEN: tl.constexpr):
    """Store 1 for numbers above 0, and 0 for others."""
    index = tl.arange(0, SIZE)
    x = tl.load(X + index, mask=index < count, other=0.0)
    positive = x.to(tl.float32) > 0.0 if WIDEN else x > 0.0
    tl.store(OUT + index, tl.where(positive, 1.0, 0.0), mask=index < count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_a_comparison(dtype: torch.dtype) -> None:
    x, out = torch.tensor([-1.0, 2.0, 0.0, -3.0], dtype=dtype), torch.empty(4)
    of_positive_numbers[(1,)](x, out, 4, SIZE=4, WIDEN=True)
    assert out.tolist() == [0.0, 1.0, 0.0, 0.0]
    with pytest.raises(Exception, match="kernels compute in float32"):
        of_positive_numbers[(1,)](x, out, 4, SIZE=4, WIDEN=False)


@triton.jit
def in_one_program(OUT, count, SIZE: tl.constexpr, RIGHT: tl.constexpr):
    """Store 1 in the first of the launch's programs."""
    index = tl.arange(0, SIZE)
    first = tl.program_id(0) == 0
    mask = mask_if(first, index < count) if RIGHT else (index < count) & first
    tl.store(OUT + index, 1.0, mask=mask)


def test_masks_are_booleans() -> None:
    out = torch.zeros(4)
    in_one_program[(2,)](out, 3, SIZE=4, RIGHT=True)
    assert out.tolist() == [1.0, 1.0, 1.0, 0.0]
    with pytest.raises(Exception, match="mask must consist of booleans"):
        in_one_program[(2,)](out, 3, SIZE=4, RIGHT=False)


def operands(shape: tuple[int, ...]) -> list[Any]:
    """Return tensors of the interpreter of every type of number, blocks of `shape` or single numbers."""
    from triton.runtime.interpreter import TensorHandle

    random = np.random.default_rng(0)
    floats = np.array([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 1e-40])
    whole = np.array([0, 1, 2, 3, -1, 2**31 - 1, -(2**31), 7])
    pools = [
        (tl.float32, floats.astype(np.float32)),
        (tl.float64, floats),
        (tl.int32, whole.astype(np.int32)),
        (tl.int64, whole.astype(np.int64)),
        (tl.uint32, whole.astype(np.uint32)),
        (tl.int1, whole > 0),
        (tl.pointer_type(tl.float32), whole.astype(np.uint64)),
    ]
    return [
        tl.tensor(
            TensorHandle(random.choice(pool, shape or (1,)), kind), tl.block_type(kind, list(shape)) if shape else kind
        )
        for kind, pool in pools
    ]


def outcome(compute: Any, left: Any, right: Any) -> tuple[Any, ...]:
    """Return a tensor's types, shape and bytes, or the kind of the error."""
    try:
        result = compute(left, right)
    except Exception as error:
        return (type(error),)
    data = result.handle.data
    if data.dtype.kind == "f":
        data = np.where(np.isnan(data), math.nan, data).astype(data.dtype)  # the sign of NaN is nobody's promise
    return result.type, result.handle.dtype, data.dtype, data.shape, data.tobytes()


OPERATORS = (
    quick_arithmetic.ARITHMETIC | quick_arithmetic.FRACTIONS | quick_arithmetic.COMPARISONS | quick_arithmetic.BITS
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_equal_those_of_the_interpreter(name: str) -> None:
    test_masks_are_booleans()  # a launch has replaced the operators
    quick = getattr(tl.tensor, name)
    numbers = [0, 1, -1, 3, 2**31, 2**40, 0.0, -0.0, 0.5, -2.0, math.inf, math.nan, 1e300, True]
    for shape, other_shape in [((8,), (8,)), ((8,), ()), ((), (8,)), ((), ()), ((8, 1), (1, 4)), ((4, 8), (8,))]:
        for _ in range(2):  # what the first pair of types tells is used by the second
            for left in operands(shape):
                for right in [*operands(other_shape), *numbers]:
                    assert outcome(quick, left, right) == outcome(quick.slow, left, right), (left.type, right)


@triton.jit
def _combine(sum_left, most_left, sum_right, most_right):
    return sum_left + sum_right, tl.maximum(most_left, most_right)


@triton.jit
def _product(left, right):
    return left * right


@triton.jit
def reductions(X, SUMS, MOST, PRODUCT, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    x = tl.load(X + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    total, most = tl.reduce((x, x), AXIS, _combine)
    index = tl.arange(0, COLUMNS if AXIS == 0 else ROWS)
    tl.store(SUMS + index, total)
    tl.store(MOST + index, most)
    tl.store(PRODUCT, tl.reduce(x, None, _product))


@pytest.mark.parametrize(("rows", "columns"), [(8, 4), (1, 16), (4, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_by_a_function(rows: int, columns: int, axis: int) -> None:
    x = torch.randn(rows, columns)
    sums, most, product = torch.empty(x.shape[1 - axis]), torch.empty(x.shape[1 - axis]), torch.empty(1)
    reductions[(1,)](x, sums, most, product, ROWS=rows, COLUMNS=columns, AXIS=axis)
    torch.testing.assert_close(sums, x.sum(axis))
    assert torch.equal(most, x.amax(axis))
    torch.testing.assert_close(product[0], x.prod())
