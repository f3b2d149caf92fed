"""Optimizers that hear of every gradient: of several that have had a parameter, the last one only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# The hook of the optimizer that listens to a parameter.
_listening: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


class Listener:
    """Calls `method(owner, param)` when a backward pass has added to a gradient, for as long as the owner lives."""

    def __init__(self, owner: Any, method: Callable[[Any, Tensor], None]) -> None:
        self._this = weakref.ref(owner)
        self._method = method
        self._hooks: list[Any] = []
        self._heard: WeakIdKeyDictionary = WeakIdKeyDictionary()
        weakref.finalize(owner, _remove, self._hooks)

    def listen(self, params: Iterable[Tensor]) -> None:
        """To these as well, and no other optimizer any more; those that require no gradient are passed over."""
        this, method = self._this, self._method

        def arrived(param: Tensor) -> None:
            owner = this()
            if owner is not None:
                method(owner, param)

        for param in params:
            if param.requires_grad and param not in self._heard:
                if param in _listening:
                    _listening[param].remove()
                hook = param.register_post_accumulate_grad_hook(arrived)
                _listening[param] = hook
                self._heard[param] = True
                self._hooks.append(hook)
