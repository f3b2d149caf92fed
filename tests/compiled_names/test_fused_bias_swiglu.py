"""The compiled module fused_bias_swiglu, called as AMD's own test calls it."""

import pytest
import torch
from torch.nn import functional

import fused_bias_swiglu
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_forward_and_backward(dtype: torch.dtype, with_bias: bool, route: Route) -> None:
    if dtype == torch.float64 and route.implementation == "triton":
        pytest.skip("the kernels compute in float32")
    input = torch.randn(6, 52, device=route.device, dtype=dtype)
    bias = torch.randn(52, device=route.device, dtype=dtype) if with_bias else None
    gradient = torch.randn(6, 26, device=route.device, dtype=dtype)
    with _library.implementation(route.implementation):
        output = fused_bias_swiglu.forward(input, bias)
        found = fused_bias_swiglu.backward(gradient, input, bias)
    wide = input.double().requires_grad_()
    gate, value = (wide if bias is None else wide + bias.double()).chunk(2, -1)
    wanted = functional.silu(gate) * value
    assert output.dtype == found.dtype == dtype
    assert_close(output, wanted)
    assert_close(found, torch.autograd.grad(wanted, wide, gradient.double())[0])


@pytest.mark.parametrize("route", routes())
def test_tensors_that_want_a_gradient_make_no_graph(route: Route) -> None:
    input, bias = (torch.randn(*shape, device=route.device, requires_grad=True) for shape in ((3, 8), (8,)))
    gradient = torch.randn(3, 4, device=route.device)
    with _library.implementation(route.implementation):
        for given in ((input, bias), (input, None)):
            assert not fused_bias_swiglu.forward(*given).requires_grad
            assert not fused_bias_swiglu.backward(gradient, *given).requires_grad


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="must be even"):
        fused_bias_swiglu.forward(torch.randn(3, 5), torch.randn(5))
    with pytest.raises(ValueError, match="the gradient has shape"):
        fused_bias_swiglu.backward(torch.randn(3, 6), torch.randn(3, 6), torch.randn(6))
