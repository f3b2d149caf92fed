"""Softmax against the float64 reference, by every route, with uninitialised memory full of NaN."""

import math

import pytest
import torch
from torch import Tensor

from apex.ops import _library, softmax
from apex.ops.softmax import SoftmaxSpec, reference
from tests.ops.softmax.cases import CASES, LARGE_CASES, SoftmaxCase
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def run(case: SoftmaxCase, x: Tensor, dy: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and gradient through the public function and autograd."""
    x = x.clone().requires_grad_()
    output = softmax.masked_softmax(x, mask, scale=case.scale, causal=case.spec.causal)
    return output.detach(), torch.autograd.grad(output, x, dy)[0]


def check(case: SoftmaxCase, route: Route) -> None:
    x, dy, mask = case.tensors(route.device)
    before = [t.clone() for t in (x, dy, mask) if t is not None]
    with _library.implementation(route.implementation):
        output, dx = run(case, x, dy, mask)
        if route.device == "cuda":
            assert_equal_bits([output, dx], run(case, x, dy, mask))
    assert_equal_bits(before, [t for t in (x, dy, mask) if t is not None])
    assert output.dtype == dx.dtype == case.dtype
    expected, _ = reference.forward(x.double(), mask, None, *case.spec)
    assert_close(output, expected, what="output")
    # The rounding of the output is part of the problem here, so the reference gets the rounded output too.
    assert_close(dx, reference.backward(dy.double(), output.double(), None, *case.spec), what="dx")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: SoftmaxCase, route: Route) -> None:
    check(case, route)


@pytest.mark.parametrize("shape", [(2, 150, 150), (150, 40), (150, 90), (130, 300), (1040, 80)], ids=str)
def test_causal_blocks_on_a_cpu(shape: tuple[int, ...]) -> None:
    """Enough queries for several blocks, which PyTorch's operators take one by one."""
    for dtype in (torch.float32, torch.bfloat16):
        check(SoftmaxCase(f"blocks {shape}", shape, "causal", dtype=dtype), Route("cpu", "torch"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_matches_reference_at_model_sizes(case: SoftmaxCase) -> None:
    check(case, Route("cuda", "triton"))


@pytest.mark.parametrize("case", [c for c in CASES if math.prod(c.shape) < 2000], ids=str)
def test_the_reference_is_the_formula(case: SoftmaxCase) -> None:
    """Exponentials over their sum, element by element; its gradient by autograd."""
    x, dy, mask = case.tensors("cpu")
    x = x.double().requires_grad_()
    queries = x.shape[-2] if x.dim() > 1 else 1
    key = torch.arange(x.shape[-1])
    exponentials = torch.exp(case.scale * x)
    if case.mask == "causal":
        exponentials = exponentials * (key <= torch.arange(queries)[:, None] + x.shape[-1] - queries)
    elif case.mask == "added":
        exponentials = exponentials * torch.exp(mask.double())
    elif mask is not None:
        exponentials = exponentials * (mask == 0)
    total = exponentials.sum(-1, keepdim=True)
    expected = exponentials / torch.where(total == 0, 1.0, total)
    output, _ = reference.forward(x.detach(), mask, None, *case.spec)
    torch.testing.assert_close(output, expected.detach())
    (gradient,) = torch.autograd.grad(expected, x, dy.double())
    torch.testing.assert_close(reference.backward(dy.double(), output, None, *case.spec), gradient)


@pytest.mark.parametrize("route", routes())
def test_rows_of_which_nothing_is_left_are_zero(route: Route) -> None:
    x = torch.randn(2, 2, 4, 40, device=route.device, requires_grad=True)
    hidden = torch.zeros(2, 1, 4, 40, dtype=torch.bool, device=route.device)
    hidden[1, 0, 2] = True
    masks = [hidden, hidden.to(torch.uint8), torch.zeros(hidden.shape, device=x.device).masked_fill(hidden, -torch.inf)]
    with _library.implementation(route.implementation):
        for mask in masks:
            output = softmax.masked_softmax(x, mask)
            (dx,) = torch.autograd.grad(output.square().sum(), x)
            for result in (output, dx):
                assert not result[1, :, 2].any()
                assert result[0].all()
                assert result[1, :, 3].all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("route", routes())
def test_nan_and_infinity(route: Route) -> None:
    """NaN spreads over its row and no further, unless it is masked; without a mask a row of -inf is NaN."""
    x = torch.randn(4, 4, device=route.device)
    x[0, 1] = math.nan
    x[1] = -math.inf
    x[2, 3] = math.inf
    mask = torch.zeros(4, 4, dtype=torch.bool, device=route.device)
    mask[0, 1] = mask[2, 3] = True
    with _library.implementation(route.implementation):
        assert softmax.masked_softmax(x).isnan().all(1).tolist() == [True, True, True, False]
        masked = softmax.masked_softmax(x, mask)
        causal = softmax.masked_softmax(x, causal=True)
    assert not masked.isnan().any()
    assert masked[0, 1] == masked[2, 3] == 0
    assert not masked[1].any()
    assert causal[0].tolist() == [1, 0, 0, 0]
    assert not causal[1].any()
    assert causal[2].tolist()[3] == 0
    assert not causal[2].isnan().any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_numbers_are_finite(route: Route, dtype: torch.dtype) -> None:
    """Models hide keys with them; a row of nothing else is uniform, as it is for `torch.softmax`."""
    lowest = torch.finfo(dtype).min
    x = torch.randn(3, 2, 40, device=route.device).to(dtype)
    added = torch.zeros_like(x)
    added[0, :, 5:] = added[1] = lowest
    hidden = x.masked_fill(added != 0, lowest)
    with _library.implementation(route.implementation):
        for given, mask, spec in ((hidden, None, SoftmaxSpec()), (hidden, None, SoftmaxSpec(causal=True))):
            assert_close(
                softmax.softmax_forward(given, mask, spec)[0], reference.forward(given, mask, None, *spec)[0].double()
            )
        output, _ = softmax.softmax_forward(x, added, SoftmaxSpec(0.5))
        in_chunks = softmax.softmax_forward(torch.full((1, 16400), lowest, device=route.device), None, SoftmaxSpec())[0]
    assert_close(output, reference.forward(x, added, None, *SoftmaxSpec(0.5))[0].double())
    assert_close(output[1], torch.full((2, 40), 1 / 40, dtype=torch.float64))
    assert_close(in_chunks, torch.full((1, 16400), 1 / 16400, dtype=torch.float64))


@pytest.mark.parametrize("route", routes())
def test_causal_backward_ignores_what_no_query_sees(route: Route) -> None:
    dy = torch.randn(2, 48, 48, device=route.device)
    with _library.implementation(route.implementation):
        spec = SoftmaxSpec(0.5, causal=True)
        output, _ = softmax.softmax_forward(torch.randn_like(dy), None, spec)
        expected = softmax.softmax_backward(dy, output, spec)
        future = torch.ones(48, 48, dtype=torch.bool, device=route.device).triu(1)
        assert torch.equal(softmax.softmax_backward(dy.masked_fill(future, 7.0), output, spec), expected)
        assert not expected.masked_fill(~future, 0).any()


@pytest.mark.parametrize("route", routes())
def test_strided_tensors(route: Route) -> None:
    wide = torch.randn(3, 2, 2, 80, device=route.device)
    x = wide.permute(2, 1, 0, 3)[..., 3:67].requires_grad_()
    dy = torch.randn(64, 3, 2, 2, device=route.device).permute(3, 2, 1, 0)
    mask = (torch.rand(64, 3, 2, device=route.device) < 0.3).permute(2, 1, 0)[:, None]
    wider = (torch.rand(2, 1, 3, 70, device=route.device) < 0.3)[..., 2:66]
    with _library.implementation(route.implementation):
        for given in (None, mask, wider, mask.expand(2, 2, 3, 64)):
            output = softmax.masked_softmax(x, given, scale=0.5)
            (dx,) = torch.autograd.grad(output, x, dy)
            expected, _ = reference.forward(x.detach().double(), given, None, *SoftmaxSpec(0.5))
            assert_close(output, expected)
            assert_close(dx, reference.backward(dy.double(), output.detach().double(), None, *SoftmaxSpec(0.5)))


@pytest.mark.parametrize("route", routes())
def test_gradient_of_another_dtype(route: Route) -> None:
    """The compiled modules' callers may hand over gradients wider than the probabilities."""
    x = torch.randn(3, 5, 64, device=route.device, dtype=torch.bfloat16)
    dy = torch.randn(x.shape, device=route.device)
    for spec in (SoftmaxSpec(0.3), SoftmaxSpec(0.3, causal=True)):
        with _library.implementation(route.implementation):
            y, _ = softmax.softmax_forward(x, None, spec)
            dx = softmax.softmax_backward(dy, y, spec)
        assert dx.dtype == torch.bfloat16
        assert_close(dx, reference.backward(dy.double(), y.double(), None, *spec))


def test_double_precision_stays_double() -> None:
    x = torch.randn(3, 7, dtype=torch.float64)
    output = softmax.masked_softmax(x, scale=0.3, causal=True)
    assert output.dtype == torch.float64
    torch.testing.assert_close(output.sum(-1), torch.ones(3, dtype=torch.float64), rtol=1e-15, atol=1e-15)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_more_than_two_to_the_31_elements(causal: bool) -> None:
    rows, columns = (1 << 31) // 4096 + 3, 4096
    x = torch.randn(1 if causal else rows, rows if causal else 1, columns, device="cuda", dtype=torch.bfloat16)
    spec = SoftmaxSpec(0.5, causal)
    mask = None if causal else torch.rand(rows, 1, columns, device="cuda") < 0.2
    output, _ = softmax.softmax_forward(x, mask, spec)
    last = (slice(None), slice(-2, None)) if causal else (slice(-2, None),)
    expected, _ = reference.forward(x[last].double(), None if mask is None else mask[last], None, *spec)
    assert_close(output[last], expected)
    dx = softmax.softmax_backward(x, output, spec)
    assert_close(dx[last], reference.backward(x[last].double(), output[last].double(), None, *spec))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"input": torch.zeros(3, dtype=torch.int64)}, TypeError, "int64"),
        ({"input": torch.zeros(())}, TypeError, r"shape \[\]"),
        ({"input": torch.zeros(3), "causal": True}, ValueError, r"\[\.\.\., queries, keys\]"),
        ({"causal": True, "mask": torch.zeros(3, 4)}, ValueError, "causal=True takes no mask"),
        ({"mask": torch.zeros(3, 5)}, ValueError, r"\[3, 5\] cannot be broadcast to the input's \[3, 4\]"),
        ({"mask": torch.zeros(2, 3, 4)}, ValueError, "cannot be broadcast"),
        ({"mask": torch.zeros(3, 4, dtype=torch.int64)}, TypeError, "mask must be bool or uint8"),
        ({"mask": torch.zeros(3, 4, device="meta")}, ValueError, "mask is on meta"),
        ({"mask": torch.zeros(3, 4, requires_grad=True)}, ValueError, "mask requires a gradient"),
        ({"dropout": 1.5}, ValueError, "dropout=1.5"),
        ({"dropout": -0.1}, ValueError, "dropout=-0.1"),
        ({"dropout": math.nan}, ValueError, "dropout=nan"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        softmax.masked_softmax(**{"input": torch.zeros(3, 4), **arguments})


def test_bad_arguments_without_autograd() -> None:
    y = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"the gradient has shape \[3, 5\]"):
        softmax.softmax_backward(torch.zeros(3, 5), y, SoftmaxSpec())
    with pytest.raises(ValueError, match="noise must be given"):
        softmax.softmax_backward(y, y, SoftmaxSpec(dropout=0.5))
    with pytest.raises(ValueError, match="noise must be given"):
        softmax.softmax_forward(y, None, SoftmaxSpec(), torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="one int64 or a bool or uint8 per element"):
        softmax.softmax_forward(y, None, SoftmaxSpec(dropout=0.5), torch.ones(3, dtype=torch.bool))
    with _library.implementation("torch"), pytest.raises(ValueError, match="only kernels understand"):
        softmax.softmax_forward(y, None, SoftmaxSpec(dropout=0.5), torch.ones(1, dtype=torch.int64))
