"""The training tasks of `apex demo`: a model, an optimizer and data for every step, in sizes that suit the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...optimizers import FusedAdam, FusedSGD
from .data import Batch, Language, Pictures
from .models import ConvNet, Gpt

_SEED = 2024


@dataclass(frozen=True)
class Sizes:
    """Arguments of a model and of its data, the batch size and the learning rate."""

    model: dict[str, int]
    data: dict[str, int]
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class Recipe:
    """A model of the demo: its class, data and optimizer, a template for its description, and its sizes by device."""

    model: Callable[..., nn.Module]
    data: type[Language] | type[Pictures]
    optimizer: Callable[..., torch.optim.Optimizer]
    describe: str
    on_cpu: Sizes
    on_gpu: Sizes


# Models for CPUs are tiny. Many CPUs have no half-precision arithmetic and do some 25 million multiplications per
# second in it (measured on a Neoverse-N1, all matrix products and convolutions backward), a thousandth of their speed
# in float32. Models for GPUs are large: computing, not launching kernels, takes most of a float32 step.
RECIPES = {
    "gpt": Recipe(
        Gpt,
        Language,
        FusedAdam,
        "width {width}, layers {layers}, FusedLayerNorm, FusedAdam; {batch} x {context} characters per step",
        on_cpu=Sizes({"width": 16, "heads": 2, "layers": 1}, {"alphabet": 4, "context": 16}, 12, 3e-2),
        on_gpu=Sizes({"width": 512, "heads": 8, "layers": 6}, {"alphabet": 8, "context": 256}, 32, 1e-3),
    ),
    "conv": Recipe(
        ConvNet,
        Pictures,
        partial(FusedSGD, momentum=0.9),
        "stages {stages}, channels from {channels}, BatchNorm2d, FusedSGD; "
        "{batch} pictures of {side} x {side} per step",
        on_cpu=Sizes({"channels": 8, "stages": 2}, {"kinds": 4, "side": 8}, 32, 1e-1),
        on_gpu=Sizes({"channels": 64, "stages": 4}, {"kinds": 8, "side": 128}, 128, 1e-1),
    ),
}


@dataclass
class Task:
    """A model by name, functions that make it and its optimizer, and a batch for every step."""

    name: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    describe: str
    batches: list[Batch] = field(repr=False)
    lowest_loss: float | None = None  # that any model can reach on these batches, if it is known

    def new_model(self) -> nn.Module:
        """Return the model with its initial weights, which are equal at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return self.make_model().to(self.batches[0][0].device)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make_task(name: str, steps: int, device: torch.device) -> Task:
    """Return the task of one of RECIPES for `steps` steps on `device`."""
    recipe = RECIPES[name]
    sizes = recipe.on_cpu if device.type == "cpu" else recipe.on_gpu
    data: Any = recipe.data(**sizes.data, batch=sizes.batch, seed=_SEED)
    batches = list(itertools.islice(data.batches(), steps))
    return Task(
        name,
        partial(recipe.model, **data.model_arguments(), **sizes.model),
        partial(recipe.optimizer, lr=sizes.learning_rate),
        recipe.describe.format(**sizes.model, **sizes.data, batch=sizes.batch),
        [(inputs.to(device), targets.to(device)) for inputs, targets in batches],
        data.lowest_loss(batches),
    )
