"""Training loops as people write them, captured: the numbers of eager ones, or a message that says why not.

Each loop is written once, and run on graphs of the CPU (`recorder.py`) and on CUDA's.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from apex.graphs import CapturedStep, capture
from apex.optimizers import FusedAdam
from tests.graphs.common import assert_equal_bits, batches
from tests.graphs.recorder import CpuGraphs

Way = Callable[[Callable[..., Any]], Any]
Loop = Callable[[str, Way], list[Any]]
LOOPS: dict[str, tuple[Loop, int]] = {}
mse_loss = nn.functional.mse_loss


def loop(graphs: int) -> Callable[[Loop], Loop]:
    """Register a loop, with the number of its graphs at the end."""

    def note(function: Loop) -> Loop:
        LOOPS[function.__name__] = function, graphs
        return function

    return note


def linear(device: str, seed: int = 0) -> tuple[nn.Module, FusedAdam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    return model, FusedAdam(model.parameters(), lr=0.01)


def trainer(device: str, model: nn.Module, optimizer: Any) -> Callable[..., Tensor]:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def numbers(*things: Any) -> list[Any]:
    """Return copies of tensors, and of the tensors in modules and optimizers."""
    found: list[Any] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found += [value.detach().clone() for value in thing.state_dict().values()]
        elif isinstance(thing, torch.optim.Optimizer):
            found += [value.clone() for state in thing.state.values() for value in state.values()]
        else:
            found.append(thing.detach().clone() if isinstance(thing, Tensor) else thing)
    return found


@loop(graphs=1)
def optimizer_outside(device: str, way: Way) -> list[Any]:
    """The function makes gradients; they are set to None between its calls."""
    model, optimizer = linear(device)

    @way
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    found = []
    for batch in batches(device, 8):
        optimizer.zero_grad()
        found += numbers(step(*batch), *(param.grad for param in model.parameters()))
        optimizer.step()
    return found + numbers(model, optimizer)


@loop(graphs=1)
def backward_through_another_model(device: str, way: Way) -> list[Any]:
    """A generator's step leaves gradients at the discriminator, whose optimizer runs eagerly."""
    critic, critic_optimizer = linear(device, 1)
    maker = nn.Linear(8, 8).to(device)
    optimizer = FusedAdam(maker.parameters(), lr=0.01)
    critic_step = trainer(device, critic, critic_optimizer)

    @way
    def step(inputs: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = critic(maker(inputs)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for inputs, targets in batches(device, 8):
        # No eager loss is alive in the captured step: autograd's nodes are used on the stream that they were made on.
        found += numbers(critic_step(inputs, targets))
        found += numbers(step(inputs))
        others = torch.full((64, 16), 7.0, device=device)  # where memory of gradients was freed
        found += numbers(step(inputs), *(param.grad for param in critic.parameters()), others)
    return found + numbers(maker, critic)


@loop(graphs=3)
def layers_are_frozen_and_added(device: str, way: Way) -> list[Any]:
    model, optimizer = linear(device)
    head = nn.Linear(4, 4).to(device).requires_grad_(False)

    @way
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(head(model(inputs)), targets)
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for index, batch in enumerate(batches(device, 16)):
        if index == 6:
            head.requires_grad_(True)
            optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.001})
        if index in (9, 13):
            model[0].requires_grad_(index == 13)  # type: ignore[index]
        found += numbers(step(*batch))
    return found + numbers(model, head, optimizer)


@loop(graphs=3)
def modes_are_set_inside(device: str, way: Way) -> list[Any]:
    """A step that finds the model in evaluation mode and leaves it in training mode has a graph of its own."""
    model, optimizer = linear(device)
    train = trainer(device, model, optimizer)

    @way
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        model.train()
        return train(inputs, targets)

    @way
    def evaluate(inputs: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(inputs)

    found = []
    for index, batch in enumerate(batches(device, 18)):
        found += numbers(step(*batch), model.training)
        if index % 2:
            found += numbers(evaluate(batch[0]), model.training)
    return found + numbers(model)


@loop(graphs=2)
def modes_around_calls(device: str, way: Way) -> list[Any]:
    """Autocast is on or off around calls, and has weights in its cache that were cast before."""
    model, optimizer = linear(device)

    @way
    def step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(inputs)
        loss = mse_loss(outputs.float(), targets)
        loss.backward()
        return loss, outputs

    found = []
    for index, (inputs, targets) in enumerate(batches(device, 14)):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=index % 2 == 0):
            model(inputs)
            loss, outputs = step(inputs, targets)
        found += numbers(loss, outputs, str(outputs.dtype))
        optimizer.step()
    return found + numbers(model)


@dataclass
class Batch:
    inputs: Tensor
    targets: Tensor
    name: str = "one"


@loop(graphs=2)
def batches_that_are_objects(device: str, way: Way) -> list[Any]:
    """A dataclass, one object that is filled anew for every call, and the model itself as arguments."""
    model, optimizer = linear(device)
    model = nn.Sequential(model, nn.Dropout(1.0))

    @way
    def step(network: nn.Module, batch: Batch) -> Tensor:
        return trainer(device, network, optimizer)(batch.inputs, batch.targets)

    found, same = [], Batch(*next(batches(device, 1)))
    for index, (inputs, targets) in enumerate(batches(device, 16)):
        model.train(index < 8)
        same.inputs, same.targets = inputs, targets
        found += numbers(step(model, same if index % 2 else Batch(inputs, targets)))
    return found + numbers(model)


class Stateful(nn.Module):
    """Carries a hidden state from call to call, and an average that is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 4)
        self.hidden: tuple[Tensor, Tensor] | None = None
        self.register_buffer("average", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, memory = self.cell(inputs, self.hidden)
        self.hidden = hidden.detach(), memory.detach()
        self.average = self.average * 0.9 + hidden.detach().mean(0) * 0.1
        return hidden - self.average


@loop(graphs=1)
def tensors_that_python_replaces(device: str, way: Way) -> list[Any]:
    """The function replaces tensors in modules, attributes and dicts; others are replaced between its calls."""
    torch.manual_seed(0)
    model = Stateful().to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    train = trainer(device, model, optimizer)
    averages = {name: param.detach().clone() for name, param in model.named_parameters()}

    class Trainer:
        total = first = second = weight = None

        def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
            loss = train(inputs * self.weight, targets)
            with torch.no_grad():
                for name, param in model.named_parameters():
                    averages[name] = averages[name] * 0.9 + param * 0.1
            self.total += loss.detach()
            self.first, self.second = self.second, self.first
            return loss + self.first

    state: Any = Trainer()
    state.total, state.first, state.second = torch.zeros((), device=device), *torch.arange(2.0, device=device)
    step = way(state.step)
    found = []
    for index, batch in enumerate(batches(device, 12)):
        if index % 3 == 0:
            weight = state.weight = torch.full((), index + 1.0, device=device)
        if index in (6, 9):
            state.total = torch.zeros((), device=device)
        found += numbers(step(*batch), state.total)
        found.append(state.weight is weight)
    return found + numbers(model, *averages.values())


class Cell(NamedTuple):
    state: Tensor
    name: str


class Remembers(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.last = [torch.zeros(3, device=device), torch.ones(3, device=device)]

    def forward(self, inputs: Tensor) -> Tensor:
        self.last = [inputs + self.last[1], self.last[0] * 0.5]
        return self.last[0]


@loop(graphs=1)
def tensors_in_tuples_and_lists(device: str, way: Way) -> list[Any]:
    """The function makes new tuples and lists of tensors and other values."""
    model, place = Remembers(device), SimpleNamespace(cell=Cell(torch.zeros(3, device=device), "one"))

    @way
    def step(inputs: Tensor) -> Tensor:
        place.cell = Cell(place.cell.state * 0.5 + model(inputs), place.cell.name)
        return place.cell.state

    found = []
    for index in range(8):
        if index == 6:
            place.cell = place.cell._replace(state=torch.ones(3, device=device))
        found += numbers(step(torch.full((3,), float(index), device=device)), *place.cell, *model.last)
    return found


@loop(graphs=1)
def inputs_that_are_written_to(device: str, way: Way) -> list[Any]:
    step = way(lambda inputs, state: state.mul_(0.5).add_(inputs))
    state = torch.zeros(3, device=device)
    found = []
    for index in range(7):
        found += numbers(step(torch.full((3,), float(index), device=device), state), state)
    return found


@loop(graphs=2)
def tensors_that_are_only_left_behind(device: str, way: Way) -> list[Any]:
    """Use graphs of two shapes; each must store its own results."""
    model, optimizer = linear(device)
    train = trainer(device, model, optimizer)
    place = SimpleNamespace(outputs=None)

    @way
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        place.outputs = model(inputs).detach()
        return train(inputs, targets)

    found = []
    for index in range(12):
        for batch in batches(device, 1, 16 if index % 2 else 7):
            found += numbers(step(*batch), place.outputs)
    return found


@loop(graphs=3)
def another_model_under_the_same_name(device: str, way: Way) -> list[Any]:
    found = []

    @way
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    for trial in range(3):
        model, optimizer = linear(device, trial)
        for batch in batches(device, 6):
            found += numbers(step(*batch))
        found += numbers(model, optimizer)
    return found


@loop(graphs=1)
def power_iterations(device: str, way: Way) -> list[Any]:
    """Spectral norm writes its vectors with `out=`."""
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)).to(device)
    step = way(trainer(device, model, FusedAdam(model.parameters(), lr=0.01)))
    return [number for batch in batches(device, 8) for number in numbers(step(*batch), model)]


@loop(graphs=1)
def a_model_that_moves(device: str, way: Way) -> list[Any]:
    """Only inference is captured, so that no optimizer has the parameters."""
    model, _ = linear(device)
    step = way(lambda inputs: model(inputs))
    found = []
    for index, (inputs, _) in enumerate(batches(device, 10)):
        with torch.no_grad():
            found += numbers(step(inputs))
            if index == 5:
                model.double().float()
                for param in model.parameters():
                    param.mul_(2.0)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, device: str) -> None:
    run, graphs = LOOPS[name]
    steps: list[CapturedStep] = []

    def way(function: Callable[..., Any]) -> CapturedStep:
        steps.append(CapturedStep(function, backend=CpuGraphs() if device == "cpu" else None))
        return steps[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a step that runs eagerly after all warns
        expected = run(device, lambda function: function)
        assert_equal_bits(expected, run(device, way))
    assert sum(step.graphs for step in steps) == graphs, [step.report() for step in steps]


def captured(function: Callable[..., Any], **options: Any) -> CapturedStep:
    return CapturedStep(function, backend=CpuGraphs(forbids_reading=True), **options)


def test_numbers_drawn_on_the_host_are_noticed() -> None:
    run = captured(lambda x: x * random.random())
    random.seed(0)
    with pytest.warns(UserWarning, match="random numbers are drawn on the host"):
        found = [float(run(torch.ones(1))) for _ in range(8)]
    random.seed(0)
    assert found == [pytest.approx(random.random()) for _ in range(8)]


def test_lists_that_grow_are_noticed() -> None:
    seen = []

    def step(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    run = captured(step)
    with pytest.warns(UserWarning, match="every call changes the length of seen"):
        assert [float(run(torch.ones(1))) for _ in range(8)] == [1.0] * 8
    assert len(seen) == 8


def test_arguments_that_never_come_again_are_not_kept() -> None:
    run = captured(lambda x, weight: x * weight, max_graphs=1)
    with pytest.warns(UserWarning, match="gets arguments of another kind at nearly every call") as found:
        assert [float(run(torch.ones(1), weight)) for weight in range(40)] == list(range(40))
    assert len(found) == 1
    assert len(run._kinds) <= 8


def test_failed_calls_do_not_count_as_warmup() -> None:
    def step(inputs: Tensor) -> Tensor:
        if fails:
            raise ValueError("a batch that cannot be read")
        return inputs + 1

    run = captured(step)
    for fails in (True, True, True, False):
        with pytest.raises(ValueError, match="cannot be read") if fails else contextlib.nullcontext():
            run(torch.ones(2))
    assert run.report() == "0 graphs, 1 eager calls, 0 captures, 0 replays"


def test_a_failed_capture_leaves_the_scaler_of_pytorch_as_it_was() -> None:
    """Its `step` waits for the device after it has unscaled gradients."""

    def train(way: Any) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        run = way(step)
        return run, numbers(*(run(*batch) for batch in batches("cpu", 6)), model)

    _, expected = train(lambda step: step)
    with pytest.warns(UserWarning, match=r"scaler\.step\(optimizer\)"):
        run, found = train(captured)
    assert run.reason is not None
    assert_equal_bits(expected, found)


class Base:
    def __init__(self) -> None:
        self.factor = torch.full((2,), 2.0)

    @capture
    def step(self, x: Tensor) -> Tensor:
        return x * self.factor


class Derived(Base):
    @capture
    def step(self, x: Tensor) -> Tensor:
        return super().step(x) + 1


@capture(warmup=2)
def plain(x: Tensor) -> Tensor:
    return x + 1


def test_overridden_methods_and_copied_objects() -> None:
    one = Derived()
    assert float(one.step(torch.ones(2))[0]) == 3.0
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        copied.factor.fill_(5.0)
        assert float(copied.step(torch.ones(2))[0]) == 6.0
        assert float(one.step(torch.ones(2))[0]) == 3.0
        assert copied.step is not one.step
    for copied in (copy.deepcopy([one, one.step]), pickle.loads(pickle.dumps([one, one.step]))):
        assert copied[1] is copied[0].step
    assert copy.deepcopy(plain) is pickle.loads(pickle.dumps(plain)) is plain
    assert pickle.loads(pickle.dumps(capture(pickle.loads)))(pickle.dumps(3)) == 3
    shallow = copy.copy(one)
    shallow.factor = torch.full((2,), 5.0)
    assert [float(each.step(torch.ones(2))[0]) for each in (shallow, one)] == [6.0, 3.0]
