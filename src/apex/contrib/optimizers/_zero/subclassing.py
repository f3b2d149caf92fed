"""Upstream's private names that clients import, and private methods that subclasses call or override.

NeMo's `MegatronDistributedFusedAdam` is such a subclass. Its backward hook keeps the gradients of some parameters until
tensor-parallel ranks have added them up, and its norm covers all model-parallel ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .optimizer import ZeroOptimizer


@contextlib.contextmanager
def _disable_pre_forward_hook(param: Tensor) -> Iterator[None]:
    """Keep tensor functions inside the block from waiting for parameters that are being received."""
    with torch._C.DisableTorchFunctionSubclass():
        yield


@torch.no_grad()
def _multi_tensor_copy(
    buffers_in: Sequence[Tensor], buffers_out: Sequence[Tensor], dummy_overflow_buf: Tensor | None = None
) -> None:
    """Copy each tensor of `buffers_in` to the tensor at the same index of `buffers_out`, which may have another dtype.

    `dummy_overflow_buf` is not used.
    """
    if len(buffers_in) != len(buffers_out):
        raise ValueError(f"buffers_in has {len(buffers_in)} tensors and buffers_out {len(buffers_out)}")
    if buffers_in:
        torch._foreach_copy_(list(buffers_out), list(buffers_in))


class _Works:
    """Collectives under way, which `wait` waits for."""

    def __init__(self) -> None:
        self._works: list[Any] = []

    def append(self, work: Any) -> None:
        """Add a collective; None stands for one that is over."""
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        """Wait for every collective."""
        while self._works:
            self._works.pop(0).wait()


@contextlib.contextmanager
def _coalescing_manager(group: Any = None, device: Any = None, async_ops: Any = False) -> Iterator[_Works]:
    """Yield an object that collects collectives; wait for them at the end if `async_ops` is False.

    Collectives inside are sent one by one: PyTorch's manager of this name works on NCCL only. Older clients pass a list
    as `async_ops`, collect collectives in it and wait for them themselves.
    """
    works = _Works()
    yield works
    if async_ops is False:
        works.wait()


def _coalescing_manager_append_work(cm: _Works, work: Any) -> None:
    """Have the object that `_coalescing_manager` yielded wait for a collective."""
    cm.append(work)


class SubclassableOptimizer(ZeroOptimizer):
    """`ZeroOptimizer` with upstream's private methods."""

    _dummy_overflow_buf: Tensor | None = None

    def _numbers(self) -> dict[Tensor, tuple[int, int]]:
        """Return, for each parameter, the number of its group and its own number in the group."""
        return {
            param: (number, index)
            for number, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        }

    @functools.cached_property
    def _param_buffers(self) -> dict[Any, Tensor]:
        """Return the buffers of parameters that a subclass keeps in this dict; this package does not read them."""
        return {}

    @functools.cached_property
    def _backward_hooks(self) -> dict[Tensor, Callable[..., None]]:
        """Return the hooks that a subclass has made, by parameter."""
        return {}

    def _gradient_arrived(self, param: Tensor) -> None:
        """Call the hook that a subclass makes; without one, take the gradient and send complete buckets."""
        if type(self)._make_post_backward_hook is SubclassableOptimizer._make_post_backward_hook:
            super()._gradient_arrived(param)
            return
        if not self._parameters.is_complete:
            self.param_sync()
        if param not in self._backward_hooks:
            self._backward_hooks[param] = self._make_post_backward_hook(param, *self._numbers()[param])
        self._backward_hooks[param](param)

    def _make_post_backward_hook(self, param: Tensor, param_group_id: int, param_id: int) -> Callable[..., None]:
        """Return the function that is called when a backward pass has added to a parameter's gradient.

        A function of a subclass decides which gradients leave their parameters and which are sent. What it keeps is
        sent by `grad_sync` or `step`, not at the end of the backward pass.
        """

        def hook(*unused: Any) -> None:
            ZeroOptimizer._gradient_arrived(self, param)

        return hook

    def _init_param_state(self, param: Tensor, param_group_id: int, param_id: int, *args: Any, **kwargs: Any) -> None:
        """Make the state of all parameters that have none; `init_params` describes further arguments.

        One parameter alone is not given state here: processes may see their first gradients in different orders.
        """
        if not self._locations:
            self.init_params(None, *args, **kwargs)

    def _grad_copy(self, param: Tensor) -> None:
        """Take the gradient away from a parameter and add it to the gradients that will be sent."""
        with self._lock:
            if param in self._locations:
                self._gradients.take(*self._locations[param])

    def _try_start_bucket_grad_sync(
        self, params: Iterable[Tensor] | None = None, ignore_last_bucket: bool = False
    ) -> None:
        """Count gradients of `params`, which `_grad_copy` has taken, as complete, and send buckets that are complete.

        `ignore_last_bucket` is not used: no bucket is open to further parameters.
        """
        with self._lock:
            for param in params or ():
                if param in self._locations:
                    self._gradients.announce(*self._locations[param])

    def _finish_bucket_grad_sync(self) -> None:
        """Wait for gradients that are under way."""
        with self._lock:
            self._gradients.finish()

    def _try_start_bucket_param_sync(self, params: Iterable[Tensor] | None = None) -> None:
        """Send updated parameters, up to the number of buckets in flight; the order does not depend on `params`."""
        with self._lock:
            self._parameters.start()

    def _local_grad_norm(self, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0) -> Tensor:
        """Return the square of the 2-norm of this rank's part of the gradients before scaling, a float32 scalar."""
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type} is not supported; 2 is")
        chosen = self._checked(parameters)
        self.grad_sync()
        return self._norms.local_square(chosen)

    @property
    def _grad_norm(self) -> Tensor | None:
        """Return the cached 2-norm of gradients before scaling, or None; a subclass may set its own."""
        return self._norms.remembered

    @_grad_norm.setter
    def _grad_norm(self, value: Tensor | None) -> None:
        self._norms.remembered = value
