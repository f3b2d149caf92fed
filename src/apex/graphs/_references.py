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

from ._state import Place, tensors_in

_NUMBERS = (bool, int, float, complex, str, type(None))


class References:
    """What a function reads from outside: numbers, flags and strings, tensors, modules.

    Looked at: variables of enclosing functions, globals of its file, attributes of `self` and of other objects that it
    names, items of dicts and lists, and attributes and items of these; also of functions and methods that it calls, if
    they are in the same file. Of modules, also among its `arguments`: their mode, and the tensors that they hold. Not:
    numbers in modules, in lists and in objects that are arguments.
    """

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        self.scalers: list[torch.amp.GradScaler] = []
        # Numbers, flags and strings, modules and optimizers, lengths of lists.
        self.plain: list[Place] = []
        self._tensors: list[Place] = []
        self._modules: dict[int, nn.Module] = {}
        self._seen: set[tuple[int, int]] = set()
        self._look(function, None)
        for argument in arguments:
            self._note(argument)

    def places(self) -> list[Place]:
        """Where all of this is, and modes of modules."""
        found = [*self.plain, *self._tensors]
        for module in self._modules.values():
            found.append(Place.of(module, "training"))
            entries = {**vars(module), **module._buffers}
            found += [Place.of(module, key, optional=True) for key, value in entries.items() if _holds_tensors(value)]
        return found

    def parameters(self) -> list[torch.Tensor]:
        """Those of the modules."""
        found = (param for module in self._modules.values() for param in module._parameters.values())
        return [param for param in found if param is not None and type(param) in (torch.Tensor, nn.Parameter)]

    def _note(self, value: Any) -> bool:
        """Whether a value is a module, an optimizer or a scaler."""
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
            function = function.func
        if not isinstance(function, FunctionType | MethodType):
            function = getattr(function, "__call__")  # noqa: B004, B009  an object that can be called
        plain, owner = _unwrapped(function), getattr(function, "__self__", None)
        code = getattr(plain, "__code__", None)
        if code is None or (id(plain), id(owner)) in self._seen or file not in (None, code.co_filename):
            return
        self._seen.add((id(plain), id(owner)))
        names = _Names(code)
        places = [Place(name, plain.__globals__, (name,)) for name in sorted(names.globals & plain.__globals__.keys())]
        for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
            places.append(Place(name, cell, ("cell_contents",)))
        if isinstance(function, MethodType):
            places.append(Place(code.co_varnames[0] if code.co_varnames else "self", function, ("__self__",)))
        for _ in range(3):  # variables; their attributes and items; and what these have
            for place in places:
                self._add(place._replace(variable=True), code.co_filename)
            places = [part for place in places for part in _parts(place, names)]

    def _add(self, place: Place, file: str) -> None:
        value = place.read()
        if isinstance(value, _NUMBERS) or self._note(value):
            self.plain.append(place)
        elif isinstance(value, FunctionType | MethodType | functools.partial):
            self._look(value, file)
        elif _holds_tensors(value):
            self._tensors.append(place)
        elif isinstance(value, list | set):
            self.plain.append(Place(f"the length of {place.name}", place.root, (*place.path, len)))


def _parts(place: Place, names: _Names) -> Iterator[Place]:
    """Attributes and methods of an object, and items of a dict, named by a function; tensors and modules in a list."""
    value = place.read()
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key in names.strings or _holds_tensors(item) or isinstance(item, nn.Module | torch.optim.Optimizer):
                yield Place(f"{place.name}[{key!r}]", place.root, (*place.path, key))
    elif not isinstance(value, ModuleType | type | nn.Module | torch.Tensor | torch.optim.Optimizer):
        for variable, attribute in sorted(names.attributes):
            is_method = isinstance(getattr(type(value), attribute, None), FunctionType)
            if variable == place.name and (is_method or attribute in getattr(value, "__dict__", ())):
                yield Place(f"{variable}.{attribute}", place.root, (*place.path, attribute))


def _holds_tensors(value: Any) -> bool:
    """Whether something is a tensor that is no parameter, or a tuple of such."""
    return bool(tensors_in(value)) and not getattr(value, "requires_grad", False)


def _unwrapped(function: Any) -> Any:
    """The function of a method, and what it was wrapped around."""
    return inspect.unwrap(getattr(function, "__func__", function))


class _Names:
    """What code names, with that of the functions in it: globals, variables with an attribute of theirs, strings."""

    def __init__(self, code: CodeType) -> None:
        self.globals: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.strings = {constant for constant in code.co_consts if isinstance(constant, str)}
        variable = None
        for each in dis.get_instructions(code):
            if each.opname in ("COPY", "DUP_TOP"):  # between a variable and its attribute in `self.count += 1`
                continue
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.globals.add(each.argval)
            is_attribute = each.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
            if is_attribute and variable is not None:
                self.attributes.add((variable, each.argval))
            # Two variables may be loaded by one instruction.
            last = each.argval[-1] if isinstance(each.argval, tuple) and each.argval else each.argval
            is_variable = each.opname.startswith("LOAD_") and each.opname != "LOAD_CONST" and not is_attribute
            if is_attribute and variable is not None:
                variable = f"{variable}.{each.argval}"
            else:
                variable = last if is_variable and isinstance(last, str) else None
        for inner in (_Names(constant) for constant in code.co_consts if isinstance(constant, CodeType)):
            self.globals |= inner.globals
            self.attributes |= inner.attributes
            self.strings |= inner.strings


def line_of(error: BaseException, function: Callable[..., Any]) -> str | None:
    """The innermost line of an error that is in the file of the function."""
    code = getattr(_unwrapped(getattr(function, "func", function)), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f"{own[-1].filename}:{own[-1].lineno}" + (f" ({own[-1].line})" if own[-1].line else "") if own else None
