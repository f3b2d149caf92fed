"""fused_dense_cuda, mlp_cuda and fused_weight_gradient_mlp_cuda, called as upstream's Python code calls them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import fused_dense_cuda
import fused_weight_gradient_mlp_cuda
import mlp_cuda
from apex.ops import _library
from apex.ops.dense import reference
from tests.support.harness import Route, assert_close, routes


def tensors(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("route", routes())
def test_linear(route: Route) -> None:
    x, weight, bias, dy = tensors(route.device, (6, 5), (4, 5), (4,), (6, 4))
    with _library.implementation(route.implementation):
        output = fused_dense_cuda.linear_bias_forward(x, weight, bias)
        dx, dweight, dbias = fused_dense_cuda.linear_bias_backward(x, weight, dy)
    assert not output.requires_grad
    assert not dx.requires_grad
    wide = [t.detach().double() for t in (x, weight, bias, dy)]
    assert_close(output, functional.linear(*wide[:3]), reduction=5)
    assert_close(dx, wide[3] @ wide[1], reduction=4)
    assert_close(dweight, wide[3].t() @ wide[0], reduction=6)
    assert_close(dbias, wide[3].sum(0), reduction=6)


@pytest.mark.parametrize("route", routes())
def test_linear_gelu_linear(route: Route) -> None:
    x, w1, b1, w2, b2, dy = tensors(route.device, (6, 5), (8, 5), (8,), (4, 8), (4,), (6, 4))
    with _library.implementation(route.implementation):
        output1, output2, gelu_in = fused_dense_cuda.linear_gelu_linear_forward(x, w1, b1, w2, b2)
        gradients = fused_dense_cuda.linear_gelu_linear_backward(x, gelu_in, output1, w1, w2, dy)
    wide = [t.detach().double().requires_grad_() for t in (x, w1, b1, w2, b2)]
    hidden = functional.linear(*wide[:3])
    active, expected = reference.activate(hidden, "gelu"), reference.dense_gelu_dense(*wide)
    for actual, wanted in ((output1, active), (output2, expected), (gelu_in, hidden)):
        assert_close(actual, wanted, reduction=8)
    assert not output2.requires_grad
    wanted = torch.autograd.grad(expected, wide, dy.double())
    for actual, gradient in zip(gradients, wanted, strict=True):
        assert_close(actual, gradient, reduction=8)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("use_bias", [0, 1])
def test_mlp(use_bias: int, activation: int, route: Route) -> None:
    x, w1, w2, b1, b2, dy = tensors(route.device, (6, 5), (8, 5), (4, 8), (8,), (4,), (6, 4))
    inputs = [x, w1, w2, b1, b2][: 5 if use_bias else 3]
    with _library.implementation(route.implementation):
        outputs = mlp_cuda.forward(use_bias, activation, inputs)
        gradients = mlp_cuda.backward(use_bias, activation, dy, outputs, inputs)
    wide = [t.detach().double() for t in (x, w1, w2, b1, b2)]
    name = ("none", "relu", "sigmoid")[activation]
    biases = wide[3:] if use_bias else []
    expected = [reference.mlp(wide[0], wide[1 : 1 + n], biases[:n], name) for n in (1, 2)]
    assert_close(outputs[0], expected[-1], reduction=8)
    dx, dweights, dbiases = reference.mlp_backward(dy.detach().double(), wide[0], expected, wide[1:3], name)
    for actual, wanted in zip(gradients, [dx, *dweights, *(dbiases if use_bias else [])], strict=True):
        assert_close(actual, wanted, reduction=8)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_weight_gradients(dtype: torch.dtype, route: Route) -> None:
    x, dy = (torch.randn(2, 7, width, device=route.device).to(dtype) for width in (5, 4))
    wanted = dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    total = torch.ones(4, 5, device=route.device)
    same = torch.ones(4, 5, device=route.device, dtype=dtype)
    with _library.implementation(route.implementation):
        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, dy, total)
        if dtype == torch.float32:
            with pytest.raises(TypeError, match="adds to float16 or bfloat16"):
                fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(x, dy, same)
        else:
            fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(x, dy, same)
            with pytest.raises(TypeError, match="adds to float32"):
                fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, dy, same)
            assert_close(same, 1 + wanted, reduction=14)
    assert_close(total, 1 + wanted, reduction=14)


def test_a_client_with_its_own_main_grad() -> None:
    """As Megatron-LM calls it: in a backward pass, with a gradient buffer that requires no gradient."""
    weight = torch.nn.Parameter(torch.randn(4, 5).bfloat16())
    weight.main_grad = torch.zeros(4, 5)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, dy, weight.main_grad)
            return dy @ weight, None

    x = torch.randn(3, 5).bfloat16().requires_grad_()
    for _ in range(2):
        Linear.apply(x, weight).float().sum().backward()
    assert_close(weight.main_grad, 2 * x.detach().double().sum(0).expand(4, 5), reduction=3)
    assert weight.grad is None
