"""What can be benchmarked: families of cases, each declared once by a module of `apex._bench.cases`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

OURS = "ours"

# One call of an implementation: does the work once and returns the tensors to compare.
Call = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Expected:
    """One right result: its values in float64, the dtype it is delivered in and how many terms each element sums.

    `slack` is an absolute error beyond the tolerance for these, for arithmetic that is known to have it.
    """

    value: Tensor
    dtype: torch.dtype
    reduction: int = 1
    slack: float = 0.0


@dataclass
class Prepared:
    """A case with its tensors allocated.

    `implementations` maps a name ("ours", "torch", "compile", "liger", ...) to a function that makes its `Call`, so
    that a peer which fails to import or compile fails alone. `timed` does the same for the calls that are timed, where
    these are not the ones that are checked: what is timed may be too large to be held against a reference, or may
    change its own input. Each of them is made, timed and dropped before the next one is made. `expected_of` has what
    is right for those that are checked on other inputs than the rest, such as a peer that takes half precision only.
    """

    implementations: Mapping[str, Callable[[], Call]]
    expected: Sequence[Expected]
    timed: Mapping[str, Callable[[], Call]] | None = None
    expected_of: Mapping[str, Sequence[Expected]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    `bytes_moved` counts each input once and each output once. `timing` is "device" for the time of the work on the
    device with a cold cache, "wall" for the time per iteration of a loop as a training script sees it, host included.
    `note` is what a reader of the results must know beyond the name. `recorded_as` is the name under which times of
    peers were recorded, where it is not this one.
    """

    name: str
    bytes_moved: int
    make: Callable[[torch.device], Prepared]
    timing: Literal["device", "wall"] = "device"
    note: str | None = None
    recorded_as: str | None = None


@dataclass(frozen=True)
class Family:
    """Cases that belong together; `cases` takes the device and whether a quick run was asked for."""

    name: str
    summary: str
    cases: Callable[[torch.device, bool], Sequence[Case]]


class UnknownFamilyError(ValueError):
    """A family name that no module has registered."""


_families: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Makes a family known to `apex bench`."""
    if _families.setdefault(family.name, family) is not family:
        raise ValueError(f"benchmark family {family.name!r} is registered twice")
    return family


def known_families() -> dict[str, Family]:
    """Every family, by name; imports the modules below `apex._bench.cases` at the first call."""
    from . import cases

    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")
    return dict(sorted(_families.items()))


def select(
    names: Iterable[str], device: torch.device, *, quick: bool = False, words: str | None = None
) -> list[tuple[str, Case]]:
    """Family name and case of the named families (all when none is named); the name has every word of `words`."""
    families = known_families()
    wanted = list(dict.fromkeys(names)) or list(families)
    unknown = [name for name in wanted if name not in families]
    if unknown:
        raise UnknownFamilyError(
            f"unknown benchmark {'family' if len(unknown) == 1 else 'families'} {', '.join(unknown)}; "
            f"known: {', '.join(families)}"
        )
    needed = (words or "").lower().split()
    return [
        (name, case)
        for name in wanted
        for case in families[name].cases(device, quick)
        if all(word in case.name.lower() for word in needed)
    ]
