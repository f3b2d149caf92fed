"""apex.fused_dense as clients use it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex.fused_dense import (
    FusedDense,
    FusedDenseGeluDense,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


def pair(kind: str, device: str) -> tuple[nn.Module, nn.Module]:
    """Return one of our modules and its equivalent in torch.nn, in float64."""
    if kind == "gelu":
        ours = FusedDenseGeluDense(12, 20, 7)
        wide = nn.Sequential(nn.Linear(12, 20), nn.GELU("tanh"), nn.Linear(20, 7)).double()
    else:
        ours = FusedDense(12, 7, bias=kind == "bias")
        wide = nn.Linear(12, 7, bias=kind == "bias").double()
    for parameter, wanted in zip(ours.parameters(), wide.parameters(), strict=True):
        wanted.data.copy_(parameter.data)
    return ours.to(device), wide.to(device)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", ["bias", "no bias", "gelu"])
@pytest.mark.parametrize("leading", [(5,), (2, 5), ()], ids=str)
def test_like_torch(leading: tuple[int, ...], kind: str, route: Route) -> None:
    ours, wide = pair(kind, route.device)
    x = torch.randn(*leading, 12, device=route.device, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    dy = torch.randn(*leading, 7, device=route.device)
    with _library.implementation(route.implementation):
        output = ours(x)
        gradients = torch.autograd.grad(output, [x, *ours.parameters()], dy)
    expected = wide(exact)
    assert_close(output, expected, reduction=20)
    wanted = torch.autograd.grad(expected, [exact, *wide.parameters()], dy.double())
    for actual, gradient in zip(gradients, wanted, strict=True):
        assert_close(actual, gradient, reduction=20)


def test_parameters_are_named_and_initialised_as_upstream() -> None:
    torch.manual_seed(1)
    layer, both = FusedDense(300, 200), FusedDenseGeluDense(300, 100, 50)
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == {"weight": (200, 300), "bias": (200,)}
    assert {k: tuple(v.shape) for k, v in both.state_dict().items()} == {
        "weight1": (100, 300),
        "bias1": (100,),
        "weight2": (50, 100),
        "bias2": (50,),
    }
    torch.manual_seed(1)
    linear = nn.Linear(300, 200)
    assert torch.equal(layer.weight, linear.weight)
    assert torch.equal(layer.bias, linear.bias)
    assert 0.9 / 10 < both.weight2.abs().max() <= 1 / 10
    linear.load_state_dict(layer.state_dict())
    assert list(FusedDenseGeluDense(4, 3, 2, bias=False).state_dict()) == ["weight1", "weight2"]
    assert "in_features=300, intermediate_features=100, out_features=50, bias=True" in repr(both)
    assert "in_features=300, out_features=200, bias=True" in repr(layer)


def test_functions_equal_modules() -> None:
    x = torch.randn(5, 12)
    layer, both = FusedDense(12, 7), FusedDenseGeluDense(12, 20, 7)
    assert torch.equal(fused_dense_function(x, layer.weight, layer.bias), layer(x))
    assert torch.equal(dense_no_bias_function(x, layer.weight) + layer.bias, layer(x))
    assert torch.equal(fused_dense_gelu_dense_function(x, both.weight1, both.bias1, both.weight2, both.bias2), both(x))


def test_modules_survive_copies_and_casts() -> None:
    both = copy.deepcopy(FusedDenseGeluDense(12, 20, 7)).to(torch.bfloat16)
    assert both(torch.randn(3, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"weight1 is torch\.bfloat16"):
        both(torch.randn(3, 12))


@pytest.mark.parametrize(("opt_level", "dtype"), [("O1", torch.float16), ("O4", torch.bfloat16)])
@pytest.mark.parametrize("route", routes(interpreter=False))
def test_amp(opt_level: str, dtype: torch.dtype, route: Route) -> None:
    model = nn.Sequential(FusedDense(12, 16), FusedDenseGeluDense(16, 20, 7)).to(route.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _library.implementation(route.implementation):
        try:
            model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
            before = [p.detach().clone() for p in model.parameters()]
            output = model(torch.randn(5, 12, device=route.device))
            assert output.dtype == dtype
            with amp.scale_loss(output.float().square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
        finally:
            amp.shutdown()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, old)
