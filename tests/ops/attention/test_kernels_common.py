"""Functions that the attention kernels share: float32 products in three passes, and the search for a sequence."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from apex.ops.attention.kernels_common import _find, _leading, finite_dot  # noqa: E402

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


@triton.jit
def _locate(cu, found, batch, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    z, first = _find(cu, number, batch, BLOCK)
    tl.store(found + 2 * number, z)
    tl.store(found + 2 * number + 1, first)


@pytest.mark.parametrize("sequences", [1, 255, 256, 600])
def test_every_row_of_many_sequences_has_one_program(sequences: int) -> None:
    """A program reads 256 bounds at a time; rows after the last sequence are one more sequence."""
    lengths = torch.randint(0, 40, (sequences,), generator=torch.Generator().manual_seed(0))
    starts = [0, *lengths.cumsum(0).tolist()]
    total, block = starts[-1] + 37, 16
    programs = total // block + sequences + 1
    found = torch.full((programs, 2), -1, dtype=torch.int32, device=DEVICE)
    _locate[(programs,)](torch.tensor(starts, dtype=torch.int32, device=DEVICE), found, sequences, block)
    ends = [*starts[1:], total]
    rows = [
        starts[z] + row for z, first in found.tolist() for row in range(first, min(first + block, ends[z] - starts[z]))
    ]
    assert sorted(rows) == list(range(total))
