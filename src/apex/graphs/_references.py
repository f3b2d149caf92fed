"""What a Python function refers to besides its arguments: numbers, which a graph would freeze, tensors and modules."""

from __future__ import annotations

import dis
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..ops._recording import Guard
from ._state import Place, holds_tensors

_NUMBERS = (bool, int, float, complex, str, type(None))
MODES = "the training mode of modules"


class References:
    """What a function reads from outside: numbers, flags and strings, tensors, modules.

    Looked at: variables of enclosing functions, globals of its file, attributes of `self` and of other objects that it
    names, items of dicts and lists; also of functions in the same file that it calls. Of modules, also of those among
    its `arguments`: their mode, and the tensors that they hold. Not: numbers inside of modules and lists.
    """

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        self._readers: dict[str, Callable[[], Any]] = {}
        self._tensors: list[Place] = []
        self._modules: dict[int, nn.Module] = {}
        self.scalers: list[Any] = []
        self._seen: set[int] = set()
        self._look(function, None)
        for argument in arguments:
            self._note(argument)
        if self._modules:  # a module in evaluation mode computes something else
            self._readers[MODES] = lambda: [module.training for module in self._modules.values()]

    def guards(self) -> list[Guard]:
        """Everything as it is now."""
        return [Guard(name, read, read()) for name, read in self._readers.items()]

    def places(self) -> list[Place]:
        """Where it finds tensors, or may put others; and modes of modules."""
        found = list(self._tensors)
        for module in self._modules.values():
            for entries in (vars(module), module._buffers):
                for key, value in entries.items():
                    if key == "training" or holds_tensors(value):
                        name = f"{type(module).__name__}.{key}"
                        found.append(Place(name, lambda entries=entries: entries, key, may_change=True))  # type: ignore[misc]
        return found

    def parameters(self) -> list[torch.Tensor]:
        """Those of the modules."""
        found = (param for module in self._modules.values() for param in module._parameters.values())
        return [param for param in found if param is not None and type(param) in (torch.Tensor, nn.Parameter)]

    def _note(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            self._modules.update((id(module), module) for module in value.modules())
        elif isinstance(value, torch.amp.GradScaler):
            self.scalers.append(value)
        return isinstance(value, nn.Module | torch.amp.GradScaler | torch.optim.Optimizer)

    def _look(self, function: Any, file: str | None) -> None:
        """At a function, if it is in the given file."""
        if isinstance(function, functools.partial):
            for argument in (*function.args, *function.keywords.values()):
                self._note(argument)
            self._look(function.func, file)
            return
        if not isinstance(function, FunctionType | MethodType):
            function = getattr(function, "__call__")  # noqa: B004, B009  an object that can be called
        code = code_of(function)
        if code is None or id(code) in self._seen or (file is not None and code.co_filename != file):
            return
        self._seen.add(id(code))
        if isinstance(function, MethodType):
            owner = code.co_varnames[0] if code.co_varnames else "self"
            self._add(Place(owner, lambda: function, "__self__"), code)
        plain = inspect.unwrap(getattr(function, "__func__", function))
        for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
            self._add(Place(name, lambda cell=cell: cell, "cell_contents", named=True), code)  # type: ignore[misc]
        for name in sorted(_loaded(code) & plain.__globals__.keys()):
            self._add(Place(name, lambda: plain.__globals__, name, named=True), code)

    def _add(self, place: Place, code: CodeType, depth: int = 0) -> None:
        value = place.read()
        if isinstance(value, _NUMBERS):
            if not place.passing:
                self._readers[place.name] = place.read
        elif isinstance(value, FunctionType | MethodType | functools.partial):
            self._look(value, code.co_filename)
        elif holds_tensors(value):
            self._tensors.append(place)
        elif self._note(value):
            self._readers[f"which object {place.name} is"] = lambda: id(place.read())
        elif depth == 0 and not isinstance(value, ModuleType | type | torch.Tensor):
            if isinstance(value, list | set):
                self._readers[f"the length of {place.name}"] = lambda: len(place.read())
            for part in _parts(place, value, code):
                self._add(part, code, depth + 1)


def _parts(place: Place, value: Any, code: CodeType) -> Iterator[Place]:
    """Attributes of an object, and items of a dict, that a function names; tensors in a dict or list."""
    if isinstance(value, dict | list):
        constants = {
            constant for inner in _with_inner(code) for constant in inner.co_consts if isinstance(constant, str)
        }
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key in constants or holds_tensors(item):
                yield Place(f"{place.name}[{key!r}]", place.read, key, named=True)
    else:
        for (owner, attribute), is_read in sorted(_attributes(code).items()):
            if owner == place.name and attribute in getattr(value, "__dict__", ()):
                yield Place(f"{place.name}.{attribute}", place.read, attribute, passing=not is_read, named=True)


def code_of(function: Any) -> CodeType | None:
    """The code of a function, of what it was wrapped around, or of a method."""
    return getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _loaded(code: CodeType) -> set[str]:
    """Globals that code reads."""
    instructions = (each for inner in _with_inner(code) for each in dis.get_instructions(inner))
    return {each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _attributes(code: CodeType) -> dict[tuple[str, str], bool]:
    """Variables, each with an attribute that code reads or sets, and whether it reads it."""
    found: dict[tuple[str, str], bool] = {}
    for inner in _with_inner(code):
        variable = None
        for each in dis.get_instructions(inner):
            if each.opname in ("COPY", "DUP_TOP"):  # between a variable and its attribute in `self.count += 1`
                continue
            if each.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and variable is not None:
                key = variable, each.argval
                found[key] = found.get(key, False) or each.opname != "STORE_ATTR"
            # Two variables may be loaded by one instruction.
            last = each.argval[-1] if isinstance(each.argval, tuple) and each.argval else each.argval
            variable = last if each.opname.startswith("LOAD_") and isinstance(last, str) else None
            if each.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST"):
                variable = None
    return found


def line_of(error: BaseException, function: Callable[..., Any]) -> str | None:
    """The innermost line of an error that is in the file of the function."""
    code = code_of(getattr(function, "func", function))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f"{own[-1].filename}:{own[-1].lineno}" + (f" ({own[-1].line})" if own[-1].line else "") if own else None
