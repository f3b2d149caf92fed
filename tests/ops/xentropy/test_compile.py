"""Cross-entropy under torch.compile and opcheck."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.ops import _library
from tests.support.harness import Route, assert_close, opcheck, routes


@pytest.mark.parametrize("route", routes())
def test_pytorch_knows_the_operators_of_a_linear_layer(route: Route) -> None:
    labels = torch.randint(0, 37, (4,), device=route.device)
    with _library.implementation(route.implementation):
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
