"""What optimizers with divided state send, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from apex._distributed import collectives


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
    start = collectives.start

    def noted(what: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flat = [tensor for arg in args for tensor in (arg if isinstance(arg, list) else [arg])]
        found.append(Exchange(what, flat, kwargs["group"]))
        return start(what, collective, *args, **kwargs)

    with mock.patch.object(collectives, "start", noted):
        yield found
