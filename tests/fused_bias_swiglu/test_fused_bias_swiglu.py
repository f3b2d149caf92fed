import pytest
import torch
from torch.nn import functional

import apex
from apex.fused_bias_swiglu import fused_bias_geglu, fused_bias_reglu, fused_bias_swiglu
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("function", "options", "activation"),
    [
        (fused_bias_swiglu, {}, functional.silu),
        (fused_bias_geglu, {}, lambda x: functional.gelu(x, approximate="tanh")),
        (fused_bias_geglu, {"approximate": "none"}, functional.gelu),
        (fused_bias_reglu, {}, functional.relu),
    ],
)
def test_the_first_half_is_the_gate(function, options, activation, bias: bool, route: Route) -> None:
    x = torch.randn(2, 3, 40, device=route.device, requires_grad=True)
    b = torch.randn(40, device=route.device, requires_grad=True) if bias else None
    dy = torch.randn(2, 3, 20, device=route.device)
    inputs = [x, b] if bias else [x]
    with _library.implementation(route.implementation):
        output = function(x, b, **options)
        gradients = torch.autograd.grad(output, inputs, dy)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    gate, value = sum(wide).chunk(2, -1)
    wanted = activation(gate) * value
    assert_close(output, wanted)
    for actual, gradient in zip(gradients, torch.autograd.grad(wanted, wide, dy.double()), strict=True):
        assert_close(actual, gradient, reduction=6)


def test_bad_approximation() -> None:
    with pytest.raises(ValueError, match="approximate='erf' is not known"):
        fused_bias_geglu(torch.randn(2, 4), approximate="erf")


def test_reachable_from_the_package() -> None:
    assert apex.fused_bias_swiglu.fused_bias_swiglu is fused_bias_swiglu
