"""The choice of benchmark cases: all families, and the cases of the requested families."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

import torch

from . import cases, examples
from .registry import REGISTERED, Case, Family


class UnknownFamilyError(ValueError):
    """A family name that no module has registered was requested."""


def known_families() -> dict[str, Family]:
    """Return every family by name, from the examples of ops and from the modules of `apex._bench.cases`."""
    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")
    return dict(sorted({**REGISTERED, **examples.families()}.items()))


def select(
    names: Iterable[str], device: torch.device, *, quick: bool = False, words: str | None = None
) -> list[tuple[str, Case]]:
    """Return (family name, case) of the named families, by default all, whose case names contain all `words`."""
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
