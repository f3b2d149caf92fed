"""What both sharded optimizers have: parameter groups, the count of steps, hooks on gradients, checkpoints."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...._distributed.experts import refuse_experts
from ...._distributed.reducer import weak_method
from ....optimizers._checks import check_options
from . import checkpoints
from .checkpoints import StateSlice
from .groups import Groups, broadcast_params

# The hook of each parameter that has one.
_hook_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


class GradientHooks:
    """Calls `method(owner, param)` when a backward pass has added to a gradient, for as long as the owner lives."""

    def __init__(self, owner: Any, method: Callable[[Any, Tensor], None]) -> None:
        self._call = weak_method(owner, method)
        self._hooks: list[Any] = []
        self._registered: WeakIdKeyDictionary = WeakIdKeyDictionary()
        weakref.finalize(owner, _remove, self._hooks)

    def register(self, params: Iterable[Tensor]) -> None:
        """Hooks of these parameters, in place of those of other optimizers; frozen ones are passed over."""
        for param in params:
            if param.requires_grad and param not in self._registered:
                if param in _hook_of:
                    _hook_of[param].remove()
                _hook_of[param] = hook = param.register_post_accumulate_grad_hook(self._call)
                self._registered[param] = True
                self._hooks.append(hook)


class StepCount:
    """`state["step"]`: an int, or, if `capturable`, an int32 tensor [1] on the device."""

    def __init__(self, state: dict[Any, Any], device: torch.device, capturable: bool) -> None:
        self._state = state
        self._device = device
        self._capturable = capturable
        # Steps that an overflow kept from happening, which the host has not heard of yet.
        self._skipped: Tensor | None = None
        self.set(0)

    @property
    def count(self) -> Any:
        """The count so far, skipped steps that the host has not heard of included."""
        return self._state["step"]

    def next(self, noop: Tensor | None) -> Any:
        """Counts a step, unless `noop` is set: an int, or a float64 tensor."""
        if self._capturable:
            count = self._state["step"]
            count += 1 if noop is None else (noop == 0).to(torch.int32).reshape(1)
            return count.to(torch.float64).reshape(())
        if noop is None:
            self.settle()
        self._state["step"] += 1
        if noop is None:
            return self._state["step"]
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.float64, device=self._device)
        step = self._state["step"] - self._skipped
        self._skipped += noop.reshape(()) != 0
        return step

    def settle(self) -> int:
        """The count, after taking skipped steps off it, which waits for the device."""
        if self._skipped is not None:
            self._state["step"] -= int(self._skipped)
            self._skipped = None
        return int(self._state["step"])

    def set(self, count: int) -> None:
        """Sets the count."""
        self._skipped = None
        if not self._capturable:
            self._state["step"] = int(count)
        elif "step" in self._state:
            self._state["step"].fill_(int(count))  # a graph that was captured goes on reading it
        else:
            self._state["step"] = torch.full((1,), int(count), dtype=torch.int32, device=self._device)


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of `DistributedFusedAdam` and `DistributedFusedLAMB`."""

    _groups: Groups
    _states: Sequence[Any]
    _steps: StepCount
    # Whether the constructor is over, after which new groups take the parameters of the first process at once.
    _made = False

    def parameters(self) -> Iterator[Any]:
        """All parameters, group by group."""
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def _checked(self, parameters: Iterable[Tensor] | None) -> set[Tensor] | None:
        """Return `parameters` as a set; None stands for all. Raise if a tensor is no parameter of this optimizer."""
        chosen = None if parameters is None else set(parameters)
        if chosen is not None and not chosen <= set(self.parameters()):
            raise ValueError("parameters has tensors that are not parameters of this optimizer")
        return chosen

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more parameter group, in all processes alike."""
        if isinstance(param_group, dict):  # else PyTorch complains
            check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            refuse_experts(
                self.param_groups[-1]["params"],
                type(self).__name__,
                "Give experts to an optimizer whose state is not divided, such as apex.optimizers.FusedAdam, and call "
                "apex.transformer.finalize_model_grads(model, data_parallel=False), which reduces their gradients",
            )
            if self._made:
                self._take_params_of_first(len(self.param_groups) - 1)
        except (RuntimeError, ValueError):
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
        return checkpoints.sharded_tensors(self)

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what was loaded into what `sharded_state_dict` gave, parameters included."""
        checkpoints.load_sharded(self, state_dict)

    def _own_state(self) -> tuple[list[StateSlice], int]:
        """This process's part of the state, as slices of parameters' memory, and the count of steps."""
        self._settle()
        return checkpoints.own_slices(self._states), int(self._steps.settle())

    def _load_own_state(self, slices: Sequence[StateSlice], groups: Sequence[dict[str, Any]], step: int) -> None:
        """Takes values for what `_own_state` lists, options of the parameter groups, and the count of steps."""
        checkpoints.load_slices(self, slices, groups, step)
