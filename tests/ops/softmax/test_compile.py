"""Softmax under torch.compile, opcheck and CUDA graphs."""

import pytest
import torch

from apex.ops import _library, softmax
from apex.ops.softmax import SoftmaxSpec
from tests.support.harness import Route, assert_close, opcheck, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_opcheck(route: Route, dropout: float) -> None:
    x = torch.randn(1, 2, 2, 20, device=route.device, requires_grad=True)
    mask = None if dropout else torch.rand(1, 1, 2, 20, device=route.device) < 0.3
    spec = SoftmaxSpec(0.5, mask is None, dropout)
    with _library.implementation(route.implementation):
        noise = softmax.draw_noise(x, spec)
        opcheck(route, torch.ops.apex.softmax.default, (x, mask, noise, *spec))
        _, probabilities = softmax.softmax_forward(x, mask, spec, noise)
        arguments = (torch.randn_like(x).detach(), probabilities, noise, *spec, [True])
        opcheck(route, torch.ops.apex.softmax_backward.default, arguments)


@pytest.mark.parametrize("route", routes())
def test_compiled_dropout_is_reproducible(route: Route) -> None:
    x = torch.randn(2, 12, 12, device=route.device, requires_grad=True)
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: softmax.masked_softmax(x, causal=True, dropout=0.5), fullgraph=True, backend=backend
        )
        results = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            output = compiled(x)
            results.append((output.detach(), *torch.autograd.grad(output.square().sum(), x)))
    assert all(map(torch.equal, results[0], results[2]))
    assert not torch.equal(results[0][0], results[1][0])
    plain = softmax.masked_softmax(x.detach(), causal=True)
    assert_close(results[0][0], plain.double() * (results[0][0] != 0) * 2)


@pytest.mark.parametrize("route", routes())
def test_the_operator_refuses_a_second_derivative(route: Route) -> None:
    x = torch.randn(4, 24, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        output = torch.ops.apex.softmax(x, None, None, *SoftmaxSpec(0.5))[0]
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivative only"):
            torch.autograd.grad(first.square().sum(), x)


def test_tensor_subclasses_take_operators() -> None:
    """FakeTensor stands for those that have no memory of their own, DTensor among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _library.implementation("auto"), FakeTensorMode():
        x = torch.randn(2, 4, 6, requires_grad=True)
        for options in ({}, {"causal": True}, {"mask": torch.zeros(4, 6, dtype=torch.bool)}, {"dropout": 0.5}):
            output = softmax.masked_softmax(x, scale=0.5, **options)
            assert output.shape == x.shape
            assert torch.autograd.grad(output.sum(), x)[0].shape == x.shape
