"""Largest magnitudes that overflow traces keep on the device: by the kernel and by PyTorch's operators."""

from __future__ import annotations

import math

import pytest
import torch

from apex.amp._overflow_buffer import MagnitudeBuffer
from apex.ops import _launch, _library, float8
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


def test_tensors_of_known_sizes_are_launched_directly(monkeypatch):
    """Tensors at odd addresses, on another device than the current one, or in parts go through the usual launch."""
    device = 2
    usual: list[int] = []
    direct: list[tuple] = []

    def launch_first(self, key, tensors, floats):
        usual.append(tensors[0].data_ptr())
        if isinstance(key[0], int):  # else for odd addresses
            self._compiled[key] = (lambda *arguments: direct.append(arguments), 0)

    monkeypatch.setattr(_launch.PreparedLaunch, "_launch_first", launch_first)
    monkeypatch.setattr("apex.amp._overflow_buffer.current_device", lambda: device)
    monkeypatch.setattr("apex.amp._overflow_buffer.current_stream", lambda index: 5 + index)
    monkeypatch.setattr(_launch, "current_device", lambda: -1)
    monkeypatch.setattr(_launch, "current_stream", lambda index: 7)
    memory = torch.ones(16, 17)
    first, odd, columns = memory.flatten()[:256], memory.flatten()[1:257], memory[:, :16].t()[:]
    with _library.implementation("triton"):
        buffer = MagnitudeBuffer(0, torch.device("cpu"))
        assert buffer.measure(first) == (0, 0)
        assert buffer.measure(first) == (0, 1)
        row = buffer._addresses[1]
        assert (usual, direct) == ([first.data_ptr()], [(7, [first.data_ptr(), row], ())])
        device = -1
        direct.clear()
        for tensor in (odd, columns, first):
            assert buffer.measure(tensor) is not None
    assert usual == [first.data_ptr(), odd.data_ptr()]
    assert direct == [(4, (first.data_ptr(), buffer._addresses[4]), ())]
