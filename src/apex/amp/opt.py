"""The older interface: the handles that `amp.init` returns, and the optimizers that they wrap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _autocast
from ._amp_state import master_params, maybe_print
from ._checks import check_count, check_loss, checked_optimizers
from .scaler import LossScaler


@contextlib.contextmanager
def scaled_loss(loss: Tensor, optimizer: Any, scaler: LossScaler) -> Iterator[Tensor]:
    """Yield the loss times the scale, for the backward pass inside; afterwards unscale all gradients in place."""
    check_loss(loss)
    scaler.to(loss.device)
    with _autocast.casts_off():
        yield loss * scaler.scale_tensor().reshape(())
        scaler.clear_overflow_state()
        grads = [param.grad for param in master_params(optimizer) if param.grad is not None]
        if grads:
            with torch.no_grad():
                scaler.unscale(grads, grads)


class OptimWrapper:
    """An optimizer with one loss scale per loss; `scale_loss` is called once per loss before a step."""

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        checked_optimizers(optimizer)
        check_count("num_loss", num_loss)
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._skip_next = [False] * num_loss
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the scaled loss; afterwards unscale the gradients of this loss and add the earlier ones."""
        if not self._amp_handle.is_active():
            yield loss
            return
        check_loss(loss)
        scaler = self._cur_loss_scaler()
        earlier = None
        if self._loss_idx > 0:
            earlier = [None if p.grad is None else p.grad.detach().clone() for p in master_params(self._optimizer)]
            self._optimizer.zero_grad()
        with scaled_loss(loss, self._optimizer, scaler) as scaled:
            yield scaled
        self._skip_next[self._loss_idx] = scaler.update_scale()
        self._loss_idx += 1
        if earlier is not None:
            with torch.no_grad():
                for param, gradient in zip(master_params(self._optimizer), earlier, strict=True):
                    if gradient is not None:
                        param.grad = gradient if param.grad is None else param.grad.add_(gradient)

    def _cur_loss_scaler(self) -> LossScaler:
        if not 0 <= self._loss_idx < self._num_loss:
            raise RuntimeError(
                f"scale_loss was called {self._loss_idx + 1} times before step, but the optimizer was wrapped for "
                f"{self._num_loss} loss(es): give num_loss to wrap_optimizer"
            )
        return self._loss_scaler[self._loss_idx]

    def step(self, closure: Any = None) -> Any:
        """Perform a step, unless the gradients of any loss overflowed."""
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure=closure)
        self._loss_idx = 0
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                self._amp_handle.remove_cache(param)
        if closure is not None:
            raise NotImplementedError("the amp handle does not support closures in optimizer.step")
        if any(self._skip_next):
            maybe_print("Gradient overflow, skipping update")
            self._skip_next = [False] * self._num_loss
            return None
        return self._optimizer.step()

    # `state_dict`, `zero_grad` and so on come from the optimizer.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __getstate__(self) -> Any:
        return self._optimizer.__getstate__()

    def __setstate__(self, state: Any) -> None:
        self._optimizer.__setstate__(state)

    def __repr__(self) -> str:
        return repr(self._optimizer)


class AmpHandle:
    """The handle that `amp.init` returns: casts are on while it is active."""

    def __init__(self, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False) -> None:
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache: dict[Any, Any] = {}
        self._default_scaler = LossScaler(loss_scale)
        self._is_active = True
        self._wrappers: list[Any] = []

    def is_active(self) -> bool:
        """Return whether casts are on."""
        return self._is_active

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        self._is_active = False
        try:
            with _autocast.suspended():
                yield
        finally:
            self._is_active = True

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer with a loss scale per loss."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yield the scaled loss; skip the optimizer's next step if its gradients overflow."""
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
        """Return whether cast weights are cached; they are, inside a model's forward pass."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Any, Any]:
        """Return an empty dict: PyTorch caches the cast weights."""
        return self._cache

    def remove_cache(self, param: Tensor) -> None:
        """Do nothing: no cast weight is cached after a forward pass."""

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def _deactivate(self) -> None:
        """End casting permanently, also inside models."""
        _autocast.switch_off()
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


class NoOpHandle(AmpHandle):
    """The handle of `amp.init(enabled=False)`, which has no effect."""

    def __init__(self) -> None:
        super().__init__(1.0, enable_caching=False)
        self._is_active = False

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass
