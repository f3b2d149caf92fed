"""The peer "compile": `torch.compile` of the eager code, for one shape, with a backward that can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function` compiled for the shapes it is called with next; forgets what was compiled for earlier cases."""
    torch.compiler.reset()
    _compile_in_this_process()
    _keep_buffers_after_backward(device)
    return torch.compile(function, dynamic=False)


def _compile_in_this_process() -> None:
    """Starts no pool of compiler processes: they would still be starting up, on every core, while others are timed."""
    import torch._inductor.config as settings

    settings.compile_threads = 1


def _keep_buffers_after_backward(device: torch.device) -> None:
    """Turns donated buffers off for the rest of the process: they forbid `retain_graph=True`.

    PyTorch keeps such settings per thread and runs a GPU's backward in a thread of its own, so the setting is made here
    and, by the hook of a tiny backward, there.
    """
    import torch._functorch.config as settings

    def turn_off(gradient: torch.Tensor) -> None:
        settings.donated_buffer = False

    probe = torch.ones(1, device=device, requires_grad=True) * 1
    probe.register_hook(turn_off)
    probe.sum().backward()
    settings.donated_buffer = False
