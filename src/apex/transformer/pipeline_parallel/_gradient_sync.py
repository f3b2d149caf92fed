"""When gradients are reduced over replicas: once per step, in the backward pass that completes them.

Modules in torch's or apex's DistributedDataParallel are kept from reducing until the last backward pass of each chunk.
A context of the caller's (`custom_sync_context_handler`), such as a ZeRO optimizer's `no_sync`, is held as long as the
schedule's interface says. It may also be a module's own `no_sync`: what the context says about such a module is
overruled in that last pass. A module whose `no_sync` was entered before the step does not reduce in it at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...parallel import DistributedDataParallel as ApexDistributedDataParallel

Handler = Callable[[], Any]


class GradientSync:
    """Contexts in which nothing is reduced; `last_backward` surrounds a chunk's last backward pass.

    Where `per_chunk`, the caller's context is left for each chunk: during its last backward pass or, where there is a
    `grad_sync`, after it, to call that with the chunk's parameters. Else it is left once: before the last backward pass
    where `early`, or when all is done, to call `grad_sync()`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        handler: Handler | None = None,
        grad_sync: Callable[..., Any] | None = None,
        per_chunk: bool = False,
        early: bool = True,
    ) -> None:
        self._chunks, self._handler, self._grad_sync = chunks, handler, grad_sync
        self._per_chunk, self._early = per_chunk, early
        self._held = contextlib.ExitStack()
        self._kept_back: set[int] = set()

    def _enter(self) -> None:
        if self._handler is not None:
            self._held.enter_context(self._handler())

    def leave(self) -> None:
        """Leaves the caller's context, if it is held."""
        self._held.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step, at whose end, an exception included, no context is held any more."""
        with contextlib.ExitStack() as modules:
            for number, chunk in enumerate(self._chunks):
                reduces = getattr(chunk, "require_backward_grad_sync", not getattr(chunk, "_disable_allreduce", False))
                self._kept_back |= set() if reduces else {number}
                if isinstance(chunk, DistributedDataParallel):
                    if chunk.static_graph:
                        raise ValueError("pipelines need DistributedDataParallel(static_graph=False), got True")
                    chunk.require_forward_param_sync = True  # buffers take the first rank's values, once per step
                    modules.enter_context(chunk.no_sync())
                elif isinstance(chunk, ApexDistributedDataParallel):
                    modules.enter_context(chunk.no_sync())
            with self._held:
                self._enter()
                yield
        if self._grad_sync is not None and not self._per_chunk and not self._early:
            self._grad_sync()

    @contextlib.contextmanager
    def last_backward(self, chunk: int, output: Tensor | None) -> Iterator[None]:
        """The backward pass that completes the gradients of a chunk, of whose last microbatch this is the output."""
        after = self._per_chunk and self._grad_sync is not None
        if self._early and not after:
            self.leave()
        with contextlib.nullcontext() if chunk in self._kept_back else _reducing(self._chunks[chunk], output):
            yield
        if after:
            self.leave()
            assert self._grad_sync is not None
            self._grad_sync(list(self._chunks[chunk].parameters()))
        if self._per_chunk:
            self._enter()


@contextlib.contextmanager
def _reducing(module: nn.Module, output: Tensor | None) -> Iterator[None]:
    """Has a module reduce in the backward pass inside, whatever contexts say."""
    if isinstance(module, DistributedDataParallel):
        # Torch decides in the forward pass, when later backward passes are yet to come: what that would do, now.
        module.reducer.prepare_for_backward([output] if module.find_unused_parameters and output is not None else [])
        yield
    elif isinstance(module, ApexDistributedDataParallel):
        before, module._disable_allreduce = module._disable_allreduce, False
        module._watch(output)
        try:
            yield
        finally:
            module._disable_allreduce = before
    else:
        yield
