"""apex.contrib.focal_loss as clients use it."""

import importlib

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import apex
from apex.contrib.focal_loss import focal_loss
from apex.contrib.focal_loss.focal_loss import FocalLoss
from apex.ops import _library
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

ALPHA, GAMMA = 0.24, 2.0


def sigmoid_focal_loss(logits, classes):
    """Compute the sum of torchvision's loss of this name."""
    targets = functional.one_hot(classes, logits.shape[-1]).to(logits.dtype)
    cross_entropy = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    probability = logits.sigmoid()
    right = probability * targets + (1 - probability) * (1 - targets)
    return ((ALPHA * targets + (1 - ALPHA) * (1 - targets)) * (1 - right) ** GAMMA * cross_entropy).sum()


@pytest.mark.parametrize("route", routes())
def test_like_upstreams_test(route: Route) -> None:
    logits = torch.randn(12, 8, device=route.device, requires_grad=True)
    classes = torch.randint(0, 8, (12,), device=route.device)
    one = torch.ones([], device=route.device)
    with _library.implementation(route.implementation):
        pieces = [
            focal_loss.FocalLoss.apply(logits[i : i + 1], classes[i : i + 1], one, 8, ALPHA, GAMMA, 0.0)
            for i in range(12)
        ]
        (gradient,) = torch.autograd.grad(sum(pieces), logits)
        whole = focal_loss(logits, classes, one, 8, ALPHA, GAMMA)
    wide = logits.detach().double().requires_grad_()
    wanted = sigmoid_focal_loss(wide, classes)
    assert_close(sum(pieces), wanted, reduction=96)
    assert_close(whole, wanted, reduction=96)
    assert_close(gradient, torch.autograd.grad(wanted, wide)[0])


def test_names_that_clients_import() -> None:
    """Older versions of upstream's package export the function under its name, newer ones the module."""
    module = importlib.import_module("apex.contrib.focal_loss.focal_loss")
    assert focal_loss is module.focal_loss is focal_loss.focal_loss is apex.contrib.focal_loss.focal_loss
    assert focal_loss.FocalLoss is FocalLoss is module.FocalLoss


@pytest.mark.parametrize("route", routes())
def test_backward_can_be_repeated(route: Route) -> None:
    """Upstream scales the kept gradient in place, so that its second backward pass is wrong."""
    logits = torch.randn(12, 8, device=route.device, requires_grad=True)
    classes, positives = torch.randint(-2, 8, (12,), device=route.device), torch.tensor([4.0], device=route.device)
    with _library.implementation(route.implementation):
        loss = focal_loss(logits, classes, positives, 8, ALPHA, GAMMA, 0.1)
        first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
        again = checkpoint(focal_loss, logits, classes, positives, 8, ALPHA, GAMMA, 0.1, use_reentrant=False)
        third = torch.autograd.grad(again, logits)[0]
        with torch.no_grad():
            assert_equal_bits([focal_loss(logits, classes, positives, 8, ALPHA, GAMMA, 0.1)], [loss])
    assert_equal_bits([second, third], [first, first])


def test_gradcheck() -> None:
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    classes, positives = torch.tensor([0, -1, -2, 3, 4]), torch.tensor(2.0)

    def function(logits):
        return focal_loss(logits, classes, positives, 5, ALPHA, 1.5, 0.1)

    assert torch.autograd.gradcheck(function, logits)
    assert torch.autograd.gradgradcheck(function, logits)
    assert function(logits).dtype == torch.float64


@pytest.mark.parametrize("route", routes())
def test_second_derivative_of_a_kernel_comes_from_the_reference(route: Route) -> None:
    logits = torch.randn(12, 8, device=route.device, requires_grad=True)
    classes = torch.randint(0, 8, (12,), device=route.device)

    def second(function, logits):
        (first,) = torch.autograd.grad(function(logits), logits, create_graph=True)
        return torch.autograd.grad(first.square().sum(), logits)[0]

    with _library.implementation(route.implementation):
        one = torch.ones((), device=route.device)
        found = second(lambda x: focal_loss(x, classes, one, 8, ALPHA, GAMMA), logits)
    wide = logits.detach().double().requires_grad_()
    assert_close(found, second(lambda x: sigmoid_focal_loss(x, classes), wide))


@pytest.mark.parametrize("route", routes())
def test_autocast_and_half_scores(route: Route) -> None:
    linear = torch.nn.Linear(16, 8, device=route.device)
    classes = torch.randint(-1, 8, (12,), device=route.device)
    positives = torch.tensor([4.0], device=route.device)
    with _library.implementation(route.implementation), torch.autocast(route.device, torch.bfloat16):
        scores = linear(torch.randn(12, 16, device=route.device))
        loss = focal_loss(scores, classes, positives, 8, ALPHA, GAMMA)
        loss.backward()
    assert scores.dtype == torch.bfloat16
    assert loss.dtype == linear.weight.grad.dtype == torch.float32
    wide = focal_loss(scores.detach().double(), classes, positives, 8, ALPHA, GAMMA)
    assert_close(loss, wide, reduction=96)


@pytest.mark.parametrize("route", routes())
def test_compiled_without_graph_breaks(route: Route) -> None:
    logits = torch.randn(12, 8, device=route.device, requires_grad=True)
    classes = torch.randint(-2, 8, (12,), device=route.device)
    positives = torch.tensor([4.0], device=route.device)

    def function(logits):
        return focal_loss(logits.sin(), classes, positives, 8, ALPHA, GAMMA)

    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        wanted = torch.autograd.grad(function(logits), logits)[0]
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        found = torch.autograd.grad(compiled(logits), logits)[0]
    assert_close(found, wanted.double())


@pytest.mark.gpu
def test_cuda_graph_capture() -> None:
    logits = torch.randn(5000, 80, device="cuda", requires_grad=True)
    classes = torch.randint(-2, 80, (5000,), device="cuda")
    positives = torch.tensor([40.0], device="cuda")

    def step():
        loss = focal_loss(logits, classes, positives, 80, ALPHA, GAMMA)
        return [loss.detach(), *torch.autograd.grad(loss, logits)]

    with torch.cuda.stream(torch.cuda.Stream()):  # compile before capture
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        logits.copy_(torch.randn_like(logits))
    graph.replay()
    torch.cuda.synchronize()
    assert_equal_bits(found, step())
