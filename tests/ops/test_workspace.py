"""The memory that partial sums are kept in: who shares it, and that a step needs no more than PyTorch's."""

import threading

import pytest
import torch

from apex.ops import _library, _workspace, norm


def test_nothing_is_kept_off_a_gpu() -> None:
    before = dict(_workspace._kept)
    pieces = [_workspace.partial_sums(8, torch.device("cpu")) for _ in range(2)]
    assert all(first.data_ptr() != second.data_ptr() for first, second in zip(*pieces, strict=True))
    assert all(not tickets.any() for _, tickets in pieces)
    assert _workspace._kept.keys() == before.keys()


@pytest.mark.gpu
def test_one_piece_per_thread_and_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first = _workspace.partial_sums(8, device)
    assert _workspace.partial_sums(4, device) is first
    larger = _workspace.partial_sums(first[0].numel() + 1, device)
    assert larger[0].numel() > first[0].numel()
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = _workspace.partial_sums(8, device)
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    thread = threading.Thread(target=lambda: others.append(_workspace.partial_sums(8, device)))
    thread.start()
    thread.join()
    pieces = (larger, elsewhere, *others)
    assert len({tensor.data_ptr() for piece in pieces for tensor in piece}) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 300, 16384])
def test_tickets_are_returned(rows: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.randn(rows, 1000, device=device, requires_grad=True)
    weight, bias = (torch.rand(1000, device=device, requires_grad=True) for _ in range(2))
    _workspace._kept.clear()
    with _library.implementation("triton"):
        output = norm.layer_norm(source, 1000, weight, bias)
        first, *others = [
            torch.autograd.grad(output, (source, weight, bias), torch.ones_like(output), retain_graph=True)
            for _ in range(20)
        ]
    assert all(torch.equal(one, other) for again in others for one, other in zip(first, again, strict=True))
    assert _workspace._kept
    assert all(not tickets.any() for _, tickets in _workspace._kept.values())


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
