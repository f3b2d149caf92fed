"""A model under amp: its parameters cast, and a forward pass that casts.

The model's class is neither subclassed nor changed: registries of subclasses and type checks see the original class.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._distributed import unreduced
from .._distributed.shards import is_sharded
from . import _autocast
from ._amp_state import HALF, _amp_state, float32_values
from ._containers import applier, to_type
from ._pretrained import save_dtypes_of_parameters, save_dtypes_of_state_dict


@dataclass(frozen=True)
class ForwardCasts:
    """Dtypes that a forward pass casts its inputs, its functions and its outputs to; None for no cast."""

    inputs: torch.dtype | None = None
    functions: torch.dtype | None = None
    outputs: torch.dtype | None = None

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward pass with these casts."""
        if self.inputs is not None:
            cast_input = functools.partial(to_type, self.inputs)
            args, kwargs = applier(args, cast_input), applier(kwargs, cast_input)
        if self.functions is not None:
            result = _autocast.run_cast(forward, self.functions, args, kwargs)
        else:
            result = forward(*args, **kwargs)
        return result if self.outputs is None else applier(result, functools.partial(to_type, self.outputs))


_NO_CASTS = ForwardCasts()


@dataclass
class ModelRecord:
    """The state of a model before amp, and functions that restore it."""

    dtypes: dict[str, torch.dtype]
    forward: CastForward | None = None
    undo: list[Callable[[nn.Module], None]] = field(default_factory=list)


def prepare_model(model: nn.Module, properties: Any, cast_model_outputs: torch.dtype | None) -> None:
    """Cast a model and its forward pass as the properties say."""
    record = _amp_state.models[model] = ModelRecord({name: tensor.dtype for name, tensor in floats_of(model)})
    cast_type = properties.cast_model_type or None
    if cast_type is not None:
        _cast_model(model, cast_type, bool(properties.keep_batchnorm_fp32))
        record.undo.append(_uncast)
        cast_model_outputs = cast_model_outputs or torch.float32
    functions = properties.patch_torch_functions_type if properties.patch_torch_functions else None
    casts = ForwardCasts(cast_type, functions, cast_model_outputs)
    # The forward pass of a scripted model cannot be replaced; autocast on the thread is all that O1 needs.
    if casts != _NO_CASTS and not isinstance(model, torch.jit.ScriptModule):
        own = vars(model).get("forward")
        if isinstance(own, CastForward):  # the model is a copy of a model under amp and has its casts
            own = own.own
        record.forward = forward = CastForward(model, casts, own)
        vars(model).update(forward=forward, _replicate_for_data_parallel=forward.replicate)
        record.undo.append(_uncast_forward)
    if cast_type in HALF:
        save_dtypes_of_state_dict(model)
        record.undo += [save_dtypes_of_parameters, _keep_state_dict_in_float32(model)]


def release_model(model: nn.Module) -> None:
    """Restore a model as it was before amp; it keeps its current values."""
    record = _amp_state.models.get(model)
    while record is not None and record.undo:
        record.undo.pop()(model)
    _amp_state.models.pop(model, None)


def dtype_before(model: nn.Module) -> Callable[[str, Tensor], torch.dtype]:
    """Return a function that gives a parameter's dtype before amp, by name."""
    record = _amp_state.models.get(model)
    return lambda name, tensor: tensor.dtype if record is None else record.dtypes.get(name, tensor.dtype)


def floats_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the model's floating-point parameters and buffers with their names."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]


def _cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
    """Cast parameters and buffers in place; with `keep_batchnorm` batch norms that have parameters stay in float32.

    Sharded parameters stay as they are, because their sharding casts them for the forward pass.

    The frequencies of rotary embeddings of transformers stay in float32, as after its own `from_pretrained`: rounded to
    bfloat16, they are wrong by a whole turn after some thousand tokens. So do buffers that a module names in
    `float32_buffers`.
    """
    for module in model.modules():
        keeps = keep_batchnorm and isinstance(module, _BatchNorm) and module.affine
        of_transformers = type(module).__module__.startswith("transformers.")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if (of_transformers and name.endswith("inv_freq")) or name in getattr(module, "float32_buffers", ()):
                continue
            if tensor is None or not tensor.is_floating_point() or is_sharded(tensor):
                continue
            if not keeps:
                _cast_tensor(tensor, dtype)
            elif tensor.dtype != dtype:  # float64 norms, or bfloat16 ones for float16, take no inputs of `dtype`
                _cast_tensor(tensor, torch.float32)
    _flatten_rnns(model)


def _uncast(model: nn.Module) -> None:
    dtypes = _amp_state.models[model].dtypes
    for name, tensor in floats_of(model):
        _cast_tensor(tensor, dtypes.get(name, tensor.dtype))
    _flatten_rnns(model)


def _flatten_rnns(model: nn.Module) -> None:
    """Make the weights of each RNN contiguous again; otherwise cuDNN would copy them at every call."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _cast_tensor(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        gradient, tensor.grad = tensor.grad, None
        tensor.data = tensor.data.to(dtype)
        if gradient is not None:
            tensor.grad = gradient.to(dtype)


class CastForward:
    """The forward pass of a model under amp, stored among the model's own attributes; its class is not changed.

    `own` is the forward pass stored there before, for example by torch.compile, or None if the class's was used.
    The model is not kept alive. Copies of it (`copy.deepcopy`, pickle, nn.DataParallel) run with their own weights.
    """

    __name__ = "forward"

    def __init__(
        self, model: nn.Module, casts: ForwardCasts, own: Callable[..., Any] | None = None, is_copy: bool = False
    ) -> None:
        self.model = weakref.ref(model)
        self.casts = casts
        self.own = own
        self.is_copy = is_copy

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the forward pass without casts; `inspect.signature` reads it."""
        if self.own is not None:
            return self.own
        model = self.model()
        if model is None:
            raise ReferenceError("this is the forward pass of a model that is gone; keep the model, and call it")
        return functools.partial(type(model).forward, model)  # looked up now: lazy and sharded models change class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            unreduced.note_forward()
        casts = self.casts
        if self.is_copy and casts.inputs is not None and not self._has_weights_of(casts.inputs):
            casts = dataclasses.replace(casts, inputs=None)  # the copy was cast since, for example by `.float()`
        return casts.run(self.__wrapped__, args, kwargs)

    __code__ = __call__.__code__  # torch.export reads where a forward pass is defined

    def _has_weights_of(self, dtype: torch.dtype) -> bool:
        return any(param.dtype == dtype for param in self.model().parameters())  # type: ignore[union-attr]

    def __reduce__(self) -> Any:
        return CastForward, (self.model(), self.casts, self.own, True)

    def replicate(self) -> nn.Module:
        """Return a replica with its own forward pass; stands in for the model's `_replicate_for_data_parallel`."""
        model: Any = self.model()
        replica = type(model)._replicate_for_data_parallel(model)
        vars(replica)["forward"] = CastForward(replica, self.casts, self.own)
        return replica


def _uncast_forward(model: nn.Module) -> None:
    forward = _amp_state.models[model].forward
    assert forward is not None
    own = forward.own
    forward.casts = _NO_CASTS  # in case a user's forward pass has wrapped it since
    vars(model).pop("_replicate_for_data_parallel", None)
    if vars(model).get("forward") is forward:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


# State dicts of half-precision models are saved in float32, from the masters if there are any. Loading one gives the
# masters their exact values: a checkpoint of O2 fits a float32 model, and a run continues to the bit.


def _keep_state_dict_in_float32(model: nn.Module) -> Callable[[nn.Module], None]:
    """Hook into saving and loading of every module of the model; return a function that removes the hooks."""
    handles: list[Any] = []
    for module in model.modules():
        # Module-level functions, not closures, so that a model can be pickled.
        handles.append(module._register_state_dict_hook(_saving))
        handles.append(module.register_load_state_dict_pre_hook(_loading))

    def undo(model: nn.Module) -> None:
        for handle in handles:
            handle.remove()

    return undo


def _saving(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        key = prefix + name
        if value is not None and key in state and value.dtype in HALF:
            master = _amp_state.masters.get(value)
            if isinstance(master, nn.Parameter):
                state[key] = master.detach().clone()
            else:
                state[key] = value.detach().float() if master is None else float32_values(value.detach(), master)


def _loading(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "load_state_dict(assign=True) would replace the half-precision parameters, which amp.initialize has made "
            "and the optimizer updates: call it without assign, or before amp.initialize"
        )
    for name, value in module._parameters.items():
        incoming = state.get(prefix + name)
        if value is None or value.dtype not in HALF:
            continue
        if not isinstance(incoming, Tensor) or incoming.shape != value.shape:
            continue
        master = _amp_state.masters.get(value)
        with torch.no_grad():
            if isinstance(master, nn.Parameter):
                master.copy_(incoming)
                continue
            # Frozen, or not in an optimizer yet. Digits that rounding would lose come from a run that trained it.
            exact = incoming.to(value.device, torch.float32, copy=True)
            if torch.equal(exact.to(value.dtype).float(), exact):
                _amp_state.masters.pop(value, None)
            else:
                _amp_state.masters[value] = exact
