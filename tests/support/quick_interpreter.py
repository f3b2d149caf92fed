"""Makes Triton's interpreter about three times as quick, without a change to what it computes but for float8.

It also refuses what kernels must not do because releases of Triton differ in it: arithmetic in half precision, and
masks that are no booleans.

Nearly all its time goes into types and checks rather than into numbers. Layer norms, RMS norms and softmaxes of small
shapes, forward and backward, took 4.9 s of CPU time in it; here it takes 1.6 s. What each part of that saves:
- `triton.language` gets its interpreted functions once per process, not at every launch and every call: 1.7 s;
- equal types are one object, and a tensor takes over the attributes of its type: 0.5 s;
- bfloat16 is converted by moving its bits: 0.4 s;
- nothing is computed for a check of integer overflow whose result the interpreter, not in debug mode, throws away, and
  numpy's name of a type is looked up once: 0.2 s each.

The tests of norms alone would take a minute and a half more without it. `quick_arithmetic` does the rest: operators,
and reductions by functions of kernels, which alone are computed in another order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from . import quick_arithmetic

# What is changed here. Where Triton has it no more, its interpreter stays as it is.
NEEDED = (
    "_LangPatchScope",
    "_get_np_dtype",
    "_patch_attr",
    "_patch_lang",
    "_patch_lang_tensor",
    "InterpretedFunction",
    "InterpreterBuilder",
    "InterpreterError",
    "ReduceOps",
    "TensorHandle",
    "interpreter_builder",
    "interpreter_semantic",
    "tl",
)
# Methods of Triton's semantics that compute with two numbers or compare them.
ARITHMETIC = ("add", "sub", "mul", "truediv", "fdiv", "mod", "minimum", "maximum")
COMPARISONS = ("equal", "not_equal", "less_than", "less_equal", "greater_than", "greater_equal")


def can_install() -> bool:
    """Return whether Triton's interpreter has everything that is changed here; those before Triton 3.6 do not."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return False
    return all(hasattr(interpreter, name) for name in NEEDED)


def install() -> None:
    """Change the interpreter for the whole process; if it is built in another way, correct its float8 alone."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _round_float8(interpreter)
    if not can_install():
        return
    _replace_functions_once(interpreter)
    _leave_out_the_overflow_check(interpreter)
    _remember_numpy_types(interpreter)
    _share_types(interpreter.tl)
    _convert_bfloat16_by_its_bits(interpreter)
    _refuse_arithmetic_in_half_precision(interpreter)
    _refuse_masks_of_integers(interpreter)
    quick_arithmetic.install(interpreter)


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


def _round_float8(interpreter: Any) -> None:
    """Convert float32 to float8 as PyTorch and GPUs do.

    Triton's own conversion loses the carry when a number is rounded up to a power of two: it gives 1 for 1.99.
    """
    import numpy as np
    import torch

    convert = getattr(interpreter, "_convert_float", None)
    formats = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.name not in formats or source.name != "fp32":
            return convert(values, source, target, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return numbers.to(formats[target.name]).view(torch.uint8).numpy().reshape(values.shape)

    if convert is not None:
        interpreter._convert_float = convert_float


def _refuse_arithmetic_in_half_precision(interpreter: Any) -> None:
    """Raise when a kernel compares or computes with bfloat16 or float16 numbers without widening them to float32.

    The interpreter holds bfloat16 numbers as 16-bit integers and computes with their bits. Triton up to 3.7 widens a
    half-precision number for a comparison with a constant; Triton 3.9 rounds the constant instead.
    """
    semantic, language = type(interpreter.interpreter_semantic), interpreter.tl
    halves = (language.bfloat16, language.float16)

    def refuse(name: str) -> None:
        compute = getattr(semantic, name)

        def checked(self: Any, left: Any, right: Any, *arguments: Any, **named: Any) -> Any:
            if getattr(left, "dtype", None) not in halves and getattr(right, "dtype", None) not in halves:
                return compute(self, left, right, *arguments, **named)
            types = [operand.type if isinstance(operand, language.tensor) else None for operand in (left, right)]
            narrow = [type is not None and type.scalar in halves for type in types]
            # A half-precision block beside a block of float32 is widened by every release.
            if all(narrow) or (any(narrow) and not all(type is not None and type.is_block() for type in types)):
                raise TypeError(f"kernels compute in float32, not with operands of types {types[0]} and {types[1]}")
            return compute(self, left, right, *arguments, **named)

        setattr(semantic, name, checked)

    for name in (*ARITHMETIC, *COMPARISONS):
        refuse(name)


def _refuse_masks_of_integers(interpreter: Any) -> None:
    """Raise when a mask is not held as booleans, which the interpreter of Triton 3.9 refuses and earlier ones accept.

    The interpreter gives a comparison the type of its operands, and a block made of one compared number has integers
    of that type: `block & (number < limit)` is no mask, `mask_if(number < limit, block)` is one.
    """
    builder, numpy = interpreter.InterpreterBuilder, interpreter.np

    def refuse(name: str, position: int) -> None:
        access = getattr(builder, name)

        def checked(self: Any, *arguments: Any, **named: Any) -> Any:
            mask = arguments[position]
            mask = mask if isinstance(mask, numpy.ndarray) else mask.data  # an array, for loads by a descriptor
            if mask.dtype != numpy.bool_:
                raise TypeError(f"a mask must consist of booleans, not of {mask.dtype}")
            return access(self, *arguments, **named)

        setattr(builder, name, checked)

    refuse("create_masked_load", 1)
    refuse("create_masked_store", 2)
