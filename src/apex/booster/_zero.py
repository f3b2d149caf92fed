"""Optimizers whose state is divided among processes (ZeRO), made from ordinary ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._distributed.experts import is_expert
from ..amp._amp_state import HALF
from ..amp._checks import has_known_step
from ..contrib.optimizers._zero.checkpoints import gather, packed_groups
from ..contrib.optimizers._zero.layout import round_up
from ..contrib.optimizers._zero.state import PARAM
from ..contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from ..ops._host import HOST
from ..ops.multi_tensor import Lists, rules
from ..ops.multi_tensor.codecs import GROUP
from ..ops.multi_tensor.flat import flat, with_strides_of
from ..ops.multi_tensor.torch_lists import StateSeed, seed_of
from ..optimizers import FusedAdam, FusedSGD, OffloadedOptimizer
from ..optimizers._base import EncodingOptimizer
from ..optimizers._state_dicts import show_own_entries

BYTES_OF_A_GRADIENT = 4


class DividedSGD(DistributedFusedAdam):
    """SGD with momentum on the engine of DistributedFusedAdam."""

    # Whether the weight decay is added to the update instead of the gradient, as in FusedSGD.
    wd_after_momentum = False

    def _state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def _update(
        self, group: dict[str, Any], lists: Lists, step: Any, noop: Tensor | None, scale: Tensor | None
    ) -> None:
        first = (step == 1).to(torch.float64) if isinstance(step, Tensor) else step == 1
        options = {name: group[name] for name in ("lr", "momentum", "dampening", "weight_decay")}
        flags = rules.sgd_flags(group["nesterov"], self.wd_after_momentum, [])
        seed = StateSeed(seed_of(step)) if self.state_format != "float32" else None
        lists.apply(rules.SGD, {**options, "first": first}, flags, noop=noop, grad_scale=scale, seed=seed)


def zero_optimizer(
    optimizer: torch.optim.Optimizer, *, cpu_offload: bool = False, expert_group: Any = None, **options: Any
) -> tuple[DistributedFusedAdam, Any]:
    """Return a ZeRO optimizer with the same algorithm and parameter groups, and the original's state dict or None.

    With `cpu_offload` its state, with the float32 weights, is in the host's memory. The state of experts is divided
    among `expert_group`, the processes that hold the same experts, which must have reduced their gradients.

    Both optimizers share the dicts of their groups, so a scheduler of one changes the other. Give the state dict to
    `load_plain_state` once all parameters have been cast.
    """
    show_own_entries([optimizer])
    groups = optimizer.param_groups
    known = has_known_step(optimizer)
    if known and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, FusedAdam)):
        kind: type[DistributedFusedAdam] = DistributedFusedAdam
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(getattr(optimizer, "adam_w_mode", False))
        options.update(adam_w_mode=decoupled or bool(groups[0].get("decoupled_weight_decay", False)))
        options.update(amsgrad=bool(groups[0].get("amsgrad", False)))
    elif known and isinstance(optimizer, (torch.optim.SGD, FusedSGD)):
        kind = DividedSGD
    else:
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__}, whose state cannot be divided; use Adam, AdamW or SGD of "
            "torch.optim, or FusedAdam or FusedSGD of apex.optimizers; DistributedFusedMuon and DistributedFusedLAMB "
            "of apex.contrib.optimizers divide theirs without a plugin"
        )
    _check_options(optimizer, options.get("store_params", True))
    if getattr(optimizer, "capturable", False) or any(group.get("capturable") for group in groups):
        options["capturable"] = True
    saved = None
    if optimizer.state:
        saved = (
            optimizer.state_dict(decoded=True) if isinstance(optimizer, EncodingOptimizer) else optimizer.state_dict()
        )
    options["state_format"] = getattr(optimizer, "state_format", "float32")
    # A bucket is hardly larger than all parameters, because the engine warns of buckets that stay mostly empty.
    unit = 1 if options["state_format"] == "float32" else GROUP
    elements = sum(round_up(param.numel(), unit) for group in groups for param in group["params"])
    size = (1.2 * elements + 64) * BYTES_OF_A_GRADIENT / 2**20
    options["bucket_cap_mb"] = min(options.get("bucket_cap_mb", size), size)
    # Set before the constructor lays the buckets out: NVIDIA's signature has no argument for it.
    divided = kind.__new__(kind)
    divided._expert_group = expert_group
    divided.__init__([dict(group) for group in groups], **options)  # type: ignore[misc]
    if cpu_offload:
        divided._offload_state()
    if isinstance(divided, DividedSGD):
        divided.wd_after_momentum = getattr(optimizer, "wd_after_momentum", False)
    for group, divided_group in zip(groups, divided.param_groups, strict=True):
        for name, value in divided_group.items():
            group.setdefault(name, value)
    divided.param_groups = groups
    return divided, saved


# Options that an update of divided state would lose, the value that each must have, and advice.
_LOST_OPTIONS = {
    "maximize": (False, "give the negative of the loss"),
    "differentiable": (False, "a divided step has no gradient"),
    "stochastic_rounding": (False, "updates are added to float32 weights, and the model's are rounded to the nearest"),
    "master_bits": (None, "divided weights are float32. TorchDDPPlugin keeps the optimizer as it is"),
}


def _check_options(optimizer: torch.optim.Optimizer, stores_params: bool) -> None:
    """Raise a ValueError for an option of an optimizer that its divided twin would not have."""
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError(
            "an OffloadedOptimizer cannot be divided; give the plugin cpu_offload=True and boost the plain optimizer"
        )
    if getattr(optimizer, "master_weights", False) and not stores_params:
        raise ValueError("master_weights=True of the optimizer and master_weights=False of ZeRO contradict each other")
    for name, (kept, advice) in _LOST_OPTIONS.items():
        for value in (getattr(optimizer, name, kept), *(group.get(name, kept) for group in optimizer.param_groups)):
            if value != kept:
                raise ValueError(f"{name}={value!r} is not supported by ZeRO: {advice}; use {name}={kept!r}")
    for name in ("amsgrad", "decoupled_weight_decay"):
        values = {bool(group.get(name, False)) for group in optimizer.param_groups}
        if len(values) > 1:
            raise ValueError(f"{name} differs between parameter groups; ZeRO needs one value for all of them")


def load_plain_state(divided: DistributedFusedAdam, saved: dict[str, Any]) -> None:
    """Load a state dict of an ordinary optimizer into a ZeRO optimizer.

    State that is missing for a parameter, or None as SGD's momentum before its first use, becomes zeros.
    """
    names = divided._state_names()
    state = {}
    for key, param in enumerate(divided.parameters()):
        values = {name: value for name, value in saved["state"].get(key, {}).items() if value is not None}
        if values:  # SGD counts no steps, but a parameter with momentum has taken its first step
            values.setdefault("step", 1)
        state[key] = {**{name: torch.zeros_like(param) for name in names}, **values}
    divided.load_state_dict({**saved, "state": state})


def divided_state(
    divided: DistributedFusedAdam, keep: bool
) -> tuple[list[dict[str, Any]], Callable[[list[int]], dict[int, Any]], dict[int, int]]:
    """Return the groups of a ZeRO optimizer, a function that reads whole state by parameter number, and its sizes.

    Groups have numbers in place of parameters. The function must be called in all processes; those without `keep` get
    an empty dict. The sizes are bytes of each parameter's state.
    """
    divided._settle()
    params, names = list(divided.parameters()), divided._state_names()
    numbers = {param: number for number, param in enumerate(params)}
    counts = {number: float(group["step"]) for group in divided._counted_groups() for number in group["params"]}

    def read(keys: list[int]) -> dict[int, Any]:
        states = _gathered(divided, keep, [params[key] for key in keys], names)
        steps = {param: torch.tensor(counts[numbers[param]], dtype=torch.float32, device=HOST) for param in states}
        return {numbers[param]: {"step": steps[param], **state} for param, state in states.items()}

    held = {param for state in divided._states for param in state.arena.params}
    sizes = {numbers[param]: 4 * len(names) * param.numel() for param in held}
    return packed_groups(divided), read, sizes


def _gathered(divided: DistributedFusedAdam, keep: bool, params: Iterable[Tensor], names: Sequence[str]) -> Any:
    """Return the whole state of parameters; processes without `keep` get only the state of experts.

    Each process has other experts, and whole tensors need all of them.
    """
    experts = {param for param in params if is_expert(param)} if divided._expert_group is not None else set()
    states = gather(divided._states, keep, set(params) - experts, names)
    return {**states, **gather(divided._states, True, experts, names)} if experts else states


class _Gradients:
    """The reduced gradients of an arena, under the name of its parameters, for `gather`."""

    names = ()

    def __init__(self, optimizer: DistributedFusedAdam, arena: Any) -> None:
        self._optimizer, self.arena = optimizer, arena

    def read(self, name: str) -> Tensor:
        gradients = self._optimizer._gradients.local(self.arena)
        values = self.arena.new_shard(self.arena.dtypes.gradients).zero_()
        for part, gradient in zip(self.arena.parts, gradients, strict=True):
            values[part.flat : part.flat + part.size] = gradient
        return values


def whole_gradients(divided: DistributedFusedAdam, params: list[Tensor]) -> dict[Tensor, Tensor]:
    """Return the whole mean gradients of some parameters of a ZeRO optimizer; all processes must call it."""
    divided.grad_sync()
    sources: Any = [_Gradients(divided, state.arena) for state in divided._states]
    return {param: gathered[PARAM].to(param.device) for param, gathered in gather(sources, True, params).items()}


class ExactWeights:
    """The float32 weights in the divided state of a ZeRO optimizer, which writes them to the model after every step."""

    def __init__(self, optimizer: DistributedFusedAdam) -> None:
        self._optimizer = optimizer

    # Reading the values needs the other processes.
    is_local = False

    def read(self, params: list[Any], keep: bool) -> dict[Tensor, Tensor]:
        """Return whole float32 values of the half-precision parameters among `params`, in the host's memory.

        All processes must call it. Those without `keep` get an empty dict.
        """
        half = {param for param in params if param is not None and param.dtype in HALF}
        if not half:
            return {}
        self._optimizer._settle()
        return {param: state[PARAM] for param, state in _gathered(self._optimizer, keep, half, [PARAM]).items()}

    def write(self, values: dict[Tensor, Tensor]) -> None:
        """Set the values of some parameters; the others do not change. All processes must call it."""
        if not self._optimizer._has_state:  # its state will be made from the model's weights
            return
        self._optimizer._settle()
        for state in self._optimizer._states:
            exact = state.read(PARAM)
            shard = state.arena.new_state(exact.dtype).copy_(exact)
            for part in state.arena.parts:
                param = state.arena.params[part.param]
                if param in values:
                    source = flat(with_strides_of(param, values[param]))
                    shard[part.flat : part.flat + part.size].copy_(source[part.start : part.stop])
            state.write(PARAM, shard)
        self._optimizer._parameters.updated()
        self._optimizer.param_sync()
