"""The one session of amp: everything that `initialize` sets up and `shutdown` undoes.

Clients read and write its attributes, so their names are the original's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from ._models import ModelRecord
    from .frontend import Properties
    from .scaler import LossScaler


class AmpState:
    """What amp knows. `opt_properties` is absent until `initialize` was called.

    Models, optimizers and parameters are not kept alive by it.
    """

    opt_properties: Properties

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.handle: Any = None
        self.loss_scalers: list[LossScaler] = []
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.overflow_patience = 100
        self.models: WeakKeyDictionary[torch.nn.Module, ModelRecord] = WeakKeyDictionary()
        self.optimizers: WeakSet[Any] = WeakSet()
        # The float32 master of a model's half-precision parameter.
        self.masters: Any = WeakIdKeyDictionary()
        # Called by shutdown in reverse order; each gives back what was changed in the process.
        self.undo: list[Callable[[], None]] = []

    def reset(self) -> None:
        """Undoes everything, newest first."""
        while self.undo:
            self.undo.pop()()
        vars(self).pop("opt_properties", None)
        vars(self).update(vars(AmpState()))


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raises, or warns where the user has set `_amp_state.hard_override`."""
    if _amp_state.hard_override:
        warnings.warn(msg, stacklevel=3)
    else:
        raise RuntimeError(msg)


def _is_first_rank() -> bool:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return True


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints unless verbosity is 0; with `rank0`, in one process only."""
    if _amp_state.verbosity > 0 and (not rank0 or _is_first_rank()):
        print(msg)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that `optimizer` updates: float32 masters where amp made them.

    Works on any object with `param_groups`, whether amp has seen it or not.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
