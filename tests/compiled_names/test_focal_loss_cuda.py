"""The compiled module focal_loss_cuda, called as upstream's Python code calls it."""

import pytest
import torch

import focal_loss_cuda
from apex.ops import _library
from apex.ops.focal_loss import reference
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forward_and_backward(dtype: torch.dtype, route: Route) -> None:
    logits = torch.randn(2, 20, 16, device=route.device).to(dtype)
    targets = torch.randint(-2, 14, (2, 20), device=route.device)
    positives, grad_loss = torch.tensor([7.0], device=route.device), torch.tensor(3.0, device=route.device)
    with _library.implementation(route.implementation):
        loss, partial_grad = focal_loss_cuda.forward(logits, targets, positives, 14, 0.25, 2.0, 0.1)
        kept = partial_grad.clone()
        gradient = focal_loss_cuda.backward(grad_loss, partial_grad, positives)
    wide = logits.double().cpu().requires_grad_()
    wanted_loss = reference.forward(wide, targets.cpu(), positives.double().cpu(), 14, 0.25, 2.0, 0.1)
    wanted = wanted_loss.detach(), torch.autograd.grad(wanted_loss, wide)[0] * 7
    assert loss.dtype == torch.float32
    assert_close(loss, wanted[0], reduction=640)
    assert_close(kept, wanted[1])
    assert gradient is partial_grad
    assert_close(gradient, kept.double() * 3 / 7)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_real_classes=9"):
        focal_loss_cuda.forward(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64), torch.ones(1), 9, 0.25, 2.0, 0.0)
