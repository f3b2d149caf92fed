"""What a Python function refers to: numbers, which a graph would freeze, tensors and modules; and where they are."""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import math
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..ops.batch_norm import BatchStatistics

# What is compared: no tensor, and nothing that has parts.
PLAIN = bool | int | float | complex | str | None | enum.Enum | torch.dtype | torch.device
MISSING = object()
# Items of a dict or list whose numbers are looked at; and how far into dicts and lists in each other.
_FEW_ITEMS, _LONGEST_PATH = 64, 6
_CLOSED = nn.Module | torch.optim.Optimizer | Tensor


class Place(NamedTuple):
    """Somewhere in Python: the attributes and keys that lead from `root` to what is there; `len` for how many."""

    name: str
    root: Any
    path: tuple[Any, ...]
    # Most steps replace what is there without reading it, as they do with gradients: see `Recording.reads`.
    temporary: bool = False
    # A variable of the function, an attribute of one, an item: a tensor that is only read stays there.
    variable: bool = False

    @staticmethod
    def of(root: Any, attribute: str, temporary: bool = False) -> Place:
        """An attribute, with a name such as "FusedAdam.param_groups"."""
        return Place(f"{type(root).__name__}.{attribute}", root, (attribute,), temporary)

    def item(self, key: Any) -> Place:
        """An item of the dict, list or tuple that is there, or how many there are."""
        shown = f"[{key!r}]" if _is_plain(key) else ""  # of a tensor or a module that takes long
        name = f"the length of {self.name}" if key is len else self.name + shown
        return self._replace(name=name, path=(*self.path, key))

    def read(self) -> Any:
        """What is there, `MISSING` if nothing is."""
        found = self.root
        try:
            for key in self.path:
                if key is len:
                    found = len(found)
                elif isinstance(found, dict):
                    found = found.get(key, MISSING)
                else:
                    found = getattr(found, key) if isinstance(key, str) else found[key]
        except Exception:  # a variable that has no value yet, or whatever the code of an attribute raises
            return MISSING
        return found

    def owners(self) -> list[tuple[Place, Any]]:
        """The objects, dicts and lists that it is in, the outermost first."""
        places = [self._replace(path=self.path[:end]) for end in range(1, len(self.path))]
        return [(place, place.read()) for place in places]

    def put(self, value: Any) -> None:
        """Changes it; where it is an item of a tuple, that becomes another one, and a list may become longer."""
        place, key = self._replace(path=self.path[:-1]), self.path[-1]
        owner = place.read()
        if isinstance(owner, tuple):
            items = (*owner[:key], value, *owner[key + 1 :])
            place.put(owner._make(items) if hasattr(owner, "_make") else items)
        elif isinstance(owner, list):
            owner[key : key + 1] = [value]
        else:
            (operator.setitem if isinstance(owner, dict) else setattr)(owner, key, value)

    def has(self, value: Any) -> bool:
        """Whether `value` is there, of all but tensors something equal."""
        found = self.read()
        if found is value or isinstance(found, Tensor) or isinstance(value, Tensor):
            return found is value
        with contextlib.suppress(Exception):  # arrays, and objects that compare in ways of their own
            return bool(found == value)
        return False


class References:
    """What a function reads: numbers, flags and strings, tensors, modules.

    Looked at: its arguments and their defaults, variables of enclosing functions, globals of its file, and attributes
    of all these that it names, over several dots; items of dicts and lists; the same of functions and methods that it
    calls, if they are in the same file. Of modules: their mode, and the tensors that they hold. Not: numbers in
    modules, behind properties, and in lists of more than 64.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, Any] = ((), {})) -> None:
        self.scalers: list[torch.amp.GradScaler] = []
        # Where numbers, flags and strings, tensors, modules and optimizers are, and lengths of lists.
        self.variables: list[Place] = []
        self._modules: dict[int, nn.Module] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._look(function, None, *arguments)
        for leaf in tree_leaves(arguments):
            self._note(leaf)

    def places(self) -> list[Place]:
        """Where all of this is, modes of modules, and tensors in them."""
        found = [*self.variables]
        for module in self._modules.values():
            found.append(Place.of(module, "training"))
            for entries in (vars(module), module._buffers):
                for key in {*entries.keys()} - {"_parameters", "_buffers"}:
                    # Norms keep statistics of the last batch for who asks, and compute with them only where
                    # `BatchStatistics.asked` says so.
                    is_kept = isinstance(entries[key], BatchStatistics)
                    place = Place(f"{type(module).__name__}.{key}", entries, (key,), is_kept, variable=True)
                    parts = parts_of(place, few=_FEW_ITEMS)
                    found += [part for part in parts if _is_tensor(part.read())]
                    if is_kept:  # other shapes may come by another kernel, which keeps something else
                        kept = place.item(BatchStatistics._fields.index("inverted"))
                        found.append(kept._replace(temporary=False))
        return found

    def entries(self) -> list[Mapping[str, Any]]:
        """Dicts of the parts of modules: other modules, parameters and hooks."""
        names = ("_modules", "_parameters", "_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
        return [getattr(module, name) for module in self._modules.values() for name in names]

    def _note(self, value: Any) -> bool:
        """Whether a value is a module, an optimizer or a scaler."""
        if isinstance(value, nn.Module):
            self._modules.update((id(module), module) for module in value.modules())
        elif isinstance(value, torch.amp.GradScaler):
            self.scalers.append(value)
        return isinstance(value, nn.Module | torch.amp.GradScaler | torch.optim.Optimizer)

    def _look(self, function: Any, file: str | None, args: Any = (), kwargs: Any = None) -> None:
        """At a function, if it is in the given file."""
        kwargs = kwargs or {}
        if isinstance(function, functools.partial):
            self._look(function.func, file, (*function.args, *args), {**function.keywords, **kwargs})
            return
        is_wrapper = "__wrapped__" in getattr(function, "__dict__", ())
        if not is_wrapper and not isinstance(function, FunctionType | MethodType):
            function = getattr(function, "__call__")  # noqa: B004, B009  an object that can be called
        if isinstance(function, MethodType):
            args = (function.__self__, *args)
        plain = _unwrapped(function)
        code, key = getattr(plain, "__code__", None), tuple(map(id, (plain, *args, *kwargs.values())))
        if code is None or key in self._seen or file not in (None, code.co_filename):
            return
        self._seen.add(key)
        names = _Names(code)
        places = {name: Place(name, plain.__globals__, (name,)) for name in names.globals & plain.__globals__.keys()}
        for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
            places[name] = Place(name, cell, ("cell_contents",))
        with contextlib.suppress(TypeError):  # what it is wrapped in takes other arguments
            given = inspect.signature(plain).bind_partial(*args, **kwargs)
            given.apply_defaults()
            objects = [name for name, value in given.arguments.items() if not _is_plain(value)]
            places |= {name: Place(name, given.arguments, (name,)) for name in objects}
        if plain.__defaults__:
            self.variables.append(Place(f"the defaults of {plain.__name__}", plain, ("__defaults__",)))
        for path in sorted(names.attributes):
            of, _, attribute = path.rpartition(".")
            if of in places and _is_open(places[of].read(), attribute):
                places[path] = Place(path, places[of].root, (*places[of].path, attribute))
        for name in sorted(places):
            for part in parts_of(places[name]._replace(variable=True), names.strings, _FEW_ITEMS):
                value = part.read()
                if _is_tensor(value) or _is_plain(value) or self._note(value):
                    self.variables.append(part)
                elif callable(value) and not isinstance(value, type):
                    self._look(value, code.co_filename)


def parts_of(place: Place, names: Set[str] = frozenset(), few: float = math.inf) -> Iterator[Place]:
    """A place; or where the items of a dict, list or tuple are that is there, and how many these are.

    Of a dict those that are named, or all if none is; of more than `few`, tensors and modules alone.
    """
    value = place.read()
    if _is_plain(value) or not isinstance(value, dict | list | tuple | set) or len(place.path) > _LONGEST_PATH:
        yield place
        return
    items = dict(value) if isinstance(value, dict) else {} if isinstance(value, set) else dict(enumerate(value))
    named = items.keys() & names
    for key, item in items.items():
        matters = key in named if named else len(items) <= few
        if matters or isinstance(item, _CLOSED) or (isinstance(item, tuple) and not _is_plain(item)):
            yield from parts_of(place.item(key), names, few)
    if not named:
        yield place.item(len)


def _is_open(value: Any, attribute: str) -> bool:
    """Whether an attribute of an object may be read: it runs no code of a property, and is not PyTorch's."""
    found = inspect.getattr_static(type(value), attribute, None)
    return not isinstance(value, _CLOSED) and not isinstance(found, property | functools.cached_property)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad


def _unwrapped(function: Any) -> Any:
    """The function of a method, and what it was wrapped around."""
    return inspect.unwrap(getattr(function, "__func__", function))


class _Names:
    """What code names, with that of the functions in it: globals, variables with attributes of theirs, strings."""

    def __init__(self, code: CodeType) -> None:
        self.globals: set[str] = set()
        # "self.config", "self.config.weight"
        self.attributes: set[str] = set()
        self.strings = {constant for constant in code.co_consts if isinstance(constant, str)}
        path = ""  # what was loaded last
        own: dict[str, str] = {}  # what was put into variables of the code itself
        for each in dis.get_instructions(code):
            # One instruction may load two variables, or store one and load another.
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            if each.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
                path = path and f"{path}.{names[0]}"
                self.attributes.add(path)
                continue
            if each.opname.startswith("STORE_FAST"):
                own[names[0]] = path
            if "LOAD_" in each.opname and each.opname != "LOAD_CONST":
                path = own.get(names[-1], str(names[-1]))
            elif each.opname not in ("COPY", "DUP_TOP"):  # between a variable and its attribute in `self.count += 1`
                path = ""
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.globals.add(path)
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
