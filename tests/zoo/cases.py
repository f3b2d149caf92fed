"""What the zoo knows of a model: how it is made, what it is given, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Case(NamedTuple):
    """A model, its inputs and the function of a training script that returns the loss: `loss(model, *inputs)`."""

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[..., Tensor]


class Entry(NamedTuple):
    """A row of the zoo: a name, the library that has the model, and `make()`, which returns a new case."""

    name: str
    library: str
    make: Callable[[], Case]

    @property
    def key(self) -> str:
        """The name in records, which is unique in the zoo."""
        return f"{self.library}/{self.name}"


def rand(*shape: int) -> Tensor:
    """Return normal random numbers."""
    return torch.randn(*shape)


def ids(count: int, *shape: int) -> Tensor:
    """Return random integers below `count`."""
    return torch.randint(0, count, shape)


def uniform(*shape: int) -> Tensor:
    """Return random numbers from 0 to 1."""
    return torch.rand(*shape)
