"""The one session of amp: everything that `initialize` sets up and `shutdown` undoes.

Clients read and write its attributes, so their names are the original's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._distributed.comparison import optimizer_settings, plain


class AmpState:
    """What amp knows. `opt_properties` is absent until `initialize` was called.

    Models, optimizers and parameters are not kept alive by it. Objects of amp's other modules, which import this one,
    are typed as Any.
    """

    opt_properties: Any  # frontend.Properties

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.handle: Any = None
        self.loss_scalers: list[Any] = []  # scaler.LossScaler
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.overflow_patience = 100
        self.models: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()  # _models.ModelRecord
        self.optimizers: WeakSet[Any] = WeakSet()
        # By half-precision parameter of a model: its float32 master, an nn.Parameter. Where it has none, the float32
        # values that it was rounded from, if known: from a checkpoint, or for an optimizer that makes its own masters.
        self.masters: Any = WeakIdKeyDictionary()
        # Called by shutdown in reverse order; each gives back what was changed in the process.
        self.undo: list[Callable[[], None]] = []

    def reset(self) -> None:
        """Calls what is in `undo`, newest first, and forgets the session."""
        while self.undo:
            self.undo.pop()()
        vars(self).pop("opt_properties", None)
        vars(self).update(vars(AmpState()))


_amp_state = AmpState()

HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def float32_values(param: Tensor, exact: Tensor) -> Tensor:
    """A half-precision parameter in float32: the values of `exact` wherever they still round to the parameter's."""
    return torch.where(exact.to(param.dtype) == param, exact, param.float())


def masters_on_every_rank(params: Iterable[Tensor], broadcast: Callable[[list[Tensor]], None]) -> list[Tensor]:
    """The float32 tensors in `masters` of these parameters, the same ones in the same order on every rank.

    Masters are on all ranks. Exact values of parameters without a master are only on ranks that loaded a checkpoint:
    the first rank decides for all, and the others get a tensor for each, or drop theirs. The caller then broadcasts the
    values; `broadcast` gives tensors the values of the first rank.
    """
    known = _amp_state.masters
    params = list(params) if hasattr(_amp_state, "opt_properties") else []
    without = [p for p in params if p.dtype in HALF and not isinstance(known.get(p), torch.nn.Parameter)]
    if without:
        flags = torch.tensor([param in known for param in without], dtype=torch.uint8, device=without[0].device)
        broadcast([flags])
        for param, is_known in zip(without, flags.tolist(), strict=True):
            if not is_known:
                known.pop(param, None)
            elif param not in known:
                known[param] = param.detach().float()
    return [known[param] for param in params if param in known]


def settings_on_this_rank(params: Iterable[Tensor]) -> dict[str, Any]:
    """Return the settings of amp that ranks must have in common: opt level, loss scales, and options of optimizers.

    Of the optimizers only those count that update one of `params`, or its master.
    """
    if not hasattr(_amp_state, "opt_properties"):
        return {}
    settings = {f"{name} of amp.initialize": value for name, value in _amp_state.opt_properties.options.items()}
    for number, scaler in enumerate(_amp_state.loss_scalers):
        settings[f"loss scale {number}"] = scaler.loss_scale()
    index_of = {
        id(tensor): index for index, param in enumerate(params) for tensor in (param, _amp_state.masters.get(param))
    }
    # The set of optimizers has no order: the first parameter of each gives one that is the same on all ranks.
    found = []
    for optimizer in _amp_state.optimizers:
        indices = [index_of[id(param)] for param in master_params(optimizer) if id(param) in index_of]
        if indices:
            options = {name: plain(value) for name, value in optimizer_settings(optimizer).items()}
            found.append((min(indices), type(optimizer).__name__, repr(options), options))
    for number, (*_, options) in enumerate(sorted(found, key=lambda each: each[:3])):
        settings.update({f"{name} of optimizer {number}": value for name, value in options.items()})
    return settings


def warn_or_err(msg: str) -> None:
    """Raises, or warns where the user has set `_amp_state.hard_override`."""
    if _amp_state.hard_override:
        warnings.warn(msg, stacklevel=3)
    else:
        raise RuntimeError(msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints unless verbosity is 0; with `rank0`, in one process only."""
    connected = rank0 and torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity > 0 and not (connected and torch.distributed.get_rank()):
        print(msg)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that `optimizer` updates: float32 masters where amp made them.

    Works on any object with `param_groups`, whether amp has seen it or not.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
