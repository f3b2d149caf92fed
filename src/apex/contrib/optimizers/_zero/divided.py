"""What optimizers whose state is divided among processes have in common, whatever their algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ....optimizers._checks import check_options
from . import formats
from .groups import Groups, broadcast_params
from .saved import Stretch
from .sharded import own_stretches


class DividedOptimizer(torch.optim.Optimizer):
    """Base of `DistributedFusedAdam` and `DistributedFusedLAMB`."""

    _groups: Groups
    _states: Sequence[Any]
    _steps: Any
    # Whether the constructor is over, after which new groups take the parameters of the first process at once.
    _made = False

    def parameters(self) -> Iterator[Any]:
        """All parameters, group by group."""
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more parameter group, in all processes alike."""
        if isinstance(param_group, dict):  # else PyTorch complains
            check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if self._made:
            try:
                self._take_params_of_first(len(self.param_groups) - 1)
            except RuntimeError:
                self.param_groups.pop()
                raise

    def _take_params_of_first(self, first: int) -> None:
        """Gives the parameters of groups from `first` on the values of the first process."""
        if not self._groups.is_one:
            broadcast_params(self.param_groups, first, self._groups.process_group, self._layout_options(first))

    def _layout_options(self, first: int) -> Any:
        """Options that the layout of parameters depends on, for groups from `first` on."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Makes state that is missing, and finishes exchanges that are under way."""
        raise NotImplementedError

    def sharded_state_dict(self) -> dict[str, Any]:
        """The state for `torch.distributed.checkpoint`, of which each process saves and loads its own part.

        Tensors are views of the state where possible: save them before the next step, and after loading into them call
        `load_sharded_state_dict`. The number of processes may be another then.
        """
        self._settle()
        return formats.sharded_dict(self)

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what was loaded into what `sharded_state_dict` gave, parameters included."""
        formats.load_sharded(self, state_dict)

    # For `apex.transformer.checkpoint`, where a parameter may be a part of one itself --------------------------------

    def _own_state(self) -> tuple[list[Stretch], int]:
        """This process's part of the state, as stretches of parameters' memory, and the count of steps."""
        self._settle()
        return own_stretches(self._states), int(self._steps.settle())

    def _load_own_state(self, stretches: Sequence[Stretch], groups: Sequence[dict[str, Any]], step: int) -> None:
        """Takes values for what `_own_state` lists, options of the parameter groups, and the count of steps."""
        formats.load_stretches(self, stretches, groups, step)
