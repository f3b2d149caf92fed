"""Workspaces of cuBLAS on the stream of captures: they are made first, so that they hold no other memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from apex.graphs import capture
from apex.ops import _graph


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.name().startswith(("aten::mm", "aten::addmm"))
        return function(*args, **(kwargs or {}))


def _on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace streams by stand-ins on the host."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(_graph.CudaGraphs, "_streams", {})


def test_a_new_stream_runs_a_product_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_host(monkeypatch)
    graphs, device = _graph.CudaGraphs(), torch.device("cuda", 0)
    with torch.no_grad(), _Products() as products:
        stream = graphs._stream(device)
        first = products.count
        assert graphs._stream(device) is stream
    assert first >= 2
    assert products.count == first


def test_a_product_that_is_refused_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic algorithms refuse products on GPUs, and a captured step may have none."""
    _on_host(monkeypatch)

    def refuse(*_: Any) -> None:
        raise RuntimeError("CUBLAS_WORKSPACE_CONFIG is not set")

    monkeypatch.setattr(_graph.functional, "linear", refuse)
    assert _graph.CudaGraphs()._stream(torch.device("cuda", 0)) is not None


def _large_blocks() -> int:
    """Return the number of blocks of at least 256 MiB that PyTorch holds outside of graphs."""
    parts = torch.cuda.memory_snapshot()
    return sum(part["total_size"] >= 1 << 28 and part["segment_pool_id"] == (0, 0) for part in parts)


@pytest.mark.gpu
def test_workspaces_hold_no_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of a large intermediate of the eager calls is released although products ran beside it."""
    monkeypatch.setattr(_graph.CudaGraphs, "_streams", {})  # a stream without workspaces
    torch.cuda.empty_cache()
    before, weight = _large_blocks(), torch.randn(64, 64, device="cuda", requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ weight).float().expand(1 << 16, 64, 64).exp().sum()  # 1 GiB, freed before the backward
        loss.backward()
        weight.grad = None
        return loss.detach()

    captured = capture(step)
    x = torch.zeros(64, 64, device="cuda")
    for _ in range(2):
        captured(x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert _large_blocks() == before
