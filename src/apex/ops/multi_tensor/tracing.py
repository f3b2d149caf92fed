"""Symbols that a rule's function can be called with, and that remember what it did to them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# What a symbol stands for: a number, the same for all tensors; a number per tensor, as a tensor without dimensions; an
# element of each tensor.
NUMBER, SMALL, FULL = range(3)

Function = Callable[..., Any]


def _binary(function: Function) -> Any:
    return lambda self, other: self.trace.record(function, self, other)


def _reflected(function: Function) -> Any:
    return lambda self, other: self.trace.record(function, other, self)


class Symbol:
    """A value in a rule: `function` of `arguments`, or one of the rule's inputs, without a function."""

    def __init__(
        self, trace: Trace, kind: int, function: Function | None = None, arguments: Sequence[Any] = ()
    ) -> None:
        self.trace = trace
        self.kind = kind
        self.index = len(trace.symbols)
        self.become(function, arguments)
        trace.symbols.append(self)

    def become(self, function: Function | None, arguments: Sequence[Any], **keywords: Any) -> None:
        """The same value computed in another way."""
        self.function = function
        self.arguments = tuple(arguments)
        self.keywords = keywords

    @property
    def inputs(self) -> list[Symbol]:
        """The symbols among the arguments."""
        return [value for value in (*self.arguments, *self.keywords.values()) if isinstance(value, Symbol)]

    @classmethod
    def __torch_function__(cls, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not kwargs
        return next(argument for argument in args if isinstance(argument, Symbol)).trace.record(function, *args)

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __lt__, __le__, __gt__, __ge__ = map(_binary, (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)
    __and__, __or__ = _binary(operator.and_), _binary(operator.or_)
    __neg__ = lambda self: self.trace.record(operator.neg, self)  # noqa: E731
    to = lambda self, dtype: self.trace.record(Tensor.to, self, dtype)  # noqa: E731
    __hash__ = None  # type: ignore[assignment]  # a comparison records itself, so symbols are no keys


class Trace:
    """Everything that a rule's function does, in order; calls that 0 or 1 makes pointless are left out.

    `zeros` and `ones` are the indices of symbols known to have this value.
    """

    def __init__(self) -> None:
        self.symbols: list[Symbol] = []
        self.zeros: set[int] = set()
        self.ones: set[int] = set()

    def record(self, function: Function, *arguments: Any) -> Any:
        """`function` of the arguments."""
        first, second = (*arguments, None)[:2]
        if function is operator.mul and self._is(first, self.ones, 1.0):
            return second
        if function is operator.mul and self._is(second, self.ones, 1.0):
            return first
        if function in (operator.add, operator.sub) and self._is(second, self.zeros, 0.0):
            return first
        if function is operator.add and self._is(first, self.zeros, 0.0):
            return second
        kind = max((argument.kind for argument in arguments if isinstance(argument, Symbol)), default=NUMBER)
        symbol = Symbol(self, kind, function, arguments)
        if function is operator.mul and any(self._is(argument, self.zeros, 0.0) for argument in arguments):
            self.zeros.add(symbol.index)
        return symbol

    def _is(self, value: Any, known: set[int], number: float) -> bool:
        if isinstance(value, Symbol):
            return value.index in known
        return isinstance(value, float | int) and value == number
