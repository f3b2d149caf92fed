"""Asynchronous saves of device tensors: a checkpoint has the numbers of the time of the call."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex import checkpoint, graphs
from apex.checkpoint import _background, _writer
from apex.contrib.optimizers import DistributedFusedAdam
from apex.ops import _staging
from apex.optimizers import FusedAdam

pytestmark = pytest.mark.gpu
WIDTH = 2048


@pytest.fixture(scope="module", autouse=True)
def writer() -> Iterator[None]:
    """Use one writer process for all tests of the module."""
    yield
    checkpoint.wait()
    _background._close()


class Training:
    """A few large layers and a norm with small running statistics, which forward passes change."""

    def __init__(self, optimizer: Callable[..., Any], capture: bool) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.inputs = torch.randn(256, WIDTH, device="cuda")
        self.step = graphs.capture(self._step) if capture else self._step
        for _ in range(4):
            self.step()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}


def copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def zeros(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("staging", ["host", "device"])
@pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, FusedAdam])
def test_steps_after_the_call_change_nothing(optimizer: Any, capture: bool, staging: Any, tmp_path: Path) -> None:
    training = Training(optimizer, capture)
    for _ in range(2):  # the second save uses the memory again
        expected = copied(training.state())
        checkpoint.save_sharded(training.state(), tmp_path / "a", use_async=True, staging=staging)
        for _ in range(5):
            training.step()
        found = zeros(expected)
        checkpoint.load_sharded(found, tmp_path / "a")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("staging", ["host", "device"])
def test_zero_optimizers(staging: str, tmp_path: Path) -> None:
    from apex.transformer import checkpoint as split

    training = Training(DistributedFusedAdam, False)
    expected = copied(training.model.state_dict())
    split.save(tmp_path / "a", training.model, training.optimizer, use_async=True, staging=staging)
    for _ in range(3):
        training.step()
    after = copied(training.model.state_dict())
    split.load(tmp_path / "a", training.model, training.optimizer)
    torch.testing.assert_close(dict(training.model.state_dict()), expected, rtol=0, atol=0)
    for _ in range(3):
        training.step()
    torch.testing.assert_close(dict(training.model.state_dict()), after, rtol=0, atol=0)


def test_a_large_tensor_that_is_changed_before_a_step_is_an_error() -> None:
    source = torch.ones(1 << 20, device="cuda")
    buffer = _staging.HostBuffer(4 << 20, True)
    copies = _staging.Copies(buffer.memory, [(source, 0)], False)
    source.mul_(2)
    _staging.wait_for_copies()
    with pytest.raises(RuntimeError, match=r"shape \(1048576,\) .* was changed while it was copied"):
        copies.finish()
    copies = _staging.Copies(buffer.memory, [(source, 0)], False)
    _staging.wait_for_copies()
    source.mul_(2)  # after the copy, as an optimizer's step
    copies.finish()
    assert torch.frombuffer(buffer.memory, dtype=torch.float32).unique().tolist() == [2.0]
    assert not _staging._reading
    buffer.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_clones_are_copied_together(on_device: bool) -> None:
    """Tensors of several dtypes and layouts, on both sides, some without elements; neighbours share a copy."""
    pickler = _writer.Pickler(io.BytesIO())
    tensors = [torch.randn(100, 7, device="cuda")[:, ::2], torch.arange(1 << 19, device="cuda"), torch.ones(3)]
    tensors += [torch.randn(5, device="cuda").to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.bool)]
    tensors += [torch.empty(0, 3, device="cuda"), torch.tensor(7, device="cuda"), torch.rand(1 << 18, device="cuda")]
    pickler.dump(tensors)
    buffer = _staging.HostBuffer(pickler.size, True)
    copies = _staging.Copies(buffer.memory, pickler.tensors, on_device)
    assert len(copies._clones) == 2  # the host's tensor lies between them
    copies.finish()
    for tensor, offset in pickler.tensors:
        found = _staging.part_of(buffer.memory, offset, tensor.dtype, tensor.shape)
        torch.testing.assert_close(found, tensor.cpu(), rtol=0, atol=0)
    del found
    buffer.close()
