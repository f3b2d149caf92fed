"""Plans by what they were made for: the one lookup between a call and its launches.

On a GPU the host is the limit for small and middling tensors. What checks, dispatch and launch rules find out about a
call is therefore found out once and kept as a plan, under a key of everything that they asked: shapes, dtypes, devices
and arguments. The next call of that kind builds the key, 2 us, and launches.
"""

from __future__ import annotations

from typing import TypeVar

import torch

# Tensors that have an address of their own. What a subclass (DTensor, FakeTensor, ...) does, PyTorch's operators know.
PLAIN = (torch.Tensor, torch.nn.Parameter)  # PyTorch 2.6 cannot look for a type in a set while it compiles

# Of one family. Beyond it a program's inputs hardly ever have the same shape twice.
MOST = 4096

Plan = TypeVar("Plan")

_all: list[Plans] = []


class Plans(dict[tuple, Plan]):
    """The plans of one family. A key must not depend on what is not kept: plans are forgotten when dispatch changes."""

    def __init__(self) -> None:
        super().__init__()
        _all.append(self)

    def keep(self, key: tuple, plan: Plan) -> Plan:
        """The plan, from now on under `key`."""
        if len(self) >= MOST:
            self.clear()
        self[key] = plan
        return plan


def forget() -> None:
    """Forgets the plans of all families, after a change of what they depend on: dispatch, device or launch rules."""
    for plans in _all:
        plans.clear()


def kind(tensor: torch.Tensor | None) -> tuple | None:
    """The part of a key that says all about a parameter; None for an absent one."""
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()
