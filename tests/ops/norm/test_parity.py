"""The norms against the float64 reference, by every route, with uninitialised memory full of NaN."""

import pytest
import torch
from torch import Tensor

from apex.ops import _device, _library, norm
from apex.ops.norm import reference
from apex.ops.norm.op import launch_backward
from tests.ops.norm.cases import CASES, NormCase
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def exact(case: NormCase, x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple:
    """Output and gradients in float64."""
    wide = [None if t is None else t.double().cpu() for t in (x, dy, weight, bias)]
    settings = (case.columns, case.eps, case.subtract_mean, False, torch.float64, torch.float64)
    output, statistics = reference.forward(wide[0], *wide[2:], *settings)
    gradients = reference.backward(wide[1], wide[0], *wide[2:], statistics, *settings)
    return output, gradients


def run(case: NormCase, x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple:
    """Output and gradients through the public function and autograd."""
    inputs = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    options = {"memory_efficient": case.memory_efficient, "out_dtype": case.out_dtype}
    if case.subtract_mean:
        output = norm.layer_norm(inputs[0], case.columns, inputs[1], inputs[2], case.eps, **options)
    else:
        output = norm.rms_norm(inputs[0], case.columns, inputs[1], case.eps, **options)
    output.backward(dy)
    return output, [None if t is None else t.grad for t in inputs]


def check(case: NormCase, route: Route) -> None:
    tensors = case.tensors(route.device)
    expected, expected_gradients = exact(case, *tensors)
    with _library.implementation(route.implementation):
        output, gradients = run(case, *tensors)
        # The interpreter runs one program after the other, and takes seconds for long rows: once is enough there.
        once = route == Route("cpu", "triton") and case.columns > 4096
        again, gradients_again = (output, gradients) if once else run(case, *tensors)
    assert output.dtype == case.result_dtype
    # Data far from zero has lost digits before the norm sees it; a sum of plain squares would lose them twice.
    conditioning = max(1, round(case.offset))
    assert_close(output, expected, reduction=conditioning, what="output")
    for name, actual, wanted, terms in zip(
        ("dx", "dweight", "dbias"), gradients, expected_gradients, (1, case.rows, case.rows), strict=True
    ):
        assert_close(actual, wanted, reduction=terms * conditioning, what=name)
    assert_equal_bits([output, *gradients], [again, *gradients_again])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: NormCase, route: Route) -> None:
    if route == Route("cpu", "triton") and not case.interpreted:
        pytest.skip("long rows of another dtype, which take the interpreter long; run on a GPU")
    check(case, route)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("columns", [100, 9000, 17000])
def test_backward_from_a_half_precision_output(columns: int, route: Route) -> None:
    """The rounding of the output is part of the problem here, so the reference gets the rounded output too."""
    case = NormCase("", 5, columns, torch.bfloat16, torch.bfloat16)
    output, dy, weight, bias = case.tensors(route.device)
    settings = (columns, case.eps, True, True)
    rstd = torch.rand(1, 5, device=route.device) + 0.5
    saved = (output, weight, bias, rstd)
    with _library.implementation(route.implementation):
        gradients = norm.NORM.run_backward((dy,), saved, (*settings, torch.bfloat16, torch.bfloat16), (True,) * 3)
    wide = [t.double() for t in (dy, *saved)]
    expected = reference.backward(*wide, *settings, torch.float64, torch.float64)
    for actual, wanted, terms in zip(gradients, expected, (1, 5, 5), strict=True):
        assert_close(actual, wanted, reduction=terms)


def _weight_gradients(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor | None, implementation: str) -> tuple:
    """Gradients of input and weight with `memory_efficient`, and those of the float64 reference."""
    case = NormCase("", *x.shape, x.dtype, subtract_mean=bias is not None, memory_efficient=True)
    with _library.implementation(implementation):
        _, (dx, dweight, _) = run(case, x, dy, weight, bias)
    _, (expected_dx, expected_dweight, _) = exact(case, x, dy, weight, bias)
    return (dx, dweight), (expected_dx, expected_dweight)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("subtract_mean", [True, False])
def test_memory_efficient_weight_gradients_of_long_rows(subtract_mean: bool, route: Route) -> None:
    x, dy = torch.randn(2, 4, 12288, device=route.device)
    weight, bias = 0.2 * torch.randn(2, 12288, device=route.device)
    weight[:4] = torch.tensor([1e-6, -1e-6, 1e-7, -1e-30])
    bias[:4] = 0
    (_, dweight), (_, wanted) = _weight_gradients(x, dy, weight, bias if subtract_mean else None, route.implementation)
    error = (dweight.cpu().double() - wanted).abs()
    assert error.sum() <= 1e-5 * wanted.abs().sum()
    # Gradients do not depend on their weights' size; where eps is in a weight's place they shrink with it.
    assert (error[:4] <= 1e-5 * wanted[:4].abs()).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("columns", [100, 9000, 17000])
def test_memory_efficient_columns_that_the_output_does_not_hold(columns: int, route: Route) -> None:
    """Half-precision outputs hold biases rounded; what weights of zero and near it make of that is bounded."""
    x, dy = torch.randn(2, 4, columns, device=route.device).half()
    weight, bias = torch.randn(2, columns, device=route.device)
    weight[:3] = torch.tensor([0.0, 1e-30, -1e-30])
    (dx, dweight), (wanted_dx, wanted_dweight) = _weight_gradients(x, dy, weight, bias, route.implementation)
    assert dweight[0].abs() < 0.1  # the bias' rounding
    assert (dweight[1:3].abs() <= 1.01 * columns**0.5 * dy[:, 1:3].abs().sum(0)).all()
    others = weight.abs().cpu() > 0.1
    for actual, wanted in (
        (dx.cpu()[:, others], wanted_dx[:, others]),
        (dweight.cpu()[others], wanted_dweight[others]),
    ):
        assert (actual.double() - wanted).abs().sum() <= 2e-3 * wanted.abs().sum()


@pytest.mark.parametrize("from_output", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_pytorchs_operators_give_what_the_formulas_give(from_output: bool, dtype: torch.dtype, parameters: int) -> None:
    """`reference` takes the first where autograd does not look on, the second where it does."""
    x, dy = torch.randn(2, 4, 5, 24).to(dtype).unbind()
    weight, bias = [*(torch.rand(2, 24) + 0.5)[:parameters], None, None][:2]
    settings = (24, 1e-5, True, from_output, dtype, dtype)

    def run(wanted: tuple[bool, ...]) -> tuple:
        output, statistics = reference.forward(x, weight, bias, *settings)
        saved = output if from_output else x
        return output, statistics, *reference.backward(dy, saved, weight, bias, statistics, *settings, wanted)

    called: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function.__name__)
            return function(*args, **(kwargs or {}))

    for wanted in ((True, True, True), (True, False, True), (True, True, False)):
        expected = run(wanted)
        with torch.no_grad(), Watch():
            found = run(wanted)
        assert [t is None for t in found[3:]] == [parameters <= i or not wanted[1 + i] for i in range(2)]
        for actual, formula in zip(found, expected, strict=True):
            if formula is None:
                assert actual is None
            else:
                assert (actual.dtype, actual.shape) == (formula.dtype, formula.shape)
                assert_close(actual, formula.double(), reduction=20)
    assert {"native_layer_norm.default", "native_layer_norm_backward.default"} <= set(called)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, columns = (1 << 31) // 4096 + 3, 4096
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.rand(2, columns, device="cuda", dtype=torch.bfloat16)
    settings = (columns, 1e-5, True, False, torch.bfloat16, torch.bfloat16)
    output, statistics = norm.NORM.run(x, weight, bias, *settings)
    dx, _, dbias = norm.NORM.run_backward((x,), (x, weight, bias, statistics), settings, (True,) * 3)
    last = slice(rows - 2, rows)
    wide, parameters = x[last].double(), (weight.double(), bias.double())
    settings = (columns, 1e-5, True, False, torch.float64, torch.float64)
    expected, statistics = reference.forward(wide, *parameters, *settings)
    assert_close(output[last], expected)
    expected_dx, _, _ = reference.backward(wide, wide, *parameters, statistics, *settings)
    assert_close(dx[last], expected_dx)
    assert_close(dbias, x.sum(0, dtype=torch.float64), reduction=rows)


@pytest.mark.parametrize("route", routes())
def test_several_normalised_dimensions(route: Route) -> None:
    x = torch.randn(3, 4, 5, 6, device=route.device)
    weight, bias = torch.rand(2, 5, 6, device=route.device)
    with _library.implementation(route.implementation):
        output = norm.layer_norm(x, [5, 6], weight, bias)
    wanted = torch.nn.functional.layer_norm(x.double(), (5, 6), weight.double(), bias.double())
    assert_close(output, wanted)


def test_frozen_parameters_cost_no_launch() -> None:
    pytest.importorskip("triton")
    from apex.ops._launch import record_launches

    rows = ["norm_backward_rows"]
    for columns, param_grads, kernels in (
        (4096, True, [*rows, "sum_partials"]),
        (4096, False, rows),
        (32, False, rows),
    ):
        x = torch.randn(4, columns, device="meta")
        weight, bias = torch.empty(2, columns, device="meta")
        statistics = torch.empty(2, 4, device="meta")
        settings = (columns, 1e-5, True, False, torch.float32, torch.float32)
        with _device.pretend(_device.INTERPRETER), record_launches() as collected:
            launch_backward(x, x, weight, bias, statistics, *settings, (True, param_grads, param_grads))
        assert [launch.prepared.kernel.name for launch in collected] == kernels


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("function", [norm.layer_norm, norm.rms_norm])
def test_an_output_of_more_digits_than_the_input_has_them(function, route: Route) -> None:
    x, weight = torch.randn(6, 24, device=route.device).half(), torch.rand(24, device=route.device).half()
    plain = {norm.layer_norm: torch.nn.functional.layer_norm, norm.rms_norm: torch.nn.functional.rms_norm}[function]
    for each in (None, weight):
        with _library.implementation(route.implementation):
            output = function(x, 24, each, eps=1e-5, out_dtype=torch.float32)
        assert_close(output, plain(x.double(), (24,), None if each is None else each.double(), eps=1e-5), reduction=24)
