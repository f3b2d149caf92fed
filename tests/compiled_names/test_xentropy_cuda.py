"""xentropy_cuda, called as upstream's Python code calls it."""

import pytest
import torch
from torch.nn import functional

import xentropy_cuda
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_forward_and_backward(route: Route, dtype: torch.dtype) -> None:
    logits = torch.randn(6, 50, device=route.device).to(dtype)
    labels = torch.randint(0, 50, (6,), device=route.device)
    slopes = torch.rand(6, device=route.device)
    with _library.implementation(route.implementation):
        losses, max_log_sum_exp = xentropy_cuda.forward(logits, labels, 0.1, dtype != torch.float32)
        gradient = xentropy_cuda.backward(slopes, logits, max_log_sum_exp, labels, 0.1)
        half = xentropy_cuda.backward(slopes.to(dtype), logits, max_log_sum_exp.to(dtype), labels, 0.1)
    wide = logits.double().requires_grad_()
    expected = functional.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1)
    assert losses.dtype == max_log_sum_exp.dtype == torch.float32
    assert_close(losses, expected)
    assert_close(max_log_sum_exp, torch.logsumexp(wide, 1))
    (wanted,) = torch.autograd.grad(expected, wide, slopes.double())
    assert_close(gradient, wanted)
    torch.testing.assert_close(half.double(), wanted, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("route", routes())
def test_padding_is_the_callers_affair(route: Route) -> None:
    """Upstream's autograd Function masks losses and their gradients itself; -100 is a padding index of its clients."""
    logits = torch.randn(4, 50, device=route.device)
    labels = torch.tensor([-100, 0, 3, -100], device=route.device)
    padding = labels == -100
    with _library.implementation(route.implementation):
        losses, max_log_sum_exp = xentropy_cuda.forward(logits, labels, 0.0, False)
        losses.masked_fill_(padding, 0)
        slopes = torch.ones(4, device=route.device).masked_fill_(padding, 0)
        gradient = xentropy_cuda.backward(slopes, logits, max_log_sum_exp, labels, 0.0)
    wide = logits.double().requires_grad_()
    expected = functional.cross_entropy(wide, labels, reduction="none")
    assert_close(losses, expected)
    assert_close(gradient, torch.autograd.grad(expected.sum(), wide)[0])
