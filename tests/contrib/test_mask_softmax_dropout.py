"""fast_mask_softmax_dropout_func, as upstream's clients call it."""

import pytest
import torch

from apex.contrib.multihead_attn import fast_mask_softmax_dropout_func
from apex.ops import _library
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

BATCH, HEADS, LENGTH = 3, 2, 10


def logits(device: str, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(BATCH * HEADS, LENGTH, LENGTH, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_against_the_formula(route: Route, additive: bool, masked: bool) -> None:
    x = logits(route.device)
    hidden = torch.rand(BATCH, LENGTH, device=route.device) > 0.5
    hidden[:, 0] = False
    mask = None
    if masked:
        mask = hidden * -10000.0 if additive else hidden.byte()
    with _library.implementation(route.implementation):
        output = fast_mask_softmax_dropout_func(True, HEADS, x, mask, additive, 0.0)
        dy = torch.randn_like(output)
        (gradient,) = torch.autograd.grad(output, x, dy)
    wide = x.detach().cpu().double().requires_grad_()
    covered = wide.view(BATCH, HEADS, LENGTH, LENGTH)
    if masked:
        covered = covered.masked_fill(hidden.cpu()[:, None, None, :], -torch.inf)
    expected = torch.softmax(covered, -1).view(x.shape)
    assert_close(output, expected)
    assert_close(gradient, torch.autograd.grad(expected, wide, dy.cpu().double())[0], reduction=LENGTH)


@pytest.mark.parametrize("route", routes())
def test_dropout(route: Route) -> None:
    x = logits(route.device)
    with _library.implementation(route.implementation):
        torch.manual_seed(2)
        output = fast_mask_softmax_dropout_func(True, HEADS, x, None, False, 0.5)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        torch.manual_seed(2)
        again = fast_mask_softmax_dropout_func(True, HEADS, x, None, False, 0.5)
        still = fast_mask_softmax_dropout_func(False, HEADS, x, None, False, 0.5)
    assert_equal_bits([output.detach()], [again.detach()])
    wide = x.detach().cpu().double().requires_grad_()
    whole = torch.softmax(wide, -1)
    expected = whole * (output.detach().cpu() != 0) * 2
    assert_close(still, whole)
    assert_close(output, expected)
    assert_close(gradient, torch.autograd.grad(expected.sum(), wide)[0], reduction=LENGTH)
    assert 0.35 < (output != 0).double().mean().item() < 0.65


def test_hidden_rows_are_zero_and_inputs_stay() -> None:
    x = logits("cpu")
    mask = torch.ones(BATCH, LENGTH, dtype=torch.uint8)
    before = x.detach().clone()
    output = fast_mask_softmax_dropout_func(False, HEADS, x, mask, False, 0.0)
    dy = torch.ones_like(output)
    (gradient,) = torch.autograd.grad(output, x, dy)
    assert output.eq(0).all()
    assert gradient.eq(0).all()
    assert_equal_bits([x.detach(), dy], [before, torch.ones_like(dy)])


def test_a_second_derivative_is_refused() -> None:
    """It must not be computed as if the probabilities were constants."""
    x = logits("cpu")
    output = fast_mask_softmax_dropout_func(True, HEADS, x, None, False, 0.0)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_bad_arguments() -> None:
    x = logits("cpu")
    with pytest.raises(ValueError, match=r"\[batch \* heads, queries, keys\] with heads=4"):
        fast_mask_softmax_dropout_func(True, 4, x, None, False, 0.0)
    with pytest.raises(ValueError, match=r"expected \[batch, keys\] = \[3, 10\]"):
        fast_mask_softmax_dropout_func(True, HEADS, x, torch.zeros(6, 10), False, 0.0)
    with pytest.raises(TypeError, match="floating-point"):
        fast_mask_softmax_dropout_func(True, HEADS, x, torch.zeros(3, 10, dtype=torch.uint8), True, 0.0)
