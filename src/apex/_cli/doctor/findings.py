"""Findings of `apex doctor`: sentences with a severity."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """A sentence about `subject` with its severity. A severity of "broken" makes the exit status non-zero."""

    severity: Severity
    subject: str
    message: str


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line, or the name of its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def import_problem(name: str) -> str | None:
    """Return the reason why the module `name` cannot be imported, or None if it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a compiled module can fail in any way
        return f"importing {name} failed: {type(error).__name__}: {one_line(error)}"
    return None
