"""DistributedFusedLAMB: LAMB whose state is sharded over processes (ZeRO)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._env import processes_on_machine
from ...optimizers._base import adam_hyperparameters, run_closure
from ...optimizers._buckets import check_parameter
from ...optimizers._checkpoints import load_with_hooks, saved_with_hooks
from ...optimizers._checks import check_options
from ._zero.arena import Arena
from ._zero.base import ShardedOptimizer, StepCount
from ._zero.groups import machine_groups, processes_of_machine, processes_that_divide
from ._zero.lamb import LambReducer, Masters, Update, make_arena
from ._zero.norms import any_nonfinite
from ._zero.parameters import ParameterSync
from ._zero.state import PARAM, ArenaState

# Maps upstream's names of state to our names of the flat shards.
_NAMES = {"fp32_p": PARAM, "fp32_m": "exp_avg", "fp32_v": "exp_avg_sq"}


class DistributedFusedLAMB(ShardedOptimizer):
    """LAMB (see `apex.optimizers.FusedLAMB`) of the mean of all processes' gradients, with sharded state.

    Each process holds and updates 1/n of the float32 master weights and moments. n is `dwu_group_size`, or with 0 the
    number of processes on a machine; machines hold copies of the same state. A training step is::

        loss.backward()                     # averages buckets of gradients meanwhile
        optimizer.complete_reductions()     # waits for them; optional, `step` does it too
        optimizer.step()                    # with a GradScaler: scaler.step(optimizer)
        optimizer.zero_grad()

    - Gradients stay in `param.grad`, unreduced. A gradient that is missing when reductions are completed counts as 0.
    - `set_global_scale` sets the loss scale. Without it a GradScaler's scale is used, or 1.
    - If a gradient of any process is not finite, no process takes or counts the step.
    - `clip_after_ar=False` clips each process's own gradient to `max_grad_norm` before the mean, which then starts
      after the backward pass. `fused_norm` computes the norm while gradients are copied. `fuse_scale` clips them while
      NCCL adds them up.
    - `full_ar` averages whole buckets over all processes, instead of shards on a machine and then over machines.
    - `set_param_views_to_flat_buffer` makes parameters views of one buffer per dtype, in the order of the numbers in
      `param_order`. With `skip_allgather`, `step` leaves sending the parameters to `param_sync`.
    - `e5m2_allgather` sends parameters in 8 bits; they then have 2 bits of mantissa.
    - `dwu_num_blocks * dwu_num_chunks` is the number of buckets (for each dtype). `dwu_num_rs_pg` communicators of a
      machine and `dwu_num_ar_pg` over machines take turns with the buckets. With `dwu_num_ag_pg`, parameters are sent
      on that many communicators of their own, with at most `nccl_allgather_channels` channels.
    """

    _refuses_amp = (
        "it averages gradients, scaled as they are, during backward passes: use torch.amp.GradScaler or "
        "set_global_scale with it, or apex.contrib.optimizers.DistributedFusedAdam with amp"
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 0.0,
        adam_w_mode: bool = True,
        use_nvlamb: bool = False,
        step_supports_amp_scaling: bool = True,
        overlap_reductions: bool = True,
        dwu_group_size: int = 0,
        dwu_num_blocks: int = 4,
        dwu_num_chunks: int = 4,
        dwu_num_rs_pg: int = 1,
        dwu_num_ar_pg: int = 4,
        dwu_num_ag_pg: int = 0,
        fused_norm: bool = False,
        e5m2_allgather: bool = False,
        verbose: bool = False,
        clip_after_ar: bool = True,
        full_ar: bool = False,
        set_param_views_to_flat_buffer: bool = False,
        skip_allgather: bool = False,
        fuse_scale: bool = False,
        param_order: Mapping[Tensor, int] | None = None,
        nccl_allgather_channels: int = 0,
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps)
        defaults |= dict(weight_decay=weight_decay, grad_averaging=grad_averaging, max_grad_norm=max_grad_norm)
        check_options(defaults)
        _check_positive(
            dwu_num_blocks=dwu_num_blocks,
            dwu_num_chunks=dwu_num_chunks,
            dwu_num_rs_pg=dwu_num_rs_pg,
            dwu_num_ar_pg=dwu_num_ar_pg,
        )
        self._step_supports_amp_scaling = step_supports_amp_scaling
        self._adam_w_mode = 1 if adam_w_mode else 0
        self._use_nvlamb = use_nvlamb
        self._num_buckets = dwu_num_blocks * dwu_num_chunks
        self._fused_norm = fused_norm
        self._e5m2_allgather = e5m2_allgather
        self._verbose = verbose
        self._clip_after_ar = clip_after_ar
        self._set_flat_param_view = set_param_views_to_flat_buffer
        self._skip_ag = skip_allgather
        self._fuse_scale = fuse_scale
        self._is_accumulation_step = False
        self._last_step = False
        self._global_scale: float | Tensor | None = None
        self._param_order = dict(param_order) if param_order else None
        self._viewed: list[tuple[int, Tensor]] = []
        super().__init__(params, defaults)
        if self._param_order is not None:
            missing = sum(param not in self._param_order for param in self._trained)
            if missing:
                raise ValueError(f"param_order lacks {missing} of the parameters")
        first = self.param_groups[0]["params"][0]
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        size = processes_that_divide(dwu_group_size, world, processes_of_machine(first, processes_on_machine()))
        self._groups = machine_groups(
            size,
            full=full_ar,
            scatters=dwu_num_rs_pg,
            reduces=dwu_num_ar_pg,
            gathers=dwu_num_ag_pg,
            channels=nccl_allgather_channels,
            verbose=verbose,
        )
        if self._groups.is_one:
            self._clip_after_ar = True  # one process's gradient is the mean
        overlap = overlap_reductions and self._clip_after_ar
        self._gradients = LambReducer(self._groups, full=full_ar, overlap=overlap)
        self._parameters = ParameterSync(self._groups, contiguous=set_param_views_to_flat_buffer)
        # Upstream's clients write to `_lr`, or replace it, to set the learning rate of all groups.
        self._lr: float | Tensor = torch.zeros((), dtype=torch.float32, device=first.device)
        self._untouched_lr = self._lr, self._lr._version
        self._steps = StepCount({}, first.device, capturable=True)
        # Whether the last gradients were not finite, so that their step is skipped.
        self._overflow_buf = torch.zeros(1, dtype=torch.int32, device=first.device)
        self._share_params()

    @property
    def max_grad_norm(self) -> float | None:
        """Return the largest norm of all gradients together, which a group cannot have of its own."""
        return self.defaults["max_grad_norm"]

    @property
    def _trained(self) -> list[Tensor]:
        return [param for param in self.parameters() if param.requires_grad]

    @property
    def _step(self) -> Tensor:
        """Return the number of steps taken, int32 [1]."""
        return self._steps.count

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group before the first backward pass; all processes must add the same one."""
        if self._states:
            raise RuntimeError("a parameter group cannot be added after the first backward pass or step")
        super().add_param_group(param_group)

    def _layout_options(self, first: int) -> Any:
        params = (param for group in self.param_groups[first:] for param in group["params"])
        return self._num_buckets, self._param_order and [self._param_order.get(param) for param in params]

    @torch.no_grad()
    def _prepare(self) -> None:
        """Lay parameters out at their first use, with the dtypes and values that they have then."""
        if self._states:
            return
        trained = self._trained
        if not trained:
            raise RuntimeError("no parameter requires a gradient")
        for index, param in enumerate(self.parameters()):
            check_parameter(param, index)
        order = self._param_order
        if order is not None:
            trained.sort(key=lambda param: order[param])
        self.device = trained[0].device
        self._steps = StepCount({}, self.device, capturable=True)
        self._add_arenas(trained, functools.partial(make_arena, groups=self._groups, buckets=self._num_buckets))
        if self._set_flat_param_view:
            self._viewed = [(param.data_ptr(), param) for param in trained]
        self._update = Update(self._states, self._gradients, self._groups)
        self._overflow_buf = self._overflow_buf.to(self.device)

    def _new_state(self, arena: Arena) -> ArenaState:
        # LAMB needs the norm of each parameter: a rule gets each piece of a parameter as a tensor of its own.
        return ArenaState(arena, ("exp_avg", "exp_avg_sq"), Masters(arena, self._e5m2_allgather), arena.owned)

    def _arena_added(self, arena: Arena) -> None:
        if self._verbose:
            layout = arena.layout
            print(
                f"DistributedFusedLAMB: {len(arena.params)} parameters of {arena.params[0].dtype} in {layout.size} "
                f"elements, {len(layout.bucket_sizes)} buckets, {layout.shard_size} elements here"
            )

    def _check_views(self) -> None:
        """Raise an error if parameters have left the buffer that their values arrive in."""
        for address, param in self._viewed:
            if param.data_ptr() != address:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} is no view of the flat buffer any more: with "
                    "set_param_views_to_flat_buffer, cast or move a model before its first backward pass or step"
                )

    def _lazy_init_stage1(self) -> None:
        """Lay parameters out; clients may call this before the first backward pass."""
        self._prepare()

    def _lazy_init_stage2(self) -> None:
        """Do nothing; clients may call this after the first backward pass."""

    def set_is_accumulation_step(self, is_accumulation_step: bool) -> None:
        """Make the next backward passes only add to gradients, if True; pass False before a step's last pass."""
        self._is_accumulation_step = is_accumulation_step

    def set_last_step(self, last_step: bool) -> None:
        """Send nothing before `complete_reductions` if `last_step`: for passes that may lack gradients."""
        self._last_step = last_step

    def set_global_scale(self, global_scale: float | Tensor | None) -> None:
        """Set the loss scale."""
        self._global_scale = global_scale

    @property
    def global_scale(self) -> float | Tensor | None:
        """Return the loss scale of `set_global_scale`."""
        return self._global_scale

    @property
    def L2_grad_norm(self) -> Tensor | None:
        """Return the norm of the mean or, with `clip_after_ar=False`, of this process's gradient: float32 [1].

        Gradients still contain the loss scale.
        """
        return self._gradients.norm

    @property
    def has_overflow(self) -> bool:
        """Return whether the last gradients of any process were not finite; waits for the device."""
        return bool(self._overflow_buf.item())

    def _gradient_arrived(self, param: Tensor) -> None:
        self._prepare()
        self._gradients.is_complete = False
        if param in self._locations and not self._is_accumulation_step:
            self._gradients.arrived(*self._locations[param], may_send=not self._last_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; the gradients of the last backward pass can still be reduced."""
        self._gradients.hold(keep_tensors=not set_to_none)
        super().zero_grad(set_to_none=set_to_none)

    def complete_reductions(self) -> None:
        """Send the remaining gradients and wait for the mean of all."""
        self._complete(self._global_scale)

    @torch.no_grad()
    def _complete(self, loss_scale: float | Tensor | None) -> None:
        self._prepare()
        reducer: LambReducer = self._gradients
        if self._clip_after_ar:
            reducer.complete()
        else:
            limit: float | Tensor | None = self.max_grad_norm
            if limit and loss_scale is not None:
                limit = limit * loss_scale
            reducer.complete_clipped(limit or None, fused_norm=self._fused_norm, fused_scale=self._fuse_scale)
        assert reducer.norm is not None
        # The norm of the mean is the same in all processes.
        nonfinite = ~torch.isfinite(reducer.norm) if self._clip_after_ar else any_nonfinite(reducer.norm, self._groups)
        self._overflow_buf = nonfinite.to(torch.int32)
        if not self._step_supports_amp_scaling:
            self._mark_nonfinite()

    def _mark_nonfinite(self) -> None:
        """Make a local gradient NaN if any process's was not finite, for a GradScaler that looks at gradients."""
        for param in self._trained:
            if param.grad is not None and param.grad.numel():
                first = param.grad.view(-1)[:1]
                first.copy_(torch.where(self._overflow_buf != 0, torch.nan, first))
                return

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None
    ) -> Any:
        """Perform one step with the mean of all gradients; return the closure's loss."""
        loss = run_closure(closure)
        loss_scale = self._global_scale
        if loss_scale is None and grad_scaler is not None:
            loss_scale = grad_scaler._get_scale_async()
        self._prepare()
        self._check_views()
        if not self._gradients.is_complete:
            self._complete(loss_scale)
        self._gradients.is_complete = False
        self._compare_settings(grad_scaler)
        self._take_step(loss_scale)
        if grad_scaler is not None:
            flags = grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"]
            flags[self._overflow_buf.device] = self._overflow_buf.to(torch.float32)
        if not self._skip_ag:
            self.param_sync()
        return loss

    @torch.no_grad()
    def _take_step(self, loss_scale: float | Tensor | None) -> None:
        count = self._steps.next(self._overflow_buf)
        rate = self._common_rate()
        groups = self.param_groups if rate is None else [{**group, "lr": rate} for group in self.param_groups]
        hyper = [adam_hyperparameters(group, count, grad_averaging=bool(group["grad_averaging"])) for group in groups]
        scaled = [bool(self._use_nvlamb or group["weight_decay"]) for group in self.param_groups]
        self._update(hyper, (bool(self._adam_w_mode),), scaled, self._overflow_buf, self._factor(loss_scale))

    def _common_rate(self) -> float | Tensor | None:
        """Return the learning rate that a client wrote to `_lr`, or None."""
        untouched, version = self._untouched_lr
        is_untouched = self._lr is untouched and untouched._version == version
        return None if is_untouched else self._lr

    def _factor(self, loss_scale: float | Tensor | None) -> Tensor | None:
        """Return the factor of the mean that removes the loss scale and clips to `max_grad_norm`: float32 [1]."""
        limit = self.max_grad_norm if self._clip_after_ar else None
        if not limit and loss_scale is None:
            return None
        norm = self.L2_grad_norm
        assert norm is not None
        if isinstance(loss_scale, Tensor):
            factor = loss_scale.detach().reshape(1).to(norm.device, torch.float64).reciprocal()
        else:
            factor = torch.full((1,), 1 / (loss_scale or 1.0), dtype=torch.float64, device=norm.device)
        if limit:
            factor = torch.minimum(factor, limit / norm.double())
        return factor.to(torch.float32)

    def param_sync(self) -> None:
        """Send updated parameters to the other processes; `step` does this unless `skip_allgather`."""
        self._prepare()
        self._parameters.updated()
        self._parameters.synchronize()

    def _layout(self) -> list[int]:
        """Return the layout of the flat shards: number of processes; per dtype, number of buckets and sizes."""
        layout = [self._groups.ranks]
        for state in self._states:
            layout.extend((len(state.arena.layout.bucket_sizes), *state.arena.layout.sizes))
        return layout

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this process's `step`, `fp32_p`, `fp32_m` and `fp32_v`, as upstream, and the groups."""
        return saved_with_hooks(self, self._saved)

    def _saved(self) -> dict[str, Any]:
        self._prepare()
        saved: dict[str, Any] = {"step": self._step.clone()}
        for name, own in _NAMES.items():
            saved[name] = torch.cat([state.read(own) for state in self._states])
        saved["param_groups"] = [
            {name: value for name, value in group.items() if name != "params"} for group in self.param_groups
        ]
        saved["layout"] = self._layout()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that this process saved with as many processes and the same options, all or nothing.

        Load the model's state first. Upstream's state dicts have no groups and no layout.
        """
        load_with_hooks(self, state_dict, self._load)

    @torch.no_grad()
    def _load(self, state_dict: dict[str, Any]) -> None:
        self._prepare()
        missing = [name for name in ("step", *_NAMES) if name not in state_dict]
        if missing:
            raise KeyError(f"the state dict has no {', '.join(missing)}; it has {', '.join(map(str, state_dict))}")
        step = int(state_dict["step"])
        layout = self._layout()
        if state_dict.get("layout", layout) != layout:
            raise ValueError(
                "the state was saved with [processes that divide it, buckets, sizes of parameters] = "
                f"{state_dict['layout']}; here they are {layout}. The number of processes and the dwu_* arguments must "
                "be the same: use torch.distributed.checkpoint to change them"
            )
        sizes = [state.arena.layout.shard_size for state in self._states]
        for name in _NAMES:
            if state_dict[name].shape != (sum(sizes),):
                raise ValueError(f"{name} has shape {tuple(state_dict[name].shape)}; ({sum(sizes)},) is expected")
        groups = state_dict.get("param_groups")
        if groups is not None and len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} parameter groups, the optimizer {len(self.param_groups)}")
        for name, own in _NAMES.items():
            for state, part in zip(self._states, state_dict[name].split(sizes), strict=True):
                state.write(own, part)
        self._steps.set(step)
        for group, values in zip(self.param_groups, groups or (), strict=groups is not None):
            group.update(values)

    def _settle(self) -> None:
        self._prepare()


def _check_positive(**numbers: int) -> None:
    """Raise an error if one of the named numbers is below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} is not positive")
