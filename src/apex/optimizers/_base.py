"""Base class of the fused optimizers.

A subclass names the state of a parameter (`_state_names`) and updates a bucket (`_update`). It gets buckets, master
weights, stochastic rounding, loss scaling without host syncs, CUDA graphs and checkpoints from this class.
"""

from __future__ import annotations

import copy
import importlib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from typing_extensions import Unpack

from ..ops import _graph_numbers
from ..ops._host import HOST, on_host
from ..ops.multi_tensor import make_lists, zero
from ..ops.multi_tensor.torch_lists import StateSeed, seed_of
from ._buckets import MASTER, Group, GroupBuckets, SlotCodecs, UpdateBucket, agreed
from ._checks import check_group, check_options
from ._formats import add_state, check_formats, decoded_state, master_of, slot_codecs, stored_names
from ._state_dicts import StateDicts

logger = logging.getLogger("apex.optimizers")

LOW_PRECISION = (torch.float16, torch.bfloat16)

# Types of attributes that are pickled with an optimizer.
_OPTIONS = (bool, int, float, str, frozenset, torch.dtype, type(None))
# Attributes that a copy of an optimizer makes anew.
_NOT_COPIED = {
    *("_group_buckets", "_states", "_ready", "_amp_stash", "_model_params", "_takes_model_grads", "_workspaces"),
    *("_memories", "_choices", "_counts"),
}


class CommonOptions(TypedDict, total=False):
    """Keyword options of all fused optimizers; `FusedOptimizer` describes them."""

    master_weights: bool
    stochastic_rounding: bool
    capturable: bool


class Options(CommonOptions, total=False):
    """The common options, and `materialize_master_grads`, which upstream's SGD and LARS take by position too."""

    materialize_master_grads: bool


class StateOptions(TypedDict, total=False):
    """Options of optimizers whose state can be stored in fewer bytes; docs/state_formats.md describes them."""

    state_format: str
    master_bits: int | None


class AllOptions(Options, StateOptions, total=False):
    """Every keyword option of `FusedOptimizer`."""


class LossScaling(NamedTuple):
    """Loss scaling in a step: tensors on the device, or None.

    If `found_inf` is not 0, the step changes nothing. The update is computed with gradients times `inverse_scale`.
    After a step that was not skipped, the gradients left in `.grad` are multiplied by `unscale`.
    """

    found_inf: Tensor | None = None
    inverse_scale: Tensor | None = None
    unscale: Tensor | None = None

    def on(self, device: torch.device) -> LossScaling:
        """Return the loss scaling with its tensors on `device`."""
        # `unscale` is on the device of `inverse_scale`.
        if all(value is None or value.device == device for value in self[:2]):
            return self
        waits = device == HOST  # Python reads the copy at once
        return LossScaling(*[None if value is None else value.to(device, non_blocking=not waits) for value in self])

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the loss scaling as keyword arguments of `apply`."""
        return {"noop": self.found_inf, "grad_scale": self.inverse_scale}


class FusedOptimizer(StateDicts):
    """Base of the fused optimizers.

    Options that all of them take by keyword:

    - `master_weights`: float16 and bfloat16 parameters get a float32 copy, and updates are applied to it;
    - `stochastic_rounding`: bfloat16 parameters without a master copy are rounded up or down at random, so that small
      updates are not lost; the same seed gives the same bits;
    - `capturable`: the step count (and the learning rate, if it is a tensor) stays on the device, so that a CUDA graph
      can be replayed;
    - `materialize_master_grads=False`: under `apex.amp` with master weights, gradients stay in half precision and
      scaled on the model's parameters, and the masters have none: 4 bytes per parameter less, and one pass less.
      `apex.amp` sets `most_recent_scale` to the loss scale left on the gradients, and `scale_set_by_backward`. A step
      divides by `most_recent_scale` and resets both.

    Gradients, state and `param.data` may be replaced between steps, with one exception on a GPU. If `param.data` is
    replaced by a part of itself with the same first element, and the old gradient is kept, the step still updates the
    whole old tensor: clear gradients after shrinking a parameter.
    """

    # Whether an update depends on the number of earlier updates: then a graph needs the count on the device.
    _counts_steps = True
    # Whether an update needs sums over whole parameters: `UpdateBucket.over_shards` then adds up the sums of shards.
    _measures = False
    # Names of state that a saved parameter may lack although it has other state.
    _may_lack: frozenset[str] = frozenset()
    # Makes, from a bucket's tensors, an object that update rules can be applied to.
    _make_lists: Callable[..., Any] = staticmethod(make_lists)
    # Returns the class of a parameter's bucket. Moves new or loaded state of a parameter to the memory that keeps it.
    _bucket_type: Callable[..., Any] = staticmethod(lambda param: UpdateBucket)
    _place_state: Callable[..., None] | None = None
    # torch.amp.GradScaler then passes scale and overflow flag instead of waiting for the device.
    _step_supports_amp_scaling = True
    # Set by apex.amp. `_model_params` maps a float32 master, which the optimizer holds, to the model's half-precision
    # parameter, which is written at each update. `_takes_model_grads`: use that parameter's gradient, not the master's.
    _model_params: Mapping[Tensor, Tensor] = MappingProxyType({})
    _takes_model_grads = False
    _wrote_models = False
    # Default values of the options.
    master_weights = stochastic_rounding = capturable = False
    state_format = "float32"
    master_bits: int | None = None
    # State that `state_format` may encode: "signed" numbers, or squares that are stored as their roots ("root").
    _encodable: Mapping[str, str] = MappingProxyType({})
    materialize_master_grads = True
    # Class attributes too, because optimizers pickled by earlier versions lack them.
    most_recent_scale: float | Tensor = 1.0
    scale_set_by_backward = False

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, set_grad_none: bool = True, **options: Unpack[AllOptions]
    ) -> None:
        if unknown := options.keys() - AllOptions.__optional_keys__:
            raise TypeError(f"{type(self).__name__} got unexpected keyword arguments: {', '.join(sorted(unknown))}")
        self._check_options({**defaults, **options, "set_grad_none": set_grad_none})
        vars(self).update(options)
        if self.stochastic_rounding and self.master_weights:
            raise ValueError("stochastic_rounding rounds parameters that have no master copy; master_weights makes one")
        check_formats(self)
        self.set_grad_none = set_grad_none
        self._group_buckets: dict[int, GroupBuckets] = {}
        # The values of `state` when buckets were last made. A user may replace one at any time: every step compares.
        self._states: list[dict[str, Any]] = []
        # Number of steps skipped for an overflow, by group: tensors on the device that the host has not read yet.
        self._skipped: dict[int, Tensor] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group after checking its hyperparameters."""
        if isinstance(param_group, dict):  # PyTorch raises for other types
            self._check_options({**self.defaults, **param_group})
            check_group(self, param_group)
        super().add_param_group(param_group)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raise an error if a group's hyperparameters are invalid."""
        check_options(options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        """Return the names of the state tensors in the order of the update rule's slots."""
        raise NotImplementedError

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        """Update one bucket; `step` counts from 1 and is a float64 tensor if the count lives on the device."""
        raise NotImplementedError

    def _initial_state(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Return a new state tensor: zeros, in float32 for half-precision parameters."""
        return torch.zeros_like(param, dtype=state_dtype(param), memory_format=torch.preserve_format)

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        """Return a key; parameters with different keys go to different buckets."""
        return None

    def _step_of(self, bucket: UpdateBucket, step: Any) -> Any:
        """Return the step count of a bucket's parameters, which is the group's unless parameters are counted."""
        return step

    def _rename_loaded_state(self) -> None:
        """Rename loaded state that PyTorch's optimizers keep under another name; called after loading."""

    def _before_step(self) -> None:
        """Move tensors if needed; called once per step, before buckets compare addresses."""

    def _before_buckets(self, index: int, group: dict[str, Any]) -> None:
        """Prepare a group whose buckets are about to be made again: parameters were added, moved, got gradients, ..."""

    def _before_update(self, scaling: LossScaling) -> None:
        """Compute norms over all gradients; called once per step, when all buckets are ready (`self._ready`)."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step and return the closure's loss."""
        loss = run_closure(closure)
        self._step(self._loss_scaling())
        return loss

    # Kept out of compiled graphs, which have no addresses for the kernels.
    @torch._disable_dynamo  # torch.compiler.disable would import the compiler here: 1.8 s
    @torch.no_grad()
    def _step(self, scaling: LossScaling) -> None:
        self._show_own()
        for group in self.param_groups:
            if group.get("maximize"):  # set after the group was made
                check_group(self, group)
        scaling = self._with_recent_scale(scaling)
        self._check_capture()
        if len(self.state) != len(self._states) or not all(map(operator.is_, self.state.values(), self._states)):
            self._group_buckets.clear()
        self._before_step()
        ready = [(index, group, self._buckets_of(index, group)) for index, group in enumerate(self.param_groups)]
        self._ready = [(group, bucket) for _, group, buckets in ready for bucket in buckets]
        flag = agreed(scaling.found_inf, [bucket for _, bucket in self._ready])
        scaling = scaling._replace(found_inf=flag)
        self._before_update(scaling)
        capture = _graph_numbers.current
        for index, group, buckets in ready:
            if not buckets:
                continue
            seed = self._next_seed(group, buckets[0].device)
            step = self._next_step(index, group, buckets[0].device, scaling)
            # A graph must not freeze hyperparameters, because schedulers change them.
            numbers = group if capture is None else capture.group(self, index)
            rate = numbers.get("lr")
            if isinstance(rate, Tensor) and rate.is_cpu:  # computed in float64, as in a graph
                numbers = {**numbers, "lr": float(rate)}
            for bucket in buckets:
                bucket_scaling = scaling.on(bucket.device)
                count = self._step_of(bucket, step.to(bucket.device) if isinstance(step, Tensor) else step)
                self._update(numbers, bucket, count, bucket_scaling, self._seed_for(bucket, seed))
                if scaling.unscale is not None:
                    bucket.unscale(scaling)
                bucket.release()
        self._ready = []
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        if self._model_params:
            self._wrote_models = True

    def _check_capture(self) -> None:
        """Raise an error if a replay of a CUDA graph that records this step would give wrong results."""
        if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
            return
        name = type(self).__name__
        if (self._counts_steps or self._rounds_at_random()) and not self.capturable and _graph_numbers.current is None:
            raise RuntimeError(
                f"a step of {name} cannot be captured in a CUDA graph: its step count is on the host, so that every "
                "replay would be the same step; use apex.graphs.capture, or make the optimizer with capturable=True"
            )
        has_state = any(self._state_names(group) for group in self.param_groups) or self._counts_steps
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if has_state and not all(self.state.get(param) for param in params):
            raise RuntimeError(
                f"{name} has parameters without state, which a captured step would make anew at every replay; take one "
                "step before capturing"
            )

    def _buckets_of(self, index: int, group: dict[str, Any]) -> list[UpdateBucket]:
        buckets = self._group_buckets.get(index)
        # Names may change with an option, such as a momentum that was 0.
        names = stored_names(self, group) if self._encodes else tuple(self._state_names(group))
        if buckets is None or buckets.names != names or not buckets.refresh(group["params"]):
            self._before_buckets(index, group)
            buckets = self._group_buckets[index] = GroupBuckets(self, group, names)
            self._states = list(self.state.values())
        return buckets.buckets

    def _prepare(self, param: Tensor, group: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """Return a parameter's state, with missing tensors created, and its kind."""
        state = self.state[param]
        kind = self._kind(param, state)
        if self._encodes:
            add_state(self, state, param, group)
        else:
            for name in names:
                if name not in state:
                    state[name] = self._initial_state(name, param, group)
        by_bits = self.master_bits is not None and param.dtype == torch.bfloat16
        if self.master_weights and not by_bits and param.dtype in LOW_PRECISION and MASTER not in state:
            state[MASTER] = param.detach().to(torch.float32, copy=True)
        return state, kind

    def _next_step(self, index: int, group: dict[str, Any], device: torch.device, scaling: LossScaling) -> Any:
        """Count a step and return the count; `group["step"]` leaves out skipped steps as soon as they are known."""
        flag, capture, count = scaling.found_inf, _graph_numbers.current, group.get("step", 0)
        if self.capturable:
            if not isinstance(count, Tensor):
                count = torch.full((1,), int(count), dtype=torch.int32, device=device)
            group["step"] = count
            count += 1 if flag is None else (flag == 0).to(device, torch.int32).reshape(1)
            return count.to(torch.float64).reshape(())
        if index in self._skipped and (flag is None or (on_host(flag) and capture is None)):
            self._settle_skipped(index, group)
            del self._skipped[index]
        count = group["step"] = int(group.get("step", 0)) + 1
        if flag is not None and on_host(flag) and capture is None:  # the host need not wait for it
            group["step"] -= int(flag != 0)
            return torch.full((), count, dtype=torch.float64, device=HOST)
        count = count if capture is None else capture.counted(self, index)
        if flag is None:
            return count
        skipped = self._skipped.get(index)
        if skipped is None:
            skipped = self._skipped[index] = torch.zeros((), dtype=torch.float64, device=flag.device)
        step = count - skipped
        skipped += flag.reshape(()) != 0
        return step

    def _settle_skipped(self, index: int, group: dict[str, Any]) -> None:
        """Subtract the skipped steps from the host's count, which waits for the device."""
        skipped = self._skipped[index]
        group["step"] = int(group["step"]) - int(skipped)
        skipped.zero_()  # in place, because a graph may continue to count in this tensor

    def _settle_all_skipped(self) -> None:
        self._show_own()
        for index in list(self._skipped):
            self._settle_skipped(index, self.param_groups[index])

    def _rounds_at_random(self) -> bool:
        """Return whether a step needs a seed: for its parameters, or for state that is rounded stochastically."""
        return self.stochastic_rounding or self.state_format != "float32"

    def _next_seed(self, group: dict[str, Any], device: torch.device) -> Any:
        """Count this step, skipped or not, and return a seed below 2**24 for its stochastic rounding, or None.

        The count moves to the device, and the seed is a tensor, if a graph may replay the step.
        """
        if not self._rounds_at_random():
            return None
        count = group.get("rounding_count", 0)
        if self.capturable or _graph_numbers.current is not None or isinstance(count, Tensor):
            if not isinstance(count, Tensor):
                count = torch.full((), int(count), dtype=torch.int64, device=device)
            group["rounding_count"] = count
            count += 1
        else:
            count = group["rounding_count"] = int(count) + 1
        return seed_of(count)

    def _seed_for(self, bucket: UpdateBucket, seed: Any) -> Any:
        """Return the seed for a bucket: for parameters and state, for state alone, or None."""
        if seed is None or (self.stochastic_rounding and bucket.params[0].dtype == torch.bfloat16):
            return seed
        return StateSeed(seed) if bucket.needs_seed else None

    @property
    def _encodes(self) -> bool:
        """Return whether state or masters are stored in another format than float32."""
        return self.state_format != "float32" or self.master_bits is not None

    def _slot_codecs(self, param: Tensor, group: dict[str, Any]) -> SlotCodecs:
        return slot_codecs(self, param, group) if self._encodes else {}

    def _loss_scaling(self, grad_scaler: Any = None) -> LossScaling:
        """Return the loss scaling that torch.amp.GradScaler set on the optimizer, or the scaling of `grad_scaler`."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scaler is not None:
            state = grad_scaler._per_optimizer_states[id(self)]
            if state["stage"] is OptState.READY:
                grad_scaler._check_inf_per_device(self)
            current = grad_scaler._get_scale_async()
            scale = None if state["stage"] is OptState.UNSCALED else current
            flags = [flag.to(current.device) for flag in state["found_inf_per_device"].values()]
            found_inf = sum(flags[1:], flags[0]) if flags else None
        inverse = None if scale is None else scale.double().reciprocal().to(torch.float32).reshape(1)
        # If no parameter has a gradient, the flags' sum is the number 0.
        return LossScaling(found_inf if isinstance(found_inf, Tensor) else None, inverse, inverse)

    def _with_recent_scale(self, scaling: LossScaling) -> LossScaling:
        """Return `scaling` extended to remove the loss scale that amp left on the gradients."""
        scale = self.most_recent_scale
        if not isinstance(scale, Tensor):
            if scale == 1.0:
                return scaling
            scale = torch.full((1,), scale, dtype=torch.float64, device=self.param_groups[0]["params"][0].device)
        inverse = scale.double().reciprocal().to(torch.float32).reshape(1)
        if scaling.inverse_scale is not None:
            inverse = inverse.to(scaling.inverse_scale.device) * scaling.inverse_scale
        return LossScaling(scaling.found_inf, inverse, scaling.unscale)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; by default set them to None if the optimizer was made with `set_grad_none`."""
        if self.set_grad_none if set_to_none is None else set_to_none:
            super().zero_grad(set_to_none=True)
            return
        gradients = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        for gradient in gradients:
            gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)
        zero(gradients)

    @property
    def _dummy_overflow_buf(self) -> Tensor:
        """Return a flag that is 0, for subclasses that call functions of `amp_C` themselves."""
        return torch.zeros(1, dtype=torch.int32, device=self.param_groups[0]["params"][0].device)

    def master_parameters(self) -> list[Tensor]:
        """Return the tensors that updates are applied to: the float32 master of a parameter, else the parameter.

        With `master_bits` a master is a copy, made of the parameter and its remainder.
        """
        params = (param for group in self.param_groups for param in group["params"])
        return [master_of(self.state[param], param) if param in self.state else param for param in params]

    def __getstate__(self) -> dict[str, Any]:
        self._settle_all_skipped()
        options = {name: value for name, value in self.__dict__.items() if isinstance(value, _OPTIONS)}
        return {**options, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._group_buckets = {}
        self._states = []
        # PyTorch's `load_state_dict` calls this too. The tensors stay: a graph may continue to count in them.
        for skipped in self.__dict__.setdefault("_skipped", {}).values():
            skipped.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedOptimizer:
        self._settle_all_skipped()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(
            {
                name: copy.deepcopy(value, memo)
                for name, value in self.__dict__.items()
                if name not in _NOT_COPIED
                and not isinstance(value, MethodType)  # set by apex.amp and schedulers, bound to the original
            }
        )
        twin._group_buckets, twin._states = {}, []
        return twin


class EncodingOptimizer(FusedOptimizer):
    """Base of the fused optimizers that take `state_format` and `master_bits`: docs/state_formats.md."""

    def state_dict(self, *, decoded: bool = False) -> dict[str, Any]:
        """Return the state, including master weights, in the format of `torch.optim`.

        State in another format than float32 is saved as it is stored, or as float32 numbers if `decoded`, which
        PyTorch's optimizers and optimizers of another format can load. Codes of groups that shards cut are decoded.
        """
        saved = super().state_dict()
        return decoded_state(self, saved, everything=decoded) if self._encodes else saved


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Run the closure passed to `step` with gradients enabled and return its loss, or None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def adam_hyperparameters(group: dict[str, Any], step: Any, **more: Any) -> dict[str, Any]:
    """Return the hyperparameters of rules with Adam's two moments, from a parameter group and a step counted from 1."""
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "beta1": beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "step": step,
        "weight_decay": group["weight_decay"],
        "bias_correction": bool(group.get("bias_correction", False)),
        **more,
    }


def compiled_function(name: str) -> property:
    """Return a property for a function of `amp_C`, for subclasses written for the original optimizers."""
    return property(lambda self: getattr(importlib.import_module("amp_C"), name))


def state_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state: float32 for half-precision parameters, else the parameter's dtype."""
    return torch.float32 if param.dtype in LOW_PRECISION else param.dtype
