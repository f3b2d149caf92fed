"""Counts of the collectives of batch norms over processes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from apex.parallel import _statistics

GATHERED, SUMMED = "_allgather_base", "allreduce"


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the collectives that are called inside, by `GATHERED` and `SUMMED`."""
    found: Counter[str] = Counter()
    backend_of = _statistics._backend_of

    class Counted:
        def __init__(self, group: Any, device: torch.device) -> None:
            self._backend = backend_of(group, device)

        def __getattr__(self, name: str) -> Any:
            found[name] += 1
            return getattr(self._backend, name)

    with mock.patch.object(_statistics, "_backend_of", Counted):
        yield found
