"""Tables of captured launches, and numbers that are read from the device once."""

import pytest
import torch

from apex.ops.multi_tensor import l2norm
from apex.ops.multi_tensor.known import known
from apex.ops.multi_tensor.lists import _REMEMBERED
from tests.harness import assert_close


@pytest.mark.gpu
def test_a_graph_keeps_its_tables() -> None:
    """Other calls with the same sizes, and with more sizes than are remembered, do not take them away."""
    tensors = [torch.randn(size, device="cuda") for size in (5000, 300)]
    l2norm(tensors, per_tensor=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, each = l2norm(tensors, per_tensor=True)
    for _ in range(3):
        l2norm([torch.randn_like(tensor) for tensor in tensors], per_tensor=True)
    for size in range(1, 2 * _REMEMBERED):
        l2norm([torch.ones(size, device="cuda")])
    rubbish = [torch.full((size,), -1, dtype=torch.int64, device="cuda") for size in range(1, 2000)]
    for tensor in tensors:
        tensor.mul_(2)
    graph.replay()
    assert_close(total, torch.cat(tensors).double().norm().reshape(1))
    assert_close(each, torch.stack([tensor.double().norm() for tensor in tensors]))
    assert rubbish


def test_numbers_on_the_cpu_are_read_each_time() -> None:
    values = torch.tensor([1.0, 2.0])
    assert known(values) == [1.0, 2.0]
    values.data[0] = 3.0
    assert known(values) == [3.0, 2.0]


@pytest.mark.gpu
def test_numbers_on_a_device_are_read_once() -> None:
    values = torch.tensor([1.0, 2.0], device="cuda")
    assert known(values) == [1.0, 2.0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert known(values) == [1.0, 2.0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values[0] = 3.0
    assert known(values) == [3.0, 2.0]
