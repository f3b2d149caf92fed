"""Parameters that wait for their values when they are first used.

While a parameter is pending, it has a subclass of its class, whose `__torch_function__` PyTorch calls for every
function with the parameter as an argument. The first such call waits for the values and restores the parameter's class.
So the model needs no hooks, and parameters with values cost nothing.

Compiled models need `param_sync` before the forward pass instead, because their guards see the change of class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_WAIT = "_apex_wait"
_CLASS = "_apex_class"


def is_pending(param: Tensor) -> bool:
    """Return whether the first use of a parameter will wait."""
    return _CLASS in type(param).__dict__


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the pending parameters in nested arguments."""
    for value in values:
        if isinstance(value, Tensor):
            if is_pending(value):
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


# Functions that do not read values; they do not wait.
_METADATA_CALLS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "grad", "is_leaf", "layout", "ndim", "requires_grad")
    ),
    *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "is_sparse", "shape")),
    Tensor.grad.__set__,  # type: ignore[union-attr]
    Tensor.grad.__delete__,  # type: ignore[union-attr]
    *(Tensor.dim, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.numel, Tensor.size, Tensor.stride),
}


def _torch_function(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if function in _METADATA_CALLS:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
    for param in list(_tensors((args, kwargs or {}))):
        wait_for_values(param)
    return function(*args, **(kwargs or {}))


def _after_waiting(name: str) -> Callable[..., Any]:
    """Return a method that waits for the values before it calls the original method of this name."""

    def method(self: Any, *args: Any) -> Any:
        wait_for_values(self)
        return getattr(self, name)(*args)

    return method


@functools.cache
def _pending_class(cls: type) -> type:
    methods = {name: _after_waiting(name) for name in ("__deepcopy__", "__reduce_ex__")}
    return type(cls)(cls.__name__, (cls,), {"__torch_function__": classmethod(_torch_function), _CLASS: cls, **methods})


def postpone(param: Tensor, wait: Callable[[], None]) -> None:
    """Make the first use of a parameter call `wait`, which must call `release` before it uses the parameter."""
    param.__dict__[_WAIT] = wait
    if not is_pending(param):
        param.__class__ = _pending_class(type(param))


def release(param: Tensor) -> None:
    """Restore a parameter's own class."""
    if is_pending(param):
        param.__class__ = type(param).__dict__[_CLASS]
        del param.__dict__[_WAIT]


def wait_for_values(param: Tensor) -> None:
    """Wait for the values of a parameter, if it is pending."""
    if is_pending(param):
        wait = param.__dict__[_WAIT]
        release(param)
        wait()
