"""What `apex demo` trains: a model, an optimizer and the data for every step, in sizes that suit the device."""

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

MODELS = ("gpt", "conv")
_SEED = 2024


@dataclass(frozen=True)
class Sizes:
    """Arguments of a model, and of its training."""

    model: dict[str, int]
    batch: int
    learning_rate: float


# Many CPUs have no half-precision arithmetic and do some 25 million multiplications per second in it (measured on a
# Neoverse-N1, all matrix products and convolutions backward), a thousandth of their speed in float32.
_SMALL = {
    "gpt": Sizes({"alphabet": 4, "context": 16, "width": 16, "heads": 2, "layers": 1}, batch=12, learning_rate=3e-2),
    "conv": Sizes({"kinds": 4, "channels": 8, "stages": 2}, batch=32, learning_rate=1e-1),
}
# Large enough that a GPU, and not the launching of kernels, takes most of the time of a step in float32.
_LARGE = {
    "gpt": Sizes({"alphabet": 8, "context": 256, "width": 512, "heads": 8, "layers": 6}, batch=32, learning_rate=1e-3),
    "conv": Sizes({"kinds": 8, "channels": 64, "stages": 4}, batch=128, learning_rate=1e-1),
}
_SMALL_PICTURE, _LARGE_PICTURE = 8, 128  # pixels in a row


@dataclass
class Task:
    """A model by name, how to make it and its optimizer, and a batch for every step."""

    name: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    describe: str
    batches: list[Batch] = field(repr=False)
    lowest_loss: float | None = None

    def new_model(self) -> nn.Module:
        """The model with its first weights, which are the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return self.make_model().to(self.batches[0][0].device)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, in nats."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def make_task(name: str, steps: int, device: torch.device) -> Task:
    """The task of one of MODELS for `steps` steps on `device`."""
    sizes = (_SMALL if device.type == "cpu" else _LARGE)[name]
    return {"gpt": _gpt, "conv": _conv}[name](sizes, steps, device)


def _gpt(sizes: Sizes, steps: int, device: torch.device) -> Task:
    model = sizes.model
    language = Language(model["alphabet"], model["context"], sizes.batch, _SEED)
    batches = list(itertools.islice(language.batches(), steps))
    return Task(
        "gpt",
        partial(Gpt, **model),
        partial(FusedAdam, lr=sizes.learning_rate),
        f"width {model['width']}, layers {model['layers']}, FusedLayerNorm, FusedAdam; "
        f"{sizes.batch} x {model['context']} characters per step",
        _moved(batches, device),
        language.lowest_loss(batches),
    )


def _conv(sizes: Sizes, steps: int, device: torch.device) -> Task:
    model, side = sizes.model, _SMALL_PICTURE if device.type == "cpu" else _LARGE_PICTURE
    pictures = Pictures(model["kinds"], side, sizes.batch, _SEED)
    batches = list(itertools.islice(pictures.batches(), steps))
    optimizer: Any = partial(FusedSGD, lr=sizes.learning_rate, momentum=0.9)
    return Task(
        "conv",
        partial(ConvNet, **model),
        optimizer,
        f"stages {model['stages']}, channels from {model['channels']}, BatchNorm2d, FusedSGD; "
        f"{sizes.batch} pictures of {side} x {side} per step",
        _moved(batches, device),
    )


def _moved(batches: list[Batch], device: torch.device) -> list[Batch]:
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
