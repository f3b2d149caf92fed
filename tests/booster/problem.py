"""A model, its data and plain PyTorch's training of it: what the Booster's training is held against."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from apex.booster import Booster

# Where models are trained; tests on a GPU change it.
DEVICE = "cpu"
FEATURES, HIDDEN, CLASSES, ROWS, STEPS = 16, 32, 4, 64, 3


class Net(nn.Module):
    """Blocks in a ModuleList between two linear layers; the norm has no statistics that depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x).tanh()  # smooth: no element is switched off by rounding
        return self.last(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    return inputs.to(DEVICE), torch.randint(0, CLASSES, (ROWS,), generator=generator).to(DEVICE)


def booster(mixed_precision: Any = None, plugin: Any = None) -> Booster:
    return Booster(DEVICE, mixed_precision, plugin)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(DEVICE)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an Adam with two parameter groups; `eps` keeps tiny gradients from becoming noise."""
    decays = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "lr": 2e-3}], lr=1e-3, eps=1e-3
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01)


OPTIMIZERS = {"adam": adam, "sgd": sgd}


@functools.cache
def plain(optimizer_name: str = "adam", steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Return weights and losses of plain float32 training; call it before `apex.amp` casts in this thread."""
    model = net()
    optimizer, criterion = OPTIMIZERS[optimizer_name](model), nn.CrossEntropyLoss()
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = criterion(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def train(
    booster: Any, parts: tuple[Any, ...], steps: range = range(STEPS), rank: int = 0, ranks: int = 1
) -> list[float]:
    """Train, and return the losses of this process's part of each batch."""
    model, optimizer, criterion = parts[:3]
    losses = []
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = (tensor[rank::ranks] for tensor in batch(step))
        loss = criterion(model(inputs), targets)
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_as_plain(weights: dict[str, Tensor], optimizer_name: str, tolerance: float, steps: int = STEPS) -> None:
    """Check that the change of the weights is close to plain PyTorch's, relative to its norm.

    Single elements may differ more: Adam moves elements with tiny gradients as far as others, but in random directions.
    """
    start, (expected, _) = net().state_dict(), plain(optimizer_name, steps)
    assert weights.keys() == expected.keys()
    assert {value.dtype for value in weights.values()} == {torch.float32}
    error = sum(float((weights[name].to(DEVICE) - expected[name]).square().sum()) for name in expected) ** 0.5
    length = sum(float((expected[name] - start[name]).square().sum()) for name in expected) ** 0.5
    assert error <= tolerance * length, f"{error / length:.4f} of the way, of at most {tolerance}"


def assert_equal(found: Any, expected: Any) -> None:
    """Check that nested containers have equal bits."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected
