"""Questions about tensors in nested arguments, and casts of them. They work on every device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ._amp_state import _amp_state
from ._containers import applier


def is_cuda_enabled() -> bool:
    """Whether this PyTorch was built for CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """The CUDA version that PyTorch was built for, such as (12, 8); empty without one."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_fp_tensor(x: Any) -> bool:
    """Whether `x` is a tensor of floating-point numbers, or a list or tuple of nothing else."""
    if is_nested(x):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def is_nested(x: Any) -> bool:
    """Whether `x` is a list or tuple."""
    return isinstance(x, list | tuple)


def type_string(x: Tensor) -> str:
    """The name of a tensor's type, such as HalfTensor."""
    return x.type().split(".")[-1]


def collect_fp_tensor_types(args: Any, kwargs: Any) -> set[str]:
    """The names of the types of all floating-point tensors among the arguments."""
    types: set[str] = set()
    applier((args, kwargs), lambda x: types.add(type_string(x)) if is_fp_tensor(x) else None)
    return types


def _maybe(dtype: torch.dtype, x: Any, name: str, verbose: bool) -> Any:
    def cast(tensor: Any) -> Any:
        if not is_fp_tensor(tensor) or tensor.dtype == dtype:
            return tensor
        if verbose:
            print(f"{tensor.dtype} -> {dtype} ({name})")
        return tensor.to(dtype)

    return applier(x, cast)


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """`x` with its floating-point tensors in float16; prints each cast if `verbose`."""
    return _maybe(torch.float16, x, name, verbose)


def maybe_bfloat16(x: Any, name: str = "", verbose: bool = False) -> Any:
    """`x` with its floating-point tensors in bfloat16; prints each cast if `verbose`."""
    return _maybe(torch.bfloat16, x, name, verbose)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """`x` with its floating-point tensors in float32; prints each cast if `verbose`."""
    return _maybe(torch.float32, x, name, verbose)


def casted_args(cast_fn: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Positional arguments after `cast_fn`. Keyword arguments are cast in place."""
    for key, value in kwargs.items():
        kwargs[key] = cast_fn(value)
    return [cast_fn(argument) for argument in args]


def verbosify(cast_fn: Callable[..., Any], fn_name: str, verbose: bool) -> Callable[..., Any]:
    """`cast_fn` that prints its casts for the function `fn_name` if `verbose`."""
    return functools.partial(cast_fn, name=fn_name, verbose=verbose) if verbose else cast_fn


def as_inplace(fns: Iterable[str]) -> list[str]:
    """The names of the in-place forms."""
    return [f"{name}_" for name in fns]


def has_func(mod: Any, fn: str) -> bool:
    """Whether `mod` has a function of that name."""
    return hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Callable[..., Any]:
    """The function of that name."""
    return getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Callable[..., Any]) -> None:
    """Replaces a function for good."""
    setattr(mod, fn, new_fn)


def set_func_save(handle: Any, mod: Any, fn: str, new_fn: Callable[..., Any]) -> None:
    """Replaces a function until `amp.shutdown`."""
    _amp_state.undo.append(functools.partial(setattr, mod, fn, getattr(mod, fn)))
    setattr(mod, fn, new_fn)
