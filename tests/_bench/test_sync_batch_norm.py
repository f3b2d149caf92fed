"""The benchmark cases of SyncBatchNorm, on small shapes."""

import pytest
import torch
import torch.distributed as dist

from apex._bench import selection
from apex._bench.cases import sync_batch_norm
from apex._bench.check import worst_excess

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def connection():
    """The group that the cases make; disconnected again for the sake of other tests."""
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("connection")
@pytest.mark.parametrize("layout", sync_batch_norm.LAYOUTS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_ours_and_the_peer_give_what_is_expected(layout: str, direction: str) -> None:
    prepared = sync_batch_norm._sync_batch_norm(torch.float32, (3, 5, 4, 4), layout, direction, CPU)
    assert list(prepared.implementations) == ["ours", "torch"]
    for make in prepared.implementations.values():
        assert worst_excess(make()(), prepared.expected) <= 1


def test_cases() -> None:
    assert not dist.is_initialized()
    moved = {case.name: case.bytes_moved for _, case in selection.select(["sync_batch_norm"], GPU)}
    assert moved["sync_batch_norm float16 nhwc 64x256x56x56 fwd"] == 2 * 64 * 256 * 56 * 56 * 2
    assert moved["sync_batch_norm float32 nchw 32x2048x7x7 bwd"] == 3 * 32 * 2048 * 7 * 7 * 4
    assert not dist.is_initialized()
