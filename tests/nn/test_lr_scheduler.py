"""Learning rates against their formulas, at every step, past the end and with impossible numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from apex.nn import lr_scheduler

BASE = 0.5


def rates(kind: Any, steps: int, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = kind(optimizer, **options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


FALLS: dict[str, tuple[Any, dict[str, float], Callable[[float], float]]] = {
    "linear": (lr_scheduler.LinearWarmupLR, {}, lambda part: BASE * (1 - part)),
    "cosine": (
        lr_scheduler.CosineAnnealingWarmupLR,
        {"eta_min": 0.1},
        lambda part: 0.1 + (BASE - 0.1) * (1 + math.cos(math.pi * part)) / 2,
    ),
    "polynomial": (
        lr_scheduler.PolynomialWarmupLR,
        {"end_lr": 0.2, "power": 2.0},
        lambda part: 0.2 + (BASE - 0.2) * (1 - part) ** 2,
    ),
    "constant": (lr_scheduler.ConstantWarmupLR, {}, lambda part: BASE),
}


@pytest.mark.parametrize("name", FALLS)
def test_rates_warm_up_fall_and_stay(name: str) -> None:
    kind, options, after = FALLS[name]
    # Colossal-AI's cosine and polynomial schedules reach the base rate in the last step of the warm-up.
    expected = [BASE * (e + 1) / (3 if name in ("cosine", "polynomial") else 4) for e in range(3)]
    expected += [after(min(1.0, (e - 3) / 7)) for e in range(3, 13)]
    assert rates(kind, 13, total_steps=10, warmup_steps=3, **options) == pytest.approx(expected)


def test_without_warmup() -> None:
    cosine = rates(lr_scheduler.CosineAnnealingLR, 5, total_steps=4)
    assert cosine == pytest.approx([BASE * (1 + math.cos(math.pi * e / 4)) / 2 for e in range(5)])
    assert rates(lr_scheduler.PolynomialLR, 3, total_steps=2, end_lr=0.0) == pytest.approx([BASE, BASE / 2, 0.0])


@pytest.mark.parametrize(("total", "warmup"), [(2, 50), (3, 3), (0, 0)])
def test_more_warmup_than_steps(total: int, warmup: int) -> None:
    """No division by zero, and no negative rate past the end."""
    found = rates(lr_scheduler.LinearWarmupLR, 55, total_steps=total, warmup_steps=warmup)
    assert found[:warmup] == pytest.approx([BASE * (e + 1) / (warmup + 1) for e in range(warmup)])
    assert min(found) >= 0
    assert found[-1] == 0


def test_resumes_and_gives_no_warning() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = lr_scheduler.LinearWarmupLR(optimizer, 10, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            optimizer.step()
            scheduler.step()
        other = lr_scheduler.LinearWarmupLR(optimizer, 1, 1)
        other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == 4
    assert other.get_lr() == scheduler.get_lr() == [pytest.approx(BASE * 6 / 8)]


@pytest.mark.parametrize("options", [{"total_steps": -1}, {"total_steps": 2, "warmup_steps": 1.5}])
def test_arguments_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="_steps must be an integer of at least 0"):
        rates(lr_scheduler.LinearWarmupLR, 1, **options)


def test_flat_then_cosine() -> None:
    cosine = [BASE * (1 + math.cos(math.pi * e / 4)) / 2 for e in range(5)]
    assert rates(lr_scheduler.FlatAnnealingLR, 13, total_steps=10, pct_start=0.6) == pytest.approx(
        [BASE] * 6 + cosine + [0.0, 0.0]
    )
    warm = rates(lr_scheduler.FlatAnnealingWarmupLR, 12, total_steps=12, warmup_steps=2, pct_start=0.6)
    assert warm == pytest.approx([BASE / 2, BASE] + [BASE] * 6 + cosine[:4])
    with pytest.raises(ValueError, match="pct_start=2 must be from 0 to 1"):
        rates(lr_scheduler.FlatAnnealingLR, 1, total_steps=10, pct_start=2)


def test_milestones() -> None:
    options: dict[str, Any] = {"total_steps": 8, "milestones": [2, 4], "gamma": 0.1}
    assert rates(lr_scheduler.MultiStepLR, 6, **options) == pytest.approx(
        [BASE] * 2 + [BASE / 10] * 2 + [BASE / 100] * 2
    )
    # A milestone within the warm-up has no effect.
    assert rates(lr_scheduler.MultiStepWarmupLR, 6, warmup_steps=3, **options) == pytest.approx(
        [BASE / 3, BASE * 2 / 3, BASE, BASE, BASE / 10, BASE / 10]
    )
    with pytest.raises(ValueError, match="milestones=None must be a list"):
        rates(lr_scheduler.MultiStepLR, 1, total_steps=3)


@pytest.mark.parametrize(
    ("name", "options", "torchs"),
    [
        ("StepLR", {"step_size": 2, "gamma": 0.5}, {"step_size": 2, "gamma": 0.5}),
        ("ExponentialLR", {"gamma": 0.5}, {"gamma": 0.5}),
        ("LambdaLR", {"lr_lambda": lambda e: 1 / (e + 1)}, {"lr_lambda": lambda e: 1 / (e + 1)}),
        ("MultiplicativeLR", {"lr_lambda": lambda e: 0.5}, {"lr_lambda": lambda e: 0.5}),
        ("OneCycleLR", {"pct_start": 0.5}, {"pct_start": 0.5, "max_lr": BASE, "total_steps": 8}),
    ],
)
def test_torchs_schedules_take_the_number_of_steps_first(
    name: str, options: dict[str, Any], torchs: dict[str, Any]
) -> None:
    found = rates(getattr(lr_scheduler, name), 6, total_steps=8, **options)
    assert found == pytest.approx(rates(getattr(torch.optim.lr_scheduler, name), 6, **torchs))


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "FlatAnnealingLR", "MultiStepLR", "LinearWarmupLR"])
def test_ignored_arguments_warn(name: str) -> None:
    """A schedule without a warm-up took `warmup_steps` and had none; misspelt names had no effect either."""
    options: dict = {"milestones": [3]} if name == "MultiStepLR" else {}
    ignored = {"eta_mim": 0.1} if name == "LinearWarmupLR" else {"warmup_steps": 5}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.warns(UserWarning, match=f"{name} ignores {next(iter(ignored))}=") as caught:
        getattr(lr_scheduler, name)(optimizer, 10, **options, **ignored)
    assert caught[0].filename == __file__
