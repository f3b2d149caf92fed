"""The focal loss against the float64 reference, by every route, with uninitialised memory full of NaN."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library, focal_loss
from apex.ops.focal_loss import FOCAL_LOSS, loss_and_gradient_of_sum, reference
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

_HALF, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# shape of the logits, real classes, dtype, gamma, smoothing: blocks of 1024 elements alone, with a rest, a rest alone;
# class counts that groups of 8 divide and do not
CASES = [
    ((1, 1), 1, _F32, 2.0, 0.0),
    ((12, 8), 8, _F32, 2.0, 0.0),
    ((2, 64, 16), 16, _F32, 2.0, 0.1),
    ((3, 50, 80), 78, _F32, 1.5, 0.0),
    ((97, 91), 90, _F32, 2.0, 0.1),
    ((40, 33), 33, _F32, 0.0, 0.0),
    ((64, 8), 5, _F32, 0.5, 0.3),
    ((60, 24), 24, _BF16, 2.0, 0.0),
    ((60, 24), 20, _HALF, 1.5, 0.1),
]
ALPHA = 0.25


class FocalSpec(NamedTuple):
    """The settings of a focal loss."""

    classes: int
    alpha: float
    gamma: float
    smoothing: float


def formula(logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec) -> Tensor:
    """The definition, by one-hot targets and PyTorch's cross-entropy."""
    rows, labels = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    right = torch.zeros_like(rows)
    named = labels >= 0
    right[named, labels[named]] = 1
    wanted = right * (1 - spec.smoothing) + spec.smoothing / 2
    cross_entropy = functional.binary_cross_entropy_with_logits(rows, wanted, reduction="none")
    probability = rows.sigmoid()
    wrong = torch.where(right == 1, 1 - probability, probability)
    losses = torch.where(right == 1, spec.alpha, 1 - spec.alpha) * wrong**spec.gamma * cross_entropy
    return losses[labels != -2, : spec.classes].sum() / num_positives.to(rows.dtype).reshape(())


def tensors(shape, classes, dtype, device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = (3 * torch.randn(shape)).to(device, dtype)
    targets = torch.randint(-2, classes, shape[:-1]).to(device)
    return logits, targets, torch.tensor([3.0], device=device), torch.tensor(1.7, device=device)


def exact(grad_loss, logits, targets, num_positives, spec: FocalSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient and gradient of the sum, in float64."""
    wide, positives = logits.detach().double().cpu().requires_grad_(), num_positives.double().cpu()
    loss = reference.forward(wide, targets.cpu(), positives, *spec)
    (gradient,) = torch.autograd.grad(loss, wide, grad_loss.double().cpu())
    return loss.detach(), gradient, gradient * positives / grad_loss.double().cpu()


def run(grad_loss, logits, targets, num_positives, spec: FocalSpec) -> list[Tensor]:
    given = logits, targets, num_positives
    (loss,) = FOCAL_LOSS.run(*given, *spec)
    (gradient,) = FOCAL_LOSS.run_backward((grad_loss,), given, spec, (True,))
    return [loss, gradient, *loss_and_gradient_of_sum(*given, *spec)]


@pytest.mark.parametrize(("gamma", "smoothing"), [(2.0, 0.0), (2.0, 0.2), (1.5, 0.1), (0.0, 0.0)])
def test_reference_is_the_definition(gamma: float, smoothing: float) -> None:
    logits, targets, num_positives, grad_loss = tensors((4, 9, 12), 10, _F64, "cpu")
    logits.requires_grad_()
    spec = FocalSpec(10, ALPHA, gamma, smoothing)
    wanted = formula(logits, targets, num_positives, spec)
    torch.testing.assert_close(reference.forward(logits, targets, num_positives, *spec), wanted)
    (gradient,) = torch.autograd.grad(wanted, logits, grad_loss.double())
    torch.testing.assert_close(exact(grad_loss, logits, targets, num_positives, spec)[1], gradient)
    assert not gradient[..., 10:].any()
    assert not gradient[targets == -2].any()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, route: Route) -> None:
    shape, classes, dtype, gamma, smoothing = case
    logits, targets, num_positives, grad_loss = tensors(shape, classes, dtype, route.device)
    spec = FocalSpec(classes, ALPHA, gamma, smoothing)
    given = grad_loss, logits, targets, num_positives, spec
    before = logits.clone()
    with _library.implementation(route.implementation):
        found, again = run(*given), run(*given)
    loss, gradient, partial = exact(*given)
    assert [t.dtype for t in found] == [_F32, dtype, _F32, dtype]
    for actual, wanted in zip(found, (loss, gradient, loss, partial), strict=True):
        assert_close(actual, wanted, reduction=logits.numel() if wanted is loss else 1)
    assert_equal_bits(found, again)
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    anchors, classes = (1 << 31) // 80 + 7, 80
    logits = torch.randn(anchors, classes, device="cuda", dtype=_BF16)
    targets = torch.full((anchors,), -2, device="cuda")
    targets[-5:] = torch.tensor([3, -1, 79, -2, 0])
    one = torch.ones((), device="cuda")
    spec = FocalSpec(classes, ALPHA, 2.0, 0.0)
    loss, gradient, _, _ = run(one, logits, targets, one, spec)
    wanted = exact(one, logits[-5:], targets[-5:], one, spec)
    assert_close(loss, wanted[0], reduction=400)
    assert_close(gradient[-5:], wanted[1])
    assert not gradient[:-5].any()


@pytest.mark.parametrize("route", routes())
def test_extreme_logits(route: Route) -> None:
    """No overflow, and gradients far from the border between the classes keep their digits."""
    logits = torch.tensor([[-300.0, -30.0, -12.0, -3.0, 3.0, 12.0, 30.0, 300.0]], device=route.device)
    one = torch.ones((), device=route.device)
    for target in (-1, 3, 4, 7):
        targets = torch.tensor([target], device=route.device)
        spec = FocalSpec(8, ALPHA, 1.0, 0.0)
        with _library.implementation(route.implementation):
            loss, gradient, _, _ = run(one, logits, targets, one, spec)
        wanted_loss, wanted, _ = exact(one, logits, targets, one, spec)
        assert_close(loss, wanted_loss)
        torch.testing.assert_close(gradient[:, 1:].double().cpu(), wanted[:, 1:], rtol=1e-5, atol=1e-30)


def test_the_operator_refuses_a_second_derivative() -> None:
    logits, targets, num_positives, _ = tensors((6, 8), 8, _F32, "cpu")
    loss = torch.ops.apex.focal_loss(logits.requires_grad_(), targets, num_positives, 8, ALPHA, 2.0, 0.0)
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.grad(first.square().sum(), logits)


def test_bad_arguments_are_named() -> None:
    logits, targets, num_positives, _ = tensors((6, 8), 8, _F32, "cpu")
    for bad in (targets[:5], targets[None]):
        with pytest.raises(ValueError, match="must have one more dimension, the classes"):
            focal_loss.check(logits, bad, num_positives, 8)
    with pytest.raises(TypeError, match="cls_output must be floating-point"):
        focal_loss.check(logits.long(), targets, num_positives, 8)
    with pytest.raises(TypeError, match="must be int64 or int32"):
        focal_loss.check(logits, targets.float(), num_positives, 8)
    with pytest.raises(ValueError, match=r"num_positives_sum must have one element, its shape is \[2\]"):
        focal_loss.check(logits, targets, torch.ones(2), 8)
    for classes in (0, 9):
        with pytest.raises(ValueError, match=f"num_real_classes={classes} must be between 1"):
            focal_loss.check(logits, targets, num_positives, classes)
    with pytest.raises(ValueError, match="cls_targets_at_level on meta"):
        focal_loss.check(logits, targets.to("meta"), num_positives, 8)
    targets[3] = 8
    with pytest.raises(ValueError, match="cls_targets_at_level has class 8, expected less than num_real_classes=8"):
        focal_loss.check(logits, targets, num_positives, 8)
