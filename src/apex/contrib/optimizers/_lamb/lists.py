"""Lists of tensors that stay where they are, for the rules of `apex.ops.multi_tensor`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....ops.multi_tensor import Lists, make_lists
from ....ops.multi_tensor.rule import SLOTS


class FixedLists:
    """`slots` of a rule, in order, and the list that gets a copy of the first; None for those that are not used."""

    def __init__(self, slots: Sequence[list[Tensor] | None], copy: list[Tensor] | None = None) -> None:
        self._slots = [*slots, *(None for _ in range(SLOTS - len(slots)))]
        self._copy = copy
        self._lists: Lists | None = None

    def here(self) -> Lists:
        """On the stream that work goes to now: tables of addresses are copied to the device on it."""
        if self._lists is None or not self._lists.usable():
            self._lists = make_lists(self._slots, self._copy)
        return self._lists
