"""amp_C: SGD, Adam, Adagrad, NovoGrad and LARS over lists, against their formulas in float64."""

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
    by_element,
    copies,
    dispatch,
    flag,
    make,
    number,
    wide,
)
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def sgd(wd, momentum, dampening, lr, nesterov, first, after, scale, stored=F32):
    """The step of SGD; a momentum that is stored in float16 is what is stored."""

    def formula(g: Tensor, p: Tensor, m: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        g = g * scale
        if not after:
            g = g + wd * p
        if momentum:
            m = g if first else momentum * m + (1 - dampening) * g
            m = m.half().double() if stored == F16 else m
            g = g + momentum * m if nesterov else m
        if after:
            g = g + wd * p
        return p - lr * g, m

    return formula


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F16, F16, F16), (F16, F32, F32, F16), (BF16, F32, F32, BF16)])
@pytest.mark.parametrize(
    "options",  # wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale
    [
        (0.0, 0.0, 0.0, 0.1, False, False, False, 1.0),
        (0.1, 0.0, 0.0, 0.1, False, False, True, 0.5),
        (0.1, 0.9, 0.3, 0.1, False, False, False, 1.0),
        (0.1, 0.9, 0.3, 0.1, False, True, False, 0.25),
        (0.1, 0.9, 0.0, 0.1, True, False, True, 2.0),
    ],
)
def test_sgd(options: tuple, dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    lists = make(route, *dtypes)
    before = copies(lists)
    expected, momentum = by_element(sgd(*options, dtypes[2]), lists)
    with dispatch(route):
        multi_tensor_applier(amp_C.multi_tensor_sgd, flag(route), lists, *options)
    assert_lists(lists[1], expected, "parameters")
    assert_lists(lists[2], momentum, "momentum")
    assert_equal_bits(lists[0], before[0])
    if len(lists) == 4:
        assert_lists(lists[3], wide(lists)[1], "copies")


@pytest.mark.parametrize("route", routes())
def test_sgd_and_lars_do_nothing_where_the_flag_is_set(route: Route) -> None:
    lists = make(route, F16, F32, F32, F16)
    before = copies(lists)
    norms = torch.ones(len(SIZES), device=route.device)
    with dispatch(route):
        amp_C.multi_tensor_sgd(CHUNK, flag(route, 1), lists, 0.1, 0.9, 0.0, 0.1, False, False, False, 1.0)
        amp_C.multi_tensor_sgd(CHUNK, flag(route, 1), lists, 0.1, 0.0, 0.0, 0.1, False, False, False, 1.0)
        amp_C.multi_tensor_lars(
            CHUNK, flag(route, 1), lists, norms, norms, 0.1, 0.1, 0.0, 0.1, 0.9, 0.0, False, False, False, 1.0, False
        )
    for tensors, old in zip(lists, before, strict=True):
        assert_equal_bits(tensors, old)


def adam(lr, beta1, beta2, eps, step, mode, corrects, decay, scale=1.0):
    def formula(g: Tensor, p: Tensor, m: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        unscaled = g = g * scale
        if mode == 0:
            g = g + decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        first, second = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
        update = (m / first) / ((v / second).sqrt() + eps)
        if mode == 1:
            update = update + decay * p
        return p - lr * update, m, v, unscaled

    return formula


ADAM = (0.1, 0.9, 0.99, 1e-5, 3)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    "dtypes", [(F32, F32, F32, F32), (F16, F16, F32, F32), (BF16, F32, F32, F32), (F64, F64, F64, F64)]
)
@pytest.mark.parametrize(("mode", "corrects", "decay"), [(0, 1, 0.1), (1, 1, 0.1), (1, 0, 0.0)])
def test_adam(mode: int, corrects: int, decay: float, dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    lists = make(route, *dtypes, offset=1, positive=(3,))
    expected = by_element(adam(*ADAM, mode, corrects, decay), lists)
    gradients = copies(lists[:1])[0]
    # Upstream's Adam updates whatever the flag says.
    with dispatch(route, *dtypes):
        multi_tensor_applier(amp_C.multi_tensor_adam, flag(route, 1), lists, *ADAM, mode, corrects, decay)
    for index, what in ((1, "parameters"), (2, "first moments"), (3, "second moments")):
        assert_lists(lists[index], expected[index - 1], what)
    assert_equal_bits(lists[0], gradients)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32, F32, F32), (F16, F16, F32, F32)])
@pytest.mark.parametrize("mode", [0, 1])
def test_adam_with_numbers_on_the_device(mode: int, dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    lr, beta1, beta2, eps, step = ADAM
    lists = make(route, *dtypes, positive=(3,))
    expected = by_element(adam(*ADAM, mode, 1, 0.1, scale=0.5), lists)
    arguments = (number(route, lr), beta1, beta2, eps, number(route, step, torch.int32), mode, 1, 0.1)
    with dispatch(route):
        amp_C.multi_tensor_adam_capturable(CHUNK, flag(route), lists, *arguments, number(route, 0.5))
        for index, what in ((1, "parameters"), (2, "first moments"), (3, "second moments"), (0, "gradients")):
            assert_lists(lists[index], expected[index - 1], what)
        before = copies(lists)
        amp_C.multi_tensor_adam_capturable(CHUNK, flag(route, 1), lists, *arguments, number(route, 0.5))
    for tensors, old in zip(lists, before, strict=True):
        assert_equal_bits(tensors, old)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("half", [F16, BF16])
@pytest.mark.parametrize("mode", [0, 1])
def test_adam_with_master_weights(mode: int, half: torch.dtype, route: Route) -> None:
    lr, beta1, beta2, eps, step = ADAM
    gradients, first, second, masters = make(route, half, F32, F32, F32, positive=(2,))
    params = [master.to(half) for master in masters]
    lists = [gradients, params, first, second, masters]
    expected = by_element(adam(*ADAM, mode, 1, 0.1, scale=0.25), [gradients, masters, first, second])
    arguments = (number(route, lr), beta1, beta2, eps, number(route, step, torch.int32), mode, 1, 0.1)
    with dispatch(route):
        amp_C.multi_tensor_adam_capturable_master(CHUNK, flag(route), lists, *arguments, number(route, 0.25))
        assert_lists(masters, expected[0], "masters")
        assert_lists(first, expected[1], "first moments")
        assert_lists(second, expected[2], "second moments")
        assert_lists(gradients, expected[3], "gradients")
        assert_lists(params, wide([masters])[0], "copies")
        before = copies(lists)
        amp_C.multi_tensor_adam_capturable_master(CHUNK, flag(route, 1), lists, *arguments, number(route, 0.25))
    for tensors, old in zip(lists, before, strict=True):
        assert_equal_bits(tensors, old)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [F32, F16, F64])
@pytest.mark.parametrize("mode", [0, 1])
def test_adagrad(mode: int, dtype: torch.dtype, route: Route) -> None:
    def formula(g: Tensor, p: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if mode == 0:
            g = g + 0.1 * p
        h = h + g * g
        update = g / (h.sqrt() + 1e-5)
        return p - 0.1 * (update + 0.1 * p if mode == 1 else update), h

    lists = make(route, dtype, dtype, dtype, positive=(2,))
    expected = by_element(formula, lists)
    with dispatch(route, dtype):
        multi_tensor_applier(amp_C.multi_tensor_adagrad, flag(route), lists, 0.1, 1e-5, mode, 0.1)
    assert_lists(lists[1], expected[0], "parameters")
    assert_lists(lists[2], expected[1], "sums")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize(("mode", "corrects", "averages"), [(0, 1, 1), (1, 1, 0), (1, 0, 1)])
def test_novograd(mode: int, corrects: int, averages: int, norm_type: int, dtype: torch.dtype, route: Route) -> None:
    lr, beta1, beta2, eps, step, decay = 0.1, 0.9, 0.8, 1e-5, 2, 0.1
    lists = make(route, dtype, dtype, dtype)
    averages_before = torch.rand(len(SIZES), device=route.device) + 0.5
    averaged = averages_before.clone()
    exact, wanted_norms = wide(lists), []
    wanted_params, wanted_moments = [], []
    first, second = (1 - beta1**step, (1 - beta2**step) ** 0.5) if corrects else (1.0, 1.0)
    for g, p, m, old in zip(*exact, averages_before.cpu().double(), strict=True):
        if norm_type == 0:
            norm = beta2 * old + (1 - beta2) * (g.abs().max() if g.numel() else 0.0)
        else:
            norm = (beta2 * old**2 + (1 - beta2) * g.norm() ** 2).sqrt()
        deviation = norm / second + eps
        share = 1 - beta1 if averages else 1.0
        if mode == 0:
            m = beta1 * m + share * (g / deviation + decay * p)
            p = p - lr * m / first
        else:
            m = beta1 * m + share * g
            p = p - lr * (m / first / deviation + decay * p)
        wanted_norms.append(norm)
        wanted_params.append(p)
        wanted_moments.append(m)
    arguments = (lr, beta1, beta2, eps, step, corrects, decay, averages, mode, norm_type)
    with dispatch(route):
        multi_tensor_applier(amp_C.multi_tensor_novograd, flag(route), lists, averaged, *arguments)
    assert_close(averaged, torch.stack(wanted_norms))
    assert_lists(lists[1], wanted_params, "parameters")
    assert_lists(lists[2], wanted_moments, "moments")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F16, F32, F32, F16)])
@pytest.mark.parametrize(("nesterov", "skipped"), [(False, False), (True, False), (False, True)])
def test_lars(nesterov: bool, skipped: bool, dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    lr, trust, eps, decay, momentum, scale = 0.1, 0.05, 1e-6, 0.1, 0.9, 0.5
    lists = make(route, *dtypes)
    param_norms = torch.tensor([p.float().norm() for p in lists[1]], device=route.device)
    grad_norms = torch.tensor([g.float().norm() * scale for g in lists[0]], device=route.device)
    wanted_params, wanted_moments = [], []
    for g, p, m in zip(*wide(lists)[:3], strict=True):
        length, slope = p.norm(), (g * scale).norm()
        rate = lr
        if not skipped and length > 0 and slope > 0:
            rate = lr * trust * length / (slope + decay * length + eps)
        g = g * scale + decay * p
        m = momentum * m - rate * g
        wanted_params.append(p + (momentum * m - rate * g if nesterov else m))
        wanted_moments.append(m)
    arguments = (lr, trust, eps, decay, momentum, 0.0, nesterov, False, False, scale, skipped)
    with dispatch(route):
        multi_tensor_applier(amp_C.multi_tensor_lars, flag(route), lists, grad_norms, param_norms, *arguments)
    assert_lists(lists[1], wanted_params, "parameters")
    assert_lists(lists[2], wanted_moments, "moments")
    if len(lists) == 4:
        assert_lists(lists[3], wide(lists)[1], "copies")


@pytest.mark.parametrize("route", routes())
def test_lists_of_mixed_dtypes_are_sorted_out(route: Route) -> None:
    """Upstream takes the first tensor's dtype for all; here a tensor's own counts."""
    first, second = make(route, F32, F32, F32, F32, positive=(3,)), make(route, BF16, BF16, F32, F32, positive=(3,))
    lists = [[*one, *other] for one, other in zip(first, second, strict=True)]
    expected = by_element(adam(*ADAM, 1, 1, 0.1), lists)
    with dispatch(route):
        amp_C.multi_tensor_adam(CHUNK, flag(route), lists, *ADAM, 1, 1, 0.1)
    assert_lists(lists[1], expected[0], "parameters")


def test_parameters_that_require_gradients() -> None:
    """The functions are called inside and outside `no_grad`."""
    p = torch.nn.Parameter(torch.ones(3))
    amp_C.multi_tensor_adam(
        CHUNK, torch.zeros(1), [[torch.ones(3)], [p], [torch.zeros(3)], [torch.zeros(3)]], *ADAM, 1, 1, 0.0
    )
    assert (p < 1).all()
    assert p.is_leaf


@pytest.mark.parametrize(
    ("name", "lists", "arguments", "message"),
    [
        ("multi_tensor_adam", 3, (*ADAM, 1, 1, 0.0), "3 lists; 4 are expected"),
        ("multi_tensor_sgd", 2, (0.0, 0.0, 0.0, 0.1, False, False, False, 1.0), "2 lists; 3 or 4 are expected"),
        ("multi_tensor_novograd", 3, (torch.ones(2), *ADAM, 1, 0.0, 1, 0, 2), "grad_norms has 2 elements"),
        (
            "multi_tensor_lars",
            3,
            (torch.ones(1), torch.ones(4), 0.1, 0.1, 0.0, 0.1, 0.9, 0.0, False, False, False, 1.0, False),
            "param_norms has 4 elements",
        ),
    ],
)
def test_refusals(name: str, lists: int, arguments: tuple, message: str) -> None:
    tensors = [[torch.ones(3)] for _ in range(lists)]
    with pytest.raises(ValueError, match=message):
        getattr(amp_C, name)(CHUNK, torch.zeros(1), tensors, *arguments)
    assert all((tensor == 1).all() for (tensor,) in tensors)


def test_a_refused_call_changes_nothing() -> None:
    """Steps of two passes check everything before the first."""
    norms = torch.full((1,), 0.5)
    for shapes, arguments, message in (
        ((3, 3, 2), (norms, *ADAM, 1, 0.0, 1, 0, 2), r"tensor_lists\[2\]\[0\] has 2 elements"),
        ((3, 3, 3), (norms, *ADAM, 1, 0.0, 1, 0, 1), r"norm_type=1 is neither"),
    ):
        lists = [[torch.ones(size)] for size in shapes]
        with pytest.raises(ValueError, match=message):
            amp_C.multi_tensor_novograd(CHUNK, torch.zeros(1), lists, *arguments)
        assert norms.item() == 0.5
        assert all((tensor == 1).all() for (tensor,) in lists)
    one = torch.ones(1)
    lists = [[torch.ones(size, dtype=torch.float16)] for size in (3, 3, 3, 3, 2)]
    lr, beta1, beta2, epsilon, step = ADAM
    arguments = (one * lr, beta1, beta2, epsilon, one * step, 1, 0.1, 1, 1, one, one, True, one * 0, one)
    with pytest.raises(ValueError, match=r"tensor_lists\[4\]\[0\] has 2 elements"):
        amp_C.multi_tensor_lamb_mp(CHUNK, torch.zeros(1), lists, *arguments)
    assert all((tensor == 1).all() for (tensor,) in lists)
