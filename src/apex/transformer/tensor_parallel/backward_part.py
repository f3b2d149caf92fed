"""Which part of a backward pass is being run, for functions that cannot see it: autograd tells only its own.

Pipeline schedules compute the gradients of inputs first and those of parameters later, from the same graph. A
`torch.autograd.Function` is then called twice; one that adds to `main_grad`, or communicates, asks here what to leave
out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# Not one per thread: autograd runs the functions of a device in a thread of its own.
_part: str | None = None


@contextlib.contextmanager
def only(part: str) -> Iterator[None]:
    """The gradients of inputs alone ("input"), or those of parameters ("weight")."""
    global _part
    before, _part = _part, part
    try:
        yield
    finally:
        _part = before


def wanted(needs_input: bool, *needs_parameters: bool) -> tuple[bool, ...]:
    """Which gradients to compute now, of those that are needed at all."""
    return (needs_input and _part != "weight", *(need and _part != "input" for need in needs_parameters))
