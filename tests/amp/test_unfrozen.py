"""A run that is resumed after layers were unfrozen goes on with equal bits, whenever the new run unfreezes them."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam, FusedSGD
from tests.amp.common import assert_same, quiet, small_model, train, values

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
}


def frozen(seed: int) -> nn.Sequential:
    model = small_model(seed)
    model[0].weight.requires_grad_(False)
    return model


def unfreeze(model: nn.Module, optimizer: Any) -> None:
    model[0].weight.requires_grad_(True)


def add_group(model: nn.Module, optimizer: Any) -> None:
    optimizer.add_param_group({"params": model[3].parameters()})


def trained(model: nn.Sequential, way: Any) -> Any:
    """Return the parameters for the optimizer: with `add_group`, all but the last layer's."""
    return model.parameters() if way is unfreeze else model[:3].parameters()


def outcome(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    moments = [value for index in sorted(state) for value in state[index].values() if isinstance(value, torch.Tensor)]
    return values([*model.parameters(), *amp.master_params(optimizer), *moments])


@pytest.mark.parametrize(
    ("way", "when"),
    [
        *((unfreeze, when) for when in ("before initialize", "before loading", "between", "after loading")),
        *((add_group, when) for when in ("before loading", "between")),
    ],
)
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resume(kind: str, level: str, way: Any, when: str) -> None:
    model = frozen(seed=0)
    model, optimizer = quiet(model, OPTIMIZERS[kind](trained(model, way)), opt_level=level)
    train(model, optimizer, 2)
    way(model, optimizer)
    train(model, optimizer, range(2, 5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    train(model, optimizer, range(5, 8))
    expected = outcome(model, optimizer)
    amp.shutdown()

    model = frozen(seed=7)
    optimizer = OPTIMIZERS[kind](trained(model, way))
    if when == "before initialize":
        way(model, optimizer)
    model, optimizer = quiet(model, optimizer, opt_level=level)
    if when == "before loading":
        way(model, optimizer)
    model.load_state_dict(saved[0])
    if when == "between":
        way(model, optimizer)
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    if when == "after loading":
        way(model, optimizer)
    assert_same(itertools.islice(saved[0].values(), 1), itertools.islice(model.state_dict().values(), 1))
    train(model, optimizer, range(5, 8))
    assert_same(expected, outcome(model, optimizer))


def test_frozen_weights_take_no_more_memory() -> None:
    """A checkpoint of a layer that was never trained has nothing that half precision lacks."""
    model = frozen(seed=0)
    model, optimizer = quiet(model, FusedAdam(model.parameters()), opt_level="O2")
    train(model, optimizer, 2)
    saved = model.state_dict(), optimizer.state_dict()
    amp.shutdown()
    model = frozen(seed=7)
    model, optimizer = quiet(model, FusedAdam(model.parameters()), opt_level="O2")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert model[0].weight not in amp._amp_state.masters
    assert len(optimizer._amp_stash.frozen) == 1


def test_a_frozen_weight_that_changes_after_loading() -> None:
    """Change a weight as a teacher that follows its student: the loaded exact value is then forgotten."""
    model = frozen(seed=0)
    model, _ = quiet(model, FusedAdam(model.parameters()), opt_level="O2")
    loaded = small_model(seed=7)
    model.load_state_dict(loaded.state_dict())
    with torch.no_grad():
        model[0].weight[0] = 0.5
    for found in (model.state_dict()["0.weight"], None):
        if found is None:
            amp.shutdown()
            found = model[0].weight
        assert torch.equal(found[1:], loaded[0].weight[1:])
        assert (found[0] == 0.5).all()
