"""distributed_adam_cuda: Adam on shards, with copies and with remainders, against the formula in float64."""

import pytest
import torch
from torch import Tensor

import distributed_adam_cuda
from apex.multi_tensor_apply import multi_tensor_applier
from apex.ops.multi_tensor.packed_floats import join_remainders, split_remainders
from tests.compiled_names.lists import (
    BF16,
    CHUNK,
    F16,
    F32,
    assert_lists,
    by_element,
    copies,
    dispatch,
    flag,
    make,
    number,
    wide,
)
from tests.compiled_names.test_amp_C_optimizers import ADAM, adam
from tests.support.harness import Route, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def formula(mode: int, decay: float):
    step = adam(*ADAM, mode, 1, decay, scale=0.5)
    return lambda p, m, v, g, *_: step(g, p, m, v)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32, F32, F32, BF16), (F32, F32, F32, BF16, F16), (F16, F16, F16, F16, F16)])
@pytest.mark.parametrize("mode", [0, 1])
def test_adam_with_copies(mode: int, dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    lists = make(route, *dtypes, offset=1, positive=(2,))
    expected = by_element(formula(mode, 0.1), lists)
    again = copies(lists)
    lr, *betas_and_eps, step = ADAM
    scale = number(route, 0.5)
    with dispatch(route):
        multi_tensor_applier(
            distributed_adam_cuda.multi_tensor_fused_adam, flag(route), lists, scale, *ADAM, mode, 1, 0.1
        )
        arguments = (scale, number(route, lr), *betas_and_eps, number(route, step, torch.int32), mode, 1, 0.1)
        distributed_adam_cuda.multi_tensor_fused_adam_capturable(CHUNK, flag(route), again, *arguments)
        for found in (lists, again):
            for index, what in ((0, "parameters"), (1, "first moments"), (2, "second moments")):
                assert_lists(found[index], expected[index], what)
            assert_lists(found[4], wide(found)[0], "copies")
        before = copies(again)
        distributed_adam_cuda.multi_tensor_fused_adam_capturable(CHUNK, flag(route, 1), again, *arguments)
    for tensors, old in zip(again, before, strict=True):
        assert_equal_bits(tensors, old)


@pytest.mark.parametrize("route", routes())
def test_parameters_may_be_their_own_copies(route: Route) -> None:
    lists = make(route, F32, F32, F32, F32, positive=(2,))
    expected = by_element(formula(1, 0.1), lists)
    with dispatch(route):
        distributed_adam_cuda.multi_tensor_fused_adam(
            CHUNK, flag(route), [*lists, lists[0]], number(route, 0.5), *ADAM, 1, 1, 0.1
        )
    assert_lists(lists[0], expected[0], "parameters")


def halves(values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    upper = [torch.empty_like(value, dtype=BF16) for value in values]
    lower = [torch.empty_like(value, dtype=torch.int16) for value in values]
    for value, high, low in zip(values, upper, lower, strict=True):
        split_remainders(value, high, low)
    return upper, lower


def test_numbers_in_two_halves_are_exact() -> None:
    values = torch.randn(5000) * torch.logspace(-35, 35, 5000)
    (high,), (low,) = halves([values])
    assert_equal_bits([join_remainders(high, low)], [values])
    assert ((high.float() - values).abs() <= (values.bfloat16().float() - values).abs()).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("gradient", [F32, BF16])
@pytest.mark.parametrize("mode", [0, 1])
def test_adam_with_remainders(mode: int, gradient: torch.dtype, route: Route) -> None:
    """Ten steps lose nothing against float32 parameters."""
    masters, first, second, gradients = make(route, F32, F32, F32, gradient, positive=(2,))
    params, lower = halves(masters)
    outputs = [torch.zeros_like(param) for param in params]
    plain = copies([masters, first, second, gradients, params])
    with dispatch(route):
        for step in range(1, 11):
            arguments = (number(route, 0.5), *ADAM[:-1], step, mode, 1, 0.1)
            distributed_adam_cuda.multi_tensor_fused_adam_with_param_remainders(
                CHUNK, flag(route), [params, lower, first, second, gradients, outputs], *arguments
            )
            params = outputs  # upstream writes to another buffer; in place works too
            distributed_adam_cuda.multi_tensor_fused_adam(CHUNK, flag(route), plain, *arguments)
    assert_equal_bits(list(map(join_remainders, params, lower)), plain[0])
    assert_equal_bits(first, plain[1])
    assert_equal_bits(second, plain[2])


def test_refusals() -> None:
    half, rest, single = torch.ones(3, dtype=BF16), torch.zeros(3, dtype=torch.int16), torch.ones(3)
    function = distributed_adam_cuda.multi_tensor_fused_adam_with_param_remainders
    arguments = (torch.ones(1), *ADAM, 1, 1, 0.0)
    for position, wrong, error, message in (
        (0, single, TypeError, r"tensor_lists\[0\]\[0\] is torch.float32; torch.bfloat16"),
        (1, single, TypeError, r"tensor_lists\[1\]\[0\] is torch.float32; torch.int16"),
        (5, half[:2], ValueError, r"tensor_lists\[5\]\[0\] is \(2,\)"),
        (4, single[:2], ValueError, r"tensor_lists\[4\]\[0\] has 2 elements"),
    ):
        lists = [[half], [rest], [single], [single], [single], [half]]
        lists[position] = [wrong]
        with pytest.raises(error, match=message):
            function(CHUNK, torch.zeros(1), lists, *arguments)
    with pytest.raises(ValueError, match="4 lists; 5 are expected"):
        distributed_adam_cuda.multi_tensor_fused_adam(CHUNK, torch.zeros(1), [[single]] * 4, *arguments)
    assert (single == 1).all()
    assert (half == 1).all()
