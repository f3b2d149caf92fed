"""Boosted optimizers whose state has fewer bytes, is in host memory, or whose parameters are rounded at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.booster import Booster
from apex.booster.mixed_precision import BF16MixedPrecision, FP16NaiveMixedPrecision
from apex.optimizers import FusedAdam, FusedLion, FusedMuon, FusedNovoGrad, OffloadedOptimizer

SMALL = {"state_format": "int8", "master_bits": 24}


def make(
    kind: Callable[..., Any] = FusedAdam, precision: Any = None, fuse: bool = False, **options: Any
) -> tuple[Booster, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = kind(model.parameters(), lr=0.01, **options)
    booster = Booster("cpu", precision or BF16MixedPrecision("O5"), fuse=fuse)
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    return booster, boosted, wrapped


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for number in range(steps):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        optimizer.backward(model(inputs).square().mean())
        optimizer.step()


def values(model: Any) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", [FusedAdam, FusedMuon, FusedLion, OffloadedOptimizer])
@pytest.mark.parametrize("bits", [24, 32])
def test_masters_are_the_bits_that_parameters_lack(bits: int, kind: Any, fuse: bool) -> None:
    exact = [param.detach().clone() for param in make(precision=BF16MixedPrecision("O4"))[1].parameters()]
    options = {"state_format": "int8", "master_bits": bits}
    _, model, optimizer = make(kind, fuse=fuse, **options)
    assert all(param.dtype == torch.bfloat16 for param in optimizer.parameters)
    for saved, param in zip(values(model), exact, strict=True):
        assert saved.dtype == torch.float32
        assert ((saved - param).abs() <= param.abs() * (2.0**-16 if bits == 24 else 0)).all()
    train(model, optimizer)
    assert all("master_param::remainder" in state for state in optimizer.state.values())

    _, other, resumed = make(kind, fuse=fuse, **options)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert same(values(model), values(other))
    train(model, optimizer)
    train(other, resumed)
    assert same(values(model), values(other))


@pytest.mark.parametrize("fuse", [False, True])
def test_muon_keeps_masters_in_its_state(fuse: bool) -> None:
    _, model, optimizer = make(FusedMuon, fuse=fuse, master_weights=True)
    train(model, optimizer)
    assert all(param.dtype == torch.bfloat16 for param in optimizer.parameters)


@pytest.mark.parametrize("fuse", [False, True])
def test_parameters_that_are_rounded_at_random_have_no_masters(fuse: bool) -> None:
    _, model, optimizer = make(fuse=fuse, stochastic_rounding=True)
    train(model, optimizer)
    assert all(param.dtype == torch.bfloat16 for param in (*optimizer.parameters, *model.parameters()))
    assert all(state.keys() == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


@pytest.mark.parametrize("option", ["stochastic_rounding", "master_bits"])
def test_options_without_effect_on_float32_masters_warn(option: str) -> None:
    with pytest.warns(UserWarning, match=f"{option}=.* has no effect"):
        make(precision=FP16NaiveMixedPrecision(), **{option: 24 if option == "master_bits" else True})


def test_a_loaded_state_without_masters_keeps_the_masters_of_the_model() -> None:
    _, model, optimizer = make(**SMALL)
    train(model, optimizer)
    before = values(model)
    plain = torch.optim.AdamW([nn.Parameter(param.detach().float()) for param in optimizer.parameters])
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    assert same(values(model), before)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "small": (FusedAdam, SMALL),
    "offloaded": (OffloadedOptimizer, SMALL),
    "plain": (FusedAdam, {}),
    "torch": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "novograd": (FusedNovoGrad, {}),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("small", "torch"),
        ("small", "plain"),
        ("small", "offloaded"),
        ("offloaded", "small"),
        ("torch", "small"),
        ("novograd", "novograd"),
    ],
)
def test_checkpoints_of_one_optimizer_are_for_all_of_its_algorithm(saved: str, loaded: str, tmp_path: Path) -> None:
    kind, options = KINDS[saved]
    booster, model, optimizer = make(kind, **options)
    train(model, optimizer)
    booster.save_model(model, tmp_path / "model")
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    kind, options = KINDS[loaded]
    booster, other, resumed = make(kind, **options)
    booster.load_model(other, tmp_path / "model")
    booster.load_optimizer(resumed, tmp_path / "optimizer")
    for one, two in zip(values(model), values(other), strict=True):
        assert ((one - two).abs() <= one.abs() * 2.0**-16).all()  # exactly, unless `loaded` has masters of 24 bits
    train(model, optimizer, 1)
    train(other, resumed, 1)
    for one, two in zip(values(model), values(other), strict=True):
        assert (one - two).abs().max() <= 0.01  # one step
    if {saved, loaded} <= {"small", "offloaded", "novograd"}:
        assert same(values(model), values(other))


@pytest.mark.parametrize("in_state", [False, True])
def test_all_groups_that_muon_makes_of_one_get_masters(in_state: bool) -> None:
    _, model, optimizer = make(FusedMuon, master_weights=in_state)
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer.add_param_group({"params": list(layer.parameters())})
    optimizer.zero_grad()
    optimizer.backward(layer(model(torch.ones(2, 8)).to(torch.bfloat16)).float().square().mean())
    optimizer.step()
    added = [param for group in optimizer.param_groups[2:] for param in group["params"]]
    assert len(added) == 2
    for param in added:
        assert "master_param" in optimizer.state[param] if in_state else param.dtype == torch.float32
