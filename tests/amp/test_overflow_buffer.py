"""Largest magnitudes that overflow traces keep on the device: by the kernel and by PyTorch's operators."""

from __future__ import annotations

import math

import pytest
import torch

from apex.amp._overflow_buffer import MagnitudeBuffer
from apex.ops import _library, float8
from tests.support.harness import routes


def values_of(buffer: MagnitudeBuffer) -> list[float]:
    return [value for part in buffer.values() for value in part.tolist()]


@pytest.mark.parametrize("route", routes())
def test_each_number_is_that_of_its_tensor_in_every_step(route, monkeypatch):
    """Numbers of an earlier step, in the same memory, leave nothing behind, whichever way a tensor is read."""
    monkeypatch.setattr(float8, "WRITE_PARTIALS", 3)  # few programs, because the interpreter runs one after the other
    monkeypatch.setattr("apex.amp._overflow_buffer._CHUNK", 4)  # so that a step needs two allocations
    device = torch.device(route.device)
    torch.manual_seed(0)
    half = torch.randn(40, 7, dtype=torch.float16, device=device)
    tensors = [
        half,
        half.t()[::2] * 2,
        half[:, :1].expand(40, 3),
        torch.full((2,), 1e300, dtype=torch.float64, device=device),
        torch.full((2,), -math.inf, dtype=torch.float64, device=device),
        half.float().log(),  # NaN
    ]
    expected = [float(tensor.abs().max()) for tensor in tensors]
    expected[3] = torch.finfo(torch.float32).max
    with _library.implementation(route.implementation):
        buffer = MagnitudeBuffer(5, device)
        for step in (tensors, tensors[::-1], tensors[:3]):
            buffer.used = 0
            assert [buffer.measure(tensor) for tensor in step] == [(5, index) for index in range(len(step))]
            for other in (half[:0], half.long(), half.float().to_sparse(), half.cfloat()):
                assert buffer.measure(other) is None
            order = expected if step[0] is half else expected[::-1]
            found = torch.tensor(values_of(buffer), dtype=torch.float64)
            wanted = torch.tensor(order[: len(step)], dtype=torch.float64)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
