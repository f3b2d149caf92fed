"""Timing of gradient reduction over replicas: once per step, in the backward pass that completes the gradients.

Modules in torch's or apex's DistributedDataParallel do not reduce before the last backward pass of their chunk. The
schedule's docstring says how long it holds the caller's context (`custom_sync_context_handler`), for example a ZeRO
optimizer's `no_sync`. If the context is the `no_sync` of such a module, the module still reduces in the last backward
pass. A module whose `no_sync` was entered before the step does not reduce during the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...parallel import DistributedDataParallel as ApexDistributedDataParallel

Handler = Callable[[], Any]


class PipelineGradientSync:
    """Contexts that suppress gradient reduction during a step; `last_backward` wraps a chunk's last backward pass.

    With `per_chunk`, the caller's context is left for each chunk during its last backward pass. If `grad_sync` is
    given, the context is left after that pass, and `grad_sync` is called with the chunk's parameters. Without
    `per_chunk` the context is left once: before the last backward pass if `early`, otherwise at the end of the step,
    where `grad_sync()` is called.
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
        self._caller_context = contextlib.ExitStack()
        self._never_reducing: set[int] = set()

    def _enter(self) -> None:
        if self._handler is not None:
            self._caller_context.enter_context(self._handler())

    def leave(self) -> None:
        """Leave the caller's context, if it is held."""
        self._caller_context.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Hold the contexts during a step; all of them are left at its end, also after an exception."""
        with contextlib.ExitStack() as modules:
            for number, chunk in enumerate(self._chunks):
                reduces = getattr(chunk, "require_backward_grad_sync", not getattr(chunk, "_disable_allreduce", False))
                self._never_reducing |= set() if reduces else {number}
                if isinstance(chunk, DistributedDataParallel):
                    if chunk.static_graph:
                        raise ValueError("pipelines need DistributedDataParallel(static_graph=False), got True")
                    chunk.require_forward_param_sync = True  # broadcasts buffers once per step
                    modules.enter_context(chunk.no_sync())
                elif isinstance(chunk, ApexDistributedDataParallel):
                    modules.enter_context(chunk.no_sync())
            with self._caller_context:
                self._enter()
                yield
        if self._grad_sync is not None and not self._per_chunk and not self._early:
            self._grad_sync()

    @contextlib.contextmanager
    def last_backward(self, chunk: int, output: Tensor | None) -> Iterator[None]:
        """Reduce the gradients of a chunk in the backward pass inside this context.

        `output` is the chunk's output for the last microbatch.
        """
        calls_grad_sync = self._per_chunk and self._grad_sync is not None
        if self._early and not calls_grad_sync:
            self.leave()
        with contextlib.nullcontext() if chunk in self._never_reducing else _reducing(self._chunks[chunk], output):
            yield
        if calls_grad_sync:
            self.leave()
            assert self._grad_sync is not None
            self._grad_sync(list(self._chunks[chunk].parameters()))
        if self._per_chunk:
            self._enter()


@contextlib.contextmanager
def _reducing(module: nn.Module, output: Tensor | None) -> Iterator[None]:
    """Make a module reduce gradients in the backward pass inside, even if its `no_sync` is held."""
    if isinstance(module, DistributedDataParallel):
        # Torch prepared it in a forward pass, but backward passes without reduction ran since: prepare it again.
        module.reducer.prepare_for_backward([output] if module.find_unused_parameters and output is not None else [])
        yield
    elif isinstance(module, ApexDistributedDataParallel):
        previous, module._disable_allreduce = module._disable_allreduce, False
        module._watch(output)
        try:
            yield
        finally:
            module._disable_allreduce = previous
    else:
        yield
