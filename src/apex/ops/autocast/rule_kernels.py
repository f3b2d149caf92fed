"""Kernels on the Autocast dispatch keys that implement apex's casting rules while a `RuleKernels` exists."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import rules

_LOW = (torch.float16, torch.bfloat16)
_CPU, _GPU = ("AutocastCPU", "cpu"), ("AutocastCUDA", "cuda")
_without_autocast = torch._C._DisableAutocast


class RuleKernels:
    """Registration of the kernels: making it installs them, and `release` restores PyTorch's own rules.

    The kernels run only while autocast is on. With `allow_banned`, banned functions run in float32.
    """

    def __init__(self, allow_banned: bool = False) -> None:
        self.allow_banned = allow_banned
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns when a kernel replaces another, which is intended here
            for name in rules.FLOAT_ON_CPU:
                self._put(name, _CPU, _in_float)
            for name in rules.HALF_ON_CPU:
                self._put(name, _CPU, _in_half)
            for name in rules.WIDEST_ON_CPU:
                self._put(name, _CPU, _in_widest)
            for place in (_CPU, _GPU):
                for name in rules.FLOAT_EVERYWHERE:
                    self._put(name, place, _in_float)
                for name in rules.REFUSED_IN_PLACE:
                    self._put(name, place, _not_in_place)
                self._put(rules.BANNED, place, self._banned)

    def release(self) -> None:
        """Remove the kernels."""
        self._library._destroy()

    def _put(self, name: str, place: tuple[str, str], wrap: Callable[..., Callable[..., Any]]) -> None:
        operator, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, operator, None)
        if packet is None or (overload or "default") not in packet.overloads():
            return  # another version of PyTorch
        key, device_type = place
        self._library.impl(name, wrap(getattr(packet, overload or "default"), device_type), key)

    def _banned(self, operator: Any, device_type: str) -> Callable[..., Any]:
        run = _in_float(operator, device_type)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            low = _low_types(args)
            if low and not self.allow_banned:
                raise NotImplementedError(rules.BAN_MESSAGE.format(dtype=low[0]))
            return run(*args, **kwargs)

        return kernel


def _in_float(operator: Any, _: str) -> Callable[..., Any]:
    """Return a kernel that runs half-precision inputs in float32; a dtype that the caller requests is kept."""
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("dtype") if "dtype" in names else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            if position is None:
                return operator(*[_cast(torch.float32, value) for value in args], **kwargs)
            asked = kwargs.get("dtype") if len(args) <= position else args[position]
            if asked is None and args[0].dtype in _LOW:
                return operator(*args[:position], **{**kwargs, "dtype": torch.float32})
            return operator(*args, **kwargs)

    return kernel


def _not_in_place(operator: Any, _: str) -> Callable[..., Any]:
    """Return a kernel that refuses half-precision tensors and runs the operator unchanged on others."""
    name = operator._schema.name.removeprefix("aten::")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = _low_types(args)
        if low:
            raise NotImplementedError(
                rules.IN_PLACE_MESSAGE.format(name=name, dtype=low[0], plain=name.removesuffix("_"))
            )
        with _without_autocast():
            return operator(*args, **kwargs)

    return kernel


def _low_types(args: Any) -> list[torch.dtype]:
    """Return the dtypes of the half-precision tensors among the arguments."""
    return [value.dtype for value in args if isinstance(value, Tensor) and value.dtype in _LOW]


def _in_half(operator: Any, device_type: str) -> Callable[..., Any]:
    """Return a kernel that runs in autocast's dtype."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        cast = functools.partial(_cast, dtype)
        with _without_autocast():
            return operator(*[_mapped(value, cast) for value in args], **kwargs)

    return kernel


def _in_widest(operator: Any, _: str) -> Callable[..., Any]:
    """Return a kernel that runs in the widest dtype among the arguments."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtypes = [value.dtype for value in args if isinstance(value, Tensor) and value.is_floating_point()]
        with _without_autocast():
            if len(set(dtypes)) > 1:
                cast = functools.partial(_cast, functools.reduce(torch.promote_types, dtypes))
                args = tuple(cast(value) for value in args)
            return operator(*args, **kwargs)

    return kernel


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in (dtype, torch.float64):
        return value.to(dtype)
    return value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    return [function(item) for item in value] if isinstance(value, list | tuple) else function(value)
