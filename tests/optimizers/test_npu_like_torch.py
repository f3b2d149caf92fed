"""Ascend's optimizers that `torch.optim` has too, against it in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from apex.optimizers import (
    NpuFusedAdadelta,
    NpuFusedAdam,
    NpuFusedAdamW,
    NpuFusedRMSprop,
    NpuFusedSGD,
)
from tests.optimizers import helpers
from tests.optimizers.helpers import parameters
from tests.support.harness import Route, routes


@dataclass(frozen=True)
class Case:
    """Options of one of our optimizers and of PyTorch's of the same algorithm."""

    kind: Callable[..., torch.optim.Optimizer]
    torchs: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.kind.__name__.removeprefix("NpuFused"), *(f"{k}={v}" for k, v in self.options.items())])

    def ours(self, **more: Any) -> helpers.Factory:
        return lambda params: self.kind(params, **self.options, **more)

    @property
    def theirs(self) -> helpers.Factory:
        return lambda params: self.torchs(params, **self.options)


def cases(kind: Any, torchs: Any, lr: float, *options: dict[str, Any]) -> list[Case]:
    return [Case(kind, torchs, {"lr": lr, **each}) for each in options]


CASES = [
    *cases(
        NpuFusedSGD,
        torch.optim.SGD,
        0.01,
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.3},
    ),
    *cases(NpuFusedAdam, torch.optim.Adam, 0.01, {}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "amsgrad": True}),
    *cases(NpuFusedAdamW, torch.optim.AdamW, 0.01, {}, {"betas": (0.5, 0.9), "eps": 1e-3}, {"amsgrad": True}),
    *cases(NpuFusedAdadelta, torch.optim.Adadelta, 1.0, {}, {"rho": 0.5, "eps": 1e-3, "weight_decay": 0.1}),
    *cases(
        NpuFusedRMSprop,
        torch.optim.RMSprop,
        0.01,
        {},
        {"weight_decay": 0.1, "alpha": 0.9, "eps": 1e-4},
        {"momentum": 0.9},
        {"centered": True, "weight_decay": 0.1},
        {"centered": True, "momentum": 0.9, "weight_decay": 0.1},
    ),
]
# One of each kind with the most state.
ONE_OF_EACH = [CASES[2], CASES[6], CASES[9], CASES[11], CASES[16]]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_torch(case: Case, route: Route) -> None:
    helpers.check_training(case.ours(), case.theirs, route)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_hundred_steps(case: Case) -> None:
    helpers.check_training(case.ours(), case.theirs, Route("cpu", "torch"), steps=helpers.STEPS)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_groups_and_late_gradients(case: Case, route: Route) -> None:
    groups = [{"lr": 0.02}, {"weight_decay": 0.2}]
    absent = lambda step: (0, 2) if step < 3 else (1,) if step % 4 == 0 else ()  # noqa: E731
    helpers.check_training(case.ours(), case.theirs, route, groups=groups, absent=absent, steps=12)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_dicts_are_those_of_torch(case: Case, route: Route) -> None:
    helpers.check_interchange(case.ours(), case.theirs, route, steps=3)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype: torch.dtype, case: Case, route: Route) -> None:
    helpers.check_master_weights(case.ours(master_weights=True), case.theirs, route, dtype=dtype, steps=10)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_resume(case: Case, route: Route) -> None:
    helpers.check_resume(case.ours(), route, steps=2)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"capturable": True}, torch.float32),
        ({"master_weights": True}, torch.bfloat16),
        ({"stochastic_rounding": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_resume_with_options(options: dict[str, Any], dtype: torch.dtype, case: Case, route: Route) -> None:
    helpers.check_resume(case.ours(**options), route, dtype=dtype, steps=2)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_scaling(case: Case, route: Route) -> None:
    helpers.check_scaler(case.ours(), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_loss_scaling_with_a_count_on_the_device(case: Case, route: Route) -> None:
    helpers.check_scaler(case.ours(capturable=True), route)


def test_steady_gradients_do_not_make_a_centered_rmsprop_nan() -> None:
    """The variance of equal gradients is zero, and its rounding may be below."""
    params = parameters()
    optimizer = NpuFusedRMSprop(params, alpha=0.5, centered=True)
    for p in params:
        p.grad = torch.full_like(p, 0.1)
    for _ in range(200):
        optimizer.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: NpuFusedSGD(p), "lr"),
        (lambda p: NpuFusedSGD(p, -1.0), "lr=-1.0"),
        (lambda p: NpuFusedSGD(p, 0.1, nesterov=True), "nesterov"),
        (lambda p: NpuFusedAdam(p, betas=(1.0, 0.9)), r"betas\[0\]"),
        (lambda p: NpuFusedAdamW(p, eps=-1.0), "eps=-1.0"),
        (lambda p: NpuFusedAdadelta(p, rho=1.5), "rho=1.5"),
        (lambda p: NpuFusedAdadelta(p, weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda p: NpuFusedRMSprop(p, alpha=-1.0), "alpha=-1.0"),
        (lambda p: NpuFusedRMSprop(p, momentum=-1.0), "momentum=-1.0"),
        (lambda p: NpuFusedRMSprop(p, master_weights=True, stochastic_rounding=True), "stochastic_rounding"),
    ],
)
def test_bad_options(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_graph(case: Case) -> None:
    helpers.check_graph(case.ours(capturable=True))
