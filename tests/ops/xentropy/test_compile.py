"""Cross-entropy under torch.compile, opcheck and CUDA graphs."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.ops import _library
from tests.support.harness import Route, assert_close, opcheck, routes


@pytest.mark.parametrize("route", routes())
def test_opcheck(route: Route) -> None:
    logits = torch.randn(4, 37, device=route.device, requires_grad=True)
    labels = torch.randint(0, 37, (4,), device=route.device)
    with _library.implementation(route.implementation):
        opcheck(route, torch.ops.apex.xentropy.default, (logits, labels, 0.1, 0))
        losses, log_sums = torch.ops.apex.xentropy(logits.detach(), labels, 0.1, 0)
        given = (losses, logits.detach(), log_sums, labels, 0.1, 0, [True])
        opcheck(route, torch.ops.apex.xentropy_backward.default, given)
        input, weight = torch.randn(4, 8, device=route.device), torch.randn(37, 8, device=route.device)
        for wanted, bias in (([True, True, True], weight[:, 0]), ([False, False, False], None)):
            transform, placed = [1.5, 2.0, 0.7], ["", False]
            settings = [0.1, 1e-3, 0.0, 0.0]
            given = [input, weight, bias, labels, None]
            arguments = (
                *given,
                None,
                None,
                settings,
                transform,
                -100,
                "entropy top",
                wanted,
                torch.float32,
                3,
                *placed,
            )
            opcheck(route, torch.ops.apex.linear_xentropy.default, arguments)
            arguments = (*given, transform, -100, "lse own entropy top", True, 3, *placed)
            opcheck(route, torch.ops.apex.linear_rows.default, arguments)
            table, _, kept, _ = torch.ops.apex.linear_rows(*arguments)
            arguments = (torch.ones_like(table), table, *given, kept, transform, -100, "lse own entropy", wanted)
            opcheck(route, torch.ops.apex.linear_rows_backward.default, (*arguments, torch.float32, 3, *placed))


@pytest.mark.parametrize("route", routes())
def test_compiled_without_graph_breaks(route: Route) -> None:
    input = torch.randn(6, 8, device=route.device, requires_grad=True)
    weight = torch.randn(37, 8, device=route.device, requires_grad=True)
    labels = torch.randint(0, 37, (6,), device=route.device)

    def function(input, weight):
        losses = SoftmaxCrossEntropyLoss.apply(input @ weight.t(), labels, 0.1, 3, False)
        rows = linear_cross_entropy(input, weight, labels, reduction="none")
        return losses.sum() + 2 * rows.sin().sum() + 3 * linear_cross_entropy(input, weight, labels, weight[:, 0])

    # Generated C++ would need a compiler; on a GPU the generated code is Triton.
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        expected = function(input, weight)
        expected_gradients = torch.autograd.grad(expected, (input, weight))
        actual = torch.compile(function, fullgraph=True, backend=backend)(input, weight)
        gradients = torch.autograd.grad(actual, (input, weight))
    assert_close(actual, expected.double(), reduction=37)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, wanted.double(), reduction=37)


@pytest.mark.parametrize("route", routes())
def test_compiled_losses_leave_the_fusion_with_a_cast_to_inductor(route: Route) -> None:
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    logits = torch.randn(6, 37, device=route.device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.tensor([3, 0, 36, 5, 3, 11], device=route.device)

    def function(logits):
        return SoftmaxCrossEntropyLoss.apply(logits.float(), labels, 0.1, 3).sum()

    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        (expected,) = torch.autograd.grad(function(logits), logits)
        compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
        (gradient,) = torch.autograd.grad(compiled(logits), logits)
    assert seen
    assert not [target for target in seen if "apex" in target]
    assert_close(gradient, expected.double(), reduction=37)


@pytest.mark.gpu
def test_a_compiled_loss_needs_no_more_memory_than_pytorchs() -> None:
    head = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 8192, (4096,), device="cuda")
    peaks = []
    for loss in (
        lambda logits: torch.nn.functional.cross_entropy(logits, labels),
        lambda logits: SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, -100).mean(),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(lambda loss=loss: loss((rows @ head.t()).float()), fullgraph=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(compiled(), head)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.02 * peaks[0]


@pytest.mark.parametrize("route", routes())
def test_the_operator_refuses_a_second_derivative(route: Route) -> None:
    logits = torch.randn(4, 24, device=route.device, requires_grad=True)
    labels = torch.randint(0, 24, (4,), device=route.device)
    with _library.implementation(route.implementation):
        losses, _ = torch.ops.apex.xentropy(logits, labels, 0.0, 0)
        (first,) = torch.autograd.grad(losses.square().sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivative only"):
            torch.autograd.grad(first.square().sum(), logits)


def test_tensor_subclasses_take_operators() -> None:
    """FakeTensor stands for those that have no memory of their own, DTensor among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _library.implementation("auto"), FakeTensorMode():
        logits, labels = torch.randn(4, 24, requires_grad=True), torch.zeros(4).long()
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels)
        assert losses.shape == (4,)
        assert torch.autograd.grad(losses.sum(), logits)[0].shape == (4, 24)


@pytest.mark.gpu
def test_cuda_graph_capture() -> None:
    input = torch.randn(512, 64, device="cuda", requires_grad=True)
    weight = torch.randn(5001, 64, device="cuda", requires_grad=True)
    labels = torch.randint(0, 5001, (512,), device="cuda")

    def step():
        losses = SoftmaxCrossEntropyLoss.apply(input @ weight.t(), labels, 0.1, 3)
        loss = losses.sum() + linear_cross_entropy(input, weight, labels, chunk_rows=200)
        return loss, *torch.autograd.grad(loss, (input, weight))

    with _library.implementation("triton"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # compile before capture
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            input.copy_(torch.randn_like(input))
        graph.replay()
        torch.cuda.synchronize()
        expected = step()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
