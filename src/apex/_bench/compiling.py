"""The peer "compile": `torch.compile` of the eager code for one shape, with a backward pass that can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return `function` compiled for the shapes of its next call; drops code compiled for earlier cases."""
    torch.compiler.reset()
    _compile_in_this_process()
    _keep_buffers_after_backward(device)
    return torch.compile(function, dynamic=False)


def _compile_in_this_process() -> None:
    """Start no pool of compiler processes, which would still be starting while other implementations are timed."""
    import torch._inductor.config as settings

    settings.compile_threads = 1


def _keep_buffers_after_backward(device: torch.device) -> None:
    """Turn donated buffers off for the rest of the process, because they forbid `retain_graph=True`.

    PyTorch keeps this setting per thread and runs a GPU's backward pass in a thread of its own. The hook of a tiny
    backward pass makes the setting there.
    """
    import torch._functorch.config as settings

    def turn_off(gradient: torch.Tensor) -> None:
        settings.donated_buffer = False

    probe = torch.ones(1, device=device, requires_grad=True) * 1
    probe.register_hook(turn_off)
    probe.sum().backward()
    settings.donated_buffer = False
