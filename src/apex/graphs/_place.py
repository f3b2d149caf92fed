"""Places in Python where a training step finds and leaves numbers and tensors."""

from __future__ import annotations

import enum
import functools
import operator
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._host import HOST
from ..ops._recording import Guard

# What is compared: no tensor, and nothing that has parts.
PLAIN = bool | int | float | complex | str | None | enum.Enum | torch.dtype | torch.device
MISSING = object()
# The last key of a place that is the contents of a tensor on the host: a graph has frozen those.
CONTENTS = Tensor.tolist


class Place(NamedTuple):
    """Somewhere in Python: the attributes and keys that lead from `root` to what is there.

    The last key may be `len`, for how many there are, or `CONTENTS`.
    """

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
    def of(root: Any, attribute: str, *keys: Any, **flags: bool) -> Place:
        """An attribute, or an item of a dict or list in one, with a name such as "FusedAdam.param_groups[0]['lr']"."""
        place = Place(f"{type(root).__name__}.{attribute}", root, (attribute,), **flags)
        return functools.reduce(Place.item, keys, place)

    def item(self, key: Any) -> Place:
        """An item of the dict, list or tuple that is there, or how many there are."""
        shown = "" if isinstance(key, Tensor) or key is len else f"[{key!r}]"  # of a tensor that takes long
        return self._replace(name=self.name + shown, path=(*self.path, key))

    def read(self) -> Any:
        """What is there, `MISSING` if nothing is."""
        found = self.root
        try:
            for key in self.path:
                if key is len or key is CONTENTS:
                    found = key(found)
                elif isinstance(found, dict):
                    found = found.get(key, MISSING)
                else:
                    found = getattr(found, key) if isinstance(key, str) else found[key]
        except (AttributeError, IndexError, TypeError, ValueError):  # the last: a variable that has no value yet
            return MISSING
        return found

    def is_computed(self) -> bool:
        return self.path[-1] is len or self.path[-1] is CONTENTS

    def reader(self) -> Callable[[], Any]:
        """What does as `read`, in a quarter of the time for an entry of a dict: most places are, and are read often."""
        is_entry = isinstance(self.root, dict) and len(self.path) == 1
        return functools.partial(self.root.get, *self.path, MISSING) if is_entry else self.read

    def put(self, value: Any) -> None:
        """Changes it; where it is an item of a tuple, that becomes another one."""
        place, key = self._replace(path=self.path[:-1]), self.path[-1]
        owner = place.read()
        if key is CONTENTS:
            owner.detach().copy_(torch.tensor(value, dtype=owner.dtype, device=HOST))
        elif isinstance(owner, tuple):
            items = (*owner[:key], value, *owner[key + 1 :])
            place.put(owner._make(items) if hasattr(owner, "_make") else items)
        else:
            (operator.setitem if isinstance(owner, dict | list) else setattr)(owner, key, value)

    def has(self, value: Any) -> bool:
        """Whether something equal to `value` is there."""
        return Guard(self.name, self.read, value).holds()


def version_of(value: Any) -> int | None:
    """How often a tensor was written to."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def is_generator(value: Any) -> bool:
    """Whether something generates random numbers on the host."""
    if isinstance(value, torch.Generator):
        return value.device == HOST
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")
