"""The definition of an update rule: a pure function of one element of each list, and the lists it reads and writes.

A rule's function is called as `function(values, whole, scalars, FLAGS)`:

    values   SLOTS numbers: 0 the parameter (or the output), 1 the gradient (or the input), 2 to 4 state
    whole    two numbers that belong to the whole tensor, norms say
        scalars  SCALARS numbers, equal for all tensors
        FLAGS    FLAG_COUNT constants

    and returns the new values. A rule that measures returns the new values and a tuple of QUANTITIES terms; each term
    is summed (or maximised) over every tensor.
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
    numbers that `function` takes, for floats and for float64 tensors alike; without it the hyperparameters are these
    numbers, in their order. `reads` and `writes` name slots. `quantities` says how many of the terms are wanted,
    `maximum` that they are maximised instead of summed. `fused` computes the rule by a function of PyTorch
    (`fused.py`), and `fused_lists` by one call of such a function for all tensors.
    """

    function: Callable[..., tuple[Any, ...]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scalars: Callable[..., tuple[Any, ...]] | None = None
    helpers: tuple[Callable[..., Any], ...] = ()
    quantities: int = 0
    maximum: bool = False
    fused: Callable[[Sequence[Any], Sequence[float], Sequence[bool]], bool] | None = None
    fused_lists: Callable[[Sequence[Any], Sequence[float], Sequence[bool]], bool] | None = None

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """Slots that need a tensor list, in order."""
        return tuple(slot for slot in range(SLOTS) if slot in self.reads or slot in self.writes)


# The namespace that rules call `tl`: PyTorch's functions under the names of `triton.language`, so that a rule is
# written once and runs with either. A sum of two products is written as an `fma`: otherwise the compiler chooses anew
# for every kernel which product is not rounded first, and a captured step, whose kernels read hyperparameters from
# memory, would have other bits.
tl = types.SimpleNamespace(
    sqrt=torch.sqrt,
    rsqrt=torch.rsqrt,
    abs=torch.abs,
    maximum=torch.maximum,
    minimum=torch.minimum,
    clamp=lambda x, low, high, propagate_nan: torch.clamp(x, low, high),  # NaN stays NaN
    PropagateNan=types.SimpleNamespace(ALL=None),
    fma=lambda x, y, z: x * y + z,
    where=torch.where,
    float16=torch.float16,
    float32=torch.float32,
)
