"""Optimizers that hear of every gradient: of several that have had a parameter, the last one only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

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
        weakref.finalize(owner, _remove, self._hooks)

    def listen(self, params: Iterable[Tensor]) -> None:
        """To these as well; those that require no gradient are passed over."""
        this, method = self._this, self._method

        def arrived(param: Tensor) -> None:
            owner = this()
            if owner is not None and _listening.get(param) is this:
                method(owner, param)

        for param in params:
            if param.requires_grad and _listening.get(param) is not this:
                _listening[param] = this
                self._hooks.append(param.register_post_accumulate_grad_hook(arrived))
