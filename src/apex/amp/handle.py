"""`scale_loss`, and amp's work around an optimizer's backward passes and steps.

Gradients are unscaled, steps with an overflow are skipped, masters are copied to the model. The functions behind
`scale_loss` become methods of the optimizer, which clients call and replace. `scale_loss` calls `_prepare_amp_backward`
before and `_post_amp_backward` after the backward pass; the user calls `step` and `zero_grad`. The handles of the older
interface are in `opt.py`.

This module owns amp's state of an optimizer, `optimizer._amp_stash`: whether its gradients are scaled, and whether its
next step is skipped. A `LossScaler` owns scale and overflow flag; this module calls its methods.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed.experts import scaled_router_losses
from .._distributed.shards import like_parameter, local
from ..ops import _graph_numbers
from ..ops.multi_tensor import scale, zero
from . import _autocast
from ._amp_state import _amp_state
from ._checks import check_flags, check_known, check_loss, checked_optimizers, has_known_step
from ._gradient_checks import check_gradients, check_reduced, warn_of_changes
from ._master_params import AmpOptimizerState, adopt_changes, adopt_frozen, agree, sparse_copy
from .opt import AmpHandle as AmpHandle
from .opt import NoOpHandle as NoOpHandle
from .scaler import LossScaler, NonfiniteCounts, _overflow_messages

_NO_CONTEXT = contextlib.nullcontext()


# Excludes functions from compiled training steps: a graph gains nothing from them. torch.compiler.disable would import
# the compiler here; torch.optim imports it when an optimizer is made.
_outside_graphs = torch._disable_dynamo


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield the loss times its scale, for the backward pass inside; afterwards unscale and check the gradients.

    With `delay_unscale` the gradients stay scaled, so that more backward passes can add to them: pass it to all but the
    last one before a step. Gradients that are unscaled together have the scale of the first of these losses, even if
    the scale has changed since, or the others have another `loss_id`. `delay_overflow_check` leaves the scale
    unchanged. `loss_id` is the index of the loss scale if `initialize` made several.
    """
    del model
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "amp.scale_loss was called before amp.initialize; first: "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...)"
        )
    options = _amp_state.opt_properties.options
    if not options["enabled"]:
        yield loss
        return
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        check_loss(loss)  # raises, like the next checks
    if type(delay_unscale) is not bool or type(delay_overflow_check) is not bool:
        check_flags(delay_unscale=delay_unscale, delay_overflow_check=delay_overflow_check)
    count = len(_amp_state.loss_scalers)
    if not isinstance(loss_id, int) or not -count <= loss_id < count:
        raise IndexError(f"loss_id={loss_id} is unknown: amp.initialize had num_losses={count}; counting starts at 0")
    scaler: LossScaler = _amp_state.loss_scalers[loss_id]
    optimizer_list = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    stashes = [optimizer._amp_stash for optimizer in optimizer_list if hasattr(optimizer, "_amp_stash")]
    has_extras = any(stash.has_masters or stash.combined is not None for stash in stashes)
    does_nothing = scaler.is_always_one and not has_extras
    if len(stashes) != len(optimizer_list):
        checked_optimizers(optimizer_list)
        if not does_nothing or options["master_weights"]:
            check_known(optimizer_list)
    if does_nothing:
        with _autocast_off():
            yield loss.float()
        return
    if any(stash.inside_scale_loss for stash in stashes) and not delay_unscale:
        raise RuntimeError(
            "amp.scale_loss was called inside of another one of the same optimizer, and would unscale gradients "
            "before that one ends: end the first before the second begins, scale the sum of the losses, or give "
            "delay_unscale=True to the inner one"
        )
    delayed_scale = None
    pending = next((stash for stash in stashes if stash.inside_scale_loss or stash.params_have_scaled_gradients), None)
    if pending is not None:
        (scaler, loss_id), delayed_scale = pending.scaled_by, pending.delayed_scale
        for optimizer in optimizer_list:
            stash = optimizer._amp_stash
            if stash.params_have_scaled_gradients and stash.delayed_scale is not delayed_scale:
                _after_backward([optimizer], stash.scaled_by[0], stash.scaled_by[1], stash.delayed_scale)
                stash.params_have_scaled_gradients = False
        # An outer scale_loss has put earlier gradients aside, and handles these gradients when it ends.
        stashes = [stash for stash in stashes if not stash.inside_scale_loss]
    scaler.to(loss.device)
    if delay_unscale and delayed_scale is None and scaler.dynamic:
        delayed_scale = scaler.scale_tensor().clone()
    scale_now = scaler.scale_tensor if delayed_scale is None else lambda: delayed_scale
    prepared = []
    for optimizer in optimizer_list:
        if not (optimizer._amp_stash.params_have_scaled_gradients or optimizer._amp_stash.inside_scale_loss):
            prepared.append(optimizer)
    for optimizer in prepared:
        optimizer._prepare_amp_backward()
        if optimizer._amp_stash.takes_gradients:
            optimizer._amp_stash.inner._set_loss_scale(scale_now())
    _overflow_messages.read()
    with _autocast_off(), scaled_router_losses(scale_now):
        for stash in stashes:
            stash.inside_scale_loss = True
            stash.scaled_by, stash.delayed_scale = (scaler, loss_id), delayed_scale
        try:
            with scaler.at_scale(delayed_scale):
                scaled = scaler.scaled(loss)
            yield scaled
        except BaseException:
            for optimizer in prepared:
                restore_grads(optimizer._amp_stash)
            raise
        finally:
            for stash in stashes:
                stash.inside_scale_loss = False
        if not delay_unscale:
            check_reduced(stashes)
        for stash in stashes:
            stash.params_have_scaled_gradients = bool(delay_unscale)
        if not delay_unscale:
            _after_backward(optimizer_list, scaler, None if delay_overflow_check else loss_id, delayed_scale)


@_outside_graphs
@torch.no_grad()
def _after_backward(
    optimizers: list[Any], scaler: LossScaler, loss_id: int | None, delayed_scale: Tensor | None
) -> None:
    """Unscale gradients by `delayed_scale`, or by the current scale; adapt the scale unless `loss_id` is None."""
    if scaler.dynamic:
        scaler.clear_overflow_state()
    counts: list[NonfiniteCounts] = []
    seen: set[Tensor] = set()
    with scaler.at_scale(delayed_scale):
        for optimizer in optimizers:
            if len(optimizers) > 1:  # a parameter of several optimizers is unscaled once
                own = set(optimizer._amp_stash.all_fp32_from_fp32_params)
                optimizer._amp_stash.unscaled_elsewhere = own & seen
                seen |= own
            counts += optimizer._post_amp_backward(scaler) or ()  # a client's own function returns None
    agree(scaler.found_inf, [optimizer._amp_stash for optimizer in optimizers])
    if loss_id is not None:
        _update_scale(scaler, loss_id, [optimizer._amp_stash for optimizer in optimizers], counts)


def _autocast_off() -> contextlib.AbstractContextManager[None]:
    """Return a context that switches autocast off in this thread; a null context if it is off already (O2, O3, O5)."""
    is_off = not torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()
    return _NO_CONTEXT if is_off else _autocast.casts_off()


def _update_scale(
    scaler: LossScaler, loss_id: int, stashes: list[AmpOptimizerState], counts: list[NonfiniteCounts]
) -> None:
    """Adapt the scale, and make the optimizers skip their next step if gradients overflowed."""
    scale_before = _overflow_messages.scale_before(scaler.scale_tensor())
    if not scaler.updates_on_device:  # a client's own function, which may ask other processes
        waiting, skips = stashes, scaler.update_scale()
    else:
        scaler.update_scale_on_device()
        if not scaler.dynamic:
            return
        waiting, found_inf = [], scaler.found_inf
        for stash in stashes:
            # In a captured step, `_undone_if` restores on the device what an optimizer without a flag changed.
            if not stash.takes_found_inf and (_graph_numbers.current is None or not _graph_numbers.current.captures):
                waiting.append(stash)
            else:
                earlier = stash.found_inf
                stash.found_inf = found_inf if earlier is None else torch.maximum(earlier, found_inf)
        skips = bool(waiting) and bool(found_inf)
    if skips:
        for stash in waiting:
            stash.already_patched = True
    if scaler.dynamic:
        scale_tensor, floor = scaler.scale_tensor(), scaler.min_loss_scale
        _overflow_messages.note(scaler.found_inf, scale_tensor, floor, loss_id, counts, scale_before)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Run the body of the context without O1's casts."""
    with _autocast.suspended():
        yield


@_outside_graphs
def prepare_amp_backward(self: Any) -> None:
    """Put unscaled gradients aside, so that a backward pass with another scale does not add to them."""
    stash: AmpOptimizerState = self._amp_stash
    if stash.takes_gradients:
        return
    if not stash.saw_first_backward:
        adopt_changes(stash)
    if stash.frozen:
        adopt_frozen(self)
    stash.accumulated_grads = {}
    for param in stash.all_fp16_params:
        if stash.optimizer_unscales and param.grad is not None:
            stash.accumulated_grads[param] = param.grad
        param.grad = None  # earlier gradients are already in the master's gradient
    for param in stash.all_fp32_from_fp32_params:
        if param.grad is not None:
            stash.accumulated_grads[param] = param.grad
            param.grad = None
    if _graph_numbers.current is not None:
        _graph_numbers.current.reads.update(map(id, stash.accumulated_grads.values()))


def restore_grads(stash: AmpOptimizerState) -> None:
    """Restore the gradients that were put aside, after a backward pass that failed."""
    for param in stash.model_params if stash.accumulated_grads else ():
        param.grad = stash.accumulated_grads.get(param)
    stash.accumulated_grads = {}


def post_amp_backward(self: Any, scaler: LossScaler) -> list[NonfiniteCounts]:
    """Unscale the new gradients, add them to earlier ones, and report overflow to the scaler."""
    stash: AmpOptimizerState = self._amp_stash
    if stash.takes_gradients:
        inner = stash.inner
        inner._grad_scale = scaler.scale_tensor().reciprocal()  # zero_grad may have been called since
        if scaler.dynamic:
            scaler.add_found_inf(inner._found_inf())
        return []
    for param in stash.zeroed:  # gradients of zeros stay, if the backward pass adds nothing to them
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    if stash.combined is not None:
        return stash.combined.after_backward(scaler, reduces=bool(self.combine_ddp))
    return _unscale(stash, scaler)


class _Scales(NamedTuple):
    """The scales of new gradients, of earlier ones, and of their sum; tensors are float32 [1]."""

    new: float | Tensor
    earlier: float | Tensor
    common: float | Tensor


def _unscale(stash: AmpOptimizerState, scaler: LossScaler) -> list[NonfiniteCounts]:
    """Unscale new gradients and add earlier ones, in a pass for each dtype and device, without waiting for it.

    Gradients of half-precision parameters go to their masters. If the optimizer unscales gradients itself, they stay on
    the parameters and are brought to one scale.
    """
    scales = _common_scale(stash.inner, scaler) if stash.optimizer_unscales else None
    halves, masters, own = stash.all_fp16_params, stash.all_fp32_from_fp16_params, stash.all_fp32_from_fp32_params
    if scales is not None:
        own, halves, masters = halves + own, [], []
    accumulated, stash.accumulated_grads = stash.accumulated_grads, {}
    stash.copied_grad = None
    elsewhere, stash.unscaled_elsewhere = stash.unscaled_elsewhere, set()
    # (parameter, gradient, tensor for the result, earlier gradient) of every pass.
    passes: defaultdict[Any, list[tuple[Tensor, Tensor, Tensor, Any]]] = defaultdict(list)
    sparse: list[tuple[Tensor, Tensor, Tensor | None]] = []
    not_renewed: list[Tensor] = []
    for param, target in zip(halves + own, masters + own, strict=True):
        grad = param.grad
        if elsewhere and param in elsewhere:
            continue
        if stash.has_shards and grad is not None:
            grad = param.grad = like_parameter(param, grad)
        if target is not param:
            earlier = target.grad
        else:
            earlier = accumulated.get(param) if accumulated else None
        if grad is None:
            if target is param and earlier is not None:
                param.grad = earlier
                not_renewed.append(local(earlier))
            continue
        if grad.layout != torch.strided:
            copied = sparse_copy(grad, target.dtype)
            sparse.append((target, copied, earlier))
            output = grad = copied._values()
            earlier = None
        elif target is param:
            output = grad
        else:
            output = earlier if earlier is not None else torch.empty_like(target)
            target.grad = output
            if stash.copied_grad is None:
                stash.copied_grad = grad, grad._version
        passes[earlier is not None, output is grad, grad.dtype, grad.device].append((param, grad, output, earlier))
    if scales is not None and not_renewed:
        scale(not_renewed, not_renewed, scales.common / scales.earlier)

    nonfinite = []
    for (adds, in_place, _, device), members in passes.items():
        # If the optimizer divides by the scale and no overflow check is needed, gradients stay unchanged.
        if scales is not None and scales.earlier is scales.new and not adds and not scaler.dynamic:
            continue
        params, grads, outputs, earlier_grads = map(list, zip(*members, strict=True))
        if stash.has_shards:
            grads, outputs, earlier_grads = (list(map(local, each)) for each in (grads, outputs, earlier_grads))
        counts = torch.zeros(len(params), 2, dtype=torch.int32, device=device) if scaler.dynamic else None
        if adds:
            options: Any = {"nonfinite_counts": counts, "checks_sum": scales is not None}
            scaler.unscale_with_stashed(grads, earlier_grads, outputs, scales, **options)
        else:
            override = None if scales is None else scales.new / scales.common
            scaler.unscale(grads, outputs, None, in_place, override, nonfinite_counts=counts)
        if counts is not None:
            nonfinite.append(NonfiniteCounts(params, counts))
    for target, new, before in sparse:
        target.grad = new if before is None else before + new
    return nonfinite


def _common_scale(inner: Any, scaler: LossScaler) -> _Scales:
    """Return the scales of gradients that an optimizer unscales itself, and set its `most_recent_scale`.

    This is the smallest scale of the backward passes before a step: half precision could not hold the gradients of one
    loss at the larger scale of another.
    """
    number = scaler.known_scale()
    new = scaler.scale_tensor() if number is None else number
    earlier = inner.most_recent_scale if inner.scale_set_by_backward else new
    if isinstance(new, Tensor):
        common: float | Tensor = new.clamp(max=earlier)
    else:
        common = earlier.clamp(max=new) if isinstance(earlier, Tensor) else min(new, earlier)
    inner.most_recent_scale, inner.scale_set_by_backward = common, True
    return _Scales(new, earlier, common)


class _Overflow(Exception):
    """An overflow in a closure, raised to end the step that called it."""


def amp_step_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the optimizer's `step`, skipped after an overflow; afterwards the model has the masters' values."""

    @functools.wraps(step)
    def amp_step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if self._amp_stash.inside_scale_loss:
            raise RuntimeError(
                "optimizer.step() was called inside of `with amp.scale_loss(loss, optimizer)`, where gradients are "
                "still scaled: call it after that block"
            )
        if closure is not None and not _calls_closure_first(self):
            return _step_with_closure(self, step, closure, *args, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._amp_stash.already_patched:
            check_gradients(self._amp_stash)
            warn_of_changes(self._amp_stash)
        result = _step(self, step, *((None, *args) if args else ()), **kwargs)
        return loss if closure is not None else result

    return amp_step


@_outside_graphs
def _step(optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Perform a step; it is skipped after an overflow, or turned off on the device by `found_inf`."""
    stash: AmpOptimizerState = optimizer._amp_stash
    inner, found_inf, result = stash.inner, stash.found_inf, None
    if stash.already_patched:
        stash.already_patched = False
        if hasattr(inner, "most_recent_scale"):
            inner.most_recent_scale, inner.scale_set_by_backward = 1.0, False
    else:
        inner._wrote_models = False
        if _graph_numbers.current is not None:
            _graph_numbers.current.reads.add(id(found_inf))
        takes_flag = found_inf is not None and stash.takes_found_inf
        if found_inf is not None and takes_flag:
            inner.found_inf, inner.grad_scale = found_inf.reshape(()), None
        elif found_inf is not None:
            step = functools.partial(_undone_if, found_inf, inner, step)
        try:
            with _autocast_off():
                result = step(*args, **kwargs)
        finally:
            if takes_flag:
                del inner.found_inf, inner.grad_scale
        if not inner._wrote_models:
            masters_to_model(optimizer)
    stash.found_inf = stash.copied_grad = None
    stash.zeroed.clear()
    for master in stash.all_fp32_from_fp16_params:
        master.grad = None  # a model's zero_grad does not clear it
    return result


def _undone_if(found_inf: Tensor, inner: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Perform a captured step of an optimizer without an overflow flag; undo its changes if `found_inf` is set."""
    changed = [param.detach() for group in inner.param_groups for param in group["params"]]
    changed += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in changed]
    result = step(*args, **kwargs)
    for tensor, value in zip(changed, before, strict=True):
        tensor.copy_(torch.where(found_inf.reshape(()) != 0, value, tensor))
    return result


def masters_to_model(self: Any) -> None:
    """Copy the masters' values to the model's parameters."""
    stash: AmpOptimizerState = self._amp_stash
    if stash.all_fp16_params:
        masters = [master.detach() for master in stash.all_fp32_from_fp16_params]
        scale(masters, [param.detach() for param in stash.all_fp16_params], 1.0)


def _calls_closure_first(optimizer: Any) -> bool:
    """Return whether a step is known to call its closure once, before anything else: then amp can call it instead."""
    return has_known_step(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def _step_with_closure(
    optimizer: Any, step: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any
) -> Any:
    """Perform a step that calls its closure at any time (SAM, LBFGS); an overflow in it undoes the step."""
    stash: AmpOptimizerState = optimizer._amp_stash
    may_skip = any(scaler.dynamic for scaler in _amp_state.loss_scalers)
    params = [param.detach() for param in stash.all_fp32_params] if may_skip else []
    before = [param.clone() for param in params]
    state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()} if may_skip else {}
    loss = None
    cast_closure = _autocast.cast_as_here(closure)  # a step itself runs without casts

    def watched() -> Any:
        nonlocal loss
        masters_to_model(optimizer)  # the step may have moved the masters
        with torch.enable_grad():
            loss = cast_closure()
        if stash.already_patched or (stash.found_inf is not None and bool(stash.found_inf)):
            raise _Overflow
        check_gradients(stash)
        return loss

    try:
        return _step(optimizer, step, watched, *args, **kwargs)
    except _Overflow:
        for param, value in zip(params, before, strict=True):
            param.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        masters_to_model(optimizer)
        stash.already_patched = True
        _step(optimizer, step)  # skipped, because of `already_patched`
        return loss


def amp_zero_grad_of(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """Return the optimizer's `zero_grad`, which also clears the gradients of the model's half-precision parameters."""

    @functools.wraps(zero_grad)
    def amp_zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        stash: AmpOptimizerState = self._amp_stash
        stash.accumulated_grads, stash.copied_grad = {}, None
        stash.params_have_scaled_gradients = False
        stash.zeroed.clear()
        zero_grad(*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else None)
        wants_zeros = not (getattr(stash.inner, "set_grad_none", True) if set_to_none is None else set_to_none)
        if wants_zeros and stash.combined is not None:
            stash.combined.zero()
        # Masters hold the sums, so the next backward pass drops the model's gradients: write zeros only on request.
        asked = set_to_none is not None or stash.combined is not None or stash.optimizer_unscales
        gradients = []
        for param in stash.all_fp16_params:  # they are not in the optimizer's groups
            if param.grad is not None and wants_zeros and asked:
                param.grad = param.grad.detach()
                gradients.append(param.grad)
                stash.zeroed.add(param)
            else:
                param.grad = None
        zero(gradients)

    return amp_zero_grad
