"""Tuned launches: a table of measured configurations that replaces answers of launch rules.

`apex tune` writes a table, and `APEX_TUNED` names the one to use. A `@tunable` rule of a family's config.py looks into
it only when a launch is first made, because its answers are cached. Without an entry the rule's own answer stands.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _env
from . import _library
from ._device import DeviceFacts, forget_launches, launch_rule, next_power_of_2

FORMAT = 1
# Sizes that are shared out among programs: a shape class rounds these arguments of rules up to a power of two.
ROUNDED = frozenset({"rows", "columns", "queries", "tokens", "images"})

_CUDA_DRIVER = ("libcuda.so.1", "cuDriverGetVersion")

Key = tuple[str, str, tuple[tuple[str, Any], ...]]
Changes = Mapping[str, Any]
Varied = Callable[[Any], Sequence[str]]


class Question(NamedTuple):
    """A call of a launch rule: its name, such as `norm.forward_config`, and its named arguments without the device."""

    op: str
    arguments: Mapping[str, Any]

    @property
    def dtype(self) -> str:
        """Return the width of an element, such as "16-bit": rules know the element size but not the dtype."""
        return f"{8 * self.arguments['element_size']}-bit"

    @property
    def shape(self) -> dict[str, Any]:
        """Return the shape class: all other arguments, with those in ROUNDED rounded up to a power of two."""
        sizes = {name: value for name, value in self.arguments.items() if name != "element_size"}
        return {name: next_power_of_2(value) if name in ROUNDED else value for name, value in sizes.items()}

    @property
    def key(self) -> Key:
        return self.op, self.dtype, tuple(sorted(self.shape.items()))


# By rule: a function that returns the names of an answer's fields that tuning may change.
TUNABLE: dict[str, Varied] = {}

_noted: dict[Key, tuple[Question, Any]] | None = None
_trial: Mapping[Key, Changes] | None = None


def tunable(varied: Varied) -> Callable[[Callable[..., Any]], Any]:
    """Make a launch rule tunable: a table may replace fields of its answers, which are NamedTuples.

    The rule takes `element_size` among its arguments and a device last. `varied` names the fields of an answer that
    can be changed independently without making the kernels wrong.
    """

    def decorate(rule: Callable[..., Any]) -> Any:
        op = f"{rule.__module__.split('.')[-2]}.{rule.__name__}"
        *names, _ = inspect.signature(rule).parameters
        TUNABLE[op] = varied

        @functools.wraps(rule)
        def choose(*arguments: Any) -> Any:
            *values, device = arguments
            answer = rule(*arguments)
            if answer is None:
                return None
            question = Question(op, dict(zip(names, values, strict=True)))
            if _noted is not None:
                _noted.setdefault(question.key, (question, answer))
            if _trial is not None:
                return answer._replace(**_trial.get(question.key, {}))
            entry = entries_for(device).get(question.key)
            # An entry does not apply if the rule has changed, or chooses something else for this member of the class.
            if entry and all(getattr(answer, name, None) == value for name, value in entry["instead_of"].items()):
                return answer._replace(**entry["config"])
            return answer

        return launch_rule(choose)

    return decorate


@contextlib.contextmanager
def noting() -> Iterator[dict[Key, tuple[Question, Any]]]:
    """Collect the questions asked of rules inside the block with their answers, one for each shape class."""
    global _noted
    previous, _noted = _noted, {}
    forget_launches()
    try:
        yield _noted
    finally:
        _noted = previous


@contextlib.contextmanager
def trying(changes: Mapping[Key, Changes]) -> Iterator[None]:
    """Apply `changes` to the answers of launch rules inside the block, and ignore all tables."""
    global _trial
    previous, _trial = _trial, changes
    forget_launches()
    try:
        yield
    finally:
        _trial = previous
        forget_launches()


@dataclass
class Table:
    """Entries of a file for one GPU, driver and Triton. `problem` says why they are not used here, or is None."""

    path: Path
    gpu: str = ""
    driver: int = 0
    triton: str = ""
    entries: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None


def versions() -> dict[str, Any]:
    """Return the versions that entries depend on besides the GPU: the driver's major version and Triton's version."""
    version = ctypes.c_int(0)
    if torch.cuda.is_available():
        library, read = ("libamdhip64.so", "hipDriverGetVersion") if torch.version.hip else _CUDA_DRIVER
        with contextlib.suppress(OSError):
            getattr(ctypes.CDLL(library), read)(ctypes.byref(version))
    has_triton = _library.triton_problem() is None  # rules are also called without Triton
    return {
        "driver": version.value // 1000,
        "triton": importlib.import_module("triton").__version__ if has_triton else "",
    }


@launch_rule
def tables() -> tuple[Table, ...]:
    """Return the tables of the file that `APEX_TUNED` names."""
    path = _env.tuned_launches()
    if path is None:
        return ()
    here, found = versions(), read_tables(path)
    for table in found:
        differing = [f"{name} {getattr(table, name)}" for name in here if getattr(table, name) != here[name]]
        if table.problem is None and differing:
            now = ", ".join(f"{name} {value}" for name, value in here.items())
            table.problem = f"made with {', '.join(differing)}; here is {now}"
    return tuple(found) if path.exists() else (Table(path, problem="there is no such file"),)


def read_tables(path: Path) -> list[Table]:
    """Return the tables of a file: an empty list without a file, one table with a `problem` if it cannot be read."""
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            return [Table(path, problem=f"has format {document['format']}, not {FORMAT}: make it again")]
        found = [Table(path, **table) for table in document["tables"]]
        for table in found:
            for entry in table.entries:
                hash(key_of(entry)), fits(entry)  # these raise if an entry is malformed
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [Table(path, problem=f"is no table of tuned launches: {type(error).__name__}: {error}")]


def key_of(entry: Mapping[str, Any]) -> Key:
    return entry["op"], entry["dtype"], tuple(sorted(entry["shape"].items()))


@launch_rule
def entries_for(device: DeviceFacts) -> dict[Key, dict[str, Any]]:
    """Return the entries in use on a device; warn once about tables that are not used."""
    entries: dict[Key, dict[str, Any]] = {}
    for table in tables():
        if table.problem is None and table.gpu == device.name:
            entries |= {key_of(entry): entry for entry in table.entries if fits(entry)}
        elif table.problem is not None and table.gpu in ("", device.name):
            _library.logger.warning("the tuned launches of %s are not used: %s", table.path, table.problem)
    return entries


def fits(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry replaces integers by integers, and names the same fields for both."""
    changed = (*entry["config"].values(), *entry["instead_of"].values())
    return entry["config"].keys() == entry["instead_of"].keys() and all(type(value) is int for value in changed)
