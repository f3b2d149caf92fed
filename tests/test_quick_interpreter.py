"""Triton's interpreter, made quick for the tests, computes what it would compute otherwise."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted on machines without a GPU"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


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
