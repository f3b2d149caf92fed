"""Hyperparameters and state dicts that no optimizer can use are refused, by name, before anything changes."""

import copy
import functools
from typing import Any

import pytest
import torch

from apex import optimizers
from apex.contrib import optimizers as contrib
from tests.optimizers.helpers import assert_same_options, parameters, set_gradients, state_tensors
from tests.optimizers.test_every_step import OPTIONS
from tests.support.harness import assert_equal_bits

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (getattr(optimizers, name), options) for name, options in OPTIONS.items()},
    "contrib.FusedAdam": (contrib.FusedAdam, {}),
    "contrib.FusedLAMB": (contrib.FusedLAMB, {}),
    "contrib.FusedSGD": (contrib.FusedSGD, {"lr": 0.1, "momentum": 0.9}),
}
every_class = pytest.mark.parametrize("name", CLASSES)
NAN = float("nan")


def make(name: str, params: Any = None, **options: Any) -> torch.optim.Optimizer:
    kind, given = CLASSES[name]
    return kind(parameters() if params is None else params, **{**given, **options})


def _unusable(name: str) -> list[tuple[str, Any]]:
    """Every hyperparameter of an optimizer with values that it cannot have."""
    found: list[tuple[str, Any]] = []
    for option in make(name).defaults:
        if option == "step":  # an argument of FusedMixedPrecisionLamb
            values = [NAN, -3, "0.1", 2.5, None]
        elif option == "betas":
            values = [(0.9,), (0.9, 0.99, 0.999), 0.9, "ab", None, (NAN, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, None)]
            if name == "FusedAdEMAMix":
                values = [(*value, 0.9) if isinstance(value, tuple) else value for value in values]
        elif option == "schedule":
            values = ["none", None]
        else:
            values = [NAN, "0.1", None, torch.ones(2)]
            if not (
                option in ("dampening", "warmup", "t_total") or (option, name[:8]) == ("max_grad_norm", "NpuFused")
            ):
                values.append(-1)
            if option == "max_grad_norm" and name != "NpuFusedBertAdam":
                values.remove(None)
            if make(name).defaults[option] is None or option == "ns_dtype":
                values.remove(None)
            if isinstance(make(name).defaults[option], int):
                values = [value for value in values if not isinstance(value, torch.Tensor)]
        found += [(option, value) for value in values]
    return found


@every_class
def test_hyperparameters_are_checked(name: str) -> None:
    params = parameters()
    optimizer = make(name, params[:1])
    unusable = _unusable(name)
    assert len({option for option, _ in unusable}) >= 3
    for option, value in unusable:
        with pytest.raises((ValueError, TypeError), match=option):
            make(name, **{option: value}) if option != "is_skipped" else make(name, [{"params": params, option: value}])
        if option == "step":
            continue
        with pytest.raises((ValueError, TypeError), match=option):
            make(name, [{"params": params, option: value}])
        with pytest.raises((ValueError, TypeError), match=option):
            optimizer.add_param_group({"params": params[1:], option: value})
        assert len(optimizer.param_groups) == 1


@every_class
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        make(name, nonsense=1)


def test_usable_hyperparameters_of_unusual_types() -> None:
    numpy = pytest.importorskip("numpy")
    for lr in (1, torch.tensor(0.1), torch.tensor([0.1]), numpy.float32(0.1)):
        optimizers.FusedAdam(parameters(), lr=lr, betas=[0, torch.tensor(0.5)], bias_correction=1)
    optimizers.FusedLAMB(parameters(), max_grad_norm=None, grad_averaging=numpy.bool_(True))
    optimizers.FusedLAMB(parameters(), max_grad_norm=float("inf"))


@pytest.mark.parametrize("kind", ["DistributedFusedAdam", "DistributedFusedLAMB"])
@pytest.mark.parametrize("options", [{"lr": NAN}, {"eps": "1"}, {"betas": (0.9,)}, {"weight_decay": None}], ids=str)
def test_hyperparameters_of_distributed_optimizers(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        getattr(contrib, kind)(parameters(), **options)


def stepped(name: str) -> torch.optim.Optimizer:
    optimizer = make(name)
    for step in range(2):
        set_gradients([param for group in optimizer.param_groups for param in group["params"]], step)
        optimizer.step()
    return optimizer


def refuses(optimizer: torch.optim.Optimizer, state_dict: Any, match: str) -> None:
    """Loading raises, and nothing is changed by it."""
    params = optimizer.param_groups[0]["params"]
    before, values, tensors = optimizer.state_dict(), [p.detach().clone() for p in params], state_tensors(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(state_dict)
    assert_same_options(before, optimizer.state_dict())
    assert_equal_bits(values, params)
    assert_equal_bits(tensors, state_tensors(optimizer))


@every_class
def test_unusable_state_dicts_are_refused(name: str) -> None:
    optimizer = stepped(name)
    good = copy.deepcopy(optimizer.state_dict())
    counts = "step" in good["param_groups"][0]
    for key in [key for key, value in good["state"][1].items() if key != "step" and value.dim()]:
        if key != "momentum_buffer" or "RMSprop" in name:
            lacking = copy.deepcopy(good)
            del lacking["state"][1][key]
            refuses(optimizer, lacking, f"parameter 1 has .*not {key}")
        for value in (torch.zeros(3, 2), torch.zeros_like(good["state"][1][key], dtype=torch.int32), 0.5):
            wrong = copy.deepcopy(good)
            wrong["state"][1][key] = value
            refuses(optimizer, wrong, f"{key} in the state of parameter 1")
    for step in (-3, NAN, "3", 1.5):
        wrong = copy.deepcopy(good)
        (wrong["param_groups"][0] if counts else wrong["state"][1])["step"] = step
        refuses(optimizer, wrong, "step in .* is not a count of steps")
    for option, value in (("lr", NAN), ("weight_decay", -1.0)):
        wrong = copy.deepcopy(good)
        wrong["param_groups"][0][option] = value
        refuses(optimizer, wrong, option)
    refuses(optimizer, {"model": {}}, "'state' and 'param_groups'")
    refuses(optimizer, [], "'state' and 'param_groups'")
    optimizer.load_state_dict(good)
    set_gradients(optimizer.param_groups[0]["params"], 2)
    optimizer.step()


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "NpuFusedBertAdam", "contrib.FusedAdam"])
def test_a_state_dict_without_step_counts_is_refused(name: str) -> None:
    optimizer = stepped(name)
    lacking = copy.deepcopy(optimizer.state_dict())
    lacking["param_groups"][0].pop("step", None)
    for state in lacking["state"].values():
        state.pop("step", None)
    refuses(optimizer, lacking, "step")


# Pairs that share all names of options and state.
ALIKE = [
    {"FusedLAMB", "contrib.FusedLAMB", "FusedMixedPrecisionLamb", "contrib.FusedAdam"},
    {"FusedSGD", "NpuFusedSGD", "contrib.FusedSGD"},
]
ALIKE += [{"FusedAdam", "FusedRAdam", "NpuFusedAdam", "NpuFusedAdamW", "Lamb", "NpuFusedLamb", "OffloadedOptimizer"}]
ALIKE += [{"NpuFusedRMSprop", "NpuFusedRMSpropTF"}]


@functools.cache
def saved_by(name: str) -> dict[str, Any]:
    return stepped(name).state_dict()


@every_class
def test_state_dicts_of_other_optimizers_are_refused(name: str) -> None:
    optimizer = stepped(name)
    for other in CLASSES:
        if other != name and not any({name, other} <= alike for alike in ALIKE):
            refuses(
                optimizer,
                saved_by(other),
                "another optimizer|cannot go on|norms of|is expected|number of parameter groups",
            )


DIVIDED = ("DistributedFusedAdam", "DistributedFusedLAMB", "DistributedFusedMuon")


@pytest.mark.parametrize(
    "option",
    [
        {"master_weights": True},
        {"stochastic_rounding": True},
        {"capturable": True},
        {"state_format": "int8"},
        {"master_bits": 24},
        {"maximize": True},
        {"differentiable": True},
    ],
    ids=str,
)
def test_options_without_effect_in_a_group_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    with pytest.raises(ValueError, match=f"{name}=.* of a parameter group"):
        optimizers.FusedAdam([{"params": [first], **option}])
    optimizer = optimizers.FusedAdam([first])
    with pytest.raises(ValueError, match=f"{name}=.* of a parameter group"):
        optimizer.add_param_group({"params": [second], **option})
    assert len(optimizer.param_groups) == 1
    optimizers.FusedAdam([{"params": [first], "capturable": False, "maximize": False, "foreach": None}])  # PyTorch's


def test_maximize_set_between_steps_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    optimizer = optimizers.FusedAdam([param])
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize=True of a parameter group"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(4))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("FusedAdam", {"adam_w_mode": False}),
        ("FusedAdagrad", {"adagrad_w_mode": True}),
        ("FusedLAMB", {"max_grad_norm": 0.5}),
        ("FusedLAMB", {"use_nvlamb": True}),
        ("FusedLARS", {"wd_after_momentum": True}),
        ("FusedNovoGrad", {"reg_inside_moment": True}),
        ("FusedSGD", {"wd_after_momentum": True}),
        ("OffloadedOptimizer", {"where": "cpu"}),
        *((name, {"maximize": True}) for name in DIVIDED),
        *((name, {"state_format": "int8"}) for name in DIVIDED),
        ("DistributedFusedAdam", {"adam_w_mode": False}),
        ("DistributedFusedLAMB", {"max_grad_norm": 0.5}),
    ],
    ids=str,
)
def test_options_of_all_groups_are_refused_in_one(name: str, option: dict[str, Any]) -> None:
    (key,) = option
    kind = getattr(contrib if name in DIVIDED else optimizers, name)
    params = [torch.nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(ValueError, match=f"{key}=.* of a parameter group"):
        kind([{"params": params, **option}], lr=0.1)
    optimizer = kind(params, lr=0.1)
    same = {key: getattr(optimizer, key, False)}  # a group may repeat the optimizer's own
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4, 4))], **same})


def test_cautious_decay_needs_decoupled_decay() -> None:
    params = [torch.nn.Parameter(torch.ones(4))]
    kinds: tuple[Any, ...] = (optimizers.FusedAdam, optimizers.FusedLAMB, contrib.DistributedFusedAdam)
    for kind in kinds:
        with pytest.raises(ValueError, match="cautious_weight_decay=True needs adam_w_mode=True"):
            kind([{"params": params, "cautious_weight_decay": True}], adam_w_mode=False, weight_decay=0.1)
