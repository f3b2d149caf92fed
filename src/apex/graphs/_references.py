"""Search for the numbers, tensors and modules that a Python function reads. A graph would freeze the numbers."""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import io
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

# Types whose values are compared: neither tensors nor containers.
PLAIN = bool | int | float | complex | str | None | enum.Enum | torch.dtype | torch.device
MISSING = object()
# Most items of a dict or list whose numbers are compared, and the deepest nesting of dicts and lists.
_FEW_ITEMS, _LONGEST_PATH = 64, 6
_CLOSED = nn.Module | torch.optim.Optimizer | Tensor


class StateLocation(NamedTuple):
    """A location of a Python value: attributes and keys that lead to it from `root`. The key `len` means a length."""

    name: str
    root: Any
    path: tuple[Any, ...]
    # Whether most steps replace the value without reading it, as they do with gradients: see `CaptureContext.reads`.
    temporary: bool = False
    # Whether it is a variable of the function, or an attribute or item of one. A tensor that is only read there is not
    # replaced by the graph's copy.
    variable: bool = False

    @staticmethod
    def of(root: Any, attribute: str, temporary: bool = False) -> StateLocation:
        """Return the location of an attribute, with a name such as "FusedAdam.param_groups"."""
        return StateLocation(f"{type(root).__name__}.{attribute}", root, (attribute,), temporary)

    def item(self, key: Any) -> StateLocation:
        """Return the location of an item of a dict, list or tuple, or of its length if `key` is `len`."""
        shown = f"[{key!r}]" if _is_plain(key) else ""  # the repr of a tensor or a module is slow
        name = f"the length of {self.name}" if key is len else self.name + shown
        return self._replace(name=name, path=(*self.path, key))

    def read(self) -> Any:
        """Return the value at this location, or `MISSING` if there is none."""
        value = self.root
        try:
            for key in self.path:
                if key is len:
                    value = len(value)
                elif isinstance(value, dict):
                    value = value.get(key, MISSING)
                else:
                    value = getattr(value, key) if isinstance(key, str) else value[key]
        except Exception:  # an unassigned variable, or any error raised by the code of an attribute
            return MISSING
        return value

    def owners(self) -> list[tuple[StateLocation, Any]]:
        """Return the objects, dicts and lists that contain the value, with their locations, the outermost first."""
        locations = [self._replace(path=self.path[:end]) for end in range(1, len(self.path))]
        return [(location, location.read()) for location in locations]

    def put(self, value: Any) -> None:
        """Set the value. A tuple that contains it is replaced by a new tuple; a list may grow by one item."""
        location, key = self._replace(path=self.path[:-1]), self.path[-1]
        owner = location.read()
        if isinstance(owner, tuple):
            items = (*owner[:key], value, *owner[key + 1 :])
            location.put(owner._make(items) if hasattr(owner, "_make") else items)
        elif isinstance(owner, list):
            owner[key : key + 1] = [value]
        else:
            (operator.setitem if isinstance(owner, dict) else setattr)(owner, key, value)

    def has(self, value: Any) -> bool:
        """Return whether the location holds `value`: the same tensor, or otherwise an equal value."""
        current = self.read()
        if current is value or isinstance(current, Tensor) or isinstance(value, Tensor):
            return current is value
        with contextlib.suppress(Exception):  # arrays and objects may define comparison in their own way
            return bool(current == value)
        return False


class References:
    """The values that a function reads: numbers, flags and strings, tensors, modules.

    The search covers the function's arguments and their defaults, variables of enclosing functions, globals of its
    file, and attributes of all these that its code names, also over several dots; items of dicts and lists; and, in the
    same way, functions and methods of the same file that it calls. For modules it covers their mode and the tensors
    that they hold, and `module_numbers` their numbers. It skips numbers behind properties, and in lists of more than 64
    items.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, Any] = ((), {})) -> None:
        self.scalers: list[torch.amp.GradScaler] = []
        # Names of iterators, such as a data loader's, which a replay would not advance.
        self.iterators: list[str] = []
        # Locations of numbers, flags and strings, tensors, modules and optimizers, and of lengths of lists.
        self.variables: list[StateLocation] = []
        self._modules: dict[int, nn.Module] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._search(function, None, *arguments)
        for leaf in tree_leaves(arguments):
            self._note(leaf)

    def locations(self) -> list[StateLocation]:
        """Return the location of every variable, of every module's `training` flag, and of every tensor in a module."""
        locations = [*self.variables]
        for module in self._modules.values():
            locations.append(StateLocation.of(module, "training"))
            for entries in (vars(module), module._buffers):
                for key in {*entries.keys()} - {"_parameters", "_buffers"}:
                    # Norms store statistics of the last batch for callers. They compute with them only if
                    # `BatchStatistics.asked` is set.
                    is_statistics = isinstance(entries[key], BatchStatistics)
                    location = StateLocation(
                        f"{type(module).__name__}.{key}", entries, (key,), is_statistics, variable=True
                    )
                    parts = parts_of(location, few=_FEW_ITEMS)
                    locations += [part for part in parts if _is_tensor(part.read())]
                    if is_statistics:  # other shapes may use another kernel, which keeps other statistics
                        inverted = location.item(BatchStatistics._fields.index("inverted"))
                        locations.append(inverted._replace(temporary=False))
        return locations

    def module_numbers(self) -> list[StateLocation]:
        """Return the locations of numbers and strings in modules, without their modes.

        They are too many to be compared before every replay.
        """
        return [
            StateLocation(f"{type(module).__name__}.{key}", vars(module), (key,))
            for module in self._modules.values()
            for key, value in vars(module).items()
            if key != "training" and isinstance(value, bool | int | float | str)
        ]

    def entries(self) -> list[Mapping[str, Any]]:
        """Return the dicts of all modules that hold submodules, parameters and hooks."""
        names = ("_modules", "_parameters", "_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
        return [getattr(module, name) for module in self._modules.values() for name in names]

    def _note(self, value: Any) -> bool:
        """Note a module or scaler; return whether the value is a module, an optimizer or a scaler."""
        if isinstance(value, nn.Module):
            self._modules.update((id(module), module) for module in value.modules())
        elif isinstance(value, torch.amp.GradScaler):
            self.scalers.append(value)
        return isinstance(value, nn.Module | torch.amp.GradScaler | torch.optim.Optimizer)

    def _search(self, function: Any, file: str | None, args: Any = (), kwargs: Any = None) -> None:
        """Search a function for the values it reads; skip it if `file` is given and it is defined in another file."""
        kwargs = kwargs or {}
        if isinstance(function, functools.partial):
            self._search(function.func, file, (*function.args, *args), {**function.keywords, **kwargs})
            return
        is_wrapper = "__wrapped__" in getattr(function, "__dict__", ())
        if not is_wrapper and not isinstance(function, FunctionType | MethodType):
            function = getattr(function, "__call__")  # noqa: B004, B009  a callable object
        if isinstance(function, MethodType):
            args = (function.__self__, *args)
        plain = _unwrapped(function)
        code, key = getattr(plain, "__code__", None), tuple(map(id, (plain, *args, *kwargs.values())))
        if code is None or key in self._seen or file not in (None, code.co_filename):
            return
        self._seen.add(key)
        names = _Names(code)
        locations = {
            name: StateLocation(name, plain.__globals__, (name,)) for name in names.globals & plain.__globals__.keys()
        }
        for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
            locations[name] = StateLocation(name, cell, ("cell_contents",))
        with contextlib.suppress(TypeError):  # a wrapper may take other arguments than the wrapped function
            bound = inspect.signature(plain).bind_partial(*args, **kwargs)
            bound.apply_defaults()
            objects = [name for name, value in bound.arguments.items() if not _is_plain(value)]
            locations |= {name: StateLocation(name, bound.arguments, (name,)) for name in objects}
        if plain.__defaults__:
            self.variables.append(StateLocation(f"the defaults of {plain.__name__}", plain, ("__defaults__",)))
        for path in sorted(names.attributes):
            owner, _, attribute = path.rpartition(".")
            if owner in locations and _is_readable(locations[owner].read(), attribute):
                locations[path] = StateLocation(path, locations[owner].root, (*locations[owner].path, attribute))
        for name in sorted(locations):
            for part in parts_of(locations[name]._replace(variable=True), names.strings, _FEW_ITEMS):
                value = part.read()
                if _is_tensor(value) or _is_plain(value) or self._note(value):
                    self.variables.append(part)
                elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                    self.iterators.append(part.name)
                elif callable(value) and not isinstance(value, type):
                    self._search(value, code.co_filename)


def parts_of(location: StateLocation, names: Set[str] = frozenset(), few: float = math.inf) -> Iterator[StateLocation]:
    """Yield `location`; or, if it holds a dict, list or tuple, the locations of its items and of its length.

    From a dict, yield the items in `names`, or all items if it has none of them. If there are more than `few` items,
    yield only tensors and modules.
    """
    value = location.read()
    if _is_plain(value) or not isinstance(value, dict | list | tuple | set) or len(location.path) > _LONGEST_PATH:
        yield location
        return
    items = dict(value) if isinstance(value, dict) else {} if isinstance(value, set) else dict(enumerate(value))
    named = items.keys() & names
    for key, item in items.items():
        matters = key in named if named else len(items) <= few
        if matters or isinstance(item, _CLOSED) or (isinstance(item, tuple) and not _is_plain(item)):
            yield from parts_of(location.item(key), names, few)
    if not named:
        yield location.item(len)


def _is_readable(value: Any, attribute: str) -> bool:
    """Return whether an attribute may be read: it is no property, and its owner is no module, optimizer or tensor."""
    definition = inspect.getattr_static(type(value), attribute, None)
    return not isinstance(value, _CLOSED) and not isinstance(definition, property | functools.cached_property)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad


def _unwrapped(function: Any) -> Any:
    """Return the plain function behind a method or a wrapper."""
    return inspect.unwrap(getattr(function, "__func__", function))


class _Names:
    """Names in the code of a function and of its inner functions: globals, dotted attributes of variables, strings."""

    def __init__(self, code: CodeType) -> None:
        self.globals: set[str] = set()
        # "self.config", "self.config.weight"
        self.attributes: set[str] = set()
        self.strings = {constant for constant in code.co_consts if isinstance(constant, str)}
        path = ""  # dotted name of the value that was loaded last
        own: dict[str, str] = {}  # dotted names of the values in local variables
        for instruction in dis.get_instructions(code):
            operation, argument = instruction.opname, instruction.argval
            # One instruction may load two variables, or store one and load another.
            names = argument if isinstance(argument, tuple) else (argument,)
            if operation in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
                path = path and f"{path}.{names[0]}"
                self.attributes.add(path)
                continue
            if operation.startswith("STORE_FAST"):
                own[names[0]] = path
            if "LOAD_" in operation and operation != "LOAD_CONST":
                path = own.get(names[-1], str(names[-1]))
            elif operation not in ("COPY", "DUP_TOP"):  # they precede the attribute in `self.count += 1`
                path = ""
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.globals.add(path)
        for inner in (_Names(constant) for constant in code.co_consts if isinstance(constant, CodeType)):
            self.globals |= inner.globals
            self.attributes |= inner.attributes
            self.strings |= inner.strings


def line_of(error: BaseException, function: Callable[..., Any]) -> str | None:
    """Return the innermost line of an error's traceback that is in the file of `function`."""
    code = getattr(_unwrapped(getattr(function, "func", function)), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f"{own[-1].filename}:{own[-1].lineno}" + (f" ({own[-1].line})" if own[-1].line else "") if own else None
