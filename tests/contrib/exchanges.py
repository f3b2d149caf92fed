"""What optimizers with divided state send, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from apex.contrib.optimizers._zero import collectives


class Exchange(NamedTuple):
    """A collective: what it is for, its tensors, and its group."""

    what: str
    tensors: list[Tensor]
    group: Any

    @property
    def sends_gradients(self) -> bool:
        return "bucket of gradients" in self.what

    @property
    def sends_parameters(self) -> bool:
        return "bucket of updated parameters" in self.what


@contextlib.contextmanager
def listed() -> Iterator[list[Exchange]]:
    """Collectives that are begun inside."""
    found: list[Exchange] = []
    begun = collectives.begun

    def noted(what: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flat = [tensor for arg in args for tensor in (arg if isinstance(arg, list) else [arg])]
        found.append(Exchange(what, flat, kwargs["group"]))
        return begun(what, collective, *args, **kwargs)

    with mock.patch.object(collectives, "begun", noted):
        yield found
