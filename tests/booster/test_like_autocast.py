"""Training loops of every kind give the numbers of torch.autocast on a boosted model."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from apex.booster import ModelWrapper

STEPS = 7  # the first two find the weights to copy


class Plain(nn.Module):
    """A model under torch.autocast, with the names of a boosted one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args).float()

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "model" else getattr(self.model, name)

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        self.model[index] = layer

    def __getitem__(self, index: int) -> Any:
        return self.model[index]


def net(*sizes: int) -> nn.Sequential:
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.25)


def batch(number: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(number))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList([net(16, 24, 16) for _ in range(2)])
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        return hidden


@dataclass
class Outputs:
    """What a model returns that PyTorch knows nothing of."""

    hidden: Tensor

    def float(self) -> Tensor:
        return self.hidden.float()


class Scaled(nn.Module):
    """A layer with weights that are looked up, added and multiplied, whose copies change the activations' dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table, self.gain = nn.Linear(16, 16), nn.Embedding(8, 16), nn.Parameter(torch.rand(16))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.layer(inputs) * self.gain + self.table(torch.arange(8)))


class CheckpointedScales(Checkpointed):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(use_reentrant)
        self.blocks = nn.ModuleList([Scaled() for _ in range(2)])


class CheckpointedOutputs(CheckpointedScales):
    def __init__(self) -> None:
        super().__init__(use_reentrant=False)

    def forward(self, inputs: Tensor) -> Outputs:
        return Outputs(super().forward(inputs))


Boost = Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]]


def step(model: Any, optimizer: Any, number: int, loss: Callable[[Tensor], Tensor] = lambda out: out.square().mean()):
    optimizer.zero_grad()
    outputs = model(batch(number))
    loss(outputs.float()).backward()
    optimizer.step()


def plain_loop(boost: Boost) -> list[Tensor]:
    inner = net(16, 24, 4)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    for number in range(STEPS):
        step(model, optimizer, number)
    return [*inner.parameters()]


def accumulation(boost: Boost) -> list[Tensor]:
    inner = net(16, 24, 4)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        for part in range(5):
            (model(batch(5 * number + part)).square().mean() / 5).backward()
        optimizer.step()
    return [*inner.parameters()]


def two_forwards_before_one_backward(boost: Boost) -> list[Tensor]:
    inner = net(16, 24, 4)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    for number in range(STEPS):
        optimizer.zero_grad()
        one, other = model(batch(number)), model(batch(-1 - number))
        (one * other).mean().backward()
        optimizer.step()
    return [*inner.parameters()]


def two_backwards(boost: Boost) -> list[Tensor]:
    inner = net(16, 24, 4)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    for number in range(STEPS):
        optimizer.zero_grad()
        outputs = model(batch(number))
        outputs.square().mean().backward(retain_graph=True)
        outputs.mean().backward()
        optimizer.step()
    return [*inner.parameters()]


def own_updates(boost: Boost) -> list[Tensor]:
    """Update weights by the gradients that torch.autograd.grad returns."""
    inner = net(16, 24, 4)
    model, _ = boost(inner, sgd(inner.parameters()))
    for number in range(STEPS):
        gradients = torch.autograd.grad(model(batch(number)).square().mean(), [*model.parameters()])
        with torch.no_grad():
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param -= 0.25 * gradient
    return [*inner.parameters()]


def gradient_penalty(boost: Boost) -> list[Tensor]:
    inner = net(16, 24, 1)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    for number in range(STEPS):
        optimizer.zero_grad()
        inputs = batch(number).requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()
    return [*inner.parameters()]


def adversarial(boost: Boost) -> list[Tensor]:
    """Train a Wasserstein critic, whose weights are clamped, and a generator."""
    inner, judge = net(16, 24, 16), net(16, 24, 1)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    critic, critics = boost(judge, sgd(judge.parameters()))
    for number in range(STEPS):
        critics.zero_grad()
        fake = model(batch(number))
        (critic(fake.detach()).mean() - critic(batch(number + 50)).mean()).backward()
        critics.step()
        for param in critic.parameters():
            param.data.clamp_(-0.1, 0.1)
        optimizer.zero_grad()
        (-critic(model(batch(number + 90))).mean()).backward()
        optimizer.step()
    assert max(param.abs().max() for param in critic.parameters()) <= 0.1
    return [*inner.parameters(), *judge.parameters()]


def unfreezing(boost: Boost) -> list[Tensor]:
    inner = net(16, 24, 24, 4)
    inner[0].requires_grad_(False)
    inner[2].requires_grad_(False)
    first = [*inner[2].parameters(), *inner[4].parameters()]
    model, optimizer = boost(inner, sgd(first))
    for number in range(3 * STEPS):
        if number == STEPS:
            inner[2].requires_grad_(True)
        if number == 2 * STEPS:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.125})
        step(model, optimizer, number)
    return [*inner.parameters()]


def a_layer_is_added(boost: Boost) -> list[Tensor]:
    inner = net(16, 24, 4)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    for number in range(2 * STEPS):
        if number == STEPS:
            torch.manual_seed(3)
            model.append(nn.Linear(4, 4))
            model[0] = nn.Linear(16, 24)
            optimizer.add_param_group({"params": [*model[3].parameters(), *model[0].parameters()]})
        step(model, optimizer, number)
    return [*inner.parameters()]


def averages(boost: Boost) -> list[Tensor]:
    """Keep averages of the weights by PyTorch's classes, as timm does, and as diffusers does."""
    inner = net(16, 24, 4)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    moving, stochastic = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)), AveragedModel(model)
    of_state, of_inner = copy.deepcopy(model).eval(), copy.deepcopy(inner)
    shadow = [param.clone().detach() for param in model.parameters()]
    for number in range(STEPS):
        step(model, optimizer, number)
        moving.update_parameters(model)
        stochastic.update_parameters(model)
        with torch.no_grad():
            for average in (of_state, of_inner):
                for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                    mean.copy_(0.999 * mean + 0.001 * value)
            for mean, value in zip(shadow, model.parameters(), strict=True):
                mean.sub_(0.001 * (mean - value))
    models: list[Any] = [moving.module, stochastic.module, of_state, of_inner]
    averages = [*(param for average in models for param in average.parameters()), *shadow]
    assert all(average.dtype == torch.float32 for average in averages)
    assert not any(torch.equal(one, other) for one, other in zip(shadow, inner.parameters(), strict=True))
    outputs = [average(batch(number)) for number in range(4) for average in (moving, stochastic, of_state)]
    return [*averages, *(output.detach() for output in outputs)]


def a_second_optimizer(boost: Boost) -> list[Tensor]:
    """Train a layer by an optimizer that is not boosted."""
    inner = net(16, 24, 4)
    other = torch.optim.Adam(inner[0].parameters(), lr=2.0**-6, eps=1e-3)
    model, optimizer = boost(inner, sgd(inner[2].parameters()))
    for number in range(STEPS):
        other.zero_grad()
        step(model, optimizer, number)
        other.step()
    return [*inner.parameters()]


def another_optimizer_later(boost: Boost) -> list[Tensor]:
    inner = net(16, 24, 4)
    model, optimizer = boost(inner, sgd(inner.parameters()))
    for number in range(STEPS):
        step(model, optimizer, number)
    del optimizer
    model, optimizer = boost(model, torch.optim.Rprop(inner.parameters(), lr=2.0**-7, foreach=False))
    for number in range(STEPS):
        step(model, optimizer, number)
    return [*inner.parameters()]


def checkpointing(boost: Boost, make: Callable[[], nn.Module]) -> list[Tensor]:
    inner = make()
    model, optimizer = boost(inner, sgd(inner.parameters()))
    for number in range(STEPS):
        optimizer.zero_grad()
        one, other = model(batch(number)).float().square().mean(), model(batch(-1 - number)).float().mean()
        (one + other).backward(retain_graph=True)
        other.backward()
        one.backward()
        optimizer.step()
        step(model, optimizer, number)
    return [*inner.parameters()]


def has_copies(model: Any) -> bool:
    """Return whether the last forward pass of a boosted model had copies of weights."""
    wrappers = [model, *([model.module] if isinstance(model.module, ModelWrapper) else [])]
    return any(wrapper._copies is not None and len(wrapper._copies.weights) > 0 for wrapper in wrappers)


LOOPS: list[Any] = [
    *(plain_loop, accumulation, two_forwards_before_one_backward, two_backwards, own_updates, gradient_penalty),
    *(adversarial, unfreezing, a_layer_is_added, averages, a_second_optimizer, another_optimizer_later),
    pytest.param(functools.partial(checkpointing, make=functools.partial(Checkpointed, True)), id="reentrant"),
    pytest.param(functools.partial(checkpointing, make=functools.partial(Checkpointed, False)), id="checkpoint"),
    pytest.param(functools.partial(checkpointing, make=CheckpointedOutputs), id="checkpoint_outputs"),
    pytest.param(functools.partial(checkpointing, make=functools.partial(CheckpointedScales, True)), id="scales"),
]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_under_autocast(loop: Callable[[Boost], list[Tensor]], boost: Any, way: str) -> None:
    """Without fused modules and optimizers all bits are equal, if no copy narrows an activation."""
    torch.manual_seed(0)
    expected = loop(lambda model, optimizer: (Plain(model), optimizer))
    torch.manual_seed(0)
    boosted = []

    def boosting(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        boosted.append(boost(model, optimizer)[:2])
        return boosted[-1]

    results = loop(boosting)
    for model, _ in boosted:
        assert all(param.dtype == torch.float32 for param in model.parameters())
        assert has_copies(model) == (way != "as on a CPU")
    narrows = any(isinstance(module, Scaled) for model, _ in boosted for module in model.modules())
    if way == "as on a GPU" or (way == "with copies" and narrows):
        for result, truth in zip(results, expected, strict=True):
            assert (result - truth).norm() <= 0.01 * truth.norm()
    else:
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
