"""Loads that are refused change nothing: damaged files, other shapes and names, another optimizer, mad loss scales."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex import checkpoint
from apex.booster import Booster
from apex.booster._whole_state import whole_model, whole_optimizer
from apex.nn.optimizer import CPUAdam, HybridAdam
from tests.campaign.saves import damaged

from .problem import adam, assert_equal, net
from .problem import booster as make
from .test_checkpoints import trained

FORMATS = [(shard, use_safetensors) for shard in (False, True) for use_safetensors in (False, True)]


@pytest.mark.parametrize(("shard", "use_safetensors"), FORMATS)
def test_damage_is_noticed_before_anything_is_loaded(shard: bool, use_safetensors: bool, tmp_path: Path) -> None:
    """Bits flipped, bytes zeroed, cut off, added or swapped, in any of the files."""
    booster, rng = make(), random.Random(shard + 2 * use_safetensors)
    original = tmp_path / "original"
    booster.save_model(net(), original, shard=shard, use_safetensors=use_safetensors, size_per_shard=0)
    checkpoint.verify(original)
    expected, model, noticed = dict(net().state_dict()), net(1), 0
    for number in range(25):
        path = tmp_path / str(number)
        (shutil.copytree if shard else shutil.copy)(original, path)
        target = rng.choice(sorted(path.iterdir())) if shard else path
        target.write_bytes(damaged(target.read_bytes(), rng))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            booster.load_model(model, path)
        except checkpoint.DamagedCheckpoint:
            noticed += 1
            assert_equal(dict(model.state_dict()), before)
            with pytest.raises(checkpoint.DamagedCheckpoint):
                checkpoint.verify(path)
        else:  # a change of a date in an archive, say
            assert_equal(dict(model.state_dict()), expected)
            model = net(1)
    assert noticed >= 15


@pytest.mark.parametrize(("shard", "use_safetensors"), FORMATS)
@pytest.mark.parametrize("precision", [None, "fp16_naive"])
def test_a_model_that_does_not_fit_is_not_touched(
    precision: str | None, shard: bool, use_safetensors: bool, tmp_path: Path
) -> None:
    """The last tensor of the last file is the one that does not fit."""
    booster, parts = trained(1, precision)
    before = whole_model(parts[0], copies=True)

    def state(**changes: Any) -> nn.Module:
        model = net()
        for name, value in changes.items():
            setattr(model, name, value)
        return model

    cases: dict[str, tuple[nn.Module, str, bool]] = {
        "shape": (state(last=nn.Linear(32, 5)), r"last\.(weight|bias) has shape .* in it, and shape .* in the", True),
        "missing": (state(last=None), r"missing \['last\.bias', 'last\.weight'\], unexpected \[\]", True),
        "other": (state(zz=nn.Linear(1, 1)), r"missing \[\], unexpected \['zz\.bias', 'zz\.weight'\]", True),
        "any shape": (state(last=nn.Linear(32, 5)), r"last\.(weight|bias) has shape", False),
    }
    for name, (model, message, strict) in cases.items():
        path = tmp_path / name
        make().save_model(model, path, shard=shard, use_safetensors=use_safetensors, size_per_shard=0)
        with pytest.raises(RuntimeError, match=message):
            booster.load_model(parts[0], path, strict=strict)
        assert_equal(whole_model(parts[0]), before)


def test_an_index_that_points_elsewhere(tmp_path: Path) -> None:
    booster, parts = trained()
    for folder, save in (("model", booster.save_model), ("optimizer", booster.save_optimizer)):
        save(parts[0] if folder == "model" else parts[1], tmp_path / folder, shard=True)
    (tmp_path / "model" / "manifest.json").unlink()
    (tmp_path / "optimizer" / "manifest.json").unlink()
    shutil.copytree(tmp_path / "model", tmp_path / "secret")
    index = tmp_path / "model" / "pytorch_model.bin.index.json"
    saved = json.loads(index.read_text())
    (file,) = set(saved["weight_map"].values())
    for name in (f"../secret/{file}", f"..\\secret\\{file}", str(tmp_path / "secret" / file), "..", 3, None):
        index.write_text(json.dumps({**saved, "weight_map": {**saved["weight_map"], "last.bias": name}}))
        with pytest.raises(checkpoint.DamagedCheckpoint, match=r"which is not in the folder|no index"):
            booster.load_model(parts[0], tmp_path / "model")
    for content in ("[]", "{}", '{"weight_map": 3}', "[" * 100_000, "x"):
        index.write_text(content)
        with pytest.raises(checkpoint.DamagedCheckpoint, match=r"pytorch_model\.bin\.index\.json in it is no index"):
            booster.load_model(parts[0], tmp_path / "model")
    index = tmp_path / "optimizer" / "pytorch_optim.bin.index.json"
    saved = json.loads(index.read_text())
    saved["metadata"]["param_groups"] = f"../secret/{file}"
    index.write_text(json.dumps(saved))
    with pytest.raises(checkpoint.DamagedCheckpoint, match="which is not in the folder"):
        booster.load_optimizer(parts[1], tmp_path / "optimizer")


def with_scale(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["scaler"].update(changes)


def with_state(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["state"][9].update(exp_avg=value)


def of_sgd(state: dict[str, Any]) -> None:
    """Return a state dict of PyTorch's SGD, which does not name its optimizer."""
    model = net()
    saved = torch.optim.SGD([{"params": [*model.parameters()][:4]}, {"params": [*model.parameters()][4:]}]).state_dict()
    del state["algorithm"]
    state.update(saved)


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "NaN": (with_scale(scale=float("nan")), "scale of the loss scale in the checkpoint must be a positive number"),
    "zero": (with_scale(scale=0.0), "scale of the loss scale in the checkpoint must be a positive number"),
    "negative": (with_scale(scale=-4.0), "scale of the loss scale in the checkpoint must be a positive number"),
    "infinite": (with_scale(scale=float("inf")), "scale of the loss scale in the checkpoint must be a positive number"),
    "text": (with_scale(scale="large"), "scale of the loss scale in the checkpoint must be a positive number"),
    "tracker": (with_scale(_growth_tracker=-1), "_growth_tracker of the loss scale in the checkpoint must be an integ"),
    "interval": (with_scale(growth_interval=1.5), "growth_interval of the loss scale in the checkpoint must be an int"),
    "backoff": (with_scale(backoff_factor=-0.5), "backoff_factor of the loss scale in the checkpoint must be"),
    "lacking": (lambda state: state["scaler"].pop("growth_factor"), "the loss scale in the checkpoint lacks growth_f"),
    "shape": (with_state(torch.zeros(5)), r"exp_avg of parameter last\.bias has shape \(5,\), not \(4,\)"),
    "scalar": (with_state(torch.zeros(())), r"exp_avg of parameter last\.bias has shape \(\), not \(4,\)"),
    "algorithm": (lambda state: state.update(algorithm="LAMB"), "the state of another optimizer, LAMB; .* is a AdamW"),
    "options": (of_sgd, "the state of another optimizer: group 0 of the optimizer has the option betas"),
    "no state": (lambda state: state.pop("state"), "holds no state of an optimizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_optimizer_that_does_not_fit_is_not_touched(name: str, tmp_path: Path) -> None:
    """The optimizer may have taken steps or not."""
    change, message = BAD[name]
    booster, parts = trained(0, "fp16")
    state = whole_optimizer(parts[1])
    booster.save_optimizer(parts[1], tmp_path / "fits")
    change(state)
    checkpoint.save(state, tmp_path / "bad")
    model = net()
    fresh = make("fp16").boost(model, adam(model))[1]
    for optimizer in (parts[1], fresh):
        before = whole_optimizer(optimizer, copies=True)
        with pytest.raises((ValueError, TypeError), match=message):
            booster.load_optimizer(optimizer, tmp_path / "bad")
        assert_equal(whole_optimizer(optimizer), before)
        booster.load_optimizer(optimizer, tmp_path / "fits")


class OwnAdam(torch.optim.Adam):
    """A subclass with another name and the same step."""


@pytest.mark.parametrize("saved", [HybridAdam, CPUAdam, OwnAdam])
@pytest.mark.parametrize("loading", [torch.optim.AdamW, HybridAdam])
def test_subclasses_with_the_same_step_load_each_other(saved: Any, loading: Any, tmp_path: Path) -> None:
    for number, kind in enumerate((saved, loading)):
        model: Any = nn.Linear(2, 2)
        booster = Booster("cpu")
        model, optimizer, *_ = booster.boost(model, kind(model.parameters(), lr=0.1))
        if number:
            booster.load_optimizer(optimizer, tmp_path / "optimizer.pt")
            assert all(optimizer.state[param]["exp_avg"].any() for param in optimizer.parameters)
        else:
            booster.backward(model(torch.ones(3, 2)).square().sum(), optimizer)
            optimizer.step()
            booster.save_optimizer(optimizer, tmp_path / "optimizer.pt")


def test_amp_refuses_before_the_optimizer_has_changed(tmp_path: Path) -> None:
    from apex import amp

    try:
        booster, parts = trained(0, "fp16_apex")
        state = whole_optimizer(parts[1], copies=True)
        state["scaler"]["amp"]["loss_scaler0"]["loss_scale"] = 0.0
        state["param_groups"][0]["lr"] = 5.0
        checkpoint.save(state, tmp_path / "bad")
        before = whole_optimizer(parts[1], copies=True)
        with pytest.raises(ValueError, match="loss_scale of 'loss_scaler0' must be a positive number"):
            booster.load_optimizer(parts[1], tmp_path / "bad")
        assert_equal(whole_optimizer(parts[1]), before)
    finally:
        amp.shutdown()


def test_a_scheduler_that_refuses_keeps_its_state(tmp_path: Path) -> None:
    class Scheduler(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            if self.last_epoch > 1:
                raise ValueError("too late")

    booster, optimizer = make(), adam(net())
    scheduler = Scheduler(optimizer, 1)
    before = scheduler.state_dict()
    checkpoint.save({**before, "last_epoch": 7, "other": 1}, tmp_path / "scheduler")
    with pytest.raises(ValueError, match="too late"):
        booster.load_lr_scheduler(scheduler, tmp_path / "scheduler")
    assert scheduler.state_dict() == before
    assert not hasattr(scheduler, "other")
