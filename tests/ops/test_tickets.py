"""The counters that launches share, and memory of a step beside PyTorch's."""

import gc
import threading

import pytest
import torch

from apex.ops import _library, _tickets, dense, norm


def test_nothing_is_kept_off_a_gpu() -> None:
    before = dict(_tickets._kept)
    first, second = (_tickets.tickets_on(torch.device("cpu")) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert not first.any()
    assert _tickets._kept.keys() == before.keys()


@pytest.mark.gpu
def test_tickets_of_a_thread() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first = _tickets.tickets_on(device)
    assert _tickets.tickets_on(device) is first
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = [_tickets.tickets_on(device) for _ in range(2)]
    others: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: others.append(_tickets.tickets_on(device)))
    thread.start()
    thread.join()
    assert len({tickets.data_ptr() for tickets in (first, *elsewhere, *others)}) == 4


@pytest.mark.gpu
def test_compiled_graphs_may_warm_up() -> None:
    """Which they do with memory of their own, none of which may be kept."""
    module = torch.nn.Linear(64, 1024, device="cuda")
    weight, bias = (torch.rand(1024, device="cuda", requires_grad=True) for _ in range(2))
    source = torch.randn(2048, 64, device="cuda")
    leaves = (module.weight, weight, bias)

    def gradients(function) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        loss = function(source).square().sum()
        return [gradient.clone() for gradient in torch.autograd.grad(loss, leaves)]

    def function(x: torch.Tensor) -> torch.Tensor:
        return norm.layer_norm(module(x), 1024, weight, bias).sin()

    with _library.implementation("triton"):
        expected = gradients(function)
        compiled = torch.compile(function, mode="reduce-overhead")
        for _ in range(4):  # warmed up, captured, replayed
            for actual, wanted in zip(gradients(compiled), expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-3 * wanted.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 300, 16384])
def test_tickets_are_returned(rows: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.randn(rows, 256, device=device, requires_grad=True)
    weight, bias = torch.randn(1000, 256, device=device), torch.rand(1000, device=device, requires_grad=True)
    _tickets._kept.clear()
    with _library.implementation("triton"):
        output = dense.mlp(source, [weight], [bias])
        first, *others = [
            torch.autograd.grad(output, (source, bias), torch.ones_like(output), retain_graph=True) for _ in range(20)
        ]
    assert all(torch.equal(one, other) for again in others for one, other in zip(first, again, strict=True))
    assert all(not tickets.any() for tickets in _tickets._kept.values())


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 16384])
def test_a_step_needs_no_more_memory_than_pytorchs_but_partial_sums(columns: int) -> None:
    rows = (1 << 24) // columns
    source = torch.randn(rows, columns, device="cuda", requires_grad=True)
    weight, bias = (torch.rand(columns, device="cuda", requires_grad=True) for _ in range(2))
    gradient = torch.randn_like(source)

    def peak(function) -> int:
        for _ in range(2):  # the first step compiles
            gc.collect()  # garbage of other tests, which would be freed while it is measured
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(function(source + 1), (source, weight, bias), gradient)
        return torch.cuda.max_memory_allocated() - before

    torchs = peak(lambda x: torch.nn.functional.layer_norm(x, (columns,), weight, bias))
    # Partial sums of the gradients of weight and bias: float32, at most two programs per multiprocessor.
    partials = 2 * 4 * columns * 2 * torch.cuda.get_device_properties("cuda").multi_processor_count
    assert peak(lambda x: norm.layer_norm(x, columns, weight, bias)) <= torchs + partials
    assert peak(lambda x: norm.layer_norm(x, columns, weight, bias, memory_efficient=True)) < torchs
