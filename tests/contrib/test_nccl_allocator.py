"""apex.contrib.nccl_allocator without NCCL, with a stand-in for it, and on a GPU."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import _apex_nccl_allocator
from apex.contrib.nccl_allocator import create_nccl_mem_pool, init, nccl_allocator, nccl_mem


def test_does_nothing_without_nccl(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "apex.nccl_allocator"):
        pool = create_nccl_mem_pool(symmetric=True)
    assert pool is None
    assert len(caplog.records) == 1
    assert _apex_nccl_allocator.get_nccl_allocator() is None
    with nccl_mem(pool):
        assert torch.ones(2).sum() == 2


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"):
        monkeypatch.setenv(name, "x")
    init()
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] == "0"


@pytest.mark.parametrize("name", ["symmetric", "symm_mem", "another"])
def test_registers_the_pool(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was never registered is accepted, and so is every way to name a device."""
    calls = []

    def deregister(pool: object) -> None:
        calls.append("deregister")
        raise RuntimeError("not registered")

    backend = SimpleNamespace(
        mem_allocator="allocator",
        deregister_mem_pool=deregister,
        register_mem_pool=lambda pool: calls.append("register"),
    )
    monkeypatch.setattr(nccl_allocator, "_backend", lambda group, device: backend)
    monkeypatch.setattr(nccl_allocator, "get_func_args", lambda function: ["allocator", name])
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator, **options: (allocator, options))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext())
    assert create_nccl_mem_pool() == ("allocator", {})
    if name == "another":
        with pytest.raises(ValueError, match="has no such option"):
            create_nccl_mem_pool(symmetric=True)
    else:
        assert create_nccl_mem_pool(symmetric=True) == ("allocator", {name: True})
    with nccl_mem("pool", enabled=False):
        assert calls == []
    for device in (None, 0, "cpu", torch.device("cpu")):
        calls.clear()
        with nccl_mem("pool", device=device) as _:
            assert calls == ["deregister"]
        assert calls == ["deregister", "register"]
    with pytest.raises(ValueError, match="device=meta"):
        nccl_mem("pool", device="meta")


def test_an_nccl_without_an_allocator(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Backend:
        @property
        def mem_allocator(self) -> None:
            raise RuntimeError("not supported in this NCCL version")

    monkeypatch.setattr(nccl_allocator, "_backend", lambda group, device: Backend())
    with caplog.at_level(logging.INFO, "apex.nccl_allocator"):
        assert create_nccl_mem_pool() is None
    assert "not supported in this NCCL version" in caplog.text


@pytest.mark.gpu
def test_memory_of_nccl(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group(
        "nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        pool = create_nccl_mem_pool()
        with nccl_mem(pool):
            tensor = torch.ones(1 << 20, device="cuda")
        torch.distributed.all_reduce(tensor)
        assert tensor.sum() == 1 << 20
        del tensor
    finally:
        torch.distributed.destroy_process_group()
