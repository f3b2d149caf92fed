"""torch.compile with convolution gradients computed one after the other, and a default backend of one's choice.

Importing this registers the backend "torchsched": Inductor, with the gradients of a convolution as separate operators,
which it can then order. Upstream's distribution over several streams is not here: it replaced private classes of
Inductor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import list_backends, register_backend

from .backend import get_backend

__all__ = ["get_backend", "set_default_backend"]

_torch_compile = torch.compile


@register_backend
def torchsched(model_: Any, example_inputs_: Any, **options: Any) -> Callable:
    """The backend, for torch.compile(backend="torchsched"); `options` are those of Inductor's compile_fx."""
    return get_backend("torchsched", "dwb")(model_, example_inputs_, **options)


def set_default_backend(backend: str) -> None:
    """Has torch.compile use this backend where none is named; "inductor" gives PyTorch's own function back."""
    known = list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f"backend={backend!r} is not known; {', '.join(known)} are")
    if backend == "inductor":
        torch.compile = _torch_compile
        return

    @functools.wraps(_torch_compile)
    def compile_by_default(*args: Any, **kwargs: Any) -> Any:
        return _torch_compile(*args, **{"backend": backend, **kwargs})

    torch.compile = compile_by_default
