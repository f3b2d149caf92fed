"""apex.mlp as clients use it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from apex import amp
from apex.mlp import MLP, mlp_function
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes

SIZES = [10, 24, 16, 5]
LAYERS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


def torch_mlp(mlp: MLP, activation: str) -> nn.Sequential:
    """Return the layers in torch.nn, in float64."""
    layers: list[nn.Module] = []
    for index, weight in enumerate(mlp.weights):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(mlp.biases)).double().to(weight.device)
        linear.weight.data.copy_(weight.data)
        if mlp.biases:
            linear.bias.data.copy_(mlp.biases[index].data)
        layers += [linear, LAYERS[activation]()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("activation", LAYERS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_like_torch(bias: bool, activation: str, route: Route) -> None:
    mlp = MLP(SIZES, bias=bias, activation=activation).to(route.device)
    wide = torch_mlp(mlp, activation)
    x = torch.randn(3, 4, 10, device=route.device, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    dy = torch.randn(3, 4, 5, device=route.device)
    with _library.implementation(route.implementation):
        output = mlp(x)
        gradients = torch.autograd.grad(output, [x, *mlp.parameters()], dy)
    expected = wide(exact)
    assert_close(output, expected, reduction=24)
    wanted = torch.autograd.grad(expected, [exact, *wide.parameters()], dy.double())
    for actual, gradient in zip(gradients, wanted, strict=True):
        assert_close(actual, gradient, reduction=24)


def test_attributes_are_upstreams() -> None:
    mlp = MLP(SIZES)
    assert (mlp.num_layers, mlp.bias, mlp.activation, mlp.mlp_sizes) == (3, 1, 1, SIZES)
    assert [name for name, _ in mlp.named_parameters()] == [
        "weight_0", "bias_0", "weight_1", "bias_1", "weight_2", "bias_2"
    ]  # fmt: skip
    assert all(a is b for a, b in zip(mlp.weights, (mlp.weight_0, mlp.weight_1, mlp.weight_2), strict=True))
    assert all(a is b for a, b in zip(mlp.biases, (mlp.bias_0, mlp.bias_1, mlp.bias_2), strict=True))
    assert MLP(SIZES, bias=False, activation="sigmoid").activation == 2
    assert MLP(SIZES, bias=False).biases == []
    assert "MLP sizes: [10, 24, 16, 5], Bias=1, activation=1" in repr(mlp)


def test_initial_values() -> None:
    mlp = MLP([1000, 600])
    assert abs(mlp.weight_0.std() - (2 / 1600) ** 0.5) < 1e-3
    assert abs(mlp.bias_0.std() - 600**-0.5) < 1e-2


def test_sizes_stay_as_they_were_given() -> None:
    sizes = [4, 3]
    mlp = MLP(sizes)
    sizes.append(2)
    assert mlp.mlp_sizes == [4, 3]


@pytest.mark.parametrize("activation", [0, 1, 2])
def test_function(activation: int) -> None:
    mlp = MLP(SIZES, activation=list(LAYERS)[activation])
    x = torch.randn(3, 10)
    assert torch.equal(mlp_function(1, activation, x, *mlp.weights, *mlp.biases), mlp(x))


def test_copies_casts_and_computed_parameters() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    mlp = copy.deepcopy(MLP(SIZES)).to(torch.float64)
    x = torch.randn(3, 10, dtype=torch.float64)
    plain = mlp(x)
    assert plain.dtype == torch.float64
    replaced = {"weight_1": torch.zeros(16, 24, dtype=torch.float64)}
    assert not torch.equal(torch.func.functional_call(mlp, replaced, (x,)), plain)
    parametrize.register_parametrization(mlp, "weight_2", Doubled())
    assert torch.equal(mlp.weights[2], 2 * mlp.parametrizations.weight_2.original)
    assert not torch.equal(mlp(x), plain)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="activation must be one of none, relu, sigmoid, got 'gelu'"):
        MLP(SIZES, activation="gelu")
    with pytest.raises(ValueError, match=r"mlp_sizes must name .* got \[3\]"):
        MLP([3])
    with pytest.raises(ValueError, match="activation is 3; use 0"):
        mlp_function(0, 3, torch.randn(2, 3), torch.randn(4, 3))
    with pytest.raises(ValueError, match="got 4 tensors with bias"):
        mlp_function(1, 1, torch.randn(2, 3), torch.randn(4, 3), torch.randn(4, 4), torch.randn(4))
    with pytest.raises(ValueError, match=r"weight 0 has shape \[24, 10\], expected \[out, 9\]"):
        MLP(SIZES)(torch.randn(3, 9))


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_amp(route: Route) -> None:
    model = MLP(SIZES).to(route.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _library.implementation(route.implementation):
        try:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
            output = model(torch.randn(4, 10, device=route.device))
            assert output.dtype == torch.float16
            with amp.scale_loss(output.float().square().mean(), optimizer) as loss:
                loss.backward()
        finally:
            amp.shutdown()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
