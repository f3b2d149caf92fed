"""Computes with two tensors of Triton's interpreter at once, where it has computed with two of the same types before.

The interpreter takes 20 Python calls to add two blocks: which type has the sum, does a number have to be converted, is
one of the blocks to be repeated. All of that follows from the types, and numpy does the same with the arrays. So the
first sum of two types is made both ways. If type, shape and bits are equal, the next ones are left to numpy; if not,
that pair of types stays with the interpreter. Only types of which both sides compute alike are tried: no half
precision, which kernels must not compute with, and no integers that are mixed with floats.

The tests of norms take two thirds of the CPU time, those of float8 blocks and of packed attention a third: 31 s, not
104 s. A third of that is `_reduce_in_pairs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Methods of a tensor: numpy's function, and whether it takes its operands in the other order.
ARITHMETIC = {
    "__add__": ("add", False),
    "__radd__": ("add", True),
    "__sub__": ("subtract", False),
    "__rsub__": ("subtract", True),
    "__mul__": ("multiply", False),
    "__rmul__": ("multiply", True),
}
FRACTIONS = {"__truediv__": ("divide", False), "__rtruediv__": ("divide", True)}
COMPARISONS = {
    "__lt__": ("less", False),
    "__le__": ("less_equal", False),
    "__gt__": ("greater", False),
    "__ge__": ("greater_equal", False),
    "__eq__": ("equal", False),
    "__ne__": ("not_equal", False),
}
BITS = {"__and__": ("bitwise_and", False), "__or__": ("bitwise_or", False), "__xor__": ("bitwise_xor", False)}
# How many pairs of types, or of a type and a Python number, are remembered for an operation.
MOST_KNOWN = 20_000


def install(interpreter: Any) -> None:
    """Change the interpreter's operators for the whole process, whenever it replaces those of `triton.language`."""
    _call_functions_directly(interpreter)
    _find_shapes_once(interpreter)
    _call_kernels_functions_directly(interpreter)
    _reduce_in_pairs(interpreter)
    if not interpreter.interpreter_builder.options.sanitize_overflow:
        _let_numpy_compute(interpreter)


def _let_numpy_compute(interpreter: Any) -> None:
    """Replace the operators of tensors after those of `triton.language` were."""
    quick: dict[str, Any] = {}
    replace = interpreter._patch_lang_tensor

    def replace_then_quicken(tensor: Any, scope: Any) -> None:
        replace(tensor, scope)
        for name, (function, swapped) in (ARITHMETIC | FRACTIONS | COMPARISONS | BITS).items():
            current = getattr(tensor, name)
            if quick.get(name) is not current:
                quick[name] = _quick_operator(interpreter, name, current, function, swapped)
                scope.set_attr(tensor, name, quick[name])

    interpreter._patch_lang_tensor = replace_then_quicken


def _call_functions_directly(interpreter: Any) -> None:
    """Let functions of `triton.language` be called with their semantics, without a check that these were given."""
    semantic = interpreter.interpreter_semantic
    check = interpreter.tl.core.builtin(lambda: None).__code__

    def replace(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is check else member

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = replace


def _call_kernels_functions_directly(interpreter: Any) -> None:
    """Let functions that kernels call be rewritten once, rather than looked up at every call."""
    function_class, error = interpreter.InterpretedFunction, interpreter.InterpreterError

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        function = self.__dict__.get("ready")
        if function is None:
            interpreter._patch_lang(self.fn)
            function = self.ready = self.rewrite()
        try:
            return function(*arguments, **named)
        except Exception as raised:
            raise error(repr(raised)) from raised

    function_class.__call__ = call


def _reduce_in_pairs(interpreter: Any) -> None:
    """Reduce by a kernel's own function in as many calls as a GPU takes steps, rather than one call per element.

    Neighbours are combined first, then neighbours of the results: a kernel must not rely on another order.
    """
    reductions, numpy, language = interpreter.ReduceOps, interpreter.np, interpreter.tl
    one_by_one = reductions.generic_reduce

    def reduce(self: Any, given: Any) -> Any:
        if self.axis is None and len(given) > 1:
            return one_by_one(self, given)
        flat, axis = self.unravel(given, self.axis)
        types = [operand.dtype for operand in flat]
        arrays = [operand.handle.data for operand in flat]
        before = (slice(None),) * axis
        while arrays[0].shape[axis] > 1:
            parts = [array[(*before, slice(first, None, 2))] for first in (0, 1) for array in arrays]
            shape = parts[0].shape
            operands = [self.to_tensor(part, dtype) for part, dtype in zip(parts, types * 2, strict=True)]
            results = self.combine_fn.fn(*operands)
            results = results if isinstance(results, tuple) else (results,)
            numbers = [result.handle.data if isinstance(result, language.tensor) else result for result in results]
            arrays = [
                numpy.broadcast_to(number, shape).astype(array.dtype)
                for number, array in zip(numbers, arrays, strict=True)
            ]
        results = []
        for array, dtype in zip(arrays, types, strict=True):
            if not self.keep_dims:
                array = array.squeeze(axis) if self.axis is not None else array.item()
            elif self.axis is None:
                array = array.reshape((1,) * len(given[0].handle.data.shape))
            results.append(self.to_tensor(array, dtype))
        return results

    reductions.generic_reduce = reduce


def _computed_types(language: Any) -> tuple[set[Any], set[Any]]:
    """Return the identities of the types that numpy computes with as kernels do, and those of signed integers."""
    signed = {id(language.int32), id(language.int64)}
    return signed | set(map(id, (language.float32, language.float64, language.uint32, language.uint64))), signed


def _find_shapes_once(interpreter: Any) -> None:
    """Find out once per pair of types what operands are converted and repeated to."""
    semantic, builder = type(interpreter.interpreter_semantic), interpreter.interpreter_builder
    language, tensor = interpreter.tl, interpreter.tl.tensor
    same_type, convert, check, repeat = (
        language.dtype.__eq__,
        semantic.cast,
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
    )
    computed = _computed_types(language)[0] | {id(language.int1)}
    # Types of both operands after they are repeated, None for one that stays, and those before, which thus live on.
    known: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def quick_check(self: Any, left: Any, right: Any, *arguments: Any, **named: Any) -> Any:
        tensors = left.__class__ is tensor and right.__class__ is tensor
        if tensors and left.type is right.type and id(left.dtype) in computed:
            return left, right
        return check(self, left, right, *arguments, **named)

    def quick_repeat(self: Any, left: Any, right: Any) -> Any:
        before = left.type, right.type
        if before[0] is before[1]:
            return left, right
        key = id(before[0]), id(before[1])
        if key not in known:
            results = repeat(self, left, right)
            if not all(kind.is_block() for kind in before) or len(before[0].shape) == len(before[1].shape):
                after = [None if new is old else new.type for new, old in zip(results, (left, right), strict=True)]
                known[key] = (*after, before)
            return results
        left_type, right_type, _ = known[key]
        return repeated(left, left_type), repeated(right, right_type)

    def repeated(operand: Any, wanted: Any) -> Any:
        if wanted is None:
            return operand
        if operand.type.is_block():
            return tensor(builder.create_broadcast(operand.handle, wanted.shape), wanted)
        return tensor(builder.create_splat(wanted, operand.handle), wanted)

    def quick_convert(self: Any, given: Any, wanted: Any, *arguments: Any, **named: Any) -> Any:
        return given if given.dtype is wanted.scalar else convert(self, given, wanted, *arguments, **named)

    language.dtype.__eq__ = lambda one, other: one is other or same_type(one, other)
    semantic.cast = quick_convert
    semantic.binary_op_type_checking_impl = quick_check
    semantic.broadcast_impl_value = quick_repeat


def _quick_operator(interpreter: Any, name: str, slow: Callable[..., Any], function: str, swapped: bool) -> Any:
    """Return a method of a tensor that computes what `slow` does."""
    numpy, language, semantic = interpreter.np, interpreter.tl, interpreter.interpreter_semantic
    tensor, handle_class, of_arrays = language.tensor, interpreter.TensorHandle, getattr(numpy, function)
    boolean, uint64, make = numpy.dtype(bool), numpy.uint64, object.__new__
    computed, signed = _computed_types(language)
    masks = name in BITS
    # Of two types, or of one and a Python number: the result's type, its handle's, the bytes by which a pointer is
    # moved for 1, and the number as an array. False if the interpreter computes otherwise.
    known: dict[tuple[Any, ...], Any] = {}
    kept: list[Any] = []  # types whose identities are keys

    def compute(left: Any, right: Any, pointed: int) -> Any:
        if pointed:
            return left + pointed * right.astype(uint64)
        return of_arrays(right, left) if swapped else of_arrays(left, right)

    def finish(data: Any, dtype: Any, kind: Any) -> Any:
        handle = make(handle_class)
        handle.__dict__.update(data=data, dtype=dtype, attr={})
        result = make(tensor)
        result.__dict__.update(kind.of_tensors)
        result.handle = handle
        return result

    def may_compute(kind: Any, other: Any) -> bool:
        """Return whether numpy computes with two types as kernels do."""
        left, right = kind.scalar, other.scalar
        if left.is_ptr():
            return name == "__add__" and id(right) in signed
        if masks:  # masks of another shape stay with the interpreter, which may hold them as integers
            return kind is other and left is language.int1
        if name in FRACTIONS and not left.is_floating():
            return False
        return (left is right and id(left) in computed) or (id(left) in signed and id(right) in signed)

    def equal(one: Any, other: Any) -> bool:
        left, right = one.handle.data, other.handle.data
        same_types = one.type is other.type and one.handle.dtype is other.handle.dtype and left.dtype == right.dtype
        return same_types and left.shape == right.shape and left.tobytes() == right.tobytes()

    def learn(key: tuple[Any, ...], self: Any, other: Any) -> Any:
        """Compute as the interpreter does, and remember whether numpy gives the same."""
        result = slow(self, other)
        number = None if other.__class__ is tensor else converted(self.type.scalar, other)
        operand = other if number is None else number
        kept.append((self.type, operand.type))
        known[key] = False
        if may_compute(self.type, operand.type) and "of_tensors" in result.type.__dict__:
            kind = self.type.scalar
            pointed = max(1, kind.element_ty.primitive_bitwidth // 8) if kind.is_ptr() else 0
            data = compute(self.handle.data, operand.handle.data, pointed)
            if equal(finish(data, result.handle.dtype, result.type), result):
                numbers = None if number is None else number.handle.data
                known[key] = result.type, result.handle.dtype, pointed, numbers
        return result

    def converted(kind: Any, number: float) -> Any:
        """Return a Python number as a tensor, of the type `kind` if the interpreter takes that one beside it."""
        alone = semantic.to_tensor(number)
        if alone.type is kind or (alone.type.is_int() and kind.is_floating()):
            return semantic.scalar_constant(number, kind)
        if alone.type.is_int() and kind.is_int() and kind.get_int_min_value() <= number <= kind.get_int_max_value():
            return semantic.scalar_constant(number, kind)
        return alone

    def quick(self: Any, other: Any) -> Any:
        kind = other.__class__
        if kind is tensor:
            key: tuple[Any, ...] = id(self.type), id(other.type)
        elif (kind is int or kind is float) and not masks:
            key = id(self.type), kind, other or repr(other)  # 0.0 equals -0.0
        else:
            return slow(self, other)
        plan = known.get(key)
        if plan:
            result_type, dtype, pointed, numbers = plan
            data = self.handle.data
            if numbers is None:
                numbers = other.handle.data
            if not masks:
                return finish(compute(data, numbers, pointed), dtype, result_type)
            if data.dtype is boolean and numbers.dtype is boolean:
                return finish(of_arrays(data, numbers), self.handle.dtype, result_type)
        elif plan is None and len(known) < MOST_KNOWN:
            return learn(key, self, other)
        return slow(self, other)

    quick.slow = slow  # type: ignore[attr-defined]  # for the tests
    return quick
