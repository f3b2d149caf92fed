"""Loss scales as plain numbers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler, to_python_float
from apex.fp16_utils import loss_scaler as module
from apex.ops import implementation
from tests.support.harness import Route, routes


def with_gradients(*gradients: Tensor | None) -> list[torch.nn.Parameter]:
    params = []
    for gradient in gradients:
        like = torch.zeros(2) if gradient is None else gradient
        param = torch.nn.Parameter(torch.zeros_like(like))
        param.grad = gradient
        params.append(param)
    return params


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(128.0)
    scaler.update_scale(True)
    assert scaler.loss_scale == 128.0
    assert not scaler.has_overflow(with_gradients(torch.tensor([float("inf")])))
    assert LossScaler().loss_scale == 1


def test_the_sequence_of_a_dynamic_scale() -> None:
    """It is halved at an overflow, and doubled after a window of updates since the last overflow."""
    scaler = DynamicLossScaler(init_scale=16, scale_factor=2.0, scale_window=3)
    found = []
    for overflow in (False, False, False, True, False, False, False, False, False, False, True, True):
        scaler.update_scale(overflow)
        found.append(scaler.loss_scale)
    assert found == [16, 16, 32, 16, 16, 16, 32, 32, 32, 64, 32, 16]
    for _ in range(9):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1


def test_defaults() -> None:
    scaler = DynamicLossScaler()
    assert (scaler.loss_scale, scaler.scale_factor, scaler.scale_window) == (2**32, 2.0, 1000)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3e38, 1.0])
def test_overflow_is_found_anywhere(value: float, dtype: torch.dtype, route: Route) -> None:
    gradients = [torch.ones(n, dtype=dtype, device=route.device) for n in (1, 70, 3)]
    gradients[1][65] = torch.tensor(value).to(dtype)  # a number that is too large is refused up to PyTorch 2.7
    expected = not gradients[1].isfinite().all()  # float16 has no 3e38, the others have
    params = with_gradients(gradients[0], None, gradients[1].view(7, 10).t(), gradients[2].float())
    with implementation(route.implementation):
        assert DynamicLossScaler().has_overflow(params) == expected
        assert not DynamicLossScaler().has_overflow(params[:1])
        assert DynamicLossScaler._has_inf_or_nan(gradients[0]) is False
    assert not DynamicLossScaler().has_overflow([])


def test_sparse_gradients_are_looked_at() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert not DynamicLossScaler().has_overflow(embedding.parameters())
    embedding.weight.grad = embedding.weight.grad * float("inf")
    assert DynamicLossScaler().has_overflow(embedding.parameters())


@pytest.mark.parametrize("scaler", [LossScaler(2.0**10), DynamicLossScaler(2.0**10)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_backward_scales_the_loss(scaler: LossScaler | DynamicLossScaler, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    loss = (weight * 2.0**-3).to(dtype).sum()
    scaler.backward(loss, retain_graph=True)
    scaler.backward(loss)
    assert weight.grad.item() == 2.0**8


def test_scale_gradient_is_a_hook() -> None:
    assert LossScaler(4).scale_gradient(None, (torch.ones(1), None), None) == (torch.full((1,), 4.0), None)


def test_to_python_float() -> None:
    assert to_python_float(torch.tensor(2.5)) == 2.5
    assert module.to_python_float([3.0]) == 3.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_scale", 0),
        ("init_scale", math.nan),
        ("init_scale", math.inf),
        ("init_scale", "large"),
        ("scale_factor", 1.0),
        ("scale_factor", math.inf),
        ("scale_window", 0),
        ("scale_window", 1.5),
    ],
)
def test_bad_arguments_are_named(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"{name} must be .*, not {value!r}"):
        DynamicLossScaler(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, None, "dynamic"])
def test_static_scales_are_numbers(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^scale must be .*, not {value!r}"):
        LossScaler(value)
    with pytest.raises((TypeError, ValueError), match=rf"static_loss_scale must be .*, not {value!r}"):
        FP16_Optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), static_loss_scale=value)
