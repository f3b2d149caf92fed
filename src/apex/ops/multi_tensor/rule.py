"""What an update rule is: a pure function of one element of each tensor list, and the lists that it reads and writes.

A rule's function is called as `function(values, whole, scalars, FLAGS)`:

    values   SLOTS numbers: 0 the parameter (or the output), 1 the gradient (or the input), 2 to 4 state
    whole    two numbers that belong to the whole tensor, norms say
    scalars  SCALARS numbers, the same for all tensors
    FLAGS    FLAG_COUNT constants

and returns the new values. A rule that measures returns the new values and a tuple of QUANTITIES terms, each of which
is summed up (or maximised) over every tensor.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SLOTS = 5
GRADIENT = 1
SCALARS = 8
FLAG_COUNT = 3
QUANTITIES = 4

Slots = Sequence[Sequence[Tensor] | None]  # a list of tensors for each slot, None for one that is not used
ZEROS, OFF = (0.0,) * SCALARS, (False,) * FLAG_COUNT  # for scalars and flags that a rule does not have


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule.

    `function` is the maths, `helpers` are the functions it calls. `scalars(**hyper)` turns hyperparameters into the
    numbers that `function` takes, and works on floats and on float64 tensors alike; without it they are these numbers,
    in their order. `reads` and `writes` name slots. `quantities` says how many of the terms are wanted,
    `maximum` that they are maximised instead of summed. `fused` is the maths by a function of PyTorch's (`fused.py`).
    """

    function: Callable[..., tuple[Any, ...]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scalars: Callable[..., tuple[Any, ...]] | None = None
    helpers: tuple[Callable[..., Any], ...] = ()
    quantities: int = 0
    maximum: bool = False
    fused: Callable[[Sequence[Any], Sequence[float], Sequence[bool]], bool] | None = None

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """The slots that need a tensor list, in order."""
        return tuple(slot for slot in range(SLOTS) if slot in self.reads or slot in self.writes)


# What rules call `tl`: the functions of PyTorch that `triton.language` has under the same names. A rule is written once
# and runs with either. A sum of two products is an `fma`: left to the compiler, the one that is not rounded first is
# chosen anew for every kernel, and a captured step, whose kernels read hyperparameters from memory, has other bits.
tl = types.SimpleNamespace(
    sqrt=torch.sqrt,
    abs=torch.abs,
    maximum=torch.maximum,
    minimum=torch.minimum,
    fma=lambda x, y, z: x * y + z,
    where=torch.where,
    float16=torch.float16,
    float32=torch.float32,
)
