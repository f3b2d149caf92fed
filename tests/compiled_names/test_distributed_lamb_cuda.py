"""distributed_lamb_cuda: LAMB in two halves, with hyperparameters per tensor, against the formula in float64."""

import pytest
import torch

import distributed_lamb_cuda
from apex.ops.multi_tensor.list_updates import read_once
from tests.compiled_names.lists import (
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

STEP = 3
# Of every tensor: beta1, beta2, whether gradients are averaged, whether bias is corrected, eps, decay.
ROWS = [
    (0.9, 0.99, True, 1, 1e-5, 0.1),
    (0.9, 0.99, True, 1, 1e-5, 0.0),
    (0.8, 0.95, True, 1, 1e-5, 0.1),
    (0.9, 0.99, False, 0, 1e-4, 0.2),
    (0.9, 0.99, True, 1, 1e-5, 0.3),
]


def columns(route: Route) -> dict[str, torch.Tensor]:
    beta1, beta2, averages, corrects, eps, decay = zip(*ROWS, strict=True)
    beta3 = [1 - beta if average else 1.0 for beta, average in zip(beta1, averages, strict=True)]
    values = {"beta1": beta1, "beta2": beta2, "beta3": beta3, "epsilon": eps, "decay": decay}
    found = {f"per_tensor_{name}": torch.tensor(value, device=route.device) for name, value in values.items()}
    return found | {
        "per_tensor_bias_correction": torch.tensor(corrects, dtype=torch.int32, device=route.device),
        "step": number(route, STEP, torch.int32),
    }


def updates(lists, mode: int, scale: float, norm: float, largest: float):
    factor = 1 / scale
    if largest > 0:
        factor *= min(1.0, largest / (norm / scale + 1e-6))
    for row, (beta1, beta2, averages, corrects, eps, decay) in zip(
        zip(*wide(lists)[:4], strict=True), ROWS, strict=True
    ):
        g, p, m, v = row
        g = g * factor
        if mode == 0:
            g = g + decay * p
        m = beta1 * m + (1 - beta1 if averages else 1.0) * g
        v = beta2 * v + (1 - beta2) * g * g
        first, second = (1 - beta1**STEP, 1 - beta2**STEP) if corrects else (1.0, 1.0)
        update = (m / first) / ((v / second).sqrt() + eps)
        yield m, v, update + decay * p if mode == 1 else update


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(F32, F32, F32, F32, F32), (F16, F32, F32, F32, F32)])
@pytest.mark.parametrize(("mode", "largest"), [(0, 0.0), (1, 0.5), (1, 100.0)])
def test_update_term(mode: int, largest: float, dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    lists = make(route, *dtypes, positive=(3,))
    expected = list(zip(*updates(lists, mode, 2.0, 8.0, largest), strict=True))
    options = columns(route) | {
        "mode": mode,
        "global_scale": number(route, 2.0),
        "global_grad_norm": number(route, 8.0),
        "max_grad_norm": largest,
    }
    before = copies(lists)
    with dispatch(route):
        function = distributed_lamb_cuda.multi_tensor_lamb_compute_update_term
        function(CHUNK, flag(route, 1), lists, **options)
        for tensors, old in zip(lists, before, strict=True):
            assert_equal_bits(tensors, old)
        function(CHUNK, flag(route), lists, **options)
    for index, wanted in zip((2, 3, 4), expected, strict=True):
        assert_lists(lists[index], wanted, f"list {index}")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("copy_dtype", [F16, F32, torch.uint8])
@pytest.mark.parametrize("nvlamb", [False, True])
def test_weights(nvlamb: bool, copy_dtype: torch.dtype, route: Route) -> None:
    steps, params = make(route, F32, F32)
    outputs = [torch.zeros(p.shape, dtype=copy_dtype, device=route.device) for p in params]
    decay = columns(route)["per_tensor_decay"]
    # The norms of updates lie in another order than the tensors.
    offsets = torch.tensor([4, 2, 0, 1, 3], device=route.device)
    update_norms = torch.empty(len(SIZES), device=route.device)
    update_norms[offsets] = torch.stack([step.norm() for step in steps])
    param_norms = torch.stack([p.norm() for p in params])
    expected = []
    for step, p, rate in zip(*wide([steps, params]), decay.tolist(), strict=True):
        adapts = (nvlamb or rate != 0) and p.norm() > 0 and step.norm() > 0
        expected.append(p - 0.1 * (p.norm() / step.norm() if adapts else 1.0) * step)
    rest = (param_norms, update_norms, offsets, number(route, 0.1), decay, number(route, 1.0), nvlamb)
    lists = [steps, params, outputs]
    before = copies(lists)
    with dispatch(route):
        distributed_lamb_cuda.multi_tensor_lamb_update_weights(CHUNK, flag(route, 1), lists, *rest)
        for tensors, old in zip(lists, before, strict=True):
            assert_equal_bits(tensors, old)
        distributed_lamb_cuda.multi_tensor_lamb_update_weights(CHUNK, flag(route), lists, *rest)
    assert_lists(params, expected, "parameters")
    if copy_dtype == torch.uint8:
        for output, p in zip(outputs, params, strict=True):
            assert ((output.view(torch.float8_e5m2).float() - p).abs() <= p.abs() / 8 + 1e-7).all()
    else:
        assert_lists(outputs, wide([params])[0], "copies")


def test_refusals() -> None:
    lists = [[torch.ones(3)] for _ in range(5)]
    one = torch.ones(1)
    with pytest.raises(ValueError, match="per_tensor_beta2 has 2 elements; there are 1 tensors"):
        distributed_lamb_cuda.multi_tensor_lamb_compute_update_term(
            CHUNK, torch.zeros(1), lists, one, torch.ones(2), one, one, one, one, 1, one, one, one, 0.0
        )
    with pytest.raises(ValueError, match="5 lists; 3 are expected"):
        distributed_lamb_cuda.multi_tensor_lamb_update_weights(
            CHUNK, torch.zeros(1), lists, one, one, one.long(), one, one, one, False
        )
    assert all((tensor == 1).all() for (tensor,) in lists)


def test_numbers_on_the_cpu_are_read_each_time() -> None:
    values = torch.tensor([1.0, 2.0])
    assert read_once(values) == [1.0, 2.0]
    values.data[0] = 3.0
    assert read_once(values) == [3.0, 2.0]


@pytest.mark.gpu
def test_numbers_on_a_device_are_read_once() -> None:
    values = torch.tensor([1.0, 2.0], device="cuda")
    assert read_once(values) == [1.0, 2.0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert read_once(values) == [1.0, 2.0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values[0] = 3.0
    assert read_once(values) == [3.0, 2.0]
