"""fused_adam_cuda: the first form of Adam and what goes with it, against the formula in float64."""

import pytest
import torch
from torch import Tensor

import fused_adam_cuda
from apex.multi_tensor_apply import multi_tensor_applier
from tests.compiled_names.lists import (
    BF16,
    CHUNK,
    F16,
    F32,
    F64,
    assert_lists,
    by_element,
    copies,
    dispatch,
    flag,
    make,
    wide,
)
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# lr, beta1, beta2, eps, grad_scale, step
HYPER = (0.1, 0.9, 0.99, 1e-3, 4.0, 3)


def early_adam(lr, beta1, beta2, eps, grad_scale, step, mode, corrects, decay):
    def formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        g = g / grad_scale
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if corrects else lr
        deviation = (v + eps).sqrt() if mode == 0 else v.sqrt() + eps
        return p - size * (m / deviation + decay * p), m, v

    return formula


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("gradient", [F32, F16, BF16, F64])
@pytest.mark.parametrize(("mode", "corrects", "decay"), [(0, 1, 0.1), (1, 1, 0.1), (1, 0, 0.0)])
def test_adam(mode: int, corrects: int, decay: float, gradient: torch.dtype, route: Route) -> None:
    wide_dtype = F64 if gradient == F64 else F32
    dtypes = (wide_dtype, gradient, wide_dtype, wide_dtype)
    params, gradients, first, second = lists = make(route, *dtypes, offset=1, positive=(3,))
    expected = by_element(early_adam(*HYPER, mode, corrects, decay), lists)
    many = copies(lists)
    outputs = [torch.empty_like(g) for g in gradients]
    with dispatch(route, *dtypes):
        for p, g, m, v, out in zip(params, gradients, first, second, outputs, strict=True):
            fused_adam_cuda.adam(p, out, m, v, g, *HYPER, mode, corrects, decay)
        arguments = (*HYPER, mode, corrects, decay)
        same = copies(many)
        ordered = [many[0], many[2], many[3], many[1]]
        multi_tensor_applier(fused_adam_cuda.adam_mt, flag(route), ordered, *arguments)
        kept = [torch.empty_like(g) for g in gradients]
        multi_tensor_applier(
            fused_adam_cuda.adam_mt, flag(route), [same[0], same[2], same[3], same[1], kept], *arguments
        )
    for found in (lists, many, same):
        for index, column in ((0, 0), (2, 1), (3, 2)):
            assert_lists(found[index], expected[column], f"list {index}")
    assert_lists(outputs, wide([params])[0], "copies")
    assert_lists(kept, wide([params])[0], "copies")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("gradient", [F32, F16])
@pytest.mark.parametrize("mode", [0, 1])
def test_a_step_is_taken_back(mode: int, gradient: torch.dtype, route: Route) -> None:
    params, gradients, first, second = lists = make(route, F32, gradient, F32, F32, positive=(3,))
    expected = by_element(early_adam(*HYPER, mode, 1, 0.1), lists)
    before = copies(lists)
    nothing = torch.empty(0, device=route.device)
    with dispatch(route):
        for p, g, m, v in zip(params, gradients, first, second, strict=True):
            fused_adam_cuda.reversible_adam(p, nothing, m, v, g, *HYPER, mode, 1, 0.1)
        assert_lists(params, expected[0], "parameters")
        after = copies(lists)
        for p, g, m, v in zip(params, gradients, first, second, strict=True):
            fused_adam_cuda.maybe_adam_undo(flag(route), p, m, v, g, *HYPER, mode, 1, 0.1)
        for tensors, old in zip(lists, after, strict=True):
            assert_equal_bits(tensors, old)
        for index, (p, g, m, v) in enumerate(zip(params, gradients, first, second, strict=True)):
            raised = nothing.int() if index == 0 else flag(route, 1)
            fused_adam_cuda.maybe_adam_undo(raised, p, m, v, g, *HYPER, mode, 1, 0.1)
    for tensors, old in zip(lists, before, strict=True):
        for tensor, wanted in zip(tensors, old, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("route", routes())
def test_taking_back_the_first_step_leaves_no_negative_square(route: Route) -> None:
    (p,), (g,), (m,), (v,) = ([torch.randn(300, device=route.device)] for _ in range(4))
    m.zero_()
    v.zero_()
    nothing = torch.empty(0, device=route.device)
    with dispatch(route):
        fused_adam_cuda.reversible_adam(p, nothing, m, v, g, 0.1, 0.9, 0.999, 1e-8, 1.0, 1, 1, 1, 0.0)
        fused_adam_cuda.maybe_adam_undo(flag(route, 1), p, m, v, g, 0.1, 0.9, 0.999, 1e-8, 1.0, 1, 1, 1, 0.0)
    assert (v >= 0).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("copy_dtype", [F16, torch.uint8])
def test_overflow_leaves_elements_alone_and_marks_the_copy(copy_dtype: torch.dtype, route: Route) -> None:
    p, g, m, v = (torch.randn(150, device=route.device) for _ in range(4))
    v.abs_()
    g = g.half()
    g[70], g[71] = float("inf"), float("nan")
    bad = torch.zeros(150, dtype=torch.bool)
    bad[70:72] = True
    before = [tensor.clone() for tensor in (p, m, v)]
    expected = by_element(early_adam(*HYPER, 1, 1, 0.1), [[p], [g], [m], [v]])
    copy = torch.zeros(150, device=route.device).to(copy_dtype)
    checked = flag(route, 1)
    with dispatch(route):
        fused_adam_cuda.strided_check_finite(checked, copy, 1, 1)
        assert not checked.item()
        fused_adam_cuda.reversible_adam(p, copy, m, v, g, *HYPER, 1, 1, 0.1)
        fused_adam_cuda.strided_check_finite(checked, copy, 150, 0)
    assert checked.item() == 1
    for tensor, old, (wanted,) in zip((p, m, v), before, expected, strict=True):
        assert_equal_bits([tensor[70:72]], [old[70:72]])
        assert_close(tensor.cpu()[~bad], wanted[~bad])
    if copy_dtype == F16:
        assert_close(copy[1:], p[1:].double())
    else:
        floats = copy.view(torch.float8_e5m2).float()
        assert floats[0].isinf()
        assert ((floats[1:] - p[1:]).abs() <= p[1:].abs() / 8).all()


@pytest.mark.parametrize("route", routes())
def test_strided_check(route: Route) -> None:
    tensor = torch.zeros(100, device=route.device)
    tensor[31] = float("nan")
    for stride, found in ((1, 1), (31, 1), (2, 0), (32, 0)):
        raised = flag(route)
        fused_adam_cuda.strided_check_finite(raised, tensor, stride, 0)
        assert raised.item() == found
    raised = flag(route, 1)
    fused_adam_cuda.strided_check_finite(raised, tensor, 2, 0)
    assert raised.item() == 1
    fused_adam_cuda.strided_check_finite(raised, tensor, 2, 1)
    assert raised.item() == 0


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("source", "target"), [(F32, F16), (F16, F32), (F32, torch.uint8), (torch.uint8, F16)])
def test_casts(source: torch.dtype, target: torch.dtype, route: Route) -> None:
    values = torch.randn(70, device=route.device)
    inputs = [part.to(source) if source.is_floating_point else part.to(torch.float8_e5m2).view(torch.uint8)
              for part in (values[:5], values[5:])]  # fmt: skip
    outputs = [torch.zeros(part.shape, dtype=target, device=route.device) for part in inputs]
    untouched = copies([outputs])[0]
    nothing = torch.empty(0, dtype=torch.int32, device=route.device)
    with dispatch(route):
        fused_adam_cuda.maybe_cast_mt(CHUNK, flag(route, 1), [inputs, outputs])
        fused_adam_cuda.maybe_cast(flag(route, 1), inputs[0], outputs[0])
        assert_equal_bits(outputs, untouched)
        fused_adam_cuda.maybe_cast_mt(CHUNK, flag(route), [inputs, outputs])
        again = torch.zeros_like(outputs[0])
        fused_adam_cuda.maybe_cast(nothing, inputs[0], again)
    assert_equal_bits([again], outputs[:1])
    for output, original in zip(outputs, inputs, strict=True):
        given = original.float() if source.is_floating_point else original.view(torch.float8_e5m2).float()
        found = output.float() if target.is_floating_point else output.view(torch.float8_e5m2).float()
        coarse = not target.is_floating_point
        assert ((found - given).abs() <= given.abs() * (0.125 if coarse else 1e-3)).all()


def test_parameters_that_require_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    m, v = torch.zeros(3), torch.zeros(3)
    fused_adam_cuda.adam(p, torch.empty(0), m, v, torch.ones(3), *HYPER, 1, 1, 0.0)
    fused_adam_cuda.reversible_adam(p, torch.empty(0), m, v, torch.ones(3), *HYPER, 1, 1, 0.0)
    assert (p < 1).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: fused_adam_cuda.adam(p, torch.empty(0), p, p, torch.ones(2), *HYPER, 1, 1, 0.0),
            ValueError,
            r"g\[0\] has 2 elements, p\[0\] has 3",
        ),
        (
            lambda p: fused_adam_cuda.adam(p, torch.ones(4), p, p, p, *HYPER, 1, 1, 0.0),
            ValueError,
            r"p_copy\[0\] has 4 elements",
        ),
        (
            lambda p: fused_adam_cuda.reversible_adam(p, torch.ones(4), p, p, p, *HYPER, 1, 1, 0.0),
            ValueError,
            "p_copy has 4 elements",
        ),
        (lambda p: fused_adam_cuda.adam_mt(1, p, [[p]] * 3, *HYPER, 1, 1, 0.0), ValueError, "4 or 5 are expected"),
        (lambda p: fused_adam_cuda.strided_check_finite(torch.zeros(1), p.long(), 1, 1), TypeError, "int64"),
        (lambda p: fused_adam_cuda.strided_check_finite(torch.zeros(1), p, 0, 1), ValueError, "stride=0"),
        (lambda p: fused_adam_cuda.maybe_cast(torch.zeros(1), p, p.long()), TypeError, "p_out"),
        (lambda p: fused_adam_cuda.maybe_cast(torch.zeros(1), p, p.byte()[:2]), ValueError, "p_out has 2 elements"),
    ],
)
def test_refusals(call, error: type[Exception], message: str) -> None:
    p = torch.ones(3)
    with pytest.raises(error, match=message):
        call(p)
    assert (p == 1).all()
