"""Derivatives: gradcheck, derivatives of derivatives, activation checkpointing, autocast."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from apex.ops import _library, softmax
from apex.ops.softmax import SOFTMAX, SoftmaxSpec, reference
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

KINDS = ["none", "causal", "bool", "added"]


def options(kind: str, device: str = "cpu") -> dict:
    """A mask of 4 queries and 6 keys, or its absence."""
    if kind == "bool":
        mask = torch.rand(4, 6, device=device) < 0.4
        mask[1] = True
        return {"mask": mask}
    if kind == "added":
        return {"mask": torch.randn(2, 1, 6, device=device)}
    return {"causal": kind == "causal"}


def double_input() -> Tensor:
    return torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    given = options(kind)
    assert torch.autograd.gradcheck(lambda x: softmax.masked_softmax(x, scale=0.7, **given), double_input())


@pytest.mark.parametrize("kind", KINDS)
def test_gradgradcheck_of_the_autograd_node(kind: str) -> None:
    given = options(kind)
    spec = SoftmaxSpec(0.7, given.get("causal", False))
    assert torch.autograd.gradgradcheck(
        lambda x: SOFTMAX.differentiable(x, given.get("mask"), None, *spec), double_input()
    )


@pytest.mark.parametrize("kind", ["causal", "bool", "added"])
def test_rows_that_are_hidden_are_zero_with_and_without_autograd(kind: str) -> None:
    given, x = options(kind), double_input()
    with torch.no_grad():
        x[0, 3], x[1, 0, 2:] = -torch.inf, -torch.inf
    arguments = (given.get("mask"), None, 0.7, kind == "causal", 0.0)
    expected, _ = reference.forward(x, *arguments)
    with torch.no_grad():
        found, _ = reference.forward(x, *arguments)
    assert_equal_bits([found], [expected])
    assert not found[0, 3].any()
    dy = torch.randn_like(found)
    gradient = reference.backward(dy, found, None, *arguments[2:])
    assert_close(gradient, torch.autograd.grad(expected, x, dy)[0])


def test_gradcheck_with_dropout() -> None:
    x, spec = double_input(), SoftmaxSpec(0.7, True, 0.4)
    keep = softmax.draw_noise(x, spec)
    assert torch.autograd.gradcheck(lambda x: SOFTMAX.differentiable(x, None, keep, *spec), x)


@pytest.mark.parametrize("route", routes())
def test_second_derivative_of_a_kernel_comes_from_the_reference(route: Route) -> None:
    x = torch.randn(2, 4, 6, device=route.device, requires_grad=True)

    def second(function, x):
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with _library.implementation(route.implementation):
        actual = second(lambda x: softmax.masked_softmax(x, scale=2.0), x)
        dropped = softmax.masked_softmax(x, dropout=0.5)
        with pytest.raises(RuntimeError, match="first derivative only"):
            torch.autograd.grad(dropped.sum(), x, create_graph=True)
    expected = second(lambda x: torch.softmax(2 * x, -1), x.detach().double().requires_grad_())
    assert_close(actual, expected)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(route: Route, use_reentrant: bool) -> None:
    """What is dropped is dropped again when the forward pass is repeated."""
    x = torch.randn(2, 4, 6, device=route.device, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return softmax.masked_softmax(x, causal=True, dropout=0.5).square()

    with _library.implementation(route.implementation):
        torch.manual_seed(3)
        (plain,) = torch.autograd.grad(function(x).sum(), x)
        torch.manual_seed(3)
        checkpointed = checkpoint(function, x, use_reentrant=use_reentrant)
        torch.rand(7, device=route.device)
        checkpointed.sum().backward()
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("route", routes())
def test_autocast_leaves_the_dtype(route: Route) -> None:
    x = torch.randn(2, 4, 6, device=route.device, dtype=torch.bfloat16, requires_grad=True)
    with _library.implementation(route.implementation):
        for kind in KINDS:
            given = options(kind, route.device)
            expected = softmax.masked_softmax(x, scale=0.5, **given)
            with torch.autocast(route.device, torch.bfloat16):
                output = softmax.masked_softmax(x, scale=0.5, **given)
            (dx,) = torch.autograd.grad(output.sum(), x)
            assert output.dtype == dx.dtype == torch.bfloat16
            assert_close(output, expected.double())


@pytest.mark.parametrize("route", routes())
def test_inference_keeps_nothing(route: Route) -> None:
    x = torch.randn(2, 4, 6, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        with torch.no_grad():
            assert softmax.masked_softmax(x, causal=True).grad_fn is None
        assert softmax.masked_softmax(x.detach(), causal=True).grad_fn is None
        assert softmax.softmax_forward(x, None, SoftmaxSpec(0.5))[0].grad_fn is None


@pytest.mark.parametrize("route", routes())
def test_the_output_may_be_changed_when_nobody_differentiates(route: Route) -> None:
    """And where somebody does, autograd notices: the backward pass needs the output."""
    x = torch.randn(2, 4, 6, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        softmax.masked_softmax(x.detach(), causal=True).mul_(2)
        output = softmax.masked_softmax(x, causal=True)
        output.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
