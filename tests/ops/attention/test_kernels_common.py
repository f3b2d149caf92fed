"""Products of float32 matrices in three passes of matrix units that take the leading digits alone."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from apex.ops.attention.kernels_common import _leading, finite_dot  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _multiply(a, b, added, product, leading, SIZE: tl.constexpr):
    r = tl.arange(0, SIZE)
    places = r[:, None] * SIZE + r[None, :]
    left = tl.load(a + places)
    tl.store(leading + places, _leading(left))
    tl.store(product + places, finite_dot(left, tl.load(b + places), tl.load(added + places), "tf32x3"))


def test_a_product_in_three_passes_keeps_the_digits_of_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, added = (torch.randn(32, 32, generator=generator).to(DEVICE) for _ in range(3))
    product, leading = torch.empty_like(a), torch.empty_like(a)
    _multiply[(1,)](a, b, added, product, leading, 32)
    assert not (leading.view(torch.int32) & 0x1FFF).any()
    assert ((a - leading).abs() <= a.abs() * 2.0**-11).all()
    expected = a.double() @ b.double() + added
    one_pass = leading.double() @ b.double() + added
    error = (product - expected).abs().max()
    assert error < 1e-5
    assert error < (one_pass - expected).abs().max() / 20
