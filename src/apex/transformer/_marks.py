"""Deep copies of modules whose parameters have marks, such as `tensor_model_parallel`: see `_distributed/marks.py`."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

from .._distributed.marks import copy_marks

M = TypeVar("M", bound="MarkedModule")


class MarkedModule(nn.Module):
    """A module whose deep copies keep the marks of its parameters.

    `copy.deepcopy` of a parameter drops its attributes. The layers of a stack of clones would then be taken for layers
    that are not split, and their gradients would not be summed over the ranks.
    """

    def __deepcopy__(self: M, memo: dict[int, Any]) -> M:
        memo[id(self)] = duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for parameter, copied in zip(self.parameters(), duplicate.parameters(), strict=True):
            copy_marks(parameter, copied)
        return duplicate
