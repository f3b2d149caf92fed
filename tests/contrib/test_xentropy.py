"""SoftmaxCrossEntropyLoss and LinearCrossEntropyLoss as clients use them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from apex.contrib import xentropy
from apex.contrib.xentropy import LinearCrossEntropyLoss, SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


def smoothed(logits: Tensor, labels: Tensor, padding_idx: int, smoothing: float) -> Tensor:
    """Compute upstream's reference: a weighted sum of mean and own log-probability; padding is zero."""
    log_probabilities = torch.log_softmax(logits.double(), -1)
    own = log_probabilities.gather(-1, labels[:, None])[:, 0]
    losses = (smoothing - 1.0) * own - smoothing * log_probabilities.mean(-1)
    return losses.masked_fill(labels == padding_idx, 0.0)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_as_upstream_tests_it(route: Route, dtype: torch.dtype) -> None:
    logits = torch.randn(6, 323, device=route.device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 323, (6,), device=route.device)
    labels[::4] = 0
    with _library.implementation(route.implementation):
        losses = xentropy.SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 0, dtype != torch.float32)
        losses.sum().backward()
    wide = logits.detach().double().requires_grad_()
    expected = smoothed(wide, labels, 0, 0.1)
    assert losses.dtype == torch.float32
    assert_close(losses, expected)
    assert_close(logits.grad, torch.autograd.grad(expected.sum(), wide)[0])


@pytest.mark.parametrize("route", routes())
def test_defaults_are_upstreams(route: Route) -> None:
    """By default there is no smoothing, and class 0 is padding."""
    logits, labels = torch.randn(5, 40, device=route.device), torch.tensor([0, 1, 2, 39, 0], device=route.device)
    with _library.implementation(route.implementation):
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels)
    assert_close(losses, functional.cross_entropy(logits.double(), labels, ignore_index=0, reduction="none"))


@pytest.mark.parametrize("route", routes())
def test_the_gradient_given_is_not_changed(route: Route) -> None:
    logits = torch.randn(5, 40, device=route.device, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 39, 0], device=route.device)
    slopes = torch.ones(5, device=route.device)
    with _library.implementation(route.implementation):
        before = logits.detach().clone()
        torch.autograd.grad(SoftmaxCrossEntropyLoss.apply(logits, labels), logits, slopes)
    assert torch.equal(slopes, torch.ones_like(slopes))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(smoothing: float) -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 6, 2])

    def function(logits):
        return SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 2)

    assert torch.autograd.gradcheck(function, logits)
    assert torch.autograd.gradgradcheck(function, logits)


@pytest.mark.parametrize("route", routes())
def test_second_derivative_of_a_kernel_comes_from_the_reference(route: Route) -> None:
    logits = torch.randn(4, 24, device=route.device, requires_grad=True)
    labels = torch.tensor([0, 3, 6, 2], device=route.device)

    def second(function, logits):
        (first,) = torch.autograd.grad(function(logits).square().sum(), logits, create_graph=True)
        return torch.autograd.grad(first.square().sum(), logits)[0]

    with _library.implementation(route.implementation):
        actual = second(lambda x: SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, 2), logits)
    wide = logits.detach().double().requires_grad_()
    assert_close(actual, second(lambda x: smoothed(x, labels, 2, 0.1), wide), reduction=24)


@pytest.mark.parametrize("route", routes())
def test_nan_logits_of_padding_do_no_harm_to_derivatives(route: Route) -> None:
    values = torch.randn(4, 24, device=route.device)
    values[3] = torch.nan
    logits = values.requires_grad_()
    labels = torch.tensor([0, 3, 6, 2], device=route.device)
    with _library.implementation(route.implementation):
        losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 2)
        (plain,) = torch.autograd.grad(losses.square().sum(), logits, retain_graph=True)
        (first,) = torch.autograd.grad(losses.square().sum(), logits, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), logits)
    for derivative in (plain, first, second):
        assert derivative[:3].isfinite().all()
        assert derivative[:3].any()
        assert not derivative[3].any()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(route: Route, use_reentrant: bool) -> None:
    logits = torch.randn(4, 24, device=route.device, requires_grad=True)
    labels = torch.tensor([0, 3, 6, 2], device=route.device)
    with _library.implementation(route.implementation):
        plain = torch.autograd.grad(SoftmaxCrossEntropyLoss.apply(logits, labels).sum(), logits)[0]
        losses = checkpoint(SoftmaxCrossEntropyLoss.apply, logits, labels, use_reentrant=use_reentrant)
        losses.sum().backward()
    assert torch.equal(logits.grad, plain)


@pytest.mark.parametrize("route", routes())
def test_under_autocast_logits_are_taken_as_they_are(route: Route) -> None:
    logits = torch.randn(4, 24, device=route.device, requires_grad=True)
    labels = torch.tensor([0, 3, 6, 2], device=route.device)
    with _library.implementation(route.implementation):
        plain = SoftmaxCrossEntropyLoss.apply(logits, labels)
        with torch.autocast(route.device, torch.bfloat16):
            losses = SoftmaxCrossEntropyLoss.apply(logits, labels)
    assert torch.equal(losses, plain)


def test_a_losss_module_passes_its_options_on() -> None:
    input, weight, bias = torch.randn(2, 3, 8), torch.randn(37, 8), torch.randn(37)
    target = torch.randint(1, 37, (2, 3))
    target[0, 0] = 5
    module = LinearCrossEntropyLoss(label_smoothing=0.2, ignore_index=5, reduction="none", chunk_rows=4)
    losses = module(input, weight, target, bias)
    assert losses.shape == (2, 3)
    assert losses[0, 0] == 0
    options = {"label_smoothing": 0.2, "ignore_index": 5, "reduction": "none"}
    assert torch.equal(losses, linear_cross_entropy(input, weight, target, bias, chunk_rows=4, **options))
    logits = functional.linear(input.double(), weight.double(), bias.double())
    assert_close(losses, functional.cross_entropy(logits.flatten(0, 1), target.flatten(), **options).view(2, 3))
    assert "label_smoothing=0.2, ignore_index=5, reduction='none', chunk_rows=4" in repr(module)


def test_a_losss_module_takes_every_option_and_no_other() -> None:
    input, weight, target = torch.randn(6, 8), torch.randn(37, 8), torch.randint(0, 37, (6,))
    class_weight = torch.rand(37)
    options = {"smoothing": "megatron", "label_smoothing": 0.1, "softcap": 9.0, "z_loss": 0.1, "outputs": ("argmax",)}
    module = LinearCrossEntropyLoss(class_weight=class_weight, **options)
    loss, rows = module(input, weight, target)
    expected, other = linear_cross_entropy(input, weight, target, class_weight=class_weight, **options)
    assert torch.equal(loss, expected)
    assert torch.equal(rows.argmax, other.argmax)
    assert module.half().class_weight.dtype == torch.float16
    with pytest.raises(TypeError, match="softcaps is no option of linear_cross_entropy; use label_smoothing, "):
        LinearCrossEntropyLoss(softcaps=1.0)
