"""Softmax cross-entropy against the float64 reference, by every route, with uninitialised memory full of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.ops import _library, xentropy
from apex.ops.xentropy import reference
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

_HALF, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32
PADDING = -100


@dataclass(frozen=True)
class XentropyCase:
    """Every third row is padding; logits have the deviation `spread`."""

    rows: int
    classes: int
    dtype: torch.dtype = _F32
    smoothing: float = 0.1
    spread: float = 1.0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.rows}x{self.classes} {kind} smoothing {self.smoothing} spread {self.spread}"

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, labels and the gradient of the losses."""
        generator = torch.Generator().manual_seed(self.rows * 131071 + self.classes)
        logits = self.spread * torch.randn(self.rows, self.classes, generator=generator)
        labels = torch.randint(0, self.classes, (self.rows,), generator=generator)
        labels[2::3] = PADDING
        slopes = torch.randn(self.rows, generator=generator)
        return logits.to(self.dtype).to(device), labels.to(device), slopes.to(device)


# Rows that the interpreter takes several blocks for, padding, and other options than the examples have.
CASES = [
    XentropyCase(7, 17, _HALF),
    XentropyCase(4, 4096, _BF16, 0.0),
    XentropyCase(3, 9001, _HALF),
    XentropyCase(3, 33333, _F32, 1.0),
    XentropyCase(3, 50257, _BF16),
    XentropyCase(5, 777, _F32, 0.1, 30.0),
]


def run(logits: Tensor, labels: Tensor, slopes: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    losses, log_sums = xentropy.xentropy_forward(logits, labels, smoothing, PADDING)
    gradient = xentropy.xentropy_backward(slopes, logits, log_sums, labels, smoothing, PADDING)
    return losses, log_sums, gradient


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: XentropyCase, route: Route) -> None:
    tensors = case.tensors(route.device)
    logits, labels, slopes = (t.cpu() for t in tensors)
    expected, sums = reference.forward(logits.double(), labels, case.smoothing, PADDING)
    wanted = reference.backward(slopes.double(), logits.double(), sums, labels, case.smoothing, PADDING)
    with _library.implementation(route.implementation):
        first, again = (run(*tensors, case.smoothing) for _ in range(2))
    losses, log_sums, gradient = first
    assert losses.dtype == log_sums.dtype == torch.float32
    assert gradient.dtype == case.dtype
    assert gradient.is_contiguous()
    assert_close(losses, expected, what="losses")
    assert_close(log_sums, sums, what="log_sums")
    assert_close(gradient, wanted, what="gradient")
    assert not losses[2::3].any()
    assert not gradient[2::3].any()
    assert_equal_bits(first, again)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_the_reference_is_pytorchs_cross_entropy(smoothing: float) -> None:
    logits, labels, slopes = XentropyCase(12, 37).tensors("cpu")
    logits = logits.double().requires_grad_()
    expected = functional.cross_entropy(
        logits, labels, ignore_index=PADDING, reduction="none", label_smoothing=smoothing
    )
    (wanted,) = torch.autograd.grad(expected, logits, slopes.double())
    losses, log_sums = reference.forward(logits.detach(), labels, smoothing, PADDING)
    gradient = reference.backward(slopes.double(), logits.detach(), log_sums, labels, smoothing, PADDING)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(gradient, wanted)
    counted = labels != PADDING
    torch.testing.assert_close(log_sums[counted], torch.logsumexp(logits.detach(), 1)[counted])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("labels_dtype", [torch.int32, torch.int64])
def test_the_gradient_written_out_is_that_of_autograd(
    smoothing: float, dtype: torch.dtype, labels_dtype: torch.dtype
) -> None:
    """Also for padding, whatever its logits are, and for labels that are no class."""
    logits, labels, slopes = XentropyCase(12, 37, dtype).tensors("cpu")
    logits[2] = torch.nan
    labels[3], labels[4] = 37, -1
    labels, leaf = labels.to(labels_dtype), logits.clone().requires_grad_()
    losses, log_sums = reference.forward(leaf, labels, smoothing, PADDING)
    (expected,) = torch.autograd.grad(losses, leaf, slopes)
    with torch.no_grad():
        assert_equal_bits(reference.forward(logits, labels, smoothing, PADDING), (losses, log_sums))
    gradient = reference.backward(slopes, logits, log_sums.detach(), labels, smoothing, PADDING)
    assert gradient.dtype == dtype
    assert_close(gradient, expected.double())


def test_passes_over_the_logits() -> None:
    """They are what takes time on a CPU; padding and the target of each row need none of their own in the loss."""
    passes = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal passes
            found = function(*args, **(kwargs or {}))
            passes += isinstance(found, Tensor) and found.numel() == 12 * 37 and not function.is_view
            return found

    logits, labels, slopes = XentropyCase(12, 37).tensors("cpu")
    with _library.implementation("torch"), Watch():
        _, log_sums = xentropy.xentropy_forward(logits, labels, 0.0, PADDING)
        assert passes == 0
        xentropy.xentropy_backward(slopes, logits, log_sums, labels, 0.0, PADDING)
    assert passes <= 5  # a difference, its exponential, the label's own, a product, zeros for padding


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinite_logits(route: Route, smoothing: float) -> None:
    """Minus infinity masks a class, also whole stretches of classes; plus infinity has no softmax."""
    logits = torch.randn(4, 3000, device=route.device)
    logits[0, 5:2900] = -torch.inf
    logits[1, :] = -torch.inf
    logits[2, 7] = torch.inf
    labels = torch.tensor([2, 2, 2, PADDING], device=route.device)
    logits[3] = torch.nan  # padding is not read
    slopes = torch.ones(4, device=route.device)
    with _library.implementation(route.implementation):
        losses, _, gradient = run(logits, labels, slopes, smoothing)
    expected = functional.cross_entropy(
        logits.double(), labels, ignore_index=PADDING, reduction="none", label_smoothing=smoothing
    )
    torch.testing.assert_close(losses[0].double(), expected[0], check_dtype=False, rtol=1e-5, atol=1e-5)
    assert not losses[1:3].isfinite().any()
    assert gradient[0].isfinite().all()
    assert_close(gradient[0].sum(), torch.zeros((), dtype=torch.float64))
    assert losses[3] == 0
    assert not gradient[3].any()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("masked", [-1e4, -1e9])
def test_a_label_whose_class_is_masked(route: Route, masked: float) -> None:
    """By a large finite number, from which the sum of exponentials cannot be told."""
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([3, 5, 3, 7])
    logits[:2, 3] = masked
    expected = logits.double().requires_grad_()
    functional.cross_entropy(expected, labels, reduction="sum").backward()
    with _library.implementation(route.implementation):
        gradient = run(logits.to(route.device), labels.to(route.device), torch.ones(4, device=route.device), 0.0)[2]
    assert_close(gradient.cpu(), expected.grad)


@pytest.mark.parametrize("route", routes())
def test_a_label_that_is_no_class_has_no_loss(route: Route) -> None:
    logits = torch.randn(4, 30, device=route.device)
    labels = torch.tensor([3, 30, -1, 1 << 40], device=route.device)
    slopes = torch.ones(4, device=route.device)
    with _library.implementation(route.implementation):
        losses, _, gradient = run(logits, labels, slopes, 0.0)
    assert losses.isnan().tolist() == [False, True, True, True]
    assert_close(gradient[1:], torch.softmax(logits[1:].double(), 1))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("labels_dtype", [torch.int32, torch.int64])
def test_leading_dimensions(route: Route, labels_dtype: torch.dtype) -> None:
    logits = torch.randn(2, 1, 3, 33, device=route.device)
    labels = torch.randint(0, 33, (2, 1, 3), device=route.device)
    with _library.implementation(route.implementation):
        losses, log_sums = xentropy.xentropy_forward(logits, labels.to(labels_dtype))
        gradient = xentropy.xentropy_backward(torch.ones_like(losses), logits, log_sums, labels.to(labels_dtype))
    wide = logits.double().requires_grad_()
    expected = functional.cross_entropy(wide.flatten(0, 2), labels.flatten(), reduction="none").view(2, 1, 3)
    assert_close(losses, expected)
    assert_close(gradient, torch.autograd.grad(expected.sum(), wide)[0])


def strided(device: str) -> list[Tensor]:
    wide = torch.randn(4, 400, device=device, dtype=torch.float16)
    return [
        wide[:, :384],  # a vocabulary padded at its end
        wide[:, 3:380],
        wide[:, :377],
        wide[::2, :257],
        wide.t()[200:203],
        wide[:1].expand(2, 400),
        torch.randn(1 + 2 * 64, device=device)[1:].view(2, 64),
    ]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("which", range(7))
def test_strided_logits_and_gradients(route: Route, which: int) -> None:
    logits = strided(route.device)[which]
    rows, classes = logits.shape
    labels = torch.randint(0, classes, (2 * rows,), device=route.device)[::2]
    slopes = torch.randn(rows, 3, device=route.device)[:, 1]
    with _library.implementation(route.implementation):
        for _ in range(2 if route.device == "cuda" else 1):  # the second call takes the launcher's cached path
            _, _, gradient = run(logits, labels, slopes, 0.1)
            losses, _, same = run(logits, labels, slopes[:1].expand(rows), 0.1)
    wide = logits.double().detach().requires_grad_()
    expected = functional.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1)
    assert_close(losses, expected)
    assert_close(gradient, torch.autograd.grad(expected, wide, slopes.double(), retain_graph=True)[0])
    assert_close(same, torch.autograd.grad(expected, wide, slopes[:1].double().expand(rows))[0])


@pytest.mark.parametrize(
    ("logits", "labels", "smoothing", "error", "words"),
    [
        (torch.randn(3, 4), torch.zeros(2).long(), 0.0, ValueError, r"labels have shape \[2\].*\[3, 4\]"),
        (torch.randn(3, 4), torch.zeros(3), 0.0, TypeError, "labels must be int64 or int32, got torch.float32"),
        (torch.zeros(3, 4).long(), torch.zeros(3).long(), 0.0, TypeError, "logits must be floating-point"),
        (torch.randn(3, 0), torch.zeros(3).long(), 0.0, ValueError, "0 classes"),
        (torch.randn(3, 4), torch.zeros(3).long(), 1.5, ValueError, "smoothing 1.5 is not between 0 and 1"),
        (torch.randn(3, 4), torch.zeros(3, device="meta").long(), 0.0, ValueError, "labels are on meta"),
    ],
)
def test_bad_arguments_are_refused(logits, labels, smoothing, error, words) -> None:
    with pytest.raises(error, match=words):
        xentropy.xentropy_forward(logits, labels, smoothing)


def test_gradients_that_do_not_belong_are_refused() -> None:
    logits, labels = torch.randn(3, 4), torch.zeros(3).long()
    losses, log_sums = xentropy.xentropy_forward(logits, labels)
    with pytest.raises(ValueError, match=r"loss_gradient has shape \[2\]"):
        xentropy.xentropy_backward(losses[:2], logits, log_sums, labels)
    with pytest.raises(ValueError, match=r"log_sums has shape \[2\]"):
        xentropy.xentropy_backward(losses, logits, log_sums[:2], labels)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [65536, 50257])
def test_more_than_two_to_the_31_elements(classes: int) -> None:
    rows = (1 << 31) // classes + 3
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, classes, (rows,), device="cuda")
    slopes = torch.rand(rows, device="cuda")
    losses, _, gradient = run(logits, labels, slopes, 0.1)
    last = slice(rows - 2, rows)
    expected, sums = reference.forward(logits[last].double(), labels[last], 0.1, PADDING)
    assert_close(losses[last], expected)
    wanted = reference.backward(slopes[last].double(), logits[last].double(), sums, labels[last], 0.1, PADDING)
    assert_close(gradient[last], wanted)
    sums_of_rows = gradient.sum(1, dtype=torch.float32)  # every element was written: each row's gradient sums to zero
    assert sums_of_rows.abs().max() < 0.01


def test_many_gradients_at_once() -> None:
    """As a Jacobian has them: vmap refuses in-place operations on what it does not map over."""
    logits, labels = torch.randn(4, 5, dtype=torch.float64), torch.tensor([1, 2, 0, 3])

    def losses(x: Tensor) -> Tensor:
        return SoftmaxCrossEntropyLoss.apply(x, labels, 0.1, 0)

    one_by_one, at_once = (torch.autograd.functional.jacobian(losses, logits, vectorize=v) for v in (False, True))
    torch.testing.assert_close(at_once, one_by_one)
