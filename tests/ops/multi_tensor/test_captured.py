"""Tables of captured launches."""

import pytest
import torch

from apex.ops import _device, implementation
from apex.ops.multi_tensor import l2norm
from apex.ops.multi_tensor.dispatch import _MOST_GROUPS
from apex.ops.multi_tensor.tables import current_stream
from apex.optimizers import FusedAdam
from tests.support.harness import assert_close


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
    for size in range(1, 2 * _MOST_GROUPS):
        l2norm([torch.ones(size, device="cuda")])
    rubbish = [torch.full((size,), -1, dtype=torch.int64, device="cuda") for size in range(1, 2000)]
    for tensor in tensors:
        tensor.mul_(2)
    graph.replay()
    assert_close(total, torch.cat(tensors).double().norm().reshape(1))
    assert_close(each, torch.stack([tensor.double().norm() for tensor in tensors]))
    assert rubbish


@pytest.mark.gpu
@pytest.mark.parametrize("implementation_name", ["triton", "torch"])
def test_graphs_do_not_need_each_other(implementation_name: str) -> None:
    """What is uploaded while one is recorded is not there for another, nor for calls before it is replayed."""
    tensors = [torch.randn(size, device="cuda") for size in (5000, 300)]
    params = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = FusedAdam(params, lr=0.0, weight_decay=0.0, capturable=True)
    exact = torch.cat(tensors).double().norm().reshape(1)
    stream = torch.cuda.Stream()
    with implementation(implementation_name):
        l2norm(tensors, per_tensor=True)
        optimizer.step()
        torch.cuda.synchronize()
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        found = []
        for graph in graphs:
            with torch.cuda.graph(graph, stream=stream):
                optimizer.step()
                found.append(l2norm(tensors, per_tensor=True)[0])
        graphs[1].replay()
        assert_close(found[1], exact)
        with torch.cuda.stream(stream):
            optimizer.step()
            eager = l2norm(tensors, per_tensor=True)[0]
        torch.cuda.synchronize()
        assert_close(eager, exact)
    assert [float(optimizer.param_groups[0]["step"])] == [3.0]
    for param, tensor in zip(params, tensors, strict=True):
        assert torch.equal(param, tensor)


def test_work_of_a_graph_is_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(_device, "current_stream", lambda index: 7)
    device = torch.device("cuda", 0)
    numbers = [current_stream(device) for _ in range(3)]
    assert len(set(numbers)) == 3
    assert max(numbers) < 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert current_stream(device) == 7
    assert current_stream(torch.device("cpu")) == 0
