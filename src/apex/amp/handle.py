"""`scale_loss`, `disable_casts`, and the handle of the older interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops import _recording
from . import _casting
from ._amp_state import _amp_state, maybe_print
from ._checks import check_flags, check_loss, checked_optimizers
from ._optimizer_step import restore_grads
from .opt import OptimWrapper, scaled_loss
from .scaler import LossScaler, NonfiniteCounts, OverflowMessages

_overflow_messages = OverflowMessages()
_ORIGINAL_UPDATE = LossScaler.update_scale


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the loss times its scale, to be differentiated inside; afterwards gradients are unscaled and checked.

    With `delay_unscale` they stay scaled, for more backward passes to add to them: give it to all but the last before a
    step. `delay_overflow_check` leaves the scale as it is. `loss_id` names the scale where `initialize` made several.
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
    check_loss(loss)
    optimizer_list = checked_optimizers(optimizers)
    scaler = _scaler(loss_id)
    check_flags(delay_unscale=delay_unscale, delay_overflow_check=delay_overflow_check)
    stashes = [optimizer._amp_stash for optimizer in optimizer_list if hasattr(optimizer, "_amp_stash")]
    moves_gradients = any(stash.has_masters or stash.combined is not None for stash in stashes)
    does_nothing = not moves_gradients and not scaler.dynamic and scaler.loss_scale() == 1.0
    if not does_nothing or options["master_weights"]:
        # A step of one that amp does not know, a copy perhaps, would leave the model as it is.
        _check_optimizers(optimizer_list)
    if does_nothing:
        with _casting.casts(False):
            yield loss.float()
        return
    scaler.to(loss.device)
    prepared = [optimizer for optimizer in optimizer_list if not optimizer._amp_stash.params_have_scaled_gradients]
    for optimizer in prepared:
        optimizer._prepare_amp_backward(scaler)
    _overflow_messages.read()
    with _casting.casts(False):
        try:
            yield loss.float() * scaler.scale_tensor().reshape(())
        except BaseException:
            for optimizer in prepared:
                restore_grads(optimizer._amp_stash)
            raise
        for stash in stashes:
            stash.params_have_scaled_gradients = bool(delay_unscale)
        if not delay_unscale:
            scaler.clear_overflow_state()
            with torch.no_grad():
                counts = [each for optimizer in optimizer_list for each in optimizer._post_amp_backward(scaler)]
                if not delay_overflow_check:
                    _update_scale(scaler, loss_id, optimizer_list, counts)


def _scaler(loss_id: int) -> LossScaler:
    count = len(_amp_state.loss_scalers)
    if not isinstance(loss_id, int) or not -count <= loss_id < count:
        raise IndexError(
            f"loss_id={loss_id} is unknown: amp.initialize was called with num_losses={count}, and counting starts at 0"
        )
    return _amp_state.loss_scalers[loss_id]


def _check_optimizers(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.scale_loss was given an optimizer ({type(optimizer).__name__}) that amp.initialize has not seen"
            )


def _update_scale(scaler: LossScaler, loss_id: int, optimizers: list[Any], counts: list[NonfiniteCounts]) -> None:
    """Adapts the scale, and has the optimizers skip their next step if gradients overflowed."""
    stashes = [optimizer._amp_stash for optimizer in optimizers]
    if type(scaler).update_scale is not _ORIGINAL_UPDATE:  # a client's own, which may ask other processes
        waiting, skips = stashes, scaler.update_scale()
    else:
        scaler.update_scale_on_device()
        if not scaler.dynamic:
            return
        waiting, recording = [], _recording.current
        is_captured = recording is not None and recording.captures
        for stash in stashes:
            # Of a captured step what an optimizer changed is put back on the device.
            if not stash.takes_found_inf and not is_captured:
                waiting.append(stash)
            elif stash.found_inf is None:
                stash.found_inf = scaler.overflow
            else:
                stash.found_inf = torch.maximum(stash.found_inf, scaler.overflow)
        skips = bool(waiting) and scaler._has_overflow
    if skips:
        for stash in waiting:
            stash.already_patched = True
    if scaler.dynamic:
        _overflow_messages.note(scaler, loss_id, counts)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Runs what is inside without O1's casts."""
    with _casting.suspended():
        yield


class AmpHandle:
    """The handle that `amp.init` returns: casts are on as long as it is active."""

    def __init__(self, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False) -> None:
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache: dict[Any, Any] = {}
        self._default_scaler = LossScaler(loss_scale)
        self._is_active = True
        self._wrappers: list[Any] = []

    def is_active(self) -> bool:
        """Whether casts are on."""
        return self._is_active

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        self._is_active = False
        try:
            with _casting.suspended():
                yield
        finally:
            self._is_active = True

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with a loss scale per loss."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yields the scaled loss; the optimizer's next step is skipped if its gradients overflow."""
        if not self.is_active():
            yield loss
            return
        checked_optimizers(optimizer)
        with scaled_loss(loss, optimizer, self._default_scaler) as scaled:
            yield scaled
        if self._default_scaler.update_scale():
            _skip_next_step(optimizer)
        self._clear_cache()

    @property
    def has_cache(self) -> bool:
        """Whether copies of weights are kept; they are, inside a model's forward pass."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Any, Any]:
        """Always empty: PyTorch keeps the copies."""
        return self._cache

    def remove_cache(self, param: Tensor) -> None:
        """Does nothing: no copy of a weight outlives a forward pass."""

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def _deactivate(self) -> None:
        """Ends casting for good, also inside models."""
        _casting.switch_off()
        self._is_active = False

    @property
    def verbose(self) -> bool:
        return self._verbose


def _skip_next_step(optimizer: Any) -> None:
    step = optimizer.step

    def skip_step(*args: Any, **kwargs: Any) -> None:
        maybe_print("Gradient overflow, skipping update")
        optimizer.step = step

    optimizer.step = skip_step


class NoOpHandle:
    """The handle of `amp.init(enabled=False)`: everything is as without amp."""

    def is_active(self) -> bool:
        return False

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        yield loss

    @property
    def has_cache(self) -> bool:
        return False

    @property
    def verbose(self) -> bool:
        return False

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass
