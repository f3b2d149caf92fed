"""A rule as a short list of PyTorch calls, most of them in place: what the CPU runs instead of the rule's function.

Taken as it is written, a step of Adam is 17 passes over memory, most of which make a new tensor. PyTorch has calls
that do several of them at once (`lerp_`, `addcmul_`, `addcdiv_`). So the rule's function is called once with symbols in
place of tensors, and what it does to them becomes a list of such calls: 7 for Adam.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rule import FLAG_COUNT, SCALARS, SLOTS, Rule, padded
from .tracing import FULL, NUMBER, SMALL, Function, Symbol, Trace

_IN_PLACE: dict[Function, Function] = {
    operator.add: Tensor.add_,
    operator.sub: Tensor.sub_,
    operator.mul: Tensor.mul_,
    operator.truediv: Tensor.div_,
    operator.neg: Tensor.neg_,
    torch.sqrt: Tensor.sqrt_,
    torch.abs: Tensor.abs_,
    torch.add: Tensor.add_,
    torch.lerp: Tensor.lerp_,
    torch.addcmul: Tensor.addcmul_,
    torch.addcdiv: Tensor.addcdiv_,
}
# The same over lists of tensors; PyTorch's own optimizers are made of these.
_OVER_LISTS: dict[Function, Function] = {
    operator.add: torch._foreach_add,
    operator.sub: torch._foreach_sub,
    operator.mul: torch._foreach_mul,
    operator.truediv: torch._foreach_div,
    torch.sqrt: torch._foreach_sqrt,
    torch.abs: torch._foreach_abs,
    torch.add: torch._foreach_add,
    torch.lerp: torch._foreach_lerp,
    torch.addcmul: torch._foreach_addcmul,
    torch.addcdiv: torch._foreach_addcdiv,
    Tensor.add_: torch._foreach_add_,
    Tensor.sub_: torch._foreach_sub_,
    Tensor.mul_: torch._foreach_mul_,
    Tensor.div_: torch._foreach_div_,
    Tensor.sqrt_: torch._foreach_sqrt_,
    Tensor.abs_: torch._foreach_abs_,
    Tensor.lerp_: torch._foreach_lerp_,
    Tensor.addcmul_: torch._foreach_addcmul_,
    Tensor.addcdiv_: torch._foreach_addcdiv_,
}
_COMMUTATIVE = (operator.add, operator.mul)
TEMPORARY = -1


class Product(NamedTuple):
    """numbers[0] * ... * tensors[0] * ... / divisor."""

    numbers: list[Any]
    tensors: list[Symbol]
    divisor: Symbol | None = None


class Square(NamedTuple):
    """A term that is the square of `root`, left to whoever adds it up: PyTorch has norms."""

    root: Tensor


def elements_of(term: Any) -> Tensor:
    """The elements of a term."""
    return term.root * term.root if isinstance(term, Square) else term


class Call(NamedTuple):
    """`function` of registers, into register `target`; then the registers `dead` are not needed any more."""

    target: int
    function: Function
    arguments: list[int]
    keywords: dict[str, int]
    dead: list[int]


class Program:
    """The calls that compute what a rule writes and measures.

    `whole_kind` is what the two numbers of a tensor are given as (None: there are none); `pattern` has the value of
    those scalars that are 0 or 1. Values live in numbered registers: those of the symbols, then constants.
    """

    def __init__(
        self, rule: Rule, flags: tuple[bool, ...], whole_kind: int | None, pattern: tuple[float | None, ...]
    ) -> None:
        trace = Trace()
        inputs = [Symbol(trace, FULL) if slot in rule.reads else 0.0 for slot in range(SLOTS)]
        whole = [0.0 if whole_kind is None else Symbol(trace, whole_kind) for _ in range(2)]
        scalars = [Symbol(trace, NUMBER) for _ in range(SCALARS)]
        trace.ones = {symbol.index for symbol, value in zip(scalars, pattern, strict=True) if value == 1.0}
        if 0 in rule.reads:  # an update; but a pass that only scales has to make NaN of 0 times infinity
            trace.zeros = {symbol.index for symbol, value in zip(scalars, pattern, strict=True) if value == 0.0}
        results = rule.function(tuple(inputs), tuple(whole), tuple(scalars), padded(flags, FLAG_COUNT, False))
        results, terms = results if rule.quantities else (results, ())
        written = {slot: results[slot] for slot in rule.writes}
        terms = terms[: rule.quantities]
        self._squares = [not rule.maximum and _is_square(term) for term in terms]
        terms = [term.arguments[0] if square else term for term, square in zip(terms, self._squares, strict=True)]
        outputs = [value for value in (*written.values(), *terms) if isinstance(value, Symbol)]
        _merge(_needed(trace, outputs), outputs, trace)
        steps = _needed(trace, outputs)

        self._constants: list[Any] = [None] * len(trace.symbols)
        self._values = [(slot, s.index) for slot, s in enumerate(inputs) if isinstance(s, Symbol)]
        self._whole = [s.index for s in whole if isinstance(s, Symbol)]
        self._scalars = [s.index for s in scalars]
        self._numbers = [self._call(s, s.function) for s in steps if s.kind == NUMBER]
        steps = [s for kind in (SMALL, FULL) for s in steps if s.kind == kind]
        self._calls, stay = self._place(steps, inputs, written, outputs)
        full = [s.index for s in (*inputs, *steps) if isinstance(s, Symbol) and s.kind == FULL]
        plain = stay and not terms and whole_kind is None
        self._over_lists = self._listed(full) if plain else None
        self._results = {slot: self._register(result) for slot, result in written.items()}
        self._terms = [self._register(term) for term in terms]

    def _register(self, value: Any) -> int:
        if isinstance(value, Symbol):
            return value.index
        self._constants.append(value)
        return len(self._constants) - 1

    def _call(self, symbol: Symbol, function: Any, arguments: Sequence[Any] | None = None) -> Call:
        arguments = symbol.arguments if arguments is None else arguments
        keywords = {name: self._register(value) for name, value in symbol.keywords.items()}
        return Call(symbol.index, function, [self._register(value) for value in arguments], keywords, [])

    def _place(
        self, steps: list[Symbol], inputs: Sequence[Any], written: dict[int, Any], outputs: list[Symbol]
    ) -> tuple[list[Call], bool]:
        """Makes calls work in place: on temporaries, and on the memory of slots that are written in the end.

        Also says whether every result is where it belongs then.
        """
        owned = {inputs[slot].index: slot for slot in written if isinstance(inputs[slot], Symbol)}
        while True:
            homes = dict(owned)
            calls = self._calls_at_home(steps, outputs, homes)
            ends = [(slot, homes.get(result.index)) for slot, result in written.items() if isinstance(result, Symbol)]
            # A result that ends up in the memory of another slot would be overwritten by that slot's own.
            misplaced = {home for slot, home in ends if home not in (slot, TEMPORARY, None)}
            if not misplaced:
                return calls, all(home == slot for slot, home in ends)
            owned = {index: slot for index, slot in owned.items() if slot not in misplaced}

    def _calls_at_home(self, steps: list[Symbol], outputs: list[Symbol], homes: dict[int, int]) -> list[Call]:
        """`homes`: for every symbol that may be overwritten, the slot whose memory it is in, or TEMPORARY."""
        kept = {symbol.index for symbol in outputs}
        last = {symbol.index: position for position, step in enumerate(steps) for symbol in step.inputs}

        def free(value: Any, position: int) -> bool:
            if not isinstance(value, Symbol) or value.kind != FULL or value.index not in homes:
                return False
            return value.index not in kept and last[value.index] == position

        calls = []
        for position, step in enumerate(steps):
            arguments, function = step.arguments, step.function
            assert function is not None
            if function in _COMMUTATIVE and not free(arguments[0], position) and free(arguments[1], position):
                arguments = arguments[::-1]
            if function in _IN_PLACE and free(arguments[0], position):
                homes[step.index] = homes[arguments[0].index]
                function = _IN_PLACE[function]
            else:
                homes[step.index] = TEMPORARY
            call = self._call(step, function, arguments)
            call.dead.extend({s.index for s in step.inputs if s.kind == FULL and free(s, position)})
            calls.append(call)
        return calls

    def _listed(self, full: list[int]) -> list[Call] | None:
        """The calls over lists of tensors, or None where PyTorch does not have one of them."""
        if any(call.function not in _OVER_LISTS or call.arguments[0] not in full for call in self._calls):
            return None
        return [call._replace(function=_OVER_LISTS[call.function]) for call in self._calls]

    @property
    def takes_lists(self) -> bool:
        """Whether `run_lists` works: the program is made of calls that exist over lists, and ends up in place."""
        return self._over_lists is not None

    def run_lists(self, lists: Sequence[Any], registers: Sequence[Any]) -> None:
        """Like `run` for several tensors per slot at once; all results are in place."""
        assert self._over_lists is not None
        registers = list(registers)
        for slot, index in self._values:
            registers[index] = lists[slot]
        _run(self._over_lists, registers)

    def registers(self, scalars: Sequence[float]) -> list[Any]:
        """The registers with all numbers in place: once per step."""
        found = list(self._constants)
        for index, value in zip(self._scalars, scalars, strict=True):
            found[index] = value
        _run(self._numbers, found)
        return found

    def run(
        self, values: Sequence[Any], whole: Sequence[Any], registers: Sequence[Any]
    ) -> tuple[dict[int, Any], list[Any]]:
        """What each written slot becomes, and what is measured: tensors or squares of them.

        The values of written slots may be overwritten.
        """
        registers = list(registers)
        for slot, index in self._values:
            registers[index] = values[slot]
        for index, value in zip(self._whole, whole, strict=False):
            registers[index] = value
        _run(self._calls, registers)
        terms = [registers[index] for index in self._terms]
        return (
            {slot: registers[index] for slot, index in self._results.items()},
            [Square(term) if square else term for term, square in zip(terms, self._squares, strict=True)],
        )


@functools.lru_cache(maxsize=512)
def program_of(
    rule: Rule, flags: tuple[bool, ...], whole_kind: int | None, pattern: tuple[float | None, ...]
) -> Program:
    """The program of a rule; see `Program`."""
    return Program(rule, flags, whole_kind, pattern)


def pattern_of(scalars: Sequence[float]) -> tuple[float | None, ...]:
    """Which scalars are 0 or 1."""
    return tuple(value if value in (0.0, 1.0) else None for value in scalars)


def _run(calls: Sequence[Call], registers: list[Any]) -> None:
    for target, function, arguments, keywords, dead in calls:
        positional = [registers[index] for index in arguments]
        if keywords:
            result = function(*positional, **{name: registers[index] for name, index in keywords.items()})
        else:
            result = function(*positional)
        if result is None:  # over lists, in place
            result = positional[0]
        for index in dead:
            registers[index] = None
        registers[target] = result


def _needed(trace: Trace, outputs: Sequence[Symbol]) -> list[Symbol]:
    """The computed symbols that the outputs depend on, in order."""
    wanted: set[int] = set()
    stack = list(outputs)
    while stack:
        symbol = stack.pop()
        if symbol.index not in wanted:
            wanted.add(symbol.index)
            stack.extend(symbol.inputs)
    return [symbol for symbol in trace.symbols if symbol.index in wanted and symbol.function is not None]


def _is_square(value: Any) -> bool:
    if not isinstance(value, Symbol) or value.kind != FULL or value.function is not operator.mul:
        return False
    return value.arguments[0] is value.arguments[1]


def _merge(steps: list[Symbol], outputs: Sequence[Symbol], trace: Trace) -> None:
    """Turns sums with products into PyTorch's calls for both at once."""
    uses: dict[int, int] = {}
    for symbol in (*outputs, *(value for step in steps for value in step.inputs)):
        uses[symbol.index] = uses.get(symbol.index, 0) + 1
    for step in steps:
        if step.kind != FULL or step.function not in (operator.add, operator.sub):
            continue
        first, second = step.arguments
        sides = [(first, second)] if step.function is operator.sub else [(first, second), (second, first)]
        found = [(base, product) for base, other in sides if (product := _product(other, uses)) is not None]
        if found:
            base, product = max(found, key=lambda pair: len(pair[1].tensors) + (pair[1].divisor is not None))
            _add_product(step, base, product, uses, trace)


def _add_product(step: Symbol, base: Any, product: Product, uses: dict[int, int], trace: Trace) -> None:
    numbers, tensors, divisor = product
    negative = step.function is operator.sub
    factor: Any = functools.reduce(lambda a, b: trace.record(operator.mul, a, b), numbers, 1.0)
    if negative:
        factor = -factor
    if not isinstance(base, Symbol) or base.kind == NUMBER:
        if divisor is None and len(tensors) == 1 and not negative:
            shift = trace.record(_as_tensor, base)
            step.become(torch.add, (shift, tensors[0]), alpha=factor)
    elif divisor is not None:
        step.become(torch.addcdiv, (base, tensors[0], divisor), value=factor)
    elif len(tensors) == 2:
        step.become(torch.addcmul, (base, *tensors), value=factor)
    else:
        (tensor,) = tensors
        if not negative and tensor.function is operator.sub and uses[tensor.index] == 1:
            end, start = tensor.arguments
            if start is base and isinstance(end, Symbol) and end.kind == FULL:
                step.become(torch.lerp, (base, end, factor))
                return
        step.become(torch.add, (base, tensor), alpha=factor)


def _product(value: Any, uses: dict[int, int]) -> Product | None:
    """`value` as a product that one call can add to something, if it is one and nobody else needs it."""
    if not isinstance(value, Symbol) or value.kind != FULL or uses[value.index] != 1:
        return None
    for depth in (3, 1):  # as long a product as possible, else its outermost factors
        numbers, tensors, divisor = product = _factors(value, uses, depth)
        if len(tensors) == (1 if divisor is not None or numbers else 2) or (len(tensors) == 2 and divisor is None):
            return product
    return None


def _factors(value: Any, uses: dict[int, int], depth: int) -> Product:
    """What `value` is a product of; a factor that is needed elsewhere too is not taken apart."""
    if not isinstance(value, Symbol) or value.kind != FULL:
        return Product([value], [])
    if depth and uses[value.index] == 1:
        if value.function is operator.mul:
            left, right = (_factors(argument, uses, depth - 1) for argument in value.arguments)
            if left.divisor is None or right.divisor is None:
                divisor = right.divisor if left.divisor is None else left.divisor
                return Product(left.numbers + right.numbers, left.tensors + right.tensors, divisor)
        elif value.function is operator.truediv:
            above, below = value.arguments
            numerator = _factors(above, uses, depth - 1)
            if numerator.divisor is None and isinstance(below, Symbol) and below.kind == FULL:
                return numerator._replace(divisor=below)
    return Product([], [value])


def _as_tensor(number: float) -> Tensor:
    """A number as a tensor without dimensions, which does not change the dtype of what it is added to."""
    return torch.tensor(number, dtype=torch.float64, device="cpu")
