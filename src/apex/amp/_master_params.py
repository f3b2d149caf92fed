"""Float32 master parameters of an optimizer, and amp's state of the optimizer: `optimizer._amp_stash`.

There are three kinds of parameters: half-precision ones of the model with a float32 master, which replaces them in the
optimizer's groups; float32 ones, which are their own masters; and half-precision ones without a master (O3).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._distributed.marks import copy_marks
from .._distributed.shards import all_shard_groups, is_sharded, reduce_over
from ._amp_state import HALF, _amp_state, float32_values
from ._containers import applier


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that performs the update: the one inside LARC, or the optimizer itself."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else getattr(optimizer, "optim", optimizer)


def takes_gradients(optimizer: Any) -> bool:
    """Return whether an optimizer takes gradients during backward passes and keeps its own masters (ZeRO)."""
    return bool(getattr(innermost(optimizer), "_takes_gradients", False))


def _takes_found_inf(inner: Any) -> bool:
    """Return whether an optimizer's step reads `found_inf` on the device, so that skipping a step needs no wait."""
    if not getattr(inner, "_step_supports_amp_scaling", False):
        return False
    # A subclass with its own step, written for the original, ignores such flags.
    return not hasattr(inner, "_model_params") or type(inner).step.__module__.startswith("apex.")


class AmpOptimizerState:
    """Amp's state of one optimizer: `optimizer._amp_stash`."""

    def __init__(self, optimizer: Any) -> None:
        # The optimizer that performs the update: the one inside LARC, or the optimizer itself.
        self.inner = innermost(optimizer)
        self.lazy_init_called = False
        # Whether masters have taken over changes made to the parameters since initialize.
        self.saw_first_backward = False
        # Whether the next step will be skipped.
        self.already_patched = False
        # Whether gradients are still scaled, because of `delay_unscale`.
        self.params_have_scaled_gradients = False
        # The scaler of the last `scale_loss` and its index; with `delay_unscale` a copy of a dynamic scale, because the
        # scale itself may change before the gradients are unscaled.
        self.scaled_by: tuple[Any, int] = None, 0
        self.delayed_scale: Tensor | None = None
        # Whether a `scale_loss` of this optimizer is active: its gradients are scaled.
        self.inside_scale_loss = False
        self.has_masters = False
        # 1 on the device if gradients overflowed since the last step; only for optimizers that accept such a flag.
        self.found_inf: Tensor | None = None
        self.takes_found_inf = _takes_found_inf(self.inner)
        # Parallel lists: a model's half-precision parameters and their masters.
        self.all_fp16_params: list[Tensor] = []
        self.all_fp32_from_fp16_params: list[Tensor] = []
        # Parameters that the optimizer updates directly.
        self.all_fp32_from_fp32_params: list[Tensor] = []
        # Half-precision parameters that get a master as soon as they are trained.
        self.frozen: list[Tensor] = []
        # Gradients that existed before the current backward pass.
        self.accumulated_grads: dict[Tensor, Tensor] = {}
        # Float32 parameters that another optimizer of the same `scale_loss` has too, and has unscaled.
        self.unscaled_elsewhere: set[Tensor] = set()
        # Half-precision parameters whose gradients are zeros since `zero_grad(set_to_none=False)`.
        self.zeroed: set[Tensor] = set()
        # A half-precision gradient that was copied to its master, and its version counter: it should not change.
        self.copied_grad: tuple[Tensor, int] | None = None
        self.warned_of_changes = False
        # The optimizer unscales gradients itself, and reads half-precision parameters' gradients directly.
        self.optimizer_unscales = False
        # The optimizer takes gradients during backward passes and keeps its own masters (ZeRO).
        self.takes_gradients = takes_gradients(optimizer)
        # The optimizer's combined gradient buffers, `_combine_grad.CombinedGradients`, which imports this module.
        self.combined: Any = None
        # Process groups over which parameters are cut: their processes must agree on an overflow.
        self.shard_groups: list[Any] = []
        self.has_shards = False
        # The optimizer's own attributes that amp replaced.
        self.replaced: dict[str, Any] = {}

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """Return the parameters that the optimizer updates."""
        return self.all_fp32_from_fp16_params + self.all_fp32_from_fp32_params

    @property
    def model_params(self) -> list[Tensor]:
        """Return the parameters that receive gradients in a backward pass."""
        return self.all_fp16_params + self.all_fp32_from_fp32_params


def collect_params(optimizer: Any, params: list[Tensor], originals: dict[Tensor, Tensor]) -> list[Tensor]:
    """Sort parameters into the lists of the stash; return the optimizer's parameters, masters if they exist.

    `originals` holds values from before the model was cast, which are more exact than its current parameters.
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
    # PyTorch only warns of duplicates; their gradient is unscaled once.
    stash.all_fp32_from_fp32_params[:] = dict.fromkeys(stash.all_fp32_from_fp32_params)
    return chosen


def adopt_frozen(optimizer: Any, trained: Container[Tensor] = ()) -> None:
    """Make masters for frozen parameters that now require gradients or are in `trained`."""
    stash: AmpOptimizerState = optimizer._amp_stash
    chosen = {id(param) for param in stash.frozen if param.requires_grad or param in trained}
    if not chosen:
        return
    stash.frozen = [param for param in stash.frozen if id(param) not in chosen]
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            if id(param) in chosen:
                group["params"][index] = _make_master(optimizer, stash, param, None)
    note_model_params(stash)


@torch.no_grad()
def adopt_changes(stash: AmpOptimizerState) -> None:
    """Give masters the values of parameters that changed since `initialize`, without waiting for the device.

    Wrappers and scripts broadcast parameters between initialize and the first backward pass, when upstream makes the
    masters. If a parameter's element is still the rounded value of its master, the master's element is kept.
    """
    stash.saw_first_backward = True
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        # Through `.data`: a master may share its version counter with a parameter that a forward pass has saved.
        master.data.copy_(float32_values(param, master))


def _make_master(optimizer: Any, stash: AmpOptimizerState, param: Tensor, value: Tensor | None) -> Tensor:
    known = _amp_state.masters.get(param)
    if value is None and known is not None:  # another optimizer's master, or loaded into a frozen parameter
        value = known if isinstance(known, Parameter) else float32_values(param, known)
    master = Parameter(param.detach().float() if value is None else value.detach())
    copy_marks(param, master)
    stash.all_fp16_params.append(param)
    stash.all_fp32_from_fp16_params.append(master)
    _amp_state.masters[param] = master
    if param in optimizer.state:
        optimizer.state[master] = cast_state(optimizer.state.pop(param), torch.float32, HALF)
    return master


def cast_state(state: dict[str, Any], dtype: torch.dtype, of: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """Return an optimizer's state of one parameter with tensors of the dtypes `of` cast, also in lists (LBFGS)."""

    def cast(value: Any) -> Any:
        # Half precision cannot hold a step count.
        fits = isinstance(value, Tensor) and (value.dim() > 0 or dtype not in HALF)
        return value.to(dtype) if fits and value.dtype in of else value

    return applier(state, cast)


def sparse_copy(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a sparse gradient in another dtype; its values can be changed in place."""
    grad = grad.coalesce()
    values = grad.values().to(dtype, copy=True)
    options: Any = {"dtype": dtype, "device": values.device, "is_coalesced": True, "check_invariants": False}
    return torch.sparse_coo_tensor(grad.indices(), values, grad.shape, **options)


def half_params(optimizer: Any) -> list[Tensor]:
    """Return the half-precision parameters that an optimizer updates directly."""
    return [param for group in optimizer.param_groups for param in group["params"] if param.dtype in HALF]


def cast_states(optimizer: Any, params: list[Tensor]) -> None:
    """Cast state to the current dtype of its parameters: to half precision for O3, and back afterwards."""
    inner = innermost(optimizer)
    if hasattr(inner, "_model_params"):
        return  # a fused optimizer keeps float32 state
    if takes_gradients(optimizer):
        inner._params_were_cast()
        return
    for param in params:
        if param in optimizer.state:
            others = (torch.float32, torch.float64) if param.dtype in HALF else HALF
            optimizer.state[param] = cast_state(optimizer.state[param], param.dtype, others)


def agree(found_inf: Tensor, stashes: list[AmpOptimizerState]) -> None:
    """Set an overflow flag that is set in any process that holds shards of the optimizers' parameters."""
    groups = {id(group): group for stash in stashes for group in stash.shard_groups}
    if groups:
        reduce_over(found_inf, groups.values(), maximum=True)


def note_model_params(stash: AmpOptimizerState) -> None:
    """Make a fused optimizer write a model's parameters in the pass that updates their masters.

    Also notes which processes hold shards of the parameters.
    """
    stash.has_shards = any(map(is_sharded, stash.model_params))
    stash.shard_groups = all_shard_groups(stash.model_params)
    if hasattr(stash.inner, "_model_params"):
        stash.inner._model_params = dict(zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, strict=True))
        stash.inner._takes_model_grads = stash.optimizer_unscales
