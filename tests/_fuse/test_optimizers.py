"""Optimizers of torch.optim that `apex.fuse` replaces in the middle of a training, and back."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apex
from apex import amp
from apex.optimizers import FusedAdam, FusedMuon, FusedSGD

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.05, "weight_decay": 0.1}),
}


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,))]


def train(optimizer: Any, params: list[Tensor], steps: int) -> None:
    for i in range(steps):
        for p in params:
            p.grad = (p.detach() + i).sin()
        optimizer.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has no Muon")
def test_muon_continues_and_goes_back() -> None:
    results = []
    for fused in (True, False):
        params = [nn.Parameter(param.detach().clone()) for param in parameters()[:1]]
        optimizer = torch.optim.Muon(params, lr=0.05)
        train(optimizer, params, 3)
        names = set(optimizer.param_groups[0])
        if fused:
            (row,) = apex.fuse(optimizer, verbose=False)
            assert not row.reason
            assert type(optimizer) is FusedMuon
        train(optimizer, params, 3)
        if fused:
            apex.unfuse(optimizer)
            assert type(optimizer) is torch.optim.Muon
            assert set(optimizer.param_groups[0]) == names
        train(optimizer, params, 2)
        results.append(params[0].detach())
    # Both iterate in bfloat16, whose errors five steps of the iteration enlarge.
    assert (results[0] - results[1]).norm() < 0.03 * (results[1] - parameters()[0].detach()).norm()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_continues_with_the_same_numbers(name: str) -> None:
    make, options = OPTIMIZERS[name]
    results = []
    for fused in (True, False):
        params = parameters()
        groups = [{"params": params[:1], "lr": 0.01}, {"params": params[1:]}]
        optimizer = make(groups, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        kept = optimizer.param_groups
        train(optimizer, params, 3)
        if fused:
            (row,) = apex.fuse(optimizer, verbose=False)
            assert not row.reason
            assert type(optimizer).__module__.startswith("apex.optimizers")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step(), scheduler.step()
        train(optimizer, params, 3)
        if fused:
            apex.unfuse(optimizer)
            assert type(optimizer) is make
        train(optimizer, params, 3)
        assert optimizer.param_groups is kept
        results.append((params, [{k: v for k, v in g.items() if k != "params"} for g in kept], optimizer.state_dict()))
    (found, groups, state), (wanted, wanted_groups, wanted_state) = results
    torch.testing.assert_close(found, wanted)
    assert groups[0]["lr"] == wanted_groups[0]["lr"] == 0.005
    assert groups[0].keys() == wanted_groups[0].keys()
    for place, of_parameter in wanted_state["state"].items():  # a step count of SGD's may remain, which nobody reads
        torch.testing.assert_close({key: state["state"][place][key] for key in of_parameter}, of_parameter)


@pytest.mark.parametrize("is_saved", [False, True], ids=["", "resumed"])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "NAdam", "RAdam"])
def test_parameters_that_are_frozen_at_first_have_their_own_step_counts(name: str, is_saved: bool) -> None:
    make, options = OPTIMIZERS[name]
    results = []
    for fused in (True, False):
        params = parameters()
        optimizer = make(params, **options)
        if fused:
            apex.fuse(optimizer, verbose=False)
        train(optimizer, params[:1], 6)
        train(optimizer, params, 2)
        if is_saved:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(params, **options)
            if fused:
                apex.fuse(optimizer, verbose=False)
            optimizer.load_state_dict(saved)
        params[0].grad = None
        train(optimizer, params[1:], 2)
        train(optimizer, params, 2)
        results.append(([param.detach() for param in params], optimizer.state_dict()["state"]))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert [int(state["step"]) for state in results[0][1].values()] == [10, 6]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_that_are_added_have_the_options_of_the_optimizer(name: str) -> None:
    make, options = OPTIMIZERS[name]
    groups = []
    for fused in (True, False):
        params = parameters()
        optimizer = make(params[:1], **options)
        if fused:
            apex.fuse(optimizer, verbose=False)
        optimizer.add_param_group({"params": params[1:]})
        try:
            train(optimizer, params, 2)
        except KeyError:
            if fused or name != "Adagrad":
                raise
            pytest.skip("this PyTorch makes no state for parameters that are added to an Adagrad")
        if fused:
            apex.unfuse(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        names = {*optimizer.param_groups[0]} - {"params", "fused", "foreach"}
        groups.append(([{name: group[name] for name in names} for group in optimizer.param_groups], params))
    assert groups[0][0] == groups[1][0]
    torch.testing.assert_close(groups[0][1], groups[1][1])


def test_before_the_first_step_and_copies() -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    apex.fuse(optimizer, verbose=False)
    assert type(optimizer) is FusedAdam
    assert type(copy.deepcopy(optimizer)) is FusedAdam
    plain_params = parameters()
    plain = torch.optim.AdamW(plain_params, lr=0.1)
    train(optimizer, params, 3), train(plain, plain_params, 3)
    torch.testing.assert_close(params, plain_params)


def test_hooks_stay() -> None:
    params, calls = parameters(), []
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_post_hook(lambda *args: calls.append(1))
    apex.fuse(optimizer, verbose=False)
    assert type(optimizer) is FusedSGD
    train(optimizer, params, 2)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (torch.optim.AdamW, {"maximize": True}, "maximize=True"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay=0.1"),
        (torch.optim.Rprop, {}, "no fused counterpart of Rprop"),
    ],
)
def test_reasons_against_fusing(make: Any, options: dict[str, Any], reason: str) -> None:
    optimizer = make(parameters(), **options)
    (row,) = apex.fuse(optimizer, verbose=False)
    assert reason in row.reason
    assert type(optimizer) is make
    apex.unfuse(optimizer)
    assert type(optimizer) is make


def test_an_optimizer_that_others_have_changed_stays() -> None:
    model = nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda: None
    assert "its step was replaced" in apex.fuse(optimizer, verbose=False)[0].reason
    _, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert "amp.initialize" in apex.fuse(optimizer, verbose=False)[0].reason
    amp.shutdown()


def test_options_of_models_are_refused() -> None:
    with pytest.raises(ValueError, match="check, choose and padding"):
        apex.fuse(torch.optim.SGD(parameters(), lr=0.1), check=torch.zeros(1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layers_that_take_no_part_in_a_step_are_not_updated(name: str) -> None:
    """A step of torch.optim skips them after zero_grad: no weight decay, no momentum."""
    make, options = OPTIMIZERS[name]
    params = parameters()
    optimizer = make(params, **{"weight_decay": 0.1, **options})
    apex.fuse(optimizer, verbose=False)
    train(optimizer, params, 2)
    optimizer.zero_grad()
    before = params[1].detach().clone()
    train(optimizer, params[:1], 2)
    assert torch.equal(params[1], before)
