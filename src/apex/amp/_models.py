"""A model under amp: its parameters in another type, and a forward pass that casts.

The forward pass belongs to a class made for the purpose, derived from the model's own: so copies of the model (made by
`copy.deepcopy` for an average of weights, or by nn.DataParallel for another device) run with their own weights.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from . import _casting
from ._amp_state import _amp_state
from ._nested import applier, to_type
from ._state_dicts import keep_state_dict_in_float32

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ForwardCasts:
    """To what a forward pass casts its inputs, its functions and its outputs; None for nothing."""

    inputs: torch.dtype | None = None
    functions: torch.dtype | None = None
    outputs: torch.dtype | None = None

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A forward pass."""
        if self.inputs is not None:
            cast_input = functools.partial(to_type, self.inputs)
            args, kwargs = applier(args, cast_input), applier(kwargs, cast_input)
        if self.functions is not None:
            result = _casting.run_cast(forward, self.functions, args, kwargs)
        else:
            result = forward(*args, **kwargs)
        return result if self.outputs is None else applier(result, functools.partial(to_type, self.outputs))


_NO_CASTS = ForwardCasts()


@dataclass
class ModelRecord:
    """What a model was before amp."""

    dtypes: dict[str, torch.dtype]
    undo: list[Callable[[nn.Module], None]] = field(default_factory=list)


def prepare_model(model: nn.Module, properties: Any, cast_model_outputs: torch.dtype | None) -> None:
    """Casts a model and its forward pass as the properties say."""
    record = _amp_state.models[model] = ModelRecord({name: tensor.dtype for name, tensor in floats_of(model)})
    cast_type = properties.cast_model_type or None
    if cast_type is not None:
        _cast_model(model, cast_type, bool(properties.keep_batchnorm_fp32))
        record.undo.append(_uncast)
        cast_model_outputs = cast_model_outputs or torch.float32
    functions = properties.patch_torch_functions_type if properties.patch_torch_functions else None
    casts = ForwardCasts(cast_type, functions, cast_model_outputs)
    if casts != _NO_CASTS:
        record.undo.append(_cast_forward(model, casts))
    if cast_type in HALF:
        record.undo.append(keep_state_dict_in_float32(model))


def release_model(model: nn.Module) -> None:
    """Gives a model back as it was before amp, with the values it has now."""
    record = _amp_state.models.get(model)
    while record is not None and record.undo:
        record.undo.pop()(model)
    _amp_state.models.pop(model, None)


def dtype_before(model: nn.Module) -> Callable[[str, torch.Tensor], torch.dtype]:
    """The type that a parameter had before amp, by name."""
    record = _amp_state.models.get(model)
    return lambda name, tensor: tensor.dtype if record is None else record.dtypes.get(name, tensor.dtype)


def floats_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers that are floating-point numbers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]


def _cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
    """Casts parameters and buffers in place; batch norms with parameters stay as they are if they are to be kept."""
    for module in model.modules():
        if keep_batchnorm and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                _cast_tensor(tensor, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _uncast(model: nn.Module) -> None:
    dtypes = _amp_state.models[model].dtypes
    for name, tensor in floats_of(model):
        _cast_tensor(tensor, dtypes.get(name, tensor.dtype))


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        gradient, tensor.grad = tensor.grad, None
        tensor.data = tensor.data.to(dtype)
        if gradient is not None:
            tensor.grad = gradient.to(dtype)


# The forward pass ----------------------------------------------------------------------------------------------------


def _cast_forward(model: nn.Module, casts: ForwardCasts) -> Callable[[nn.Module], None]:
    """Replaces the forward pass of this one model; the result undoes it."""
    if isinstance(model, torch.jit.ScriptModule):
        return lambda model: None  # its forward pass cannot be replaced; autocast on the thread is all that O1 needs
    if "forward" in vars(model):
        return _replace_own_forward(model, casts)
    try:
        model.__class__ = _casting_class(type(model))  # type: ignore[arg-type]
    except TypeError:  # a class that cannot be derived from
        return _replace_own_forward(model, casts)
    model._amp_casts = casts  # type: ignore[assignment]
    return _restore_class


def _restore_class(model: nn.Module) -> None:
    model.__class__ = type(model)._amp_original  # type: ignore[attr-defined]
    vars(model).pop("_amp_casts", None)


def _replace_own_forward(model: nn.Module, casts: ForwardCasts) -> Callable[[nn.Module], None]:
    """For models that have been given a forward pass of their own, by torch.compile for example."""
    before = model.forward

    @functools.wraps(before)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return casts.run(before, args, kwargs)

    had_own = "forward" in vars(model)

    def undo(model: nn.Module) -> None:
        if had_own:
            model.forward = before  # type: ignore[method-assign]
        else:
            del model.forward

    model.forward = forward  # type: ignore[method-assign]
    return undo


@functools.cache
def _casting_class(original: Any) -> Any:
    """A class that is `original` in everything but its forward pass."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        casts = self.__dict__.get("_amp_casts", _NO_CASTS)
        return casts.run(functools.partial(original.forward, self), args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        rebuild, args, *rest = tuple(original.__reduce_ex__(self, protocol))
        if rebuild is copyreg.__newobj__ and args == (type(self),):  # type: ignore[attr-defined]
            return _new, (original,), *rest
        return rebuild, args, *rest

    names = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_amp_original": original,
    }
    return type(original)(original.__name__, (original,), names)


def _new(original: Any) -> nn.Module:
    """A model of the casting class, for copies and pickles; its state follows."""
    casting_class = _casting_class(original)
    return casting_class.__new__(casting_class)
