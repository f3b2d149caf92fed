"""Bytes that optimizers keep for every bfloat16 parameter, counted after a step of the real optimizers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import optimizers
from ..ops._host import HOST

_SMALL: dict[str, Any] = {"state_format": "int8", "master_bits": 24}
_MASTERS: dict[str, Any] = {"master_weights": True}
_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("FusedAdam", _MASTERS),
    ("FusedAdam", {"master_bits": 32}),
    ("FusedAdam", {"master_bits": 32, "state_format": "bfloat16"}),
    ("FusedAdam", {"master_bits": 32, "state_format": "float8"}),
    ("FusedAdam", {"master_bits": 24, "state_format": "int8"}),
    ("FusedAdam", {"stochastic_rounding": True, "state_format": "int8"}),
    ("FusedNAdam", _MASTERS),
    ("FusedRAdam", _MASTERS),
    ("FusedScheduleFreeAdamW", _MASTERS),
    ("FusedAdEMAMix", _MASTERS),
    ("FusedAdEMAMix", _SMALL),
    ("FusedLion", _MASTERS),
    ("FusedLion", _SMALL),
    ("FusedSGD", {"momentum": 0.9, **_MASTERS}),
    ("FusedSGD", {"momentum": 0.9, **_SMALL}),
    ("FusedMuon", _MASTERS),
    ("FusedMuon", _SMALL),
    ("FusedLAMB", _MASTERS),
    ("FusedNovoGrad", _MASTERS),
)


class StateBytes(NamedTuple):
    """Bytes per parameter of an optimizer: of its state and masters, and with a bfloat16 parameter and gradient."""

    optimizer: str
    options: str
    state: float
    total: float


def state_bytes() -> list[StateBytes]:
    """Return the bytes of every optimizer and format of state."""
    return [_counted(name, options) for name, options in _CASES]


def _counted(name: str, options: dict[str, Any]) -> StateBytes:
    """Take one step with a small matrix, and count its state, except single numbers such as a step count."""
    param = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16, device=HOST))
    param.grad = torch.zeros_like(param)
    optimizer = getattr(optimizers, name)([param], lr=1e-3, **options)
    optimizer.step()
    tensors = [value for value in optimizer.state[param].values() if isinstance(value, Tensor) and value.numel() > 1]
    state = sum(tensor.nbytes for tensor in tensors) / param.numel()
    words = ", ".join(f"{option}={value!r}" for option, value in options.items())
    return StateBytes(name, words, state, state + 2 * param.element_size())
