"""What a Python function refers to besides its arguments: numbers, which a graph would freeze, and modules."""

from __future__ import annotations

import dis
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..ops._recording import Guard

_NUMBERS = (bool, int, float, complex, str, type(None))


class References:
    """Numbers, flags and strings that a function reads from outside, and whether the modules that it names are trained.

    Looked at: variables of enclosing functions, globals of its file, attributes of `self` and of other objects that it
    names, items of dicts; also of functions in the same file that it calls. Not: what is inside of modules and lists.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._readers: dict[str, Callable[[], Any]] = {}
        self._modules: list[nn.Module] = []
        self._seen: set[int] = set()
        self._look(function, None)
        each = {id(module): module for root in self._modules for module in root.modules()}
        if each:  # a module in evaluation mode computes something else
            self._readers["the training mode of modules"] = lambda: [module.training for module in each.values()]

    def guards(self) -> list[Guard]:
        """Everything as it is now."""
        return [Guard(name, read, read()) for name, read in self._readers.items()]

    def _look(self, function: Any, file: str | None) -> None:
        """At a function, if it is in the given file."""
        if isinstance(function, functools.partial):
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
            self._add(owner, functools.partial(getattr, function, "__self__"), code)
        plain = inspect.unwrap(getattr(function, "__func__", function))
        for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
            self._add(name, functools.partial(getattr, cell, "cell_contents"), code)
        for name in sorted(_loaded(code) & plain.__globals__.keys()):
            self._add(name, functools.partial(plain.__globals__.__getitem__, name), code)

    def _add(self, name: str, read: Callable[[], Any], code: CodeType, depth: int = 0) -> None:
        try:
            value = read()
        except ValueError:  # a variable that has no value yet
            return
        if isinstance(value, _NUMBERS):
            self._readers[name] = read
        elif isinstance(value, FunctionType | MethodType | functools.partial):
            self._look(value, code.co_filename)
        elif isinstance(value, nn.Module | torch.optim.Optimizer):
            self._readers[f"which object {name} is"] = lambda: id(read())
            if isinstance(value, nn.Module):
                self._modules.append(value)
        elif depth == 0 and not isinstance(value, ModuleType | type | torch.Tensor):
            for part, reader in _parts(name, value, code):
                self._add(part, reader, code, depth + 1)


def _parts(name: str, value: Any, code: CodeType) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Attributes of an object, and items of a dict, that a function names."""
    if isinstance(value, dict):
        constants = (constant for inner in _with_inner(code) for constant in inner.co_consts)
        for key in (each for each in constants if isinstance(each, str) and each in value):
            yield f"{name}[{key!r}]", functools.partial(value.__getitem__, key)
    else:
        for owner, attribute in sorted(_attributes(code)):
            if owner == name and attribute in getattr(value, "__dict__", ()):
                yield f"{name}.{attribute}", functools.partial(getattr, value, attribute)


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


def _attributes(code: CodeType) -> set[tuple[str, str]]:
    """Variables, each with an attribute that code takes of it."""
    found = set()
    for inner in _with_inner(code):
        variable = None
        for each in dis.get_instructions(inner):
            if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and variable is not None:
                found.add((variable, each.argval))
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
