"""The global state of amp: everything that `initialize` sets up and `shutdown` undoes.

Clients read and write its attributes, so they have the original's names.
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
    """The state of amp's session; it has no `opt_properties` until `initialize` is called.

    It does not keep models, optimizers and parameters alive. Objects of amp's other modules, which import this one, are
    typed as Any.
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
        self.models: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()  # _model_casts.ModelRecord
        self.optimizers: WeakSet[Any] = WeakSet()
        # Maps a model's half-precision parameter to its float32 master, an nn.Parameter. For a parameter without a
        # master, maps it to the float32 values that it was rounded from, if they are known: from a checkpoint, or for
        # an optimizer that makes its own masters.
        self.masters: Any = WeakIdKeyDictionary()
        # Called by shutdown in reverse order; each undoes one change to the process.
        self.undo: list[Callable[[], None]] = []

    def reset(self) -> None:
        """Call the functions in `undo`, newest first, and forget the session."""
        while self.undo:
            self.undo.pop()()
        vars(self).pop("opt_properties", None)
        vars(self).update(vars(AmpState()))


_amp_state = AmpState()

HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def float32_values(param: Tensor, exact: Tensor) -> Tensor:
    """Return a half-precision parameter in float32: elements of `exact` if they round to it, else its own value."""
    return torch.where(exact.to(param.dtype) == param, exact, param.float())


def masters_on_every_rank(params: Iterable[Tensor], broadcast: Callable[[list[Tensor]], None]) -> list[Tensor]:
    """Return the float32 tensors in `masters` of these parameters, in the same order on every rank.

    All ranks have the masters. Only ranks that loaded a checkpoint have exact values of parameters without a master:
    the first rank decides, and the others create or drop tensors accordingly. The caller then broadcasts the values.
    `broadcast` gives tensors the values of the first rank.
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
    """Return the settings of amp that must be equal on all ranks: opt level, loss scales, and options of optimizers.

    Only optimizers that update one of `params`, or its master, are included.
    """
    if not hasattr(_amp_state, "opt_properties"):
        return {}
    settings = {f"{name} of amp.initialize": value for name, value in _amp_state.opt_properties.options.items()}
    for number, scaler in enumerate(_amp_state.loss_scalers):
        settings[f"loss scale {number}"] = scaler.loss_scale()
    index_of = {
        id(tensor): index for index, param in enumerate(params) for tensor in (param, _amp_state.masters.get(param))
    }
    # The set of optimizers has no order. Sorting by the first parameter gives an order that is equal on all ranks.
    ordered = []
    for optimizer in _amp_state.optimizers:
        indices = [index_of[id(param)] for param in master_params(optimizer) if id(param) in index_of]
        if indices:
            options = {name: plain(value) for name, value in optimizer_settings(optimizer).items()}
            ordered.append((min(indices), type(optimizer).__name__, repr(options), options))
    for number, (*_, options) in enumerate(sorted(ordered, key=lambda entry: entry[:3])):
        settings.update({f"{name} of optimizer {number}": value for name, value in options.items()})
    return settings


def warn_or_err(msg: str) -> None:
    """Raise RuntimeError, or only warn if the user has set `_amp_state.hard_override`."""
    if _amp_state.hard_override:
        warnings.warn(msg, stacklevel=3)
    else:
        raise RuntimeError(msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print unless verbosity is 0; with `rank0`, print on rank 0 only."""
    connected = rank0 and torch.distributed.is_available() and torch.distributed.is_initialized()
    if _amp_state.verbosity > 0 and not (connected and torch.distributed.get_rank()):
        print(msg)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield the parameters that `optimizer` updates: float32 masters if amp made them.

    Works on any object with `param_groups`, whether amp has seen it or not.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
