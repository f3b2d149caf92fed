"""Places in Python where a training step finds or leaves something: optimizers, amp, gradients, variables."""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..amp._amp_state import _amp_state
from ..ops._recording import Guard

MISSING = object()


class Place(NamedTuple):
    """Somewhere in Python: the attributes and keys that lead from `root` to what is there."""

    name: str
    root: Any
    path: tuple[Any, ...]
    # Most steps replace what is there without reading it, as they do with gradients: see `Recording.reads`.
    temporary: bool = False
    # It matters only where the step changes it.
    optional: bool = False
    # A variable of the function, an attribute of one, an item: a tensor that is only read stays there.
    variable: bool = False

    @staticmethod
    def of(root: Any, *path: Any, **flags: bool) -> Place:
        """An attribute, or an item of a dict or list in one, with a name such as "FusedAdam.param_groups[0]['lr']"."""
        keys = "".join(f"[{key!r}]" for key in path[1:] if not isinstance(key, Tensor))
        return Place(f"{type(root).__name__}.{path[0]}{keys}", root, path, **flags)

    def read(self) -> Any:
        """What is there, `MISSING` if nothing is."""
        return functools.reduce(_get, self.path, self.root)

    def put(self, value: Any) -> None:
        """Changes it."""
        owner = functools.reduce(_get, self.path[:-1], self.root)
        (operator.setitem if isinstance(owner, dict | list) else setattr)(owner, self.path[-1], value)

    def guard(self) -> Guard:
        """That what is there stays as it is now."""
        return Guard(self.name, self.read, self.read())


def _get(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return owner.get(key, MISSING)
    try:
        return owner[key] if isinstance(owner, list) else getattr(owner, key)
    except (AttributeError, IndexError, TypeError, ValueError):  # the last: a variable that has no value yet
        return MISSING


def parameters(optimizers: Iterable[Any]) -> list[Tensor]:
    """Parameters that a step may change, and the half-precision ones that amp writes from them."""
    found = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    found += [param for optimizer in _amp_state.optimizers for param in optimizer._amp_stash.all_fp16_params]
    return list({id(param): param for param in found}.values())


def hyperparameters(optimizers: Sequence[Any], but: Container[tuple[int, int, str]] = ()) -> list[Guard]:
    """Every hyperparameter as it is now, `but` for some: id of the optimizer, index of the group and name of each."""
    places = [Place.of(optimizer, "defaults", name) for optimizer in optimizers for name in optimizer.defaults]
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            names = [
                name for name in group if name not in ("params", "step") and (id(optimizer), index, name) not in but
            ]
            places += [Place.of(optimizer, "param_groups", index, name) for name in names]
    return [place.guard() for place in places if not isinstance(place.read(), Tensor)]


def training_places(optimizers: Sequence[Any]) -> list[Place]:
    """Every place of these optimizers and of amp, and the gradients of all tensors of the process."""
    stepped = {id(param): param for param in parameters(optimizers)}
    found = [Place.of(param, "grad", temporary=True) for param in stepped.values()]
    # An optimizer may step outside of the function, and a backward pass may come through another's parameters.
    leaves = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and _is_leaf(each)]
    found += [Place.of(leaf, "grad", temporary=True, optional=True) for leaf in leaves if id(leaf) not in stepped]
    for optimizer in optimizers:
        found += [
            Place.of(optimizer, "state", param, name) for param in optimizer.state for name in optimizer.state[param]
        ]
        found += [Place.of(optimizer, name) for name in ("most_recent_scale", "scale_set_by_backward")]
        for index, group in enumerate(optimizer.param_groups):
            tensors = [name for name, value in group.items() if isinstance(value, Tensor)]  # steps, learning rates
            found += [Place.of(optimizer, "param_groups", index, name) for name in tensors]
            found.append(Place.of(optimizer, "_skipped", index))
    for optimizer in _amp_state.optimizers:
        found += [
            Place.of(optimizer._amp_stash, name)
            for name in ("found_inf", "already_patched", "params_have_scaled_gradients")
        ]
    for scaler in _amp_state.loss_scalers:
        found += [Place.of(scaler, name, temporary=name == "_overflow_buf") for name in vars(scaler)]
    return found


def _is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor gets gradients."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view whose base was written to since, a tensor of torch.func that is out of use
        return False


def holds_tensors(value: Any) -> bool:
    """Whether something is a tensor that is no parameter, or a tuple of such."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(each, Tensor) for each in value)
    return isinstance(value, Tensor) and not value.requires_grad
