"""Checks of arguments against annotations: `@checked` functions refuse a wrong value by name, before they do anything.

Annotations list the accepted values: `Tensor`, `int`, `float`, `bool`, `str`, `torch.dtype`, classes, functions, lists
and mappings of these, unions, and integers with a lower bound, `Count` and `Index`. `Any` accepts everything. A call
with arguments of the same types as an earlier one costs half a microsecond more. Under `torch.compile` nothing is
checked.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


class AtLeast(NamedTuple):
    """The lower bound of an integer, in an annotation."""

    least: int


@typing.runtime_checkable
class Stateful(typing.Protocol):
    """An object whose state can be saved and loaded: an optimizer, a scheduler, a scaler."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


@typing.runtime_checkable
class HasGroups(typing.Protocol):
    """An optimizer, or a wrapper of one."""

    param_groups: Any


Count = Annotated[int, AtLeast(1)]
Index = Annotated[int, AtLeast(0)]


class Kind(NamedTuple):
    """The values that an annotation accepts."""

    words: str
    # The error that a value deserves: TypeError, ValueError, or None if it is accepted.
    error: Callable[[Any], type[Exception] | None]
    # Exact types all of whose values are accepted: most arguments are compared with these alone.
    types: tuple[type, ...] = ()


def checked(function: F) -> F:
    """Make a function raise TypeError or ValueError for arguments that its annotations do not accept."""
    # Types of the arguments of earlier calls, all of whose values are accepted.
    accepted: set[tuple[Any, ...]] = set()
    # Made in the first call, because annotations may name classes that are defined below the function.
    kinds = functools.cache(lambda: _parameters(function))

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Raise for a wrong argument; return whether all values of these types are accepted."""
        positions, names = kinds()
        given = [
            *zip(args, positions, strict=False),
            *((value, (name, names.get(name))) for name, value in kwargs.items()),
        ]
        unsure = [(value, name, kind) for value, (name, kind) in given if kind and type(value) not in kind.types]
        for value, name, kind in unsure:
            error = kind.error(value)
            if error is not None:
                raise error(f"{name} must be {kind.words}, got {_shown(value)}")
        return not unsure

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            signature: tuple[Any, ...] = tuple(map(type, args))
            if kwargs:
                signature = (*signature, *kwargs, *map(type, kwargs.values()))
            if signature not in accepted and check(args, kwargs):
                accepted.add(signature)
        return function(*args, **kwargs)

    call.is_checked = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def check_fields(options: Any, owner: type) -> None:
    """Raise TypeError or ValueError for a field of `options` that its annotation in `owner` does not accept."""
    for name, hint in typing.get_type_hints(owner, include_extras=True).items():
        kind, value = kind_of(hint), getattr(options, name)
        error = None if kind is None else kind.error(value)
        if kind is not None and error is not None:
            raise error(f"{name} must be {kind.words}, got {_shown(value)}")


def _parameters(function: Callable[..., Any]) -> tuple[list[tuple[str, Kind | None]], dict[str, Kind | None]]:
    """Return the kinds of a function's parameters by position and by name; the names include keys of `Unpack`."""
    hints = typing.get_type_hints(function, include_extras=True)
    positions, names = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            if typing.get_origin(hints.get(name)) is Unpack:
                options = typing.get_type_hints(typing.get_args(hints[name])[0], include_extras=True)
                names.update({option: kind_of(hint) for option, hint in options.items()})
            continue
        names[name] = kind_of(hints.get(name, Any))
        if parameter.kind is not parameter.KEYWORD_ONLY:
            positions.append((name, names[name]))
    return positions, names


def _shown(value: Any) -> str:
    """Return a short description of a value for a message; the elements of a tensor are not read."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and type {value.dtype}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(each) for each in value[:3])}{', ...' if len(value) > 3 else ''}]"
    return f"{value!r:.80}"


def kind_of(hint: Any) -> Kind | None:
    """Return the kind of values that an annotation accepts; None if it accepts everything."""
    if hint in (Any, object):
        return None
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [kind_of(each) for each in arguments]
        return None if None in parts else _either([part for part in parts if part is not None])
    if origin is Annotated:
        return _bounded(next(each.least for each in arguments if isinstance(each, AtLeast)))
    if origin is collections.abc.Callable:
        return _SIMPLE[Callable]
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Iterable):
        return _several(origin, kind_of(arguments[0]) if arguments else None)
    if isinstance(origin or hint, type):
        return _instance(origin or hint)
    return None


def _instance(kind: type, words: str = "", *others: type) -> Kind:
    accepted = (kind, *others)
    words = words or f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
    return Kind(words, lambda value: None if isinstance(value, accepted) else TypeError, accepted)


def _either(parts: list[Kind]) -> Kind:
    def error(value: Any) -> type[Exception] | None:
        errors = [part.error(value) for part in parts]
        return None if None in errors else ValueError if ValueError in errors else TypeError

    words = [part.words for part in parts]
    return Kind(" or ".join(words), error, tuple(each for part in parts for each in part.types))


def _bounded(least: int) -> Kind:
    def error(value: Any) -> type[Exception] | None:
        if not _is_integer(value):
            return TypeError
        return None if operator.index(value) >= least else ValueError

    return Kind(f"an integer of at least {least}", error)


def _several(container: Any, element: Kind | None) -> Kind:
    accepted = (list, tuple) if container in (list, tuple) else container

    def error(value: Any) -> type[Exception] | None:
        if not isinstance(value, accepted) or isinstance(value, str | bytes):
            return TypeError
        # Elements of an iterator would be used up.
        elements = value if element is not None and isinstance(value, collections.abc.Collection) else ()
        errors = [element.error(each) for each in elements]  # type: ignore[union-attr]
        return next(filter(None, errors), None)

    what = "values" if element is None else f"elements that are each {element.words}"
    return Kind(f"a list of {what}", error)


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except (TypeError, RuntimeError):
        return False
    return True


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, str | bytes)


def _is_flag(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype == torch.bool
    return isinstance(value, int) or type(value).__name__ in ("bool", "bool_")  # also NumPy's


_SIMPLE: dict[Any, Kind] = {
    Tensor: _instance(Tensor, "a tensor", nn.Parameter),
    nn.Module: _instance(nn.Module, "a torch.nn.Module"),
    torch.dtype: _instance(torch.dtype, "a torch.dtype"),
    str: _instance(str, "a string"),
    type: _instance(type, "a class"),
    Stateful: _instance(Stateful, "an object with state_dict and load_state_dict"),
    HasGroups: _instance(HasGroups, "an optimizer, with param_groups"),
    type(None): _instance(type(None), "None"),
    bool: Kind("True or False", lambda value: None if _is_flag(value) else TypeError, (bool, int)),
    int: Kind("an integer", lambda value: None if _is_integer(value) else TypeError, (int,)),
    float: Kind("a number", lambda value: None if _is_number(value) else TypeError, (float, int)),
    Callable: Kind("a function", lambda value: None if callable(value) else TypeError, (types.FunctionType,)),
}
