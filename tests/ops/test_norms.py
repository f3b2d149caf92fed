"""What all norms do alike: refuse what does not fit, take saved tensors in another layout, and show their operators."""

import pytest
import torch
from torch.autograd import forward_ad

from apex.ops import _library, batch_norm, group_norm, norm
from tests.support.harness import Route, assert_close, routes


def _layer_norm(x, weight, bias):
    return norm.layer_norm(x, [x.shape[1]], weight, bias)


def _group_norm(x, weight, bias):
    return group_norm.group_norm(x, 2, weight, bias)


def _batch_norm(x, weight, bias):
    return batch_norm.batch_norm(x, None, None, weight, bias, relu=True)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("function", [_layer_norm, _group_norm, _batch_norm])
def test_what_does_not_fit_is_refused_and_what_is_strided_works(function, route: Route) -> None:
    x = torch.randn(6, 8, device=route.device, requires_grad=True)
    weight, bias = (torch.rand(8, device=route.device, requires_grad=True) for _ in range(2))
    strided = torch.empty(8, 2, device=route.device)[:, 0].copy_(weight.detach()).requires_grad_()
    with _library.implementation(route.implementation):
        output = function(x, weight, bias)
        gradients = torch.autograd.grad(output.square().sum(), (x, weight, bias))
        with pytest.raises(ValueError, match="weight has shape"):
            function(x, weight[:4], bias)
        with pytest.raises(TypeError, match="floating-point"):
            function(x, weight, bias.int())
        with pytest.raises(TypeError, match="floating-point"):
            function(x.int(), weight, bias)
        again = function(x, strided, bias)
        others = torch.autograd.grad(again.square().sum(), (x, strided, bias))
        with torch.no_grad():
            inferred = function(x, weight, bias)
    assert_close(again, output.double())
    assert_close(inferred, output.double())
    for one, other in zip(gradients, others, strict=True):
        assert_close(other, one.double(), reduction=8)


def _batch_norm_and_addend(x, weight, bias):
    return batch_norm.batch_norm(x, None, None, weight, bias, z=x, relu=True)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("gradient_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("function", [_group_norm, _batch_norm, _batch_norm_and_addend])
def test_hooks_may_give_saved_tensors_another_layout(function, gradient_format, route: Route) -> None:
    """As `torch.autograd.graph.save_on_cpu(pin_memory=True)` does."""
    x = torch.randn(2, 8, 3, 5, device=route.device).to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = (torch.rand(8, device=route.device, requires_grad=True) for _ in range(2))
    dy = torch.randn(x.shape, device=route.device).to(memory_format=gradient_format)
    with _library.implementation(route.implementation):
        expected = torch.autograd.grad(function(x, weight, bias), (x, weight, bias), dy)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), _same):
            output = function(x, weight, bias)
        gradients = torch.autograd.grad(output, (x, weight, bias), dy)
    for gradient, other in zip(gradients, expected, strict=True):
        assert_close(gradient, other.double(), reduction=30)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("function", [_layer_norm, _group_norm, _batch_norm])
def test_transforms_of_torch_func_see_operators(function, route: Route) -> None:
    x, tangent = (torch.randn(6, 8, device=route.device) for _ in range(2))
    weight, bias = (torch.rand(8, device=route.device) for _ in range(2))

    def total(x):
        return function(x, weight, bias).square().sum()

    with _library.implementation("torch"):
        slope = torch.autograd.functional.jvp(lambda x: function(x, weight, bias), x, tangent)[1]
    with _library.implementation(route.implementation):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(total(leaf), leaf)
        assert_close(torch.func.grad(total)(x), gradient.double(), reduction=60)
        each = torch.func.vmap(lambda x: function(x, weight, bias))(torch.stack((x, 2 * x)))
        assert_close(each[1], function(2 * x, weight, bias).double(), reduction=8)
        with torch.no_grad(), forward_ad.dual_level():
            output = function(forward_ad.make_dual(x, tangent), weight, bias)
            assert_close(forward_ad.unpack_dual(output).tangent, slope.double(), reduction=60)
