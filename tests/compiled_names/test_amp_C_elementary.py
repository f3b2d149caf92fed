"""amp_C: scaling, sums and norms, called as clients call them."""

import itertools

import pytest
import torch
from torch import Tensor

import amp_C
from apex.multi_tensor_apply import multi_tensor_applier
from tests.compiled_names.lists import (
    BF16,
    CHUNK,
    F16,
    F32,
    F64,
    SIZES,
    assert_lists,
    dispatch,
    flag,
    make,
    number,
    wide,
)
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("in_dtype", "out_dtype"), list(itertools.product((F16, BF16, F32, F64), repeat=2)))
def test_scale(in_dtype: torch.dtype, out_dtype: torch.dtype, route: Route) -> None:
    lists = make(route, in_dtype, out_dtype)
    raised = flag(route)
    with dispatch(route, in_dtype, out_dtype):
        assert multi_tensor_applier(amp_C.multi_tensor_scale, raised, lists, 0.25) is None
    assert_lists(lists[1], [x * 0.25 for x in wide(lists)[0]], "outputs")
    assert not raised.item()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("offset", [1, 3])
def test_scale_of_slices_that_are_not_aligned(offset: int, route: Route) -> None:
    lists = make(route, F16, F32, offset=offset)
    with dispatch(route):
        amp_C.multi_tensor_scale(CHUNK, flag(route), lists, scale=-2.0)
    assert_lists(lists[1], [x * -2.0 for x in wide(lists)[0]], "outputs")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_scale_reports_and_passes_on_what_is_not_finite(bad: float, route: Route) -> None:
    lists = make(route, F32, F32)
    lists[0][1][129] = bad
    raised = flag(route)
    with dispatch(route):
        amp_C.multi_tensor_scale(CHUNK, raised, lists, 0.5)
        assert raised.item() == 1
        # A flag that is set already does not keep it from working.
        lists[1][0].fill_(7)
        amp_C.multi_tensor_scale(CHUNK, raised, lists, 0.5)
    assert raised.item() == 1
    assert not lists[1][1][129].isfinite()
    assert_close(lists[1][0], lists[0][0].double() * 0.5)


@pytest.mark.parametrize("route", routes())
def test_scale_by_a_factor_on_the_device_into_parameters(route: Route) -> None:
    """As gradient clipping and master weights do: a tensor as factor, outputs that require gradients."""
    (sources,) = make(route, F32)
    params = [torch.nn.Parameter(torch.empty_like(tensor, dtype=F16)) for tensor in sources]
    with dispatch(route):
        amp_C.multi_tensor_scale(CHUNK, flag(route), [sources, params], torch.tensor(0.5, device=route.device))
    assert_lists(params, [x * 0.5 for x in wide([sources])[0]], "parameters")


@pytest.mark.parametrize("route", routes())
def test_flat_and_shaped_tensors_go_together(route: Route) -> None:
    flat = torch.randn(24, device=route.device)
    shaped = torch.zeros(4, 6, device=route.device)
    strided = torch.zeros(6, 4, device=route.device).t()
    with dispatch(route):
        amp_C.multi_tensor_scale(CHUNK, flag(route), [[flat], [shaped]], 2.0)
    assert_close(shaped, flat.double().view(4, 6) * 2)
    with dispatch(route, F64):
        amp_C.multi_tensor_scale(CHUNK, flag(route), [[flat], [strided]], 2.0)
    assert_close(strided, flat.double().view(4, 6) * 2)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F16, F32, F16), (BF16, BF16, F32), (F64, F32, F64)])
def test_axpby(dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    lists = make(route, *dtypes)
    raised = flag(route)
    with dispatch(route, *dtypes):
        multi_tensor_applier(amp_C.multi_tensor_axpby, raised, lists, 2.0, -0.5, -1)
    x, y, _ = wide(lists)
    assert_lists(lists[2], [2.0 * a - 0.5 * b for a, b in zip(x, y, strict=True)], "outputs")
    assert not raised.item()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("arg_to_check", [-1, 0, 1])
@pytest.mark.parametrize("poisoned", [0, 1])
def test_axpby_looks_at_the_list_it_is_told_to(poisoned: int, arg_to_check: int, route: Route) -> None:
    lists = make(route, F32, F32, F32)
    lists[poisoned][3][0] = float("inf")
    raised = flag(route)
    with dispatch(route):
        amp_C.multi_tensor_axpby(CHUNK, raised, lists, 1.0, 1.0, arg_to_check)
    assert raised.item() == (arg_to_check in (-1, poisoned))


def norms_of(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    exact = [tensor.cpu().double() for tensor in tensors]
    return torch.cat(exact).norm().reshape(1), torch.stack([tensor.norm() for tensor in exact])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("function", [amp_C.multi_tensor_l2norm, amp_C.multi_tensor_l2norm_mp])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_l2norm(dtype: torch.dtype, function, route: Route) -> None:
    (tensors,) = make(route, dtype, offset=1)
    raised = flag(route)
    total, each = norms_of(tensors)
    with dispatch(route, dtype):
        norm, nothing = multi_tensor_applier(function, raised, [tensors])
        _, also_nothing = multi_tensor_applier(function, raised, [tensors], False)
        _, found = multi_tensor_applier(function, raised, [tensors], True)
    assert norm.shape == (1,)
    assert norm.dtype == nothing.dtype == found.dtype == torch.float32
    assert nothing.numel() == also_nothing.numel() == 0
    assert_close(norm, total)
    assert_close(found, each)
    assert not raised.item()


@pytest.mark.parametrize("route", routes())
def test_l2norm_of_mixed_dtypes(route: Route) -> None:
    tensors = [tensor for pair in zip(*make(route, F32, F16, BF16), strict=True) for tensor in pair]
    total, each = norms_of(tensors)
    with dispatch(route):
        norm, found = amp_C.multi_tensor_l2norm_mp(CHUNK, flag(route), [tensors], per_tensor_python=True)
    assert_close(norm, total)
    assert_close(found, each)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 3e38])
def test_norms_report_what_is_not_finite(bad: float, route: Route) -> None:
    """Also a norm whose sum of squares leaves float32, though every element is finite."""
    for function, extra in (
        (amp_C.multi_tensor_l2norm, ()),
        (amp_C.multi_tensor_l2norm_mp, ()),
        (amp_C.multi_tensor_unscale_l2norm, (number(route, 1.0),)),
    ):
        (tensors,) = make(route, F32)
        tensors[1][129] = bad
        raised = flag(route)
        with dispatch(route):
            norm, _ = function(CHUNK, raised, [tensors], *extra)
        assert raised.item() == 1
        assert not norm.isfinite().item()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F32), (F32, BF16)])
def test_l2norm_scale_measures_before_it_scales(dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    lists = make(route, *dtypes)
    total, each = norms_of(lists[0])
    raised = flag(route)
    with dispatch(route):
        norm, found = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, raised, lists, 0.125, True)
    assert_close(norm, total)
    assert_close(found, each)
    assert_lists(lists[1], [x * 0.125 for x in wide(lists)[0]], "outputs")
    assert not raised.item()


@pytest.mark.parametrize("route", routes())
def test_unscale_l2norm_leaves_its_inputs_alone(route: Route) -> None:
    (tensors,) = make(route, F16)
    before = [tensor.clone() for tensor in tensors]
    total, each = norms_of(tensors)
    inverse = number(route, 0.25)
    with dispatch(route):
        norm, found = amp_C.multi_tensor_unscale_l2norm(CHUNK, flag(route), [tensors], inverse, True)
    assert_close(norm, total * 0.25)
    assert_close(found, each * 0.25)
    assert_equal_bits(tensors, before)


def test_no_tensors() -> None:
    raised = torch.zeros(1, dtype=torch.int32)
    amp_C.multi_tensor_scale(CHUNK, raised, [[], []], 2.0)
    norm, each = amp_C.multi_tensor_l2norm(CHUNK, raised, [[]], True)
    assert norm.tolist() == [0.0]
    assert each.shape == (0,)


def reference_hysteresis(overflows: list[int], growth: float, backoff: float, interval: int, patience: int):
    """Upstream's rule, step by step, on Python numbers; the scale is rounded to float32 as it is stored."""
    scale, tracker, left = 1000.0, 0, patience
    for overflow in overflows:
        if overflow:
            left -= 1
            if left <= 0:
                scale = torch.tensor(scale * backoff, dtype=torch.float32).item()
            tracker = 0
        else:
            tracker += 1
            if tracker == interval:
                scale, tracker = torch.tensor(scale * growth, dtype=torch.float32).item(), 0
            left = patience
        yield scale, tracker, left


@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.3, 0.7)])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_update_scale_hysteresis(patience: int, growth: float, backoff: float) -> None:
    overflows = torch.randint(2, (60,)).tolist()
    current, tracker = torch.tensor([1000.0]), torch.zeros(1, dtype=torch.int32)
    left = torch.full((1,), patience, dtype=torch.int32)
    for overflow, expected in zip(
        overflows, reference_hysteresis(overflows, growth, backoff, 3, patience), strict=True
    ):
        found = torch.tensor([float(overflow)])
        result = amp_C.update_scale_hysteresis(current, tracker, left, found, growth, backoff, 3, patience)
        assert result is current
        assert (current.item(), tracker.item(), left.item()) == expected


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: amp_C.multi_tensor_scale(CHUNK, f, [[torch.ones(3)]], 1.0), ValueError, "tensor_lists has 1 lists"),
        (
            lambda f: amp_C.multi_tensor_scale(CHUNK, f, [[torch.ones(3)], []], 1.0),
            ValueError,
            r"tensor_lists\[\d\] has \d tensors",
        ),
        (
            lambda f: amp_C.multi_tensor_scale(CHUNK, f, [[torch.ones(3)], [torch.ones(4)]], 1.0),
            ValueError,
            r"tensor_lists\[\d\]\[0\] has \d elements",
        ),
        (
            lambda f: amp_C.multi_tensor_scale(CHUNK, f, [[torch.ones(3).long()], [torch.ones(3)]], 1.0),
            TypeError,
            r"tensor_lists\[0\]\[0\] is torch.int64",
        ),
        (lambda f: amp_C.multi_tensor_scale(CHUNK, 0, [[], []], 1.0), TypeError, "noop_flag is a int"),
        (
            lambda f: amp_C.multi_tensor_scale(CHUNK, torch.zeros(2), [[], []], 1.0),
            ValueError,
            "noop_flag has 2 elements",
        ),
        (
            lambda f: amp_C.multi_tensor_axpby(CHUNK, f, [[], [], []], 1.0, 1.0, 2),
            ValueError,
            "arg_to_check=2",
        ),
        (
            lambda f: amp_C.multi_tensor_l2norm(CHUNK, f, [[torch.ones(3).to_sparse()]]),
            TypeError,
            r"tensor_lists\[0\]\[0\] is sparse",
        ),
    ],
)
def test_refusals(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.zeros(1, dtype=torch.int32))


def test_sizes_have_every_kind_of_tail() -> None:
    assert {size % 64 for size in SIZES} >= {0, 1, 2, 5}
