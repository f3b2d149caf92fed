"""The registry of benchmarks: families of cases, each declared once by a module of `apex._bench.cases`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

OURS = "ours"

# A call of an implementation: performs the work once and returns the tensors to compare.
Call = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Expected:
    """An expected result: its float64 values, its dtype and how many terms each element sums.

    `slack` is an absolute error allowed beyond the tolerance, for arithmetic that is known to have it.
    """

    value: Tensor
    dtype: torch.dtype
    reduction: int = 1
    slack: float = 0.0


@dataclass
class Prepared:
    """A case with its tensors allocated.

    `implementations` maps a name ("ours", "torch", "compile", "liger", ...) to a function that makes its `Call`, so
    that a peer that fails to import or compile fails alone. `timed` holds the functions for timing if these differ:
    the timed problem may be too large for a reference, or a call may change its own input. Each timed call is made,
    timed and dropped before the next one is made. `expected_of` holds the expected results of implementations that are
    checked on other inputs, such as a peer that accepts only half precision.
    """

    implementations: Mapping[str, Callable[[], Call]]
    expected: Sequence[Expected]
    timed: Mapping[str, Callable[[], Call]] | None = None
    expected_of: Mapping[str, Sequence[Expected]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A case: one row of the table.

    `bytes_moved` counts each input once and each output once. `timing` is "device" for the time of the work on the
    device with a cold cache, or "wall" for the time per iteration of a loop as a training script sees it, including the
    host. `note` tells readers of the results more than the name does.
    """

    name: str
    bytes_moved: int
    make: Callable[[torch.device], Prepared]
    timing: Literal["device", "wall"] = "device"
    note: str | None = None


@dataclass(frozen=True)
class Family:
    """A family of related cases; `cases` takes the device and whether the run is quick."""

    name: str
    summary: str
    cases: Callable[[torch.device, bool], Sequence[Case]]


# Families that are not made of examples of ops, by name; `selection.known_families` adds the families of examples.
REGISTERED: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family to `apex bench`."""
    if REGISTERED.setdefault(family.name, family) is not family:
        raise ValueError(f"benchmark family {family.name!r} is registered twice")
    return family
