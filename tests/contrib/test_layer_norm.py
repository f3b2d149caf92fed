import inspect

import pytest
import torch
from torch import nn

from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN, _fast_layer_norm
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("hidden", [5, 768, 5000])
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_any_hidden_size(route: Route, hidden: int, memory_efficient: bool) -> None:
    norm = FastLayerNorm(hidden, memory_efficient=memory_efficient).to(route.device)
    plain = nn.LayerNorm(hidden).to(route.device, torch.float64)
    assert list(norm.state_dict()) == list(plain.state_dict())
    x = torch.randn(2, 3, hidden, device=route.device, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    with _library.implementation(route.implementation):
        output = norm(x)
        output.sin().sum().backward()
    expected = plain(wide)
    expected.sin().sum().backward()
    assert_close(output, expected)
    assert_close(x.grad, wide.grad)
    assert_close(norm.weight.grad, plain.weight.grad, reduction=6)
    assert_close(norm.bias.grad, plain.bias.grad, reduction=6)


def test_output_has_the_weights_dtype() -> None:
    assert FastLayerNorm(16).to(torch.bfloat16)(torch.randn(4, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"memory_efficient": True}])
def test_function_behind_the_module(options: dict) -> None:
    """Clients call it with four arguments, or name the fifth."""
    x, weight, bias = torch.randn(4, 16), torch.rand(16) + 0.5, torch.randn(16)
    expected = nn.functional.layer_norm(x.double(), (16,), weight.double(), bias.double(), 1e-3)
    assert_close(_fast_layer_norm(x, weight, bias, 1e-3, **options), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert _fast_layer_norm(x, weight, bias, 1e-3, **options).dtype == torch.bfloat16


@pytest.mark.parametrize("memory_efficient", [[], [True]])
def test_function_that_clients_introspect_and_apply(memory_efficient: list) -> None:
    assert inspect.getfullargspec(FastLayerNormFN.forward).args == [
        "ctx",
        "x",
        "gamma",
        "beta",
        "epsilon",
        "memory_efficient",
    ]
    x, beta = (torch.randn(s, requires_grad=True) for s in ((4, 16), (16,)))
    gamma = (torch.rand(16) + 0.5).requires_grad_()
    dy = torch.randn(4, 16)
    output = FastLayerNormFN.apply(x, gamma, beta, 1e-5, *memory_efficient)
    wide = [t.detach().double().requires_grad_() for t in (x, gamma, beta)]
    expected = nn.functional.layer_norm(wide[0], (16,), wide[1], wide[2])
    assert_close(output, expected)
    wanted = torch.autograd.grad(expected, wide, dy.double())
    for actual, gradient in zip(torch.autograd.grad(output, (x, gamma, beta), dy), wanted, strict=True):
        assert_close(actual, gradient, reduction=4)
