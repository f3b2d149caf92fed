"""Tuned launches: tables of measured configurations that replace the answers of launch rules.

`apex tune` writes them. A rule of a family's config.py that is `@tunable` looks into them when a launch is first made,
never later: its answers are kept. Without an entry the rule's own answer stands.
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
# Tables that come with the package, a file for each GPU.
SHIPPED = Path(__file__).parent / "tuned"
# Arguments of rules that a shape class rounds up to a power of two: how much there is to share out among programs.
ROUNDED = frozenset({"rows", "columns", "queries", "tokens", "images"})

_CUDA_DRIVER = ("libcuda.so.1", "cuDriverGetVersion")

Key = tuple[str, str, tuple[tuple[str, Any], ...]]
Changes = Mapping[str, Any]
Varied = Callable[[Any], Sequence[str]]


class Question(NamedTuple):
    """What a rule was asked: `norm.forward_config` and its arguments but for the device, by name."""

    op: str
    arguments: Mapping[str, Any]

    @property
    def dtype(self) -> str:
        """The bits of an element: rules do not know its dtype."""
        return f"{8 * self.arguments['element_size']}-bit"

    @property
    def shape(self) -> dict[str, Any]:
        """The shape class: the other arguments, of which ROUNDED are rounded."""
        sizes = {name: value for name, value in self.arguments.items() if name != "element_size"}
        return {name: next_power_of_2(value) if name in ROUNDED else value for name, value in sizes.items()}

    @property
    def key(self) -> Key:
        return self.op, self.dtype, tuple(sorted(self.shape.items()))


# By rule, which fields of an answer may be varied.
TUNABLE: dict[str, Varied] = {}

_noted: dict[Key, tuple[Question, Any]] | None = None
_trial: Mapping[Key, Changes] | None = None
# Families whose entries are no longer used, because a launch did not fit.
_given_up: set[str] = set()


def tunable(varied: Varied) -> Callable[[Callable[..., Any]], Any]:
    """Makes a launch rule one whose answers, NamedTuples, a table may replace.

    The rule takes `element_size` among its arguments and a device last. `varied` names the fields of an answer that
    can be changed by themselves, so that the kernels are still right.
    """

    def decorate(rule: Callable[..., Any]) -> Any:
        op = f"{rule.__module__.split('.')[-2]}.{rule.__name__}"
        *names, _ = inspect.signature(rule).parameters
        TUNABLE[op] = varied

        @functools.wraps(rule)
        def choose(*arguments: Any) -> Any:
            *values, device = arguments
            question, answer = Question(op, dict(zip(names, values, strict=True))), rule(*arguments)
            if answer is None:
                return None
            if _noted is not None:
                _noted.setdefault(question.key, (question, answer))
            if _trial is not None:
                return answer._replace(**_trial.get(question.key, {}))
            return _from_tables(question, answer, device)

        return launch_rule(choose)

    return decorate


def _from_tables(question: Question, answer: Any, device: DeviceFacts) -> Any:
    if question.op.partition(".")[0] in _given_up:
        return answer
    entry = entries_for(device).get(question.key)
    # Where the rule has changed, or chooses something else for this member of the class, the entry says nothing.
    if entry is None or any(getattr(answer, name, None) != value for name, value in entry["instead_of"].items()):
        return answer
    return answer._replace(**entry["config"])


@contextlib.contextmanager
def noting() -> Iterator[dict[Key, tuple[Question, Any]]]:
    """Collects the questions that rules are asked inside, and what they answer, one for each shape class."""
    global _noted
    previous, _noted = _noted, {}
    forget_launches()
    try:
        yield _noted
    finally:
        _noted = previous


@contextlib.contextmanager
def trying(changes: Mapping[Key, Changes]) -> Iterator[None]:
    """Replaces these fields of rules' answers inside; no table is looked into."""
    global _trial
    previous, _trial = _trial, changes
    forget_launches()
    try:
        yield
    finally:
        _trial = previous
        forget_launches()


# Tables ---------------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """The entries of a file for one GPU, driver and Triton; `problem` says why they are not used here, if not."""

    path: Path
    gpu: str = ""
    driver: int = 0
    triton: str = ""
    entries: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None


def versions() -> dict[str, Any]:
    """What entries are good for besides the GPU: the driver's major version and Triton's version."""
    version = ctypes.c_int(0)
    if torch.cuda.is_available():
        library, read = ("libamdhip64.so", "hipDriverGetVersion") if torch.version.hip else _CUDA_DRIVER
        with contextlib.suppress(OSError):
            getattr(ctypes.CDLL(library), read)(ctypes.byref(version))
    has_triton = _library.triton_problem() is None  # rules are asked without it too
    return {
        "driver": version.value // 1000,
        "triton": importlib.import_module("triton").__version__ if has_triton else "",
    }


@functools.cache
def tables() -> tuple[Table, ...]:
    """Every table there is: those that come with the package, then those of `APEX_TUNED` or the user's cache."""
    chosen = _env.tuned_launches()
    if chosen is None:
        return ()
    found = [table for path in (*sorted(SHIPPED.glob("*.json")), chosen) for table in read_tables(path)]
    here = versions()
    for table in found:
        differing = [f"{name} {getattr(table, name)}" for name in here if getattr(table, name) != here[name]]
        if table.problem is None and differing:
            now = ", ".join(f"{name} {value}" for name, value in here.items())
            table.problem = f"made with {', '.join(differing)}; here is {now}"
    return tuple(found)


def read_tables(path: Path) -> list[Table]:
    """The tables of a file; one with a problem where it cannot be read, none where there is no file."""
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            return [Table(path, problem=f"has format {document['format']}, not {FORMAT}: make it again")]
        found = [Table(path, **table) for table in document["tables"]]
        for table in found:
            for entry in table.entries:
                hash(key_of(entry)), fits(entry)  # which raise where an entry is no entry
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [Table(path, problem=f"is no table of tuned launches: {type(error).__name__}: {error}")]


def key_of(entry: Mapping[str, Any]) -> Key:
    return entry["op"], entry["dtype"], tuple(sorted(entry["shape"].items()))


@functools.cache
def entries_for(device: DeviceFacts) -> dict[Key, dict[str, Any]]:
    """The entries in use on a device; says once which tables of the user are not."""
    entries: dict[Key, dict[str, Any]] = {}
    for table in tables():
        if table.problem is None and table.gpu == device.name:
            entries |= {key_of(entry): entry for entry in table.entries if fits(entry)}
        elif table.problem is not None and table.gpu in ("", device.name) and table.path.parent != SHIPPED:
            _library.logger.warning("the tuned launches of %s are not used: %s", table.path, table.problem)
    return entries


def give_up(family: str, error: Exception) -> bool:
    """Whether to launch again what raised `error`: now without the tuned launches of its family, if it had some.

    A launch with other options than the one that was tuned may need more shared memory than there is.
    """
    ops = [entry["op"] for table in tables() if table.problem is None for entry in table.entries]
    tuned = family not in _given_up and any(op.startswith(f"{family}.") for op in ops)
    if type(error).__name__ != "OutOfResources" or _trial is not None or not tuned:
        return False
    _given_up.add(family)
    forget_launches()
    _library.logger.warning("the tuned launches of %s are no longer used, since one does not fit: %s", family, error)
    return True


def falls_back(family: str) -> Callable[[Callable[..., Any]], Any]:
    """Lets a function that launches kernels of a family, and is no `Op`'s, launch again where it is to `give_up`."""

    def decorate(launch: Callable[..., Any]) -> Any:
        @functools.wraps(launch)
        def run(*arguments: Any) -> Any:
            try:
                return launch(*arguments)
            except Exception as error:
                if not give_up(family, error):
                    raise
            return launch(*arguments)

        return run

    return decorate


def configurations() -> dict[Key, Changes]:
    """What the tables for this Triton change on any GPU: for compiling ahead, where the GPU and its driver are not."""
    triton = versions()["triton"]
    entries = [entry for table in tables() if table.triton == triton for entry in table.entries if fits(entry)]
    return {key_of(entry): entry["config"] for entry in entries}


def fits(entry: Mapping[str, Any]) -> bool:
    """Whether an entry replaces whole numbers by whole numbers, and names the same fields for both."""
    changed = (*entry["config"].values(), *entry["instead_of"].values())
    return entry["config"].keys() == entry["instead_of"].keys() and all(type(value) is int for value in changed)


def forget_tables() -> None:
    """Lets the tables be read again."""
    _given_up.clear()
    tables.cache_clear()
    entries_for.cache_clear()
    forget_launches()
