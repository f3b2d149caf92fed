"""Derivatives: gradcheck, derivatives of derivatives, activation checkpointing."""

import pytest
import torch

from apex.ops import _library, norm
from tests.support.harness import Route, assert_close, routes


def norms(memory_efficient: bool = False):
    return [
        lambda x, w, b: norm.layer_norm(x, x.shape[-1], w, b, memory_efficient=memory_efficient),
        lambda x, w, b: norm.rms_norm(x, x.shape[-1], w, memory_efficient=memory_efficient) + b,
    ]


def double_inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5,), (5,)))


@pytest.mark.parametrize("which", [0, 1])
def test_gradgradcheck_of_the_autograd_node(which: int) -> None:
    def node(x, w, b):
        settings = (5, 1e-5, which == 0, False, x.dtype, x.dtype)
        return norm.NORM.differentiable(x, w, b if which == 0 else None, *settings)

    assert torch.autograd.gradgradcheck(node, double_inputs(), atol=1e-6)


@pytest.mark.parametrize("route", routes())
def test_second_derivative_of_a_kernel_comes_from_the_reference(route: Route) -> None:
    x = torch.randn(4, 24, device=route.device, requires_grad=True)
    weight = torch.rand(24, device=route.device, requires_grad=True)

    def second(function, x, weight):
        (first,) = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    with _library.implementation(route.implementation):
        actual = second(lambda x, w: norm.rms_norm(x, 24, w), x, weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = second(lambda x, w: torch.nn.functional.rms_norm(x, (24,), w, 1e-5), *wide)
    for a, e, terms in zip(actual, expected, (24 * 24, 24 * 24), strict=True):
        assert_close(a, e, reduction=terms)


@pytest.mark.parametrize("route", routes())
def test_second_derivative_is_refused_when_memory_efficient(route: Route) -> None:
    x = torch.randn(4, 24, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        output = norm.layer_norm(x, 24, memory_efficient=True)
        with pytest.raises(RuntimeError, match="memory_efficient=False"):
            torch.autograd.grad(output.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("route", routes())
def test_memory_efficient_keeps_the_output_and_not_the_input(route: Route) -> None:
    saved: list[int] = []
    x = torch.randn(4, 24, device=route.device, requires_grad=True)
    source = x * 1
    with (
        _library.implementation(route.implementation),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t),
    ):
        output = norm.layer_norm(source, 24, memory_efficient=True)
    assert output.data_ptr() in saved
    assert source.data_ptr() not in saved
