"""Memory, counted on a CPU tensor by tensor: what amp keeps between steps, and the peak of a step."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp
from apex._memory.storages import BLOCK, LiveStorages
from apex.optimizers import FusedAdam, FusedSGD
from tests.amp.common import quiet

# Scales, flags and step counts.
SMALL = 2048
# How many bytes of state there are for a parameter, and how the optimizer is made.
OPTIMIZERS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "SGD": (4, lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)),
    "FusedSGD": (4, lambda params: FusedSGD(params, lr=0.01, momentum=0.9)),
    "FusedSGD that unscales": (
        4,
        lambda params: FusedSGD(params, lr=0.01, momentum=0.9, materialize_master_grads=False),
    ),
    "FusedAdam": (8, lambda params: FusedAdam(params, lr=0.01)),
}
WIDTH, WORDS, LENGTH = 32, 128, 256


class Language(nn.Module):
    """A residual stream and many outputs, which take most of a transformer's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "language": (Language, lambda: (torch.arange(LENGTH) % WORDS, torch.arange(1, LENGTH + 1) % WORDS)),
    "images": (images, lambda: (torch.rand(32, 3, 8, 8), torch.arange(32) % 4)),
}


@pytest.fixture(scope="module", autouse=True)
def _little_to_look_through() -> None:
    """Freeze existing objects: collecting garbage among them takes 0.3 s each time."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports PyTorch's compiler
    gc.collect()
    gc.freeze()


def step(model: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data[0]), data[1])
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_between_steps(name: str, level: str) -> None:
    """Only weights, masters and optimizer state remain: no gradient, no third copy of a weight."""
    data = PROBLEMS["language"][1]()
    gc.collect()
    with LiveStorages(lambda tensor: True) as live:
        model = Language()
        of_state, make = OPTIMIZERS[name]
        model, optimizer = quiet(model, make(model.parameters()), opt_level=level)
        for _ in range(3):
            step(model, optimizer, data)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        alive = live.live
    count = sum(param.numel() for param in model.parameters())
    expected = count * (of_state + (4 if level == "O1" else 6))
    rounding = 3 * BLOCK * len(list(model.parameters()))  # of weights, masters or casts, and state
    assert expected <= alive <= expected + SMALL + rounding < expected + 4 * count


def peak(level: str, name: str, make: Callable[[Any], Any]) -> int:
    """Return the peak memory of steps after the first."""
    new_model, new_data = PROBLEMS[name]
    data = new_data()
    gc.collect()
    with LiveStorages(lambda tensor: True) as live:
        model = new_model()
        model, optimizer = quiet(model, make(model.parameters()), opt_level=level)
        step(model, optimizer, data)
        gc.collect()
        live.peak = 0
        step(model, optimizer, data)
    amp.shutdown()
    return live.peak


@pytest.mark.parametrize("levels", [("O1", "O2"), ("O4", "O5")], ids="-".join)
@pytest.mark.parametrize("name", PROBLEMS)
def test_masters_cost_no_more_than_casting(name: str, levels: tuple[str, str]) -> None:
    """Check that O2 takes at most as much as O1 if activations dominate: both have half-precision weights."""
    casting, masters = (peak(level, name, OPTIMIZERS["FusedAdam"][1]) for level in levels)
    assert masters <= casting + SMALL
    if name == "language":  # the stream is in float32 under autocast
        assert masters < 0.95 * casting


def test_outputs_in_half_precision_take_less() -> None:
    """Check that `cast_model_outputs` avoids the model's float32 copy of many outputs."""
    sizes = []
    for outputs in (None, torch.float16):
        data = PROBLEMS["language"][1]()
        gc.collect()
        with LiveStorages(lambda tensor: True) as live:
            model = quiet(Language(), opt_level="O2", cast_model_outputs=outputs)
            live.peak = 0
            assert model(data[0]).dtype == (outputs or torch.float32)
        sizes.append(live.peak)
        amp.shutdown()
    assert sizes[0] - sizes[1] >= LENGTH * WORDS * 4 - SMALL
