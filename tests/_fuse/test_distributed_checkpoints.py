"""Checkpoints of torch.distributed.checkpoint go between optimizers of torch.optim and those that `apex.fuse` made."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import apex
from apex.booster._snapshot import TrainingSnapshot
from apex.optimizers import FusedAdam, FusedSGD
from tests._fuse.test_optimizers import OPTIMIZERS

KINDS = {**OPTIMIZERS, "capturable AdamW": (torch.optim.AdamW, {"lr": 0.05, "capturable": True})}
if hasattr(torch.optim, "Muon"):
    KINDS["Muon"] = (torch.optim.Muon, {"lr": 0.05})
if not torch.cuda.is_available():
    del KINDS["capturable AdamW"]  # PyTorch's refuses parameters on a CPU
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def made(name: str, fused: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    kind, options = KINDS[name]
    optimizer = kind(model.parameters(), **options)
    if fused:
        apex.fuse(optimizer, verbose=False)
        assert type(optimizer) is not kind
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), step + 1.0)).square().sum().backward()
        optimizer.step()


def same_weights(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-5, atol=1e-6)


def resume(model: nn.Module, optimizer: Any, path: Path, options: Any, **how: Any) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    dcp.load(states, checkpoint_id=path, **how)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=options
    )


def save(model: nn.Module, optimizer: Any, path: Path, options: Any) -> None:
    states = zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True)
    dcp.save(dict(states), checkpoint_id=path)


@pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns that there is one process
@pytest.mark.parametrize("options", [StateDictOptions(), FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("way", ["to fused", "to torch", "fused"])
@pytest.mark.parametrize("name", KINDS)
def test_checkpoints_go_both_ways(name: str, way: str, options: Any, tmp_path: Path) -> None:
    model, optimizer = made(name, fused=way != "to fused")
    train(model, optimizer, 3)
    save(model, optimizer, tmp_path, options)
    other, resumed = made(name, fused=way != "to torch")
    resume(other, resumed, tmp_path, options)
    saved, loaded = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    for key, state in saved.items():
        for entry, value in state.items():
            torch.testing.assert_close(loaded[key][entry], value, check_dtype=False)
    for each in ((model, optimizer), (other, resumed)):
        train(*each, 0 if name == "Muon" else 3)  # Muon's products are rounded to bfloat16
    same_weights(model, other)
    save(other, resumed, tmp_path / "again", options)


@pytest.mark.parametrize("name", KINDS)
def test_state_dicts_have_the_names_of_torchs(name: str) -> None:
    plain, fused = made(name, fused=False), made(name, fused=True)
    for each in (plain, fused):
        train(*each, 2)
    expected, found = (each[1].state_dict() for each in (plain, fused))
    groups = [set(saved["param_groups"][0]) for saved in (found, expected)]
    assert groups[0] == groups[1], "apex.fuse keeps PyTorch's names: hide others in StateDicts"
    for key in range(2):
        names = [{n for n, v in saved["state"].get(key, {}).items() if v is not None} for saved in (found, expected)]
        assert names[0] == names[1]


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD"])
def test_a_save_changes_no_training(name: str) -> None:
    """Nor do copies, pickles and restored optimizers of one that has just been saved."""
    model, optimizer = made(name, fused=True)
    twin = copy.deepcopy((model, optimizer))
    for step in range(4):
        train(*twin, 1)
        train(model, optimizer, 1)
        optimizer.state_dict()
        if step == 1:
            model, optimizer = copy.deepcopy((model, optimizer))
        if step == 2:
            file = io.BytesIO(pickle.dumps((model, optimizer)))
            model, optimizer = pickle.load(file)
            assert set(optimizer.state_dict()["param_groups"][0]) == set(twin[1].state_dict()["param_groups"][0])
    same_weights(model, twin[0])
    optimizer.state_dict()
    apex.unfuse(optimizer)
    for each in ((model, optimizer), twin):
        train(*each, 2)
    same_weights(model, twin[0])


def test_groups_that_are_added_after_a_save() -> None:
    model, optimizer = made("AdamW", fused=True)
    train(model, optimizer, 2)
    optimizer.state_dict()
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    train(model, optimizer, 1)
    assert [group.get("step") for group in optimizer.param_groups] == [3, None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [FusedAdam, FusedSGD])
def test_fused_optimizers_go_on_from_partial_loads(fused: Any, tmp_path: Path) -> None:
    """FusedAdam has upstream's names, which a checkpoint of AdamW lacks; a partial load leaves its own step count."""
    name = "AdamW" if fused is FusedAdam else "SGD"
    model, optimizer = made(name, fused=False)
    train(model, optimizer, 5)
    save(model, optimizer, tmp_path, None)
    other, _ = made(name, fused=False)
    resumed = fused(other.parameters(), **KINDS[name][1])
    resume(other, resumed, tmp_path, None, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    for each in ((model, optimizer), (other, resumed)):
        train(*each, 3)
    same_weights(model, other)
    get_optimizer_state_dict(other, resumed)


def test_a_trial_after_a_save_keeps_every_entry() -> None:
    """A snapshot of a training puts back groups as they were before `state_dict`."""
    model, optimizer = made("AdamW", fused=True)
    train(model, optimizer, 3)
    expected = {**optimizer.param_groups[0]}
    optimizer.state_dict()
    snapshot = TrainingSnapshot([model], [optimizer])
    train(model, optimizer, 2)
    snapshot.restore()
    train(model, optimizer, 1)
    assert {**optimizer.param_groups[0], "step": 3} == expected
