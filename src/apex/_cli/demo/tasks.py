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
    """Sizes of models and batches."""

    gpt: dict[str, int]
    gpt_batch: int
    gpt_learning_rate: float
    conv: dict[str, int]
    conv_side: int
    conv_batch: int
    conv_learning_rate: float


# Many CPUs have no half-precision arithmetic and do some 25 million multiplications per second in it (measured on a
# Neoverse-N1, all matrix products and convolutions backward), a thousandth of their speed in float32.
_SMALL = Sizes(
    gpt={"alphabet": 4, "context": 16, "width": 16, "heads": 2, "layers": 1},
    gpt_batch=12,
    gpt_learning_rate=3e-2,
    conv={"kinds": 4, "channels": 8, "stages": 2},
    conv_side=8,
    conv_batch=32,
    conv_learning_rate=1e-1,
)
# Large enough that a GPU, and not the launching of kernels, takes most of the time of a step in float32.
_LARGE = Sizes(
    gpt={"alphabet": 8, "context": 256, "width": 512, "heads": 8, "layers": 6},
    gpt_batch=32,
    gpt_learning_rate=1e-3,
    conv={"kinds": 8, "channels": 64, "stages": 4},
    conv_side=128,
    conv_batch=128,
    conv_learning_rate=1e-1,
)


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
    sizes = _SMALL if device.type == "cpu" else _LARGE
    return {"gpt": _gpt, "conv": _conv}[name](sizes, steps, device)


def _gpt(sizes: Sizes, steps: int, device: torch.device) -> Task:
    language = Language(sizes.gpt["alphabet"], sizes.gpt["context"], sizes.gpt_batch, _SEED)
    batches = list(itertools.islice(language.batches(), steps))
    return Task(
        "gpt",
        partial(Gpt, **sizes.gpt),
        partial(FusedAdam, lr=sizes.gpt_learning_rate),
        f"width {sizes.gpt['width']}, layers {sizes.gpt['layers']}, FusedLayerNorm, FusedAdam; "
        f"{sizes.gpt_batch} x {sizes.gpt['context']} characters per step",
        _moved(batches, device),
        language.lowest_loss(batches),
    )


def _conv(sizes: Sizes, steps: int, device: torch.device) -> Task:
    pictures = Pictures(sizes.conv["kinds"], sizes.conv_side, sizes.conv_batch, _SEED)
    batches = list(itertools.islice(pictures.batches(), steps))
    optimizer: Any = partial(FusedSGD, lr=sizes.conv_learning_rate, momentum=0.9)
    return Task(
        "conv",
        partial(ConvNet, **sizes.conv),
        optimizer,
        f"stages {sizes.conv['stages']}, channels from {sizes.conv['channels']}, BatchNorm2d, FusedSGD; "
        f"{sizes.conv_batch} pictures of {sizes.conv_side} x {sizes.conv_side} per step",
        _moved(batches, device),
    )


def _moved(batches: list[Batch], device: torch.device) -> list[Batch]:
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
