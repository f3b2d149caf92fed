"""Small models and a training loop that every test of amp can read at a glance."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}


def small_model(seed: int = 0, device: str = "cpu") -> nn.Sequential:
    """Return a model of two linear layers with a batch norm between them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).to(device)


def batch(step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return inputs, and targets that can be learned."""
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 + step))
    return inputs.to(device), (inputs[:, :4] - inputs[:, 2:]).to(device)


def loss_of(model: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    inputs, targets = batch(step, next(model.parameters()).device.type)
    return nn.functional.mse_loss(model(inputs), targets) * factor


def overflow_at(*steps: int) -> Callable[[int], float]:
    """Return a factor for the loss that makes gradients overflow at some steps."""
    return lambda step: float("inf") if step in steps else 1.0


def train(
    model: nn.Module,
    optimizer: Any,
    steps: Iterable[int] | int,
    factor: Callable[[int], float] = lambda step: 1.0,
) -> list[float]:
    """Train with the three lines of amp in a loop; return the losses."""
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, factor(step))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def assert_same(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    """Check that tensors have equal bits."""
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"largest difference {(a - b).abs().max()}"


def quiet(*args: Any, **kwargs: Any) -> Any:
    """Call `amp.initialize` without prints."""
    return amp.initialize(*args, verbosity=0, **kwargs)
