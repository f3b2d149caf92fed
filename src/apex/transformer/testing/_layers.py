"""Initial weights and dropout of the standalone models."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops._host import HOST
from ..tensor_parallel.random import own_random_numbers

Init = Callable[[Tensor], Tensor]


def init_method_normal(sigma: float, generator: torch.Generator | None = None) -> Init:
    """Return a function that fills a weight with normal numbers of standard deviation `sigma`."""
    return lambda tensor: nn.init.normal_(tensor, mean=0.0, std=sigma, generator=generator)


def scaled_init_method_normal(sigma: float, num_layers: int, generator: torch.Generator | None = None) -> Init:
    """Return the initializer of layers that add to the residual, scaled down by the square root of 2 * `num_layers`."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers), generator)


def get_linear_layer(rows: int, columns: int, init_method: Init) -> nn.Linear:
    """Return a linear layer that is not split, with a bias of zeros."""
    layer = nn.Linear(rows, columns, device=HOST, dtype=torch.float32)
    init_method(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def dropout(x: Tensor, probability: float, training: bool, own: bool) -> Tensor:
    """Return `x` with elements dropped in training, by this rank's own random numbers if `own`."""
    if not training or probability == 0.0:
        return x
    with own_random_numbers(own):
        return F.dropout(x, probability)
