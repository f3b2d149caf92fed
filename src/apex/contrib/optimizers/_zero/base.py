"""The base class of both sharded optimizers: layout of parameters, step count, gradient hooks, checkpoints."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...._distributed.comparison import check_settings, optimizer_settings
from ...._distributed.experts import is_expert, refuse_experts
from ...._distributed.reducer import weak_method
from ....ops._host import on_host
from ....optimizers._checks import check_group, check_options
from . import checkpoints
from .arena import Arena
from .checkpoints import StateSlice
from .groups import Groups, broadcast_params
from .parameters import ParameterSync

# The gradient hook of each parameter that has one.
_hook_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


class GradientHooks:
    """Hooks that call `method(owner, param)` when a backward pass has added to a gradient, while the owner lives."""

    def __init__(self, owner: Any, method: Callable[[Any, Tensor], None]) -> None:
        self._call = weak_method(owner, method)
        self._hooks: list[Any] = []
        self._registered: WeakIdKeyDictionary = WeakIdKeyDictionary()
        weakref.finalize(owner, _remove, self._hooks)

    def register(self, params: Iterable[Tensor]) -> None:
        """Hook the parameters that require gradients; remove the hooks that other optimizers have on them."""
        for param in params:
            if param.requires_grad and param not in self._registered:
                if param in _hook_of:
                    _hook_of[param].remove()
                _hook_of[param] = hook = param.register_post_accumulate_grad_hook(self._call)
                self._registered[param] = True
                self._hooks.append(hook)


class StepCount:
    """The number of steps, `state["step"]`: an int, or an int32 tensor [1] on the device if `capturable`.

    A parameter group counts the steps since its parameters got state: an update uses its own count (`by_group`).
    """

    def __init__(self, state: dict[Any, Any], device: torch.device, capturable: bool) -> None:
        self._state = state
        self._device = device
        self._capturable = capturable
        # Number of steps skipped for an overflow that the host has not read from the device yet.
        self._skipped: Tensor | None = None
        # Steps before a parameter group had state, by its number: an int, or a float64 scalar if `capturable`.
        self._before: dict[int, Any] = {}
        self.set(0)

    @property
    def count(self) -> Any:
        """Return the count, which still includes skipped steps that the host has not read."""
        return self._state["step"]

    def next(self, noop: Tensor | None) -> Any:
        """Count a step unless `noop` is set; return the count as an int or a float64 tensor."""
        if self._capturable:
            count = self._state["step"]
            count += 1 if noop is None else (noop == 0).to(torch.int32).reshape(1)
            return count.to(torch.float64).reshape(())
        known = noop is None or on_host(noop)  # the host need not wait for a flag in its own memory
        if known:
            self.settle()
        before = self._state["step"]
        if noop is not None and known:
            self._state["step"] += int(noop == 0)
            return torch.full((), before + 1, dtype=torch.float64, device=self._device)
        self._state["step"] += 1
        if noop is None:
            return self._state["step"]
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.float64, device=self._device)
        step = self._state["step"] - self._skipped
        self._skipped += noop.reshape(()) != 0
        return step

    def start(self, groups: Iterable[int]) -> None:
        """Start the counts of parameter groups that have none; `groups` has their numbers."""
        for number in set(groups).difference(self._before):
            taken = self._state["step"].to(torch.float64).reshape(()) if self._capturable else self.settle()
            self._before[number] = taken

    def by_group(self, count: Any) -> dict[int, Any]:
        """Return the count of each parameter group with state, by its number; `next` or `settle` returned `count`."""
        alike = {taken: count - taken if self._capturable or taken else count for taken in set(self._before.values())}
        return {number: alike[taken] for number, taken in self._before.items()}

    def settle(self) -> int:
        """Subtract skipped steps, which waits for the device, and return the count."""
        if self._skipped is not None:
            self._state["step"] -= int(self._skipped)
            self._skipped = None
        return int(self._state["step"])

    def set(self, count: int, by_group: Sequence[int] | None = None) -> None:
        """Set the count, and those of parameter groups, which are equal to it by default."""
        self._skipped = None
        for number, taken in self._before.items():
            before = 0 if by_group is None else count - by_group[number]
            self._before[number] = taken.fill_(before) if self._capturable else before  # a captured graph reads it
        if not self._capturable:
            self._state["step"] = int(count)
        elif "step" in self._state:
            self._state["step"].fill_(int(count))  # in place, because a captured graph reads this tensor
        else:
            self._state["step"] = torch.full((1,), int(count), dtype=torch.int32, device=self._device)


def check_device(wanted: Any, actual: torch.device) -> None:
    """Raise an error if the `device` argument is not the device of the parameters."""
    if wanted is None:
        return
    device = torch.device(wanted)
    if device.type != actual.type or device.index not in (None, actual.index):
        raise ValueError(f"device={device} is not where the parameters are: {actual}")


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of `DistributedFusedAdam` and `DistributedFusedLAMB`: optimizers whose state is sharded over processes.

    A subclass sets `_groups`, `_gradients`, `_parameters` and `_steps`, then calls `_share_params`. It says when
    parameters are laid out (`_add_arenas`), which state they have (`_new_state`), and takes their gradients
    (`_gradient_arrived`).
    """

    _groups: Groups
    # The reducer of gradients: `GradientSync` or `LambReducer`.
    _gradients: Any
    _parameters: ParameterSync
    _steps: StepCount
    # The device of parameters and state.
    device: torch.device
    # Whether the caller has named the processes: then they may be the ones that hold the same experts.
    _takes_experts = False
    # The processes that hold the same experts, for experts beside other parameters. Set before the constructor runs.
    # Gradients of experts must be the same in these processes before they are taken.
    _expert_group: Any = None
    # Groups that ask for another format than the optimizer's are refused.
    state_format, master_bits, stochastic_rounding = "float32", None, False
    # Whether the constructor has ended; new groups then take the first process's values at once.
    _made = False
    # Whether the first step has compared this process's settings with the other processes'.
    _is_compared = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # The state of each arena.
        self._states: list[Any] = []
        # For each parameter, the index of its arena and its index in the arena.
        self._locations: dict[Tensor, tuple[int, int]] = {}
        self._gradient_hooks = GradientHooks(self, type(self)._gradient_arrived)
        super().__init__(params, defaults)
        self.device = next(self.parameters()).device

    def _share_params(self) -> None:
        """Give all parameters the first process's values and register gradient hooks; ends the constructor."""
        self._made = True
        self._take_params_of_first(0)
        self._gradient_hooks.register(self.parameters())

    def parameters(self) -> Iterator[Any]:
        """Yield all parameters, group by group."""
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def _checked(self, parameters: Iterable[Tensor] | None) -> set[Tensor] | None:
        """Return `parameters` as a set; None stands for all. Raise if a tensor is no parameter of this optimizer."""
        chosen = None if parameters is None else set(parameters)
        if chosen is not None and not chosen <= set(self.parameters()):
            raise ValueError("parameters has tensors that are not parameters of this optimizer")
        return chosen

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; all processes must add the same one."""
        if isinstance(param_group, dict):  # PyTorch raises for other types
            check_options({**self.defaults, **param_group})
            check_group(self, param_group)
        super().add_param_group(param_group)
        try:
            is_apart = self._takes_experts and all(is_expert(param) for param in self.parameters())
            if self._expert_group is None and not is_apart:
                refuse_experts(
                    self.parameters(),
                    type(self).__name__,
                    "Give experts to an optimizer of their own: one whose state is not divided, such as "
                    "apex.optimizers.FusedAdam, or DistributedFusedAdam with process_group="
                    "get_expert_data_parallel_group(). Call apex.transformer.finalize_model_grads(model, "
                    "data_parallel=False) before its step, which reduces their gradients",
                )
            if self._made:
                self._take_params_of_first(len(self.param_groups) - 1)
        except (RuntimeError, ValueError):
            self.param_groups.pop()
            raise
        if self._made:
            self._gradient_hooks.register(self.param_groups[-1]["params"])

    def _take_params_of_first(self, first: int) -> None:
        """Give the parameters of groups from index `first` on the values of the first process."""
        if not self._groups.is_one:
            options, skips_experts = self._layout_options(first), self._expert_group is not None
            broadcast_params(self.param_groups, first, self._groups.process_group, options, skips_experts)

    @torch.no_grad()
    def _add_arenas(self, params: Iterable[Tensor], make_arena: Callable[[list[Tensor], list[int]], Arena]) -> None:
        """Lay parameters out in one arena per dtype and `_kind`, experts apart from others, and make their state.

        `make_arena` gets the parameters of an arena and the indices of their parameter groups.
        """
        group_of = {param: number for number, group in enumerate(self.param_groups) for param in group["params"]}
        alike: dict[Any, list[Tensor]] = {}
        for param in params:
            if param not in group_of:
                raise ValueError(f"params has a tensor of shape {tuple(param.shape)} that is in no parameter group")
            if param.device != self.device:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is on {param.device}, others are on {self.device}: "
                    "parameters and state of a process are on one device"
                )
            kind = param.dtype, is_expert(param), self._kind(self.param_groups[group_of[param]])
            alike.setdefault(kind, []).append(param)
        for members in alike.values():
            arena = make_arena(members, [group_of[param] for param in members])
            self._steps.start(arena.group_of)
            self._parameters.add(arena)
            self._gradients.add(arena)
            self._states.append(self._new_state(arena))
            self._locations.update({param: (len(self._states) - 1, index) for index, param in enumerate(members)})
            self._arena_added(arena)

    def _kind(self, group: dict[str, Any]) -> Any:
        """Return a key; parameters of groups with different keys go to different arenas."""
        return None

    def _new_state(self, arena: Arena) -> Any:
        """Return new state for the parameters of an arena."""
        raise NotImplementedError

    def _arena_added(self, arena: Arena) -> None:
        """Do more for a new arena, whose state is `self._states[-1]`."""

    def _gradient_arrived(self, param: Tensor) -> None:
        """Take a gradient that a backward pass has added to."""
        raise NotImplementedError

    def _compare_settings(self, grad_scaler: Any) -> None:
        """Raise in all processes, in a first step, if their learning rates, other options or loss scales differ.

        Called when all gradients have been sent, so that all processes are at the same place.
        """
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if self._is_compared or self._groups.is_one or capturing:
            return
        self._is_compared = True
        settings = optimizer_settings(self)
        if grad_scaler is not None:
            settings["loss scale"] = grad_scaler.get_scale()
        check_settings(settings, "settings of optimizers", self._groups.process_group, list(self.parameters()))

    def _layout_options(self, first: int) -> Any:
        """Return the options that decide the layout of the parameters of groups from index `first` on."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Make missing state and finish the exchanges that are under way."""
        raise NotImplementedError

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the state for `torch.distributed.checkpoint`: each process saves and loads its own part.

        Tensors are views of the state if possible, so save them before the next step. After loading into them call
        `load_sharded_state_dict`. The number of processes may differ between saving and loading.
        """
        self._refuse_numbered_experts()
        self._settle()
        return checkpoints.sharded_tensors(self)

    def _refuse_numbered_experts(self) -> None:
        """Raise if processes have different experts under the same number of a parameter."""
        if self._expert_group is not None and any(map(is_expert, self.parameters())):
            raise RuntimeError(
                "the state has experts, of which other processes hold different ones: save it by "
                "booster.save_optimizer, which makes whole tensors of them"
            )

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the values that were loaded into the tensors of `sharded_state_dict`, parameters included."""
        self._settle()
        checkpoints.load_sharded(self, state_dict)

    def _own_state(self) -> tuple[list[StateSlice], int]:
        """Return this process's part of the state, as slices of parameters' memory, and the step count."""
        self._settle()
        return checkpoints.own_slices(self._states), int(self._steps.settle())

    def _load_own_state(self, slices: Sequence[StateSlice], groups: Sequence[dict[str, Any]], step: int) -> None:
        """Load values for the slices of `_own_state`, `_counted_groups`, and the step count."""
        checkpoints.load_slices(self, slices, groups, step)

    def _counted_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups with indices instead of parameters, and with their step counts."""
        counts = self._steps.by_group(self._steps.settle())
        groups = enumerate(checkpoints.packed_groups(self))
        return [{**group, "step": int(counts.get(number, 0))} for number, group in groups]
