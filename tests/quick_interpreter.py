"""Makes Triton's interpreter about four times as quick, without a change to what it computes.

Nearly all its time goes into types and checks rather than into numbers. So here
- `triton.language` gets its interpreted functions once per process, not at every launch and every call;
- nothing is computed for a check of integer overflow whose result the interpreter, not in debug mode, throws away;
- equal types are one object, a tensor takes over the attributes of its type, and equal shapes are not broadcast;
- a block of equal numbers holds one, and bfloat16 is converted by moving its bits;
- what an operation asks of the interpreter is found once for arguments of the same types (interpreter_plans.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from . import interpreter_plans

# What an interpreter of Triton has that is built in the way that is changed here.
NEEDED = (
    "_LangPatchScope",
    "_get_np_dtype",
    "_get_signed_np_dtype",
    "_patch_attr",
    "_patch_lang",
    "_patch_lang_tensor",
    "InterpreterBuilder",
    "TensorHandle",
    "TritonSemantic",
    "interpreter_builder",
    "interpreter_semantic",
    "tl",
)


def install() -> None:
    """Takes effect for the whole process; does nothing where the interpreter is built in another way."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not all(hasattr(interpreter, name) for name in NEEDED):
        return
    _replace_functions_once(interpreter)
    _leave_out_the_overflow_check(interpreter)
    _remember_signatures(interpreter)
    _remember_numpy_types(interpreter)
    _share_types(interpreter.tl)
    _convert_bfloat16_by_its_bits(interpreter)
    _keep_handles_lean(interpreter)
    _copy_no_scalars(interpreter)
    _broadcast_unequal_shapes_only(interpreter)
    interpreter_plans.install(interpreter)


def _replace_functions_once(interpreter: Any) -> None:
    replace = interpreter._patch_lang
    modules = (interpreter.tl, interpreter.tl.core)
    seen: set[Callable[..., Any]] = set()
    replaced: set[tuple[str, ...]] = set()

    def replace_once(function: Callable[..., Any]) -> Any:
        if function not in seen:
            seen.add(function)
            visible = tuple(m.__name__ for m in modules if any(value is m for value in function.__globals__.values()))
            if visible not in replaced:
                replaced.add(visible)
                replace(function)  # gives what would undo it
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once


def _leave_out_the_overflow_check(interpreter: Any) -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_signatures(interpreter: Any) -> None:
    signature = functools.lru_cache(None)(inspect.getfullargspec)

    def call_arguments(function: Callable[..., Any], *arguments: Any, **named: Any) -> dict[str, Any]:
        names = signature(function).args
        found = dict(zip(names, arguments, strict=False)) | named
        if len(arguments) + len(named) == len(found) == len(names) and found.keys() == set(names):
            return found
        return inspect.getcallargs(function, *arguments, **named)  # has defaults, or is wrong

    interpreter.inspect = types.SimpleNamespace(
        **{**vars(inspect), "getfullargspec": signature, "getcallargs": call_arguments}
    )


def _remember_numpy_types(interpreter: Any) -> None:
    find, block_type = interpreter._get_np_dtype, interpreter.tl.block_type
    known: dict[str, Any] = {}

    def numpy_type(type: Any) -> Any:
        element = type.element_ty if isinstance(type, block_type) else type
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    interpreter._get_np_dtype = numpy_type


def _share_types(language: Any) -> None:
    """Equal types become one, whose identity stands for it, and whose tensors take over its attributes."""
    tensor, constexpr, start_tensor = language.tensor, language.constexpr, language.tensor.__init__

    def value(argument: Any) -> Any:
        return argument.value if isinstance(argument, constexpr) else argument

    def share(kind: type, key: Callable[..., tuple[Any, ...]]) -> None:
        make, start = kind.__new__, kind.__init__  # type: ignore[misc]
        # A key holds the identity of the element type, which lives as long as the type that holds it.
        known: dict[tuple[Any, ...], Any] = {}

        def shared(cls: type, *arguments: Any, **named: Any) -> Any:
            place = (cls, *key(*arguments, **named))
            found = known.get(place)
            if found is None:
                found = make(cls)
                start(found, *arguments, **named)
                known[place] = found
            return found

        kind.__new__ = shared  # type: ignore[assignment]
        kind.__init__ = lambda *arguments, **named: None  # type: ignore[misc]

    def start_tensor_like_others(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.get("of_tensors")
        if attributes is None:
            start_tensor(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(attributes)
            self.handle = handle

    share(language.block_type, lambda element_ty, shape: (id(element_ty), *map(value, shape)))
    share(
        language.pointer_type,
        lambda element_ty, address_space=1, const=False: (id(value(element_ty)), address_space, const),
    )
    tensor.__init__ = start_tensor_like_others
    language.str_to_ty = functools.lru_cache(None)(language.str_to_ty)


def _convert_bfloat16_by_its_bits(interpreter: Any) -> None:
    builder, numpy, language = interpreter.InterpreterBuilder, interpreter.np, interpreter.tl
    convert = builder.cast_impl

    def cast(self: Any, source: Any, type: Any) -> Any:
        given, wanted = source.dtype.scalar, type.scalar
        if given is language.bfloat16 and wanted is language.float32:
            bits = source.data.astype(numpy.uint32) << numpy.uint32(16)
            return interpreter.TensorHandle(bits.view(numpy.float32), wanted)
        if given is language.float32 and wanted is language.bfloat16:  # without rounding, as the interpreter does it
            bits = numpy.ascontiguousarray(source.data).view(numpy.uint32) >> numpy.uint32(16)
            return interpreter.TensorHandle(bits.astype(numpy.uint16), wanted)
        return convert(self, source, type)

    builder.cast_impl = cast


def _keep_handles_lean(interpreter: Any) -> None:
    """Without a look at sizes in bytes, which follow from the types, and with no handle changed after it was made."""
    builder, numpy = interpreter.InterpreterBuilder, interpreter.np

    def start(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    def shift(self: Any, left: Any, right: Any) -> Any:
        signed = [each.data.astype(interpreter._get_signed_np_dtype(each.data.dtype)) for each in (left, right)]
        return interpreter.TensorHandle(numpy.right_shift(*signed), left.dtype.scalar)

    interpreter.TensorHandle.__init__ = start
    builder.create_ashr = shift


def _copy_no_scalars(interpreter: Any) -> None:
    """A block of equal numbers is one number with strides of zero."""
    builder, handle, numpy = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.np
    splat, broadcast = builder.create_splat, builder.create_broadcast

    def quick_splat(self: Any, type: Any, scalar: Any) -> Any:
        data = scalar.data
        if data.shape != (1,) or data.dtype != interpreter._get_np_dtype(scalar.dtype):
            return splat(self, type, scalar)
        return handle(numpy.ndarray(type.shape, data.dtype, data, 0, (0,) * len(type.shape)), scalar.dtype.scalar)

    def quick_broadcast(self: Any, block: Any, shape: Any) -> Any:
        data = block.data
        if not data.flags.c_contiguous or len(data.shape) != len(shape):
            return broadcast(self, block, shape)
        strides = [0 if size == 1 else stride for size, stride in zip(data.shape, data.strides, strict=True)]
        return handle(numpy.ndarray(shape, data.dtype, data, 0, strides), block.dtype.scalar)

    def quick_expand(self: Any, block: Any, axis: int) -> Any:
        return handle(block.data[(slice(None),) * axis + (None,)], block.dtype.scalar)

    def quick_sum(self: Any, pointers: Any, offsets: Any) -> Any:
        size = pointers.dtype.__dict__.get("element_bytes")
        if size is None:
            size = pointers.dtype.element_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        data = offsets.data.astype(numpy.uint64)
        data *= size
        return handle(pointers.data + data, pointers.dtype)

    builder.create_addptr = quick_sum
    builder.create_splat, builder.create_broadcast, builder.create_expand_dims = (
        quick_splat,
        quick_broadcast,
        quick_expand,
    )


def _broadcast_unequal_shapes_only(interpreter: Any) -> None:
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_if_unequal(self: Any, left: Any, right: Any) -> Any:
        if [*getattr(left.type, "shape", ())] == [*getattr(right.type, "shape", ())]:
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_if_unequal
