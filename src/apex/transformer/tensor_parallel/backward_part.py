"""The part of a split backward pass that is running, for autograd functions that must know it.

Pipeline schedules compute the gradients of inputs first and the gradients of parameters later, from the same graph.
Each `torch.autograd.Function` then runs twice. A function that adds to `main_grad` or communicates asks here which
gradients to skip.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# Not thread-local, because autograd runs the functions of each device in a separate thread.
_part: str | None = None


@contextlib.contextmanager
def only(part: str) -> Iterator[None]:
    """Compute only the gradients of inputs ("input") or of parameters ("weight") inside this context."""
    global _part
    outer, _part = _part, part
    try:
        yield
    finally:
        _part = outer


def wanted(needs_input: bool, *needs_parameters: bool) -> tuple[bool, ...]:
    """Return which of the needed gradients to compute in the current part of the backward pass."""
    return (needs_input and _part != "weight", *(need and _part != "input" for need in needs_parameters))
