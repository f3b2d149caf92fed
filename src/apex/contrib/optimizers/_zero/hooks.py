"""Hooks that tell an optimizer of every gradient; of several optimizers of a parameter the last one has the hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...._distributed.reducer import weak_method

# The hook of each parameter that has one.
_hook_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


class GradientHooks:
    """Calls `method(owner, param)` when a backward pass has added to a gradient, for as long as the owner lives."""

    def __init__(self, owner: Any, method: Callable[[Any, Tensor], None]) -> None:
        self._call = weak_method(owner, method)
        self._hooks: list[Any] = []
        self._registered: WeakIdKeyDictionary = WeakIdKeyDictionary()
        weakref.finalize(owner, _remove, self._hooks)

    def register(self, params: Iterable[Tensor]) -> None:
        """Hooks of these parameters, in place of those of other optimizers; frozen ones are passed over."""
        for param in params:
            if param.requires_grad and param not in self._registered:
                if param in _hook_of:
                    _hook_of[param].remove()
                _hook_of[param] = hook = param.register_post_accumulate_grad_hook(self._call)
                self._registered[param] = True
                self._hooks.append(hook)
