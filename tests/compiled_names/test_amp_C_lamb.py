"""amp_C's and fused_lamb_cuda's forms of LAMB, against the formula in float64."""

import pytest
import torch
from torch import Tensor

import amp_C
import fused_lamb_cuda
from apex.multi_tensor_apply import multi_tensor_applier
from tests.compiled_names.lists import (
    BF16,
    CHUNK,
    F16,
    F32,
    SIZES,
    assert_lists,
    copies,
    dispatch,
    flag,
    make,
    number,
    wide,
)
from tests.support.harness import Route, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LR, BETA1, BETA2, EPS, STEP = 0.1, 0.9, 0.99, 1e-5, 3


def moments_and_update(g, p, m, v, *, decay, mode, corrects=1, averages=1, step=STEP):
    if mode == 0:
        g = g + decay * p
    m = BETA1 * m + (1 - BETA1 if averages else 1.0) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    first, second = (1 - BETA1**step, 1 - BETA2**step) if corrects else (1.0, 1.0)
    update = (m / first) / ((v / second).sqrt() + EPS)
    return m, v, update + decay * p if mode == 1 else update


def ratio(p: Tensor, update: Tensor, adapts: bool) -> float:
    return (p.norm() / update.norm()).item() if adapts and p.norm() > 0 and update.norm() > 0 else 1.0


def lamb(lists: list[list[Tensor]], factor: float, *, adapts: bool, **options) -> list[list[Tensor]]:
    """With half-precision moments, the step that adapts is kept in the gradient, and takes its dtype."""
    kept = lists[0][0].dtype if adapts and lists[2][0].dtype == F16 else torch.float64
    results = []
    for g, p, m, v in zip(*wide(lists)[:4], strict=True):
        m, v, update = moments_and_update(g * factor, p, m, v, **options)
        update = update.to(kept).double()
        results.append((p - LR * ratio(p, update, adapts) * update, m, v))
    return [list(column) for column in zip(*results, strict=True)]


def assert_state(lists: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for index, what in ((1, "parameters"), (2, "first moments"), (3, "second moments")):
        assert_lists(lists[index], expected[index - 1], what)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32, F32, F32), (F16, F16, F16, F16), (BF16, F32, F32, F32)])
@pytest.mark.parametrize(
    ("mode", "decay", "nvlamb", "corrects", "averages", "norm"),
    [
        (1, 0.1, None, 1, 1, 4.0),
        (1, 0.1, False, 0, 0, 0.5),
        (0, 0.1, False, 1, 1, 4.0),
        (1, 0.0, None, 1, 1, 0.5),
        (1, 0.0, True, 1, 1, 4.0),
    ],
)
def test_lamb(mode, decay, nvlamb, corrects, averages, norm, dtypes, route: Route) -> None:
    lists = make(route, *dtypes, positive=(3,))
    adapts = bool(nvlamb) or decay != 0
    factor = 1.0 / norm if norm > 1 else 1.0
    expected = lamb(lists, factor, adapts=adapts, decay=decay, mode=mode, corrects=corrects, averages=averages)
    arguments = (LR, BETA1, BETA2, EPS, STEP, corrects, decay, averages, mode, number(route, norm), 1.0)
    extra = () if nvlamb is None else (nvlamb,)
    again = copies(lists)
    with dispatch(route):
        multi_tensor_applier(amp_C.multi_tensor_lamb, flag(route), lists, *arguments, *extra)
        assert_state(lists, expected)
        if not nvlamb:
            arguments = (*arguments[:-2], norm, 1.0)
            fused_lamb_cuda.lamb(CHUNK, flag(route), again, *arguments)
            assert_state(again, expected)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("half", [None, F16, BF16])
def test_lamb_with_numbers_on_the_device(half: torch.dtype | None, route: Route) -> None:
    lists = make(route, half or F32, F32, F32, F32, positive=(3,))
    if half is not None:
        lists.append([p.to(half) for p in lists[1]])
    expected = lamb(lists, 0.5 * 0.25, adapts=True, decay=0.1, mode=1)
    arguments = (
        number(route, LR),
        BETA1,
        BETA2,
        EPS,
        number(route, STEP, torch.int32),
        1,
        0.1,
        1,
        1,
        number(route, 4.0),
        number(route, 1.0),
        False,
    )
    scale = number(route, 0.5)
    with dispatch(route):
        amp_C.multi_tensor_lamb_mp(CHUNK, flag(route), lists, *arguments, number(route, 0.0), scale)
        assert_state(lists, expected)
        if half is not None:
            assert_lists(lists[4], wide(lists)[1], "copies")
        before = copies(lists)
        for raised, found in ((1, 0.0), (0, 1.0)):
            amp_C.multi_tensor_lamb_mp(CHUNK, flag(route, raised), lists, *arguments, number(route, found), scale)
            for tensors, old in zip(lists, before, strict=True):
                assert_equal_bits(tensors, old)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32, F32, F32, F32), (F16, F32, F32, F32, F16)])
@pytest.mark.parametrize(("decay", "nvlamb"), [(0.1, None), (0.0, False), (0.0, True)])
def test_lamb_in_two_halves(decay: float, nvlamb: bool | None, dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    """As its users do it: updates, norms of parameters and updates, weights. The step counts from 0."""
    lists = make(route, *dtypes, positive=(3,))
    expected = []
    for g, p, m, v in zip(*wide(lists)[:4], strict=True):
        expected.append((p, *moments_and_update(g / 2, p, m, v, decay=decay, mode=1)))
    decays = torch.full((len(SIZES),), decay, device=route.device)
    arguments = (decays, STEP - 1, BETA1, BETA2, EPS, number(route, 2.0), 1.0)
    with dispatch(route):
        multi_tensor_applier(amp_C.multi_tensor_lamb_stage1_cuda, flag(route), lists, *arguments)
        for index, what in ((2, "first moments"), (3, "second moments"), (4, "updates")):
            assert_lists(lists[index], [row[index - 1] for row in expected], what)
        _, param_norms = amp_C.multi_tensor_l2norm(CHUNK, flag(route), [lists[1]], True)
        _, update_norms = amp_C.multi_tensor_l2norm(CHUNK, flag(route), [lists[4]], True)
        extra = () if nvlamb is None else (nvlamb,)
        wanted = [
            p - LR * ratio(p, update, bool(nvlamb) or decay != 0) * update
            for p, update in zip(*wide([lists[1], lists[4]]), strict=True)
        ]
        multi_tensor_applier(
            amp_C.multi_tensor_lamb_stage2_cuda,
            flag(route),
            [lists[1], lists[4]],
            param_norms,
            update_norms,
            LR,
            decay,
            *extra,
        )
    assert_lists(lists[1], wanted, "parameters")


@pytest.mark.parametrize("route", routes())
def test_the_first_half_takes_a_decay_per_tensor(route: Route) -> None:
    lists = make(route, F32, F32, F32, F32, F32, positive=(3,))
    decays = torch.linspace(0, 0.4, len(SIZES), device=route.device)
    expected = [
        moments_and_update(*row, decay=decay.item(), mode=1)[2]
        for row, decay in zip(zip(*wide(lists)[:4], strict=True), decays, strict=True)
    ]
    with dispatch(route):
        amp_C.multi_tensor_lamb_stage1_cuda(
            CHUNK, flag(route), lists, decays, STEP - 1, BETA1, BETA2, EPS, number(route, 0.5), 1.0
        )
    assert_lists(lists[4], expected, "updates")


def test_refusals() -> None:
    lists = [[torch.ones(3)] for _ in range(5)]
    with pytest.raises(ValueError, match="5 lists; 4 are expected"):
        fused_lamb_cuda.lamb(CHUNK, torch.zeros(1), lists, LR, BETA1, BETA2, EPS, 1, 1, 0.1, 1, 1, 1.0, 1.0)
    with pytest.raises(ValueError, match="per_tensor_decay has 2 elements"):
        amp_C.multi_tensor_lamb_stage1_cuda(
            CHUNK, torch.zeros(1), lists, torch.ones(2), 0, BETA1, BETA2, EPS, torch.ones(1), 1.0
        )
    assert all((tensor == 1).all() for (tensor,) in lists)
