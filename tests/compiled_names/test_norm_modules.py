"""fused_layer_norm_cuda and fast_layer_norm, called as upstream's Python code calls them."""

import pytest
import torch
from torch import nn

import fast_layer_norm
import fused_layer_norm_cuda
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes

SHAPE = (4, 8)


def inputs(device: str) -> tuple[torch.Tensor, ...]:
    x, dy = (torch.randn(2, 3, *SHAPE, device=device) for _ in range(2))
    gamma, beta = (torch.rand(SHAPE, device=device) + 0.5 for _ in range(2))
    return x, dy, gamma, beta


def expected(x, dy, gamma, beta, rms: bool) -> tuple:
    wide = [t.detach().double().requires_grad_() for t in (x, gamma, beta)]
    if rms:
        output = nn.functional.rms_norm(wide[0], SHAPE, wide[1], 1e-5)
        return output, torch.autograd.grad(output, wide[:2], dy.double())
    output = nn.functional.layer_norm(wide[0], SHAPE, wide[1], wide[2], 1e-5)
    return output, torch.autograd.grad(output, wide, dy.double())


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_layer_norm(route: Route, memory_efficient: bool) -> None:
    x, dy, gamma, beta = inputs(route.device)
    wanted, wanted_gradients = expected(x, dy, gamma, beta, rms=False)
    with _library.implementation(route.implementation):
        output, mean, invvar = fused_layer_norm_cuda.forward_affine(x, SHAPE, gamma, beta, 1e-5)
        saved = output if memory_efficient else x
        gradients = fused_layer_norm_cuda.backward_affine(
            dy, None if memory_efficient else mean, invvar, saved, SHAPE, gamma, beta, 1e-5, memory_efficient
        )
    assert mean.shape == invvar.shape == (6,)
    assert_close(output, wanted)
    for actual, gradient in zip(gradients, wanted_gradients, strict=True):
        assert_close(actual, gradient, reduction=6)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_rms_norm(route: Route, memory_efficient: bool) -> None:
    x, dy, gamma, beta = inputs(route.device)
    wanted, wanted_gradients = expected(x, dy, gamma, beta, rms=True)
    with _library.implementation(route.implementation):
        output, invvar = fused_layer_norm_cuda.rms_forward_affine(x, SHAPE, gamma, 1e-5)
        saved = output if memory_efficient else x
        gradients = fused_layer_norm_cuda.rms_backward_affine(dy, invvar, saved, SHAPE, gamma, 1e-5, memory_efficient)
    assert_close(output, wanted)
    for actual, gradient in zip(gradients, wanted_gradients, strict=True):
        assert_close(actual, gradient, reduction=6)


def test_without_parameters() -> None:
    x, dy, gamma, beta = inputs("cpu")
    wanted, (wanted_dx, *_) = expected(x, dy, torch.ones_like(gamma), torch.zeros_like(beta), rms=False)
    output, mean, invvar = fused_layer_norm_cuda.forward(x, SHAPE, 1e-5)
    assert_close(output, wanted)
    assert_close(fused_layer_norm_cuda.backward(dy, mean, invvar, x, SHAPE, 1e-5, False), wanted_dx)
    wanted, (wanted_dx, *_) = expected(x, dy, torch.ones_like(gamma), beta, rms=True)
    output, invvar = fused_layer_norm_cuda.rms_forward(x, SHAPE, 1e-5)
    assert_close(output, wanted)
    assert_close(fused_layer_norm_cuda.rms_backward(dy, invvar, x, SHAPE, 1e-5, False), wanted_dx)


def test_mixed_dtypes_return_the_weights() -> None:
    x, _, gamma, beta = inputs("cpu")
    half = x.half()
    assert fused_layer_norm_cuda.forward_affine_mixed_dtypes(half, SHAPE, gamma, beta, 1e-5)[0].dtype == torch.float32
    assert fused_layer_norm_cuda.rms_forward_affine_mixed_dtypes(half, SHAPE, gamma, 1e-5)[0].dtype == torch.float32
    assert fused_layer_norm_cuda.forward_affine(half, SHAPE, gamma.half(), beta.half(), 1e-5)[0].dtype == torch.float16


def test_bad_shapes_are_refused() -> None:
    x, dy, gamma, beta = inputs("cpu")
    with pytest.raises(ValueError, match="trailing dimensions"):
        fused_layer_norm_cuda.forward_affine(x, (8, 4), gamma, beta, 1e-5)
    _, mean, invvar = fused_layer_norm_cuda.forward_affine(x, SHAPE, gamma, beta, 1e-5)
    with pytest.raises(ValueError, match="the gradient has shape"):
        fused_layer_norm_cuda.backward_affine(dy[:1], mean, invvar, x, SHAPE, gamma, beta, 1e-5, False)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_fast_layer_norm(route: Route, memory_efficient: bool) -> None:
    x, dy = (torch.randn(6, 40, device=route.device) for _ in range(2))
    gamma, beta = (torch.rand(40, device=route.device) + 0.5 for _ in range(2))
    wide = [t.double().requires_grad_() for t in (x, gamma, beta)]
    wanted = nn.functional.layer_norm(wide[0], (40,), wide[1], wide[2], 1e-5)
    wanted_gradients = torch.autograd.grad(wanted, wide, dy.double())
    with _library.implementation(route.implementation):
        z, mu, rsigma = fast_layer_norm.ln_fwd(x, gamma, beta, 1e-5)
        if memory_efficient:
            gradients = fast_layer_norm.ln_bwd(dy, z, None, rsigma, gamma, beta, True)
        else:
            gradients = fast_layer_norm.ln_bwd(dy, x, mu, rsigma, gamma, None, False)
    assert len(gradients) == 5
    assert_close(z, wanted)
    for actual, gradient in zip(gradients[:3], wanted_gradients, strict=True):
        assert_close(actual, gradient, reduction=6)
    assert_close(gradients[3].sum(0), wanted_gradients[1], reduction=6)


def test_fast_layer_norm_needs_beta_to_recover_its_input() -> None:
    z, _, rsigma = fast_layer_norm.ln_fwd(torch.randn(6, 40), torch.ones(40), torch.zeros(40), 1e-5)
    with pytest.raises(ValueError, match="beta_"):
        fast_layer_norm.ln_bwd(z, z, None, rsigma, torch.ones(40), None, True)


def test_statistics_that_do_not_belong_are_refused() -> None:
    x, dy, gamma, beta = inputs("cpu")
    _, mean, invvar = fused_layer_norm_cuda.forward_affine(x, SHAPE, gamma, beta, 1e-5)
    with pytest.raises(ValueError, match="mean of each row is needed"):
        fused_layer_norm_cuda.backward_affine(dy, None, invvar, x, SHAPE, gamma, beta, 1e-5, False)
    with pytest.raises(ValueError, match="the mean has shape"):
        fused_layer_norm_cuda.backward_affine(dy, mean[:1], invvar, x, SHAPE, gamma, beta, 1e-5, False)
    with pytest.raises(ValueError, match="reciprocal deviation has shape"):
        fused_layer_norm_cuda.rms_backward_affine(dy, invvar[:1], x, SHAPE, gamma, 1e-5, False)
    flat = x.reshape(6, 32)
    with pytest.raises(ValueError, match="mean of each row is needed"):
        fast_layer_norm.ln_bwd(flat, flat, None, invvar, gamma.flatten())
    with pytest.raises(ValueError, match="the gradient has shape"):
        fast_layer_norm.ln_bwd(flat[:1], flat, mean, invvar, gamma.flatten())


@pytest.mark.parametrize("route", routes())
def test_statistics_of_any_layout_and_dtype(route: Route) -> None:
    x, dy, gamma, beta = inputs(route.device)
    with _library.implementation(route.implementation):
        _, mean, invvar = fused_layer_norm_cuda.forward_affine(x, SHAPE, gamma, beta, 1e-5)
        expected = fused_layer_norm_cuda.backward_affine(dy, mean, invvar, x, SHAPE, gamma, beta, 1e-5, False)
        strided = [t.double().repeat_interleave(2)[::2] for t in (mean, invvar)]
        actual = fused_layer_norm_cuda.backward_affine(dy, *strided, x, SHAPE, gamma, beta, 1e-5, False)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e.double(), reduction=6)
