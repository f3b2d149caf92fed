"""Peer memory and halos on a GPU: one process with NCCL, two that share the GPU with Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apex._distributed import peer_memory
from apex.contrib.peer_memory import PeerHaloExchanger1d, PeerMemoryPool
from tests.contrib.spatial import gpu_checks
from tests.parallel.processes import run_checks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(gpu_checks.__name__, Path(tmp_path_factory.mktemp("two")), on_gpu=True)


@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_two_processes(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]


def test_pool_of_one_process() -> None:
    pool = PeerMemoryPool(4096, 4096)
    (tensor,) = pool.allocate_peer_tensors((2, 3, 4, 5), torch.bfloat16, True, True)
    assert tensor.is_cuda
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    y = torch.ones(1, 2, 8, 3, device="cuda")
    PeerHaloExchanger1d([0], 0, pool, 2)(y)
    assert y[:, :, 2:-2].all()
    assert not y[:, :, :2].any()
    assert not y[:, :, -2:].any()


def test_symmetric_memory_in_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one rank with itself as its neighbour, which is as far as one GPU goes."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.setattr(peer_memory, "group_of", lambda ranks: dist.group.WORLD)
        pool = PeerMemoryPool(0, 4096)
        assert pool.memory.problem is None, pool.memory.problem
        halos = torch.randn(2, 3, device="cuda")
        found = torch.zeros_like(halos)
        pool.exchange_halos(list(halos), list(found), (0, 0))
        assert torch.equal(found, halos.flip(0))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pool.exchange_halos(list(halos), list(found), (0, 0))
        for _ in range(3):
            halos.normal_()
            graph.replay()
            assert torch.equal(found, halos.flip(0))
    finally:
        dist.destroy_process_group()
