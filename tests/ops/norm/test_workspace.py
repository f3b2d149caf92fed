"""The memory that partial sums are kept in: who shares it, and that a step needs no more than PyTorch's."""

import threading

import pytest
import torch

from apex.ops import norm
from apex.ops.norm import workspace


def test_nothing_is_kept_off_a_gpu() -> None:
    before = dict(workspace._kept)
    first, second = (workspace.partial_sums(8, torch.device("cpu")) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert workspace._kept.keys() == before.keys()


@pytest.mark.gpu
def test_one_piece_per_thread_and_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first = workspace.partial_sums(8, device)
    assert workspace.partial_sums(4, device) is first
    larger = workspace.partial_sums(first.numel() + 1, device)
    assert larger.numel() > first.numel()
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = workspace.partial_sums(8, device)
    others: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: others.append(workspace.partial_sums(8, device)))
    thread.start()
    thread.join()
    assert len({tensor.data_ptr() for tensor in (larger, elsewhere, *others)}) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 16384])
def test_a_step_needs_no_more_memory_than_pytorchs(columns: int) -> None:
    rows = (1 << 24) // columns
    source = torch.randn(rows, columns, device="cuda", requires_grad=True)
    weight, bias = (torch.rand(columns, device="cuda", requires_grad=True) for _ in range(2))
    gradient = torch.randn_like(source)

    def peak(function) -> int:
        for _ in range(2):  # the first step makes what is kept
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(function(source + 1), (source, weight, bias), gradient)
        return torch.cuda.max_memory_allocated() - before

    torchs = peak(lambda x: torch.nn.functional.layer_norm(x, (columns,), weight, bias))
    assert peak(lambda x: norm.layer_norm(x, columns, weight, bias)) <= torchs
    assert peak(lambda x: norm.layer_norm(x, columns, weight, bias, memory_efficient=True)) < torchs
