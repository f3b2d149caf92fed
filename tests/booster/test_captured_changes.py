"""Weights and models that change between captured steps: replays compute with what is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.booster.mixed_precision import BF16MixedPrecision
from tests.booster import problem
from tests.booster.test_nothing_lost import add_noise, clamp, clamp_data, exchange_data, set_data, set_vector
from tests.booster.test_steps import Training, _few_objects, _quiet, assert_equal, graphs

__all__ = ["_few_objects", "_quiet", "graphs"]  # fixtures


def initialise(model: Any) -> None:
    torch.manual_seed(2)
    for block in model.blocks:
        nn.init.orthogonal_(block.weight)
    model.first.reset_parameters()


def load(model: Any) -> None:
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})


def load_inner(model: Any) -> None:
    model.unwrap().blocks.load_state_dict({name: value / 2 for name, value in model.blocks.state_dict().items()})


def assign(model: Any) -> None:
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()}, assign=True)


def replace_layer(model: Any) -> None:
    torch.manual_seed(3)
    model.last = nn.Linear(model.last.in_features, model.last.out_features)


def freeze(model: Any) -> None:
    model.blocks.requires_grad_(False)


CHANGES = [
    *(clamp, clamp_data, set_data, exchange_data, set_vector, add_noise, initialise),
    *(load, load_inner, assign, replace_layer, freeze),
]


@pytest.mark.parametrize("copies", [False, True], ids=["", "copies"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_captured_steps_holds(change: Callable[[Any], None], copies: bool, graphs: None) -> None:
    def trained(capture: bool) -> list[Tensor]:
        precision = BF16MixedPrecision(weight_copies=copies)
        training = Training(problem.sgd, precision, fuse=True, capture=capture)
        model, optimizer = training.model, training.optimizer

        @training.booster.step
        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.backward(loss)
            optimizer.step()
            return loss

        for number in range(16):
            if number in (8, 12):
                change(model)
            training.run(step, *problem.batch(number))
        row = training.booster.report()[-1]
        assert row.done == capture
        assert not capture or " 0 replays" not in row.text
        return training.results()

    assert_equal(trained(True), trained(False))
