"""What `apex doctor` has to say about one thing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """A sentence about `subject` and how bad it is. Anything `broken` makes the exit status non-zero."""

    severity: Severity
    subject: str
    message: str


def one_line(error: BaseException) -> str:
    """The message of an error as one line of text, or its type where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def import_problem(name: str) -> str | None:
    """Why the module `name` cannot be imported, or None when it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a compiled module can fail in any way
        return f"importing {name} failed: {type(error).__name__}: {one_line(error)}"
    return None
