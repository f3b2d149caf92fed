"""What amp keeps beside an optimizer, and how its gradients get from scaled to unscaled, and to the masters.

Three kinds of parameters: half-precision ones of the model that have a float32 master (the master takes their place in
the optimizer's groups), float32 ones (their own masters), and half-precision ones without a master (O3).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..ops.multi_tensor import scale
from ._amp_state import HALF, _amp_state, with_digits_of
from ._containers import applier
from .scaler import LossScaler


class AmpOptimizerState:
    """Amp's data on one optimizer: `optimizer._amp_stash`."""

    def __init__(self) -> None:
        self.lazy_init_called = False
        # Whether masters have taken over what happened to the parameters since initialize.
        self.saw_first_backward = False
        # Whether the next step is to be skipped.
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.has_masters = False
        # Whether the last backward pass overflowed, for optimizers that can be told on the device.
        self.noop: Tensor | None = None
        # Parallel lists: a model's half-precision parameters and their masters.
        self.all_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        # Parameters that the optimizer updates directly.
        self.all_fp32_from_fp32_params: list[Tensor] = []
        # Half-precision parameters that will get a master when they are trained.
        self.frozen: list[Tensor] = []
        # Gradients that were there before the backward pass that is under way.
        self.stashed: dict[Tensor, Tensor] = {}
        # The optimizer unscales gradients itself, and takes those of half-precision parameters as they are.
        self.optimizer_unscales = False
        # The optimizer takes gradients from parameters during backward passes, and keeps its own masters (ZeRO).
        self.takes_gradients = False
        # The optimizer's combined gradient buffers, `_combined.CombinedGradients`, which imports this module.
        self.combined: Any = None
        # The optimizer's own attributes that amp's took the place of.
        self.replaced: dict[str, Any] = {}

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The parameters that the optimizer updates."""
        return self.all_fp32_from_fp16_params + self.all_fp32_from_fp32_params

    @property
    def model_params(self) -> list[Tensor]:
        """The parameters that a backward pass gives gradients to."""
        return self.all_fp16_params + self.all_fp32_from_fp32_params


def collect_params(optimizer: Any, params: list[Tensor], originals: dict[Tensor, Tensor]) -> list[Tensor]:
    """Notes parameters that the optimizer is to update; returns what belongs in its groups: with masters, those.

    `originals` holds values from before the model was cast, which are more exact than its parameters are now.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    chosen = []
    for param in params:
        if not stash.has_masters or param.dtype not in HALF:
            stash.all_fp32_from_fp32_params.append(param)
            chosen.append(param)
        elif not param.requires_grad:
            stash.frozen.append(param)
            chosen.append(param)
        else:
            chosen.append(_make_master(optimizer, stash, param, originals.get(param)))
    return chosen


def adopt_frozen(optimizer: Any, trained: Container[Tensor] = ()) -> bool:
    """Makes masters for parameters that are frozen no more, or are in `trained`; returns whether there were any."""
    stash: AmpOptimizerState = optimizer._amp_stash
    chosen = {id(param) for param in stash.frozen if param.requires_grad or param in trained}
    if not chosen:
        return False
    stash.frozen = [param for param in stash.frozen if id(param) not in chosen]
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            if id(param) in chosen:
                group["params"][index] = _make_master(optimizer, stash, param, None)
    stash.combined = stash.combined and stash.combined.renewed()
    return True


@torch.no_grad()
def adopt_changes(stash: AmpOptimizerState) -> None:
    """Masters of parameters that were changed since initialize take over the change, without waiting for the device.

    Wrappers and scripts broadcast parameters between initialize and the first backward pass, which is where upstream
    made the masters. An element that is still the rounding of its master keeps the digits of the master.
    """
    stash.saw_first_backward = True
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        # Through `.data`: a master may share its count of changes with the parameter, which a forward pass has saved.
        master.data.copy_(with_digits_of(param, master))


def _make_master(optimizer: Any, stash: AmpOptimizerState, param: Tensor, value: Tensor | None) -> Tensor:
    if value is None and param in _amp_state.masters:  # a checkpoint was loaded into the frozen parameter
        value = with_digits_of(param, _amp_state.masters[param])
    master = Parameter(param.detach().float() if value is None else value.detach())
    stash.all_fp16_params.append(param)
    stash.all_fp32_from_fp16_params.append(master)
    _amp_state.masters[param] = master
    if param in optimizer.state:
        optimizer.state[master] = cast_state(optimizer.state.pop(param), torch.float32, HALF)
    return master


def cast_state(state: dict[str, Any], dtype: torch.dtype, of: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """An optimizer's state of one parameter, with tensors of the types `of` cast, in lists (LBFGS) too."""

    def cast(value: Any) -> Any:
        # Half precision cannot hold a count of steps.
        fits = isinstance(value, Tensor) and (value.dim() > 0 or dtype not in HALF)
        return value.to(dtype) if fits and value.dtype in of else value

    return applier(state, cast)


def before_backward(stash: AmpOptimizerState) -> None:
    """Puts unscaled gradients aside, so that a backward pass with another scale does not add to them."""
    stash.stashed = {}
    for param in stash.all_fp16_params:
        if stash.optimizer_unscales and param.grad is not None:
            stash.stashed[param] = param.grad
        param.grad = None  # what was there is in the master's gradient already
    for param in stash.all_fp32_from_fp32_params:
        if param.grad is not None:
            stash.stashed[param] = param.grad
            param.grad = None


def after_failure(stash: AmpOptimizerState) -> None:
    """Puts back what was put aside: the backward pass came to nothing."""
    for param in stash.model_params if stash.stashed else ():
        param.grad = stash.stashed.get(param)
    stash.stashed = {}


class NonfiniteCounts(NamedTuple):
    """Parameters, and how many elements of their gradients were infinite and NaN: int32 [parameters, 2]."""

    params: list[Tensor]
    counts: Tensor


def after_backward(stash: AmpOptimizerState, scaler: LossScaler) -> list[NonfiniteCounts]:
    """Unscales the new gradients and adds them to what was there before."""
    ways = _Ways()
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        gradient = param.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            ways.add_sparse(param, gradient, master, master.grad)
        elif master.grad is None:
            master.grad = torch.empty_like(master)
            ways.add("fresh", param, gradient, master.grad)
        else:
            ways.add("added", param, gradient, master.grad, master.grad)
    for param in stash.all_fp32_from_fp32_params:
        gradient, earlier = param.grad, stash.stashed.get(param)
        if gradient is None:
            param.grad = earlier
        elif gradient.layout != torch.strided:
            ways.add_sparse(param, gradient, param, earlier)
        elif earlier is None:
            ways.add("in place", param, gradient, gradient)
        else:
            ways.add("added", param, gradient, gradient, earlier)
    stash.stashed = {}
    return ways.run(scaler, None)


def after_backward_scaled(optimizer: Any, stash: AmpOptimizerState, scaler: LossScaler) -> list[NonfiniteCounts]:
    """For optimizers that unscale: gradients keep a scale, `most_recent_scale`.

    It is the smallest of the backward passes before a step: half precision could not hold the gradients of one loss at
    the larger scale of another.
    """
    new, first = scaler.scale_tensor(), not optimizer.scale_set_by_backward
    before = new if first else optimizer.most_recent_scale
    kept = optimizer.most_recent_scale = new.clamp(max=before)
    optimizer.scale_set_by_backward = True
    ways = _Ways()
    for param in stash.model_params:
        gradient, earlier = param.grad, stash.stashed.get(param)
        if gradient is not None and earlier is not None:
            ways.add("added", param, gradient, gradient, earlier)
        elif gradient is not None:
            ways.add("in place", param, gradient, gradient)
        elif earlier is not None:
            param.grad = earlier
            if not first:
                ways.add("lowered", param, earlier, earlier)
    stash.stashed = {}
    return ways.run(scaler, _Scales(new, before, kept))


class _Scales(NamedTuple):
    """The scales of new gradients, of earlier ones, and of what they become; tensors are float32 [1]."""

    new: Tensor
    earlier: float | Tensor
    kept: Tensor


class _Lists:
    """Parameters whose gradients take the same way."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.earlier: list[Tensor] = []


class _Ways:
    """Gradients by the way they take, their dtype and their device: each list is one pass, and no list waits."""

    def __init__(self) -> None:
        self._lists: dict[Any, _Lists] = {}
        # Sparse gradients to be given to parameters, and what was there before.
        self._later: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def add(self, way: str, param: Tensor, grad: Tensor, output: Tensor, earlier: Tensor | None = None) -> None:
        kind = way, grad.dtype, grad.device
        lists = self._lists.get(kind)
        if lists is None:
            lists = self._lists[kind] = _Lists()
        lists.params.append(param)
        lists.grads.append(grad)
        lists.outputs.append(output)
        if earlier is not None:
            lists.earlier.append(earlier)

    def add_sparse(self, param: Tensor, gradient: Tensor, target: Tensor, earlier: Tensor | None) -> None:
        """A sparse gradient, of which the values are unscaled, for `target`."""
        gradient = gradient.coalesce()
        values = gradient.values().to(target.dtype, copy=True)
        self.add("in place", param, values, values)
        shape, indices = gradient.shape, gradient.indices()
        kind: Any = {"dtype": values.dtype, "device": values.device}
        new = torch.sparse_coo_tensor(indices, values, shape, **kind, is_coalesced=True, check_invariants=False)
        self._later.append((target, new, earlier))

    def run(self, scaler: LossScaler, scales: _Scales | None) -> list[NonfiniteCounts]:
        """Divides by the scaler's scale, or brings gradients from their scale to one that is kept."""
        counted = []
        for (way, _, device), lists in self._lists.items():
            if way == "lowered":
                assert scales is not None
                scale(lists.grads, lists.outputs, scales.kept / scales.earlier)
                continue
            nonfinite_counts = torch.zeros(len(lists.params), 2, dtype=torch.int32, device=device)
            if way == "added":
                scaler.unscale_with_stashed(
                    lists.grads,
                    lists.earlier,
                    lists.outputs,
                    scale_override=scales,
                    nonfinite_counts=nonfinite_counts,
                    checks_sum=scales is not None,
                )
            else:
                scaler.unscale(
                    lists.grads,
                    lists.outputs,
                    models_are_masters=way == "in place",
                    scale_override=None if scales is None else scales.new / scales.kept,
                    nonfinite_counts=nonfinite_counts,
                )
            counted.append(NonfiniteCounts(lists.params, nonfinite_counts))
        for target, gradient, earlier in self._later:
            target.grad = gradient if earlier is None else earlier + gradient
        return counted
