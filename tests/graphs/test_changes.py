"""Changes between the calls of a captured function, which notices values that it names.

Each case makes a function, and a change of a value that it reads, for after the capture.
"""

from __future__ import annotations

import enum
import functools
import math
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from apex.graphs import CapturedStep
from apex.graphs._references import References
from apex.graphs._state import Snapshot, State
from apex.ops._graph_numbers import CaptureContext
from apex.optimizers import FusedAdam
from tests.graphs.common import assert_equal_bits
from tests.graphs.recorder import CpuGraphs

Step = Callable[..., Any]
# A function, what changes something that it reads, and its arguments behind the first.
Case = Callable[[str], tuple[Any, ...]]
CASES: dict[str, Case] = {}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Config:
    """Has a weight that is the class's until it is set."""

    weight: Any = 1.0


class Slots:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


class Loss:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.weight


class Mode(enum.Enum):
    HALF = 0.5
    TWICE = 2.0


class Masked(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, device=device))
        self.linear = nn.Linear(4, 4, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


@case
def a_default(device: str) -> tuple[Any, ...]:
    def step(x: Tensor, weight: float = 1.0) -> Tensor:
        return x * weight

    return step, lambda: setattr(step, "__defaults__", (2.0,))


@case
def a_dict_that_is_a_default(device: str) -> tuple[Any, ...]:
    config = {"weight": 1.0}

    def step(x: Tensor, *, config: dict[str, float] = config) -> Tensor:
        return x * config["weight"]

    return step, lambda: config.update(weight=2.0)


@case
def a_model_that_is_a_default(device: str) -> tuple[Any, ...]:
    model = nn.Dropout(1.0)
    return lambda x, model=model: model(x), model.eval


@case
def a_dict_that_is_bound(device: str) -> tuple[Any, ...]:
    config = {"weight": 1.0}
    return functools.partial(lambda config, x: x * config["weight"], config), lambda: config.update(weight=2.0)


@case
def an_object_that_is_bound(device: str) -> tuple[Any, ...]:
    config = Config()
    return functools.partial(lambda x, config: x * config.weight, config=config), lambda: setattr(config, "weight", 2.0)


@case
def an_object_that_is_an_argument(device: str) -> tuple[Any, ...]:
    config = Config()
    config.model = nn.Dropout(0.0)  # no batch, for which objects with tensors and numbers alone are taken
    return lambda x, config: config.model(x) * config.weight, lambda: setattr(config, "weight", 2.0), config


@case
def an_attribute_of_a_class(device: str) -> tuple[Any, ...]:
    config = type("Settings", (), {"weight": 1.0})
    return lambda x: x * config.weight, lambda: setattr(config, "weight", 2.0)  # type: ignore[attr-defined]


@case
def an_attribute_that_hides_one_of_a_class(device: str) -> tuple[Any, ...]:
    config = Config()
    return lambda x: x * config.weight, lambda: setattr(config, "weight", 2.0)


@case
def a_slot(device: str) -> tuple[Any, ...]:
    config = Slots()
    return lambda x: x * config.weight, lambda: setattr(config, "weight", 2.0)


@case
def a_number_of_a_python_module(device: str) -> tuple[Any, ...]:
    config = types.ModuleType("config")
    config.weight = 1.0  # type: ignore[attr-defined]
    return lambda x: x * config.weight, lambda: setattr(config, "weight", 2.0)


@case
def far_away(device: str) -> tuple[Any, ...]:
    config = types.SimpleNamespace(of=types.SimpleNamespace(the=types.SimpleNamespace(loss={"weights": [1.0, 3.0]})))
    return lambda x: x * config.of.the.loss["weights"][0], lambda: config.of.the.loss["weights"].insert(0, 2.0)


@case
def a_value_in_a_local_variable(device: str) -> tuple[Any, ...]:
    trainer = types.SimpleNamespace(config=Config())

    def step(x: Tensor) -> Tensor:
        config = trainer.config
        total = x + 1
        return total * config.weight

    return step, lambda: setattr(trainer.config, "weight", 2.0)


@case
def a_number_in_a_list(device: str) -> tuple[Any, ...]:
    weights = [1.0, 3.0]
    return lambda x: x * weights[0], weights.reverse


@case
def a_tuple(device: str) -> tuple[Any, ...]:
    config = Config()
    config.weight = (1.0, 3.0)
    return lambda x: x * config.weight[0], lambda: setattr(config, "weight", (2.0, 3.0))


@case
def an_enumeration(device: str) -> tuple[Any, ...]:
    config = Config()
    config.weight = Mode.HALF
    return lambda x: x * config.weight.value, lambda: setattr(config, "weight", Mode.TWICE)


@case
def items_that_are_not_named(device: str) -> tuple[Any, ...]:
    weights = {"first": 1.0, "second": 2.0}
    return lambda x: sum(x * weight for weight in weights.values()), lambda: weights.update(third=3.0)


@case
def an_object_that_is_called(device: str) -> tuple[Any, ...]:
    loss = Loss()
    return lambda x: loss(x), lambda: setattr(loss, "weight", 2.0)


@case
def a_function_of_a_captured_one(device: str) -> tuple[Any, ...]:
    config = Config()
    inner = captured(lambda x: x * config.weight, device)
    return lambda x: inner(x) + 1, lambda: setattr(config, "weight", 2.0)


@case
def a_buffer(device: str) -> tuple[Any, ...]:
    model = Masked(device)
    return lambda x: model(x), lambda: setattr(model, "mask", torch.full((4,), 2.0, device=device))


@case
def a_parameter(device: str) -> tuple[Any, ...]:
    model = Masked(device)
    state = {name: value * 2 for name, value in model.state_dict().items()}
    return lambda x: model(x), lambda: model.load_state_dict(state, assign=True)


@case
def a_layer(device: str) -> tuple[Any, ...]:
    model = Masked(device)
    return lambda x: model(x), lambda: setattr(model, "linear", nn.Identity())


@case
def a_hook(device: str) -> tuple[Any, ...]:
    model = Masked(device)
    return lambda x: model(x), lambda: model.linear.register_forward_hook(lambda *given: given[-1] * 2)


@case
def a_hook_that_is_replaced(device: str) -> tuple[Any, ...]:
    model = Masked(device)
    handle = model.linear.register_forward_hook(lambda *given: given[-1] * 2)

    def change() -> None:
        handle.remove()
        model.linear.register_forward_hook(lambda *given: given[-1] * 3)

    return lambda x: model(x), change


@case
def pruning(device: str) -> tuple[Any, ...]:
    model = Masked(device)
    return lambda x: model(x), lambda: prune.l1_unstructured(model.linear, "weight", amount=0.5)


@case
def a_parametrization(device: str) -> tuple[Any, ...]:
    model = Masked(device)

    def change() -> None:
        parametrizations.weight_norm(model.linear)
        model.linear.parametrizations.weight.original0.data.mul_(2.0)  # type: ignore[union-attr]

    return lambda x: model(x), change


def captured(function: Step, device: str) -> CapturedStep:
    return CapturedStep(function, warmup=1, backend=CpuGraphs(forbids_reading=True) if device == "cpu" else None)


def results(name: str, way: Callable[[Step], Step], device: str) -> list[Any]:
    torch.manual_seed(0)
    function, change, *more = CASES[name](device)
    step, found = way(function), []
    with torch.no_grad():
        for index in range(7):
            if index == 4:
                change()
            found.append(step(torch.arange(4.0, device=device), *more).clone())
    assert not torch.equal(found[3], found[4])
    return found


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_changes_between_calls_are_noticed(name: str, device: str) -> None:
    steps: list[CapturedStep] = []

    def way(function: Step) -> CapturedStep:
        steps.append(captured(function, device))
        return steps[-1]

    assert_equal_bits(results(name, lambda step: step, device), results(name, way, device))
    assert steps[-1].graphs == (1 if name == "a_buffer" else 2)  # a tensor is copied to the graph's memory
    assert steps[-1]._replays


class Counting(nn.Module):
    """A module whose output depends on the number of calls, as a queue with a pointer in Python does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Identity(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


def test_a_number_of_a_module_that_every_call_changes_is_named() -> None:
    model = nn.Sequential(Counting())
    run = captured(lambda x: model(x), "cpu")
    found = []
    with pytest.warns(UserWarning, match="every call changes Counting.calls, which no graph can"):
        found += [float(run(torch.ones(()))) for _ in range(6)]
    assert found == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    quiet = nn.Sequential(nn.Dropout(0.0)).eval()
    mode = captured(lambda x: quiet.train()(x), "cpu")  # a mode that the function sets is no count
    for _ in range(6):
        quiet.eval()
        mode(torch.ones(2))
    assert mode._replays


@pytest.mark.parametrize("kind", ["list", "generator", "loader", "attribute"])
def test_iterators_are_not_captured(kind: str) -> None:
    """A replay would compute with the items of the capture again."""
    items = [torch.full((2,), float(number)) for number in range(6)]
    makers: dict[str, Callable[[], Any]] = {
        "list": lambda: iter(items),
        "generator": lambda: (item for item in items),
        "loader": lambda: iter(torch.utils.data.DataLoader(items, batch_size=None)),  # type: ignore[arg-type]
        "attribute": lambda: iter(items),
    }
    iterator = makers[kind]()
    owner = types.SimpleNamespace(iterator=makers["list"]())
    run = captured((lambda: next(owner.iterator) * 2) if kind == "attribute" else lambda: next(iterator) * 2, "cpu")
    with pytest.warns(UserWarning, match="it uses the iterator .*iterator, which a replay would not advance"):
        found = [float(run()[0]) for _ in range(6)]
    assert found == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_files_are_no_iterators(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        run = captured(lambda x: (file.write("step"), x * 2)[1], "cpu")
        for _ in range(5):
            run(torch.ones(2))
    assert run._replays


def test_a_number_of_an_argument_that_every_call_changes_is_named() -> None:
    def step(x: Tensor, config: Config) -> Tensor:
        config.weight += 1.0
        return x * config.weight

    run, config = captured(step, "cpu"), Config()
    with pytest.warns(UserWarning, match="every call changes config.weight, which no graph can"):
        assert [float(run(torch.ones(1), config)) for _ in range(4)] == [2.0, 3.0, 4.0, 5.0]


def test_outputs_that_are_objects_have_no_gradients() -> None:
    model = nn.Linear(4, 4)
    run = captured(lambda x: types.SimpleNamespace(outputs=model(x), name="one"), "cpu")
    for index in range(4):
        found = run(torch.full((2, 4), float(index)))
        assert torch.equal(found.outputs, model(torch.full((2, 4), float(index))))
        assert (found.outputs.requires_grad, found.name) == (False, "one")


def test_writes_to_host_tensors_in_a_capture_are_refused_and_undone() -> None:
    count, device = torch.zeros(2), torch.device("meta")
    before = Snapshot([], References(lambda: count), device)
    State(before, CaptureContext(True, device))
    count += 1
    with pytest.raises(NotImplementedError, match="every call changes count, which no graph can"):
        State(before, CaptureContext(True, device))
    before.restore()
    assert count.tolist() == [0.0, 0.0]


@pytest.mark.gpu
def test_optimizers_that_count_on_the_host_run_eagerly() -> None:
    def train(way: Callable[[Step], Step]) -> list[Tensor]:
        weight = nn.Parameter(torch.ones(4, device="cuda"))
        optimizer = torch.optim.Adagrad([weight], lr=0.1, lr_decay=0.5)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            return weight

        run = way(step)
        found = [run(torch.ones(4, device="cuda")).detach().clone() for _ in range(6)]
        return [*found, optimizer.state[weight]["step"]]

    expected = train(lambda step: step)
    with pytest.warns(UserWarning, match=r"every call changes Adagrad.state\['step'\]"):
        assert_equal_bits(expected, train(lambda step: captured(step, "cuda")))


@pytest.mark.gpu
def test_a_rate_in_a_tensor_of_the_host_is_followed() -> None:
    def train(way: Callable[[Step], Step]) -> tuple[Any, list[Tensor]]:
        weight, rate = nn.Parameter(torch.ones(4, device="cuda")), torch.tensor(0.1)
        optimizer = FusedAdam([weight], lr=rate)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            (weight * x).square().sum().backward()
            optimizer.step()
            return weight

        run, found = way(step), []
        for _ in range(6):
            found.append(run(torch.ones(4, device="cuda")).detach().clone())
            rate.mul_(0.5)
        return run, found

    (_, expected), (run, found) = train(lambda step: step), train(lambda step: captured(step, "cuda"))
    assert_equal_bits(expected, found)
    assert run.graphs == 1


class Raises:
    """An object whose attributes raise, like lazily loaded modules and settings."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Anything:
    """An object that has every attribute, like a disabled logger."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *given: Any) -> Any:
        return self


class Method:
    def weight(self) -> float:
        return 1.0

    weight.scale = 2.0  # type: ignore[attr-defined]


# A function's first arguments, and the function.
UNUSUAL: dict[str, tuple[Any, Step]] = {
    "attributes that raise": (Raises(), lambda value, x: value.weight if x is None else x * 2),
    "attributes of every name": (Anything(), lambda value, x: x * 2 if value.log(1) else x),
    "numbers that are made anew": (torch.finfo(torch.float16), lambda value, x: x * 2 if value.min else x),
    "a method with an attribute": (Method(), lambda value, x: x * value.weight.scale),
    "no number": (types.SimpleNamespace(best=math.nan), lambda value, x: x * 2 if value.best else x),
    "a long list": ([2.0] * 1000, lambda value, x: x * value[3]),
    "a long list of tuples": ([(2.0, index) for index in range(1000)], lambda value, x: x * value[3][0]),
    "modules as keys": ({nn.Linear(1, 1): 2.0}, lambda value, x: x * 2 if value else x),
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_objects_that_a_function_names(name: str) -> None:
    value, function = UNUSUAL[name]
    step = functools.partial(function, value)
    run = captured(step, "cpu")
    assert [float(run(torch.tensor(float(index)))) for index in range(5)] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert run._replays == 3
    locations = References(step).variables
    assert len(locations) <= 2
    assert not any("Linear" in location.name for location in locations)
    assert "weight" not in getattr(value, "__dict__", ())


class Refuses(Tensor):
    """A tensor that has no use but one."""

    @classmethod
    def __torch_function__(cls, *given: Any) -> Any:
        raise TypeError


@pytest.mark.filterwarnings("error::UserWarning")
def test_many_parameters_beside_tensors_that_refuse_everything() -> None:
    """Python shares integers up to 256 and makes larger ones anew at every count."""
    refusing = torch.ones(1).as_subclass(Refuses)
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(300)]
    optimizer = torch.optim.SGD(weights, lr=1.0)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (torch.stack(weights) * x).sum().backward()
        optimizer.step()
        return weights[-1].detach()

    run = captured(step, "cpu")
    assert [float(run(torch.ones(()))) for _ in range(5)] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert run._replays == 3
    assert type(refusing) is Refuses


def test_a_variable_that_every_call_removes_is_refused_and_put_back() -> None:
    owner = types.SimpleNamespace(batch=None)

    def step(x: Tensor) -> Tensor:
        weight = owner.batch.weight
        owner.batch = None
        return x * weight

    run = captured(step, "cpu")

    def call(index: float) -> float:
        owner.batch = types.SimpleNamespace(weight=torch.tensor(index))
        return float(run(torch.ones(())))

    with pytest.warns(UserWarning, match=r"every call changes owner\.batch\.weight"):
        assert [*map(call, [0.0, 1.0, 2.0, 3.0])] == [0.0, 1.0, 2.0, 3.0]
    assert owner.batch is None


def test_a_list_that_a_failed_capture_made_shorter_is_put_back() -> None:
    weights, calls = [3.0, 4.0, 5.0], deque[int]()

    def step(x: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 2:
            weights.pop(0)
            raise RuntimeError("a capture fails")
        return x * weights[0]

    run = captured(step, "cpu")
    with pytest.warns(UserWarning, match="a capture fails"):
        assert [float(run(torch.ones(()))) for _ in range(3)] == [3.0] * 3
    assert weights == [3.0, 4.0, 5.0]
