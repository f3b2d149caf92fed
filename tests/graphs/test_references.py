"""Values that functions refer to: `References` finds the numbers that a graph would freeze."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.graphs._references import References, line_of

WEIGHT = 2.0
step = 5  # a global of this name that nobody reads


def names(function: Any) -> set[str]:
    return {location.name for location in References(function).variables}


def helper(x: Tensor) -> Tensor:
    return x * WEIGHT


def test_globals_variables_and_functions_of_the_same_file() -> None:
    alpha, unused = 0.5, 3.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    def train(x: Tensor) -> Tensor:
        optimizer.step()
        return helper(x) * alpha

    assert names(train) == {"alpha", "WEIGHT", "optimizer"}
    assert names(functools.partial(train, None)) == names(train)
    assert unused == 3.0


def test_attributes_that_a_function_reads_and_no_others() -> None:
    settings = SimpleNamespace(rate=1.0, step=0, other=2)
    table = {"scale": 2.0, "count": 1}

    class Trainer:
        def __init__(self) -> None:
            self.step = 0  # counted elsewhere
            self.beta = 0.5
            self.model = nn.Linear(1, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def train(self, x: Tensor) -> Tensor:
            self.optimizer.step()
            return self.model(x) * self.beta * settings.rate * table["scale"]

        __call__ = train

    expected = {"self.beta", "settings.rate", "table['scale']"}
    objects = {"self.model", "self.optimizer"}
    assert names(Trainer().train) == names(Trainer()) == expected | objects


def test_methods_that_a_function_calls() -> None:
    class Trainer:
        alpha = 0.0

        def __init__(self) -> None:
            self.alpha = 0.5

        def loss(self, x: Tensor) -> Tensor:
            return x * self.alpha

        def train(self, x: Tensor) -> Tensor:
            return self.loss(x)

    trainer = Trainer()
    assert names(trainer.train) == {"self.alpha"}
    assert names(lambda x: trainer.train(x)) == {"self.alpha"}


def test_attributes_and_items_of_attributes() -> None:
    models = [nn.Dropout(), nn.Dropout()]
    config = SimpleNamespace(loss=SimpleNamespace(weight=1.0, other=2.0), rates={"first": 0.5, "last": 0.25})

    def train(x: Tensor) -> Tensor:
        return sum(model(x) for model in models) * config.loss.weight * config.rates["first"]

    numbers = {"config.loss.weight", "config.rates['first']"}
    assert names(train) == {"the length of models", "models[0]", "models[1]"} | numbers
    assert sum(location.name == "Dropout.training" for location in References(train).locations()) == 2


def test_items_of_tensors_are_named_without_looking_at_them() -> None:
    key = torch.empty(3, device="meta")
    averages = {key: torch.ones(1)}
    (location,) = (each for each in References(lambda: averages).locations() if each.read() is averages[key])
    assert location.name == "averages"


def test_values_are_read_anew() -> None:
    alpha = 0.5
    model = first = nn.Dropout()
    seen: list[Tensor] = []

    def train(x: Tensor) -> Tensor:
        seen.append(x)
        return model(x) * alpha

    read = lambda: {location.name: location.read() for location in References(train).variables}  # noqa: E731
    assert read() == {"alpha": 0.5, "model": first, "the length of seen": 0}
    alpha, model = 0.25, nn.Dropout()
    train(torch.ones(1))
    assert read() == {"alpha": 0.25, "model": model, "the length of seen": 1, "seen[0]": seen[0]}


@pytest.mark.filterwarnings("ignore:.*jit.script.* is deprecated:DeprecationWarning")
def test_modes_of_modules_and_tensors_in_them() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    locations = {location.name for location in References(lambda x: model(x)).locations()} - {"model"}
    modes = {"Sequential.training", "BatchNorm1d.training", "Dropout.training"}
    assert locations == modes | {f"BatchNorm1d.{name}" for name, _ in model[0].named_buffers()}
    scripted = torch.jit.script(nn.Dropout())  # whose mode is no attribute in Python
    (mode,) = (each for each in References(lambda x: scripted(x)).locations() if each.name.endswith(".training"))
    scripted.eval()
    assert mode.read() is False


def test_every_closure_of_one_function_is_looked_at() -> None:
    def scaled(factor: float) -> Any:
        return lambda x: x * factor

    first, second = scaled(1.0), scaled(2.0)
    locations = References(lambda x: first(x) + second(x)).variables
    assert [location.read() for location in locations if location.name == "factor"] == [1.0, 2.0]
    third, fourth = (functools.partial(lambda x, factors: x * factors[0], factors=[factor]) for factor in (3.0, 4.0))
    locations = References(lambda x: third(x) + fourth(x)).variables
    assert {location.read() for location in locations if location.name == "factors[0]"} == {3.0, 4.0}


def test_callables_without_code() -> None:
    assert names(abs) == names(torch.add) == set()
    assert names(nn.Identity()) == {"self", "the length of kwargs"}


def test_the_line_of_an_error() -> None:
    def train(x: Tensor) -> Tensor:
        return x.view(7)  # wrong

    with pytest.raises(RuntimeError) as raised:
        train(torch.ones(3))
    found = line_of(raised.value, train)
    assert found is not None
    assert found.endswith("(return x.view(7)  # wrong)")
    assert "test_references.py:" in found
    assert line_of(ValueError("elsewhere"), train) is None
