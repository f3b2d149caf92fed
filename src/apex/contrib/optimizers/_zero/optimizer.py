"""ZeroOptimizer: DistributedFusedAdam without state dicts and without upstream's view of its buckets.

A subclass for another algorithm names the state of a parameter (`_state_names`) and updates lists of tensors
(`_update`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...._distributed.experts import is_expert
from ....ops._host_memory import HostMemory
from ....ops.multi_tensor import Lists, rules
from ....ops.multi_tensor.codecs import GROUP
from ....ops.multi_tensor.torch_lists import StateSeed, seed_of
from ....optimizers._base import adam_hyperparameters, run_closure
from ....optimizers._checks import check_cautious, check_options
from .arena import Arena, Dtypes, allocator
from .base import ShardedOptimizer, StepCount, check_device
from .gradients import GradientSync
from .groups import Groups, own_world
from .layout import Layout, check_fill
from .norms import Norms
from .parameters import ParameterSync
from .scaled_state import ScaledState
from .state import ArenaState, format_of, start_from
from .wait_on_use import is_pending, postpone, release
from .weights import check_state_format, check_storage, weights_of


class ZeroOptimizer(ShardedOptimizer):
    """Base of `DistributedFusedAdam`, which describes the options."""

    # torch.amp.GradScaler then leaves unscaling and the overflow flag to `step`.
    _step_supports_amp_scaling = True
    # Maps parameters to their state; the keys "step" and "buckets" belong to all parameters.
    state: Any
    _custom_amp_unscale_grads = True
    # For apex.amp: the optimizer takes gradients during backward passes and keeps float32 master weights.
    _takes_gradients = True
    # Set by apex.amp: returns the float32 values of a parameter from before it was cast, or None.
    _exact_value: Callable[[Tensor], Tensor | None] | None = None
    # Host memory for the state, set by `_offload_state`; None for the memory of the device.
    _host: HostMemory | None = None
    # Set by apex.amp during a step: not 0 if the step is to be skipped.
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        dtype: torch.dtype = torch.float32,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
        device: Any = None,
        process_group: Any = None,
        distributed_process_group: Any = None,
        redundant_process_group: Any = None,
        average_grad_sync: bool = True,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 100.0,
        pipeline_size: int = 2,
        contiguous_param_buffer: bool = False,
        contiguous_grad_buffer: bool = False,
        store_params: bool = True,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        nccl_ub: bool = False,
        capturable: bool = False,
        *,
        state_format: str = "float32",
    ) -> None:
        defaults = self._group_defaults(
            dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        check_options(defaults)
        dtypes = Dtypes(dtype, grad_sync_dtype or dtype, param_sync_dtype or dtype).check()
        check_storage(dtypes, store_params, store_param_remainders, with_scaled_states, capturable)
        check_state_format(state_format, dtypes, amsgrad, with_scaled_states)
        self.state_format = state_format
        if nccl_ub and not contiguous_grad_buffer:
            raise ValueError("nccl_ub needs contiguous_grad_buffer=True: NCCL registers buffers that stay")
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be positive")
        if pipeline_size < 1:
            raise ValueError(f"pipeline_size={pipeline_size} must be at least 1")
        self.adam_w_mode = adam_w_mode
        self.amsgrad = amsgrad
        self.average_grad_sync = average_grad_sync
        self.overlap_grad_sync = overlap_grad_sync
        self.overlap_param_sync = overlap_param_sync
        self.bucket_cap_mb = bucket_cap_mb
        self.pipeline_size = pipeline_size
        self.contiguous_param_buffer = contiguous_param_buffer
        self.contiguous_grad_buffer = contiguous_grad_buffer
        self.store_params = store_params
        self.store_param_remainders = store_param_remainders
        self.with_scaled_states = with_scaled_states
        self.nccl_ub = nccl_ub
        self.capturable = capturable
        groups = Groups(process_group or own_world(), distributed_process_group, redundant_process_group)
        self._groups, self._expert_groups = groups, groups.of_experts(self._expert_group)
        self._takes_experts = process_group is not None
        self._dtypes = dtypes
        self.process_group = groups.process_group
        self.distributed_process_group = groups.distributed
        self.redundant_process_group = groups.redundant
        self.process_group_size = groups.size
        self.process_group_root = groups.root
        self.distributed_size, self.distributed_rank = groups.ranks, groups.rank
        self.redundant_size = groups.replicas
        self.dtype, self.grad_sync_dtype, self.param_sync_dtype = dtypes
        self.greedy_grad_copy = True
        self._gradients = GradientSync(
            groups, average=average_grad_sync, in_flight=pipeline_size, contiguous=contiguous_grad_buffer
        )
        self._parameters = ParameterSync(groups, in_flight=pipeline_size, contiguous=contiguous_param_buffer)
        # The autograd engine runs hooks in threads of its own.
        self._lock = threading.RLock()
        self._in_pass = False
        self._count = 0
        super().__init__(params, defaults)
        check_device(device, self.device)
        self._norms = Norms(self._gradients, self.device)
        self._steps = StepCount(self.state, self.device, capturable)
        self.state["buckets"] = []
        self._share_params()

    def _group_defaults(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """Return the default options of parameter groups, made from Adam's options."""
        return defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; all processes must add the same one. Its state is made at its first use."""
        if isinstance(param_group, dict) and param_group.get("cautious_weight_decay"):
            check_cautious(self.amsgrad, self.adam_w_mode)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._count += len(group["params"])
        if self.capturable:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if self._made and self._locations:
            self.init_params()  # now, while all processes are at the same place

    def _layout_options(self, first: int) -> Any:
        return self.bucket_cap_mb, self._dtypes

    def init_params(
        self,
        params: Iterable[Tensor] | Tensor | None = None,
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """Make the state of parameters that have none, in this order, in new buckets.

        Without `params` state is made for all parameters that require gradients, the last ones first, because their
        gradients arrive first. The optimizer does this when it first needs state. All processes must make equal calls.
        """
        self._init(params, Dtypes(*self._or_default(dtype, grad_sync_dtype, param_sync_dtype)), self.bucket_cap_mb)

    def init_params_bucket(
        self,
        params: Iterable[Tensor] | Tensor,
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """Make the state of parameters that have none, in one bucket of any size; otherwise as `init_params` does."""
        self._init(params, Dtypes(*self._or_default(dtype, grad_sync_dtype, param_sync_dtype)), None)

    def _or_default(self, *dtypes: torch.dtype | None) -> Iterator[torch.dtype]:
        return (dtype or default for dtype, default in zip(dtypes, self._dtypes, strict=True))

    @torch.no_grad()
    def _init(self, params: Iterable[Tensor] | Tensor | None, dtypes: Dtypes, bucket_cap_mb: float | None) -> None:
        if params is None and len(self._locations) == self._count:
            return
        dtypes.check()
        trained = [param for param in self.parameters() if param.requires_grad]
        if params is None:
            params = reversed(trained)
        chosen = [
            param for param in ([params] if isinstance(params, Tensor) else params) if param not in self._locations
        ]
        size = None if bucket_cap_mb is None else bucket_cap_mb * 1024 * 1024

        def make_arena(members: list[Tensor], group_of: list[int]) -> Arena:
            allocate = allocator(self._groups.process_group, self.device, self.nccl_ub)
            # Offloaded weights are sent from the device, in the dtype that the parameters get them in.
            sent = dtypes if self._host is None else dtypes._replace(parameters=members[0].dtype)
            layout = self._layout_of(members, group_of)
            groups = self._expert_groups if is_expert(members[0]) else self._groups
            alignment = 1 if self.state_format == "float32" else GROUP
            return Arena(members, group_of, sent, groups, size, allocate, self._host, layout, alignment)

        self._add_arenas(dict.fromkeys(chosen), make_arena)
        self._gradient_hooks.register(chosen)
        if all(param in self._locations for param in trained):
            check_fill([state.arena.layout for state in self._states])

    def _layout_of(self, params: list[Tensor], group_of: list[int]) -> Callable[..., Layout]:
        """Return the class of the layout of parameters of one kind; `group_of` has the numbers of their groups."""
        return Layout

    def _new_state(self, arena: Arena) -> ArenaState | ScaledState:
        names = self._state_names()
        if self.with_scaled_states:
            return ScaledState(arena, names)
        stores = self.store_params or (self.store_param_remainders and arena.dtypes != self._dtypes)
        weights = weights_of(arena, stores, self.store_param_remainders and not stores)
        return ArenaState(arena, names, weights, format=format_of(self, arena))

    def _arena_added(self, arena: Arena) -> None:
        if self._exact_value is not None:
            exact = list(map(self._exact_value, arena.params))
            if self.store_params:
                start_from(self._states[-1], exact)

    def _offload_state(self) -> None:
        """Keep the state in the host's memory, which kernels read and write over the bus; call it before any step."""
        assert not self._states
        assert not self.with_scaled_states
        self._host = HostMemory(self.device)

    def init_param_buffer(self) -> None:
        """Make all parameters views of one buffer per dtype, which also receives them from other processes."""
        self.contiguous_param_buffer = self._parameters.contiguous = True
        self.param_sync()
        self.init_params()
        for state in self._states:
            self._parameters.make_buffer(state.arena)
            state.connect()

    def _gradient_arrived(self, param: Tensor) -> None:
        # Other processes may wait for parameters that this one has not used: send them before any gradient.
        if not self._parameters.is_complete:
            self.param_sync()
        if not self.greedy_grad_copy:
            return
        with self._lock:
            if not self._locations:
                self.init_params()
            if param not in self._locations:
                return  # it was frozen: `grad_sync`, which all processes call, makes its state and takes its gradient
            if self.overlap_grad_sync:
                self._begin_pass()
                self._gradients.arrived(*self._locations[param])
            else:
                self._gradients.take(*self._locations[param])

    def _begin_pass(self) -> None:
        """End the round of gradients when the current backward pass ends.

        A reentrant checkpoint runs a backward pass inside another one. If the first gradient arrives in the inner pass,
        the inner pass is a round of its own; the sums of rounds are added.
        """
        if not self._in_pass and not self._groups.is_one:
            self._in_pass = True
            self._rounds = self._gradients.rounds
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)  # type: ignore[attr-defined]

    def _end_pass(self) -> None:
        with self._lock:
            self._in_pass = False
            # The round may have ended with the last gradient. Otherwise other processes wait for its buckets, even if
            # no gradient of this process had elements.
            if self._gradients.has_begun or self._gradients.rounds == self._rounds:
                self._gradients.end_round()

    @contextlib.contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Accumulate gradients of the backward passes inside without sending them.

        `step`, or the next backward pass outside, sends the sums. Gradients are added in `param.grad`, or with
        `greedy_grad_copy` in `grad_sync_dtype`.
        """
        before = self.greedy_grad_copy, self.overlap_grad_sync
        self.greedy_grad_copy, self.overlap_grad_sync = greedy_grad_copy, False
        try:
            yield
        finally:
            self.greedy_grad_copy, self.overlap_grad_sync = before

    def grad_sync(self) -> None:
        """Send all gradients that have not been sent, and wait for the sums. All processes must call it."""
        with self._lock:
            if self._locations:
                self._gradients.synchronize()
            if len(self._locations) != self._count:
                known = len(self._states)
                self.init_params()
                if len(self._states) != known:
                    self._gradients.synchronize()

    @torch.no_grad()
    def grad_buffer_view(self, param: Tensor) -> Tensor:
        """Return a parameter's view of the gradient buffer; values written to it count as its gradient."""
        if not self.contiguous_grad_buffer:
            raise RuntimeError("there is a buffer of gradients with contiguous_grad_buffer=True only")
        self.init_params()
        arena_index, index = self._locations[param]
        buffer = self._gradients.arenas[arena_index].gradient_buffer
        assert buffer is not None
        return buffer.views[index]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop all gradients. With `contiguous_grad_buffer`, `param.grad` becomes a view of the buffer."""
        if self.contiguous_grad_buffer:
            self.init_params()
        self._gradients.clear()
        self._norms.reset()
        self._in_pass = False  # a backward pass may have failed
        # A parameter that still waits for its values does not need them for this.
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.parameters():
                if set_to_none or self.contiguous_grad_buffer:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.detach_().zero_() if param.grad.grad_fn is not None else param.grad.zero_()
            for arena in self._gradients.arenas if not set_to_none else ():
                if arena.gradient_buffer is not None and arena.dtypes.gradients == arena.params[0].dtype:
                    for param, view in zip(arena.params, arena.gradient_buffer.views, strict=True):
                        param.grad = view

    def grad_norm(
        self, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0, force: bool = False
    ) -> Tensor:
        """Return the norm of the gradients of `parameters`, or of all, after averaging, unscaling and clipping.

        `norm_type` is 2 or infinity. The norm of all gradients is cached until they change; `force` computes it again.
        """
        chosen = self._checked(parameters)
        self.grad_sync()
        return self._norms.norm(chosen, float(norm_type), force)

    def clip_grad_norm(
        self, max_norm: float, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Make the next step clip gradients to a norm of `max_norm`; return the norm before that."""
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm} must be positive")
        norm = self.grad_norm(parameters, norm_type)
        self._norms.scale_by(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def unscale_grads(
        self, *args: Any, inv_scale: Tensor | None = None, grad_scaler: Any = None
    ) -> dict[torch.device, Tensor]:
        """Make the next step multiply gradients by `inv_scale` (or the first argument), or unscale for `grad_scaler`.

        Return an overflow flag per device: 1 if a gradient of any process is not finite.
        """
        return self._norms.unscale(self, args[0] if inv_scale is None and args else inv_scale, grad_scaler)

    @property
    def _grad_scale(self) -> Tensor:
        """Return the factor of gradients in the next step."""
        return self._norms.scale

    @_grad_scale.setter
    def _grad_scale(self, value: Tensor) -> None:
        self._norms.scale = value

    @property
    def _has_state(self) -> bool:
        """Return whether state has been made, for the dtypes that the parameters had at that time."""
        return bool(self._locations)

    def _set_loss_scale(self, scale: Tensor) -> None:
        """Set the loss scale of the next backward passes, and bring earlier gradients to this scale.

        Gradients that overflowed are dropped: their step is skipped, and an overflow of the next pass stays visible.
        """
        with self._lock:
            self.init_params()
            self._gradients.multiply(self._norms.scale * scale, self._norms.overflowed)
            self._norms.overflowed = None
            self._norms.scale = scale.reciprocal()

    def _found_inf(self) -> Tensor:
        """Return 1, float32 [1], if a gradient of any process is not finite, else 0; all processes must call it."""
        with self._lock:
            return self._norms.found_inf()

    def _params_were_cast(self) -> None:
        """Adapt to parameters that got another dtype and other memory; the state keeps its precision."""
        for state in self._states:
            state.arena.parameter_buffer = None
            state.connect()

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """Perform one optimization step and return the closure's loss.

        With a `grad_scaler`, an infinite or NaN gradient in any process makes all processes skip the step, without
        waiting for the device.
        """
        loss = run_closure(closure)
        self._step(grad_scaler)
        return loss

    @torch._disable_dynamo  # torch.compiler.disable would import the compiler here: 1.8 s
    @torch.no_grad()
    def _step(self, grad_scaler: Any) -> None:
        self._check_capture()
        with self._lock:
            self.param_sync()
            self.grad_sync()
            self._compare_settings(grad_scaler)
            noop = self._norms.flag_of(self, grad_scaler)
            if noop is None and self.found_inf is not None:
                noop = self.found_inf.to(self.device, torch.float32).reshape(1)
            scale = self._norms.grad_scale
            counts = self._steps.by_group(self._steps.next(noop))
            for state in self._states:
                self._update_arena(state, counts, noop, scale)
            self._parameters.updated()
            if self.overlap_param_sync and self._groups.ranks > 1:
                self._postpone_params()
                self._parameters.start()
            else:
                self._parameters.synchronize()

    def _update_arena(self, state: Any, counts: dict[int, Any], noop: Tensor | None, scale: Tensor | None) -> None:
        """Update the parameters of an arena: call `_update` with the lists and step count of each parameter group."""

        def update(number: int, lists: Lists) -> None:
            self._update(self.param_groups[number], lists, counts[number], noop, scale)

        state.apply(self._gradients, update, noop)

    def _state_names(self) -> tuple[str, ...]:
        """Return the names of a parameter's state, in the order of the update rule's slots."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def _update(
        self, group: dict[str, Any], lists: Lists, step: Any, noop: Tensor | None, scale: Tensor | None
    ) -> None:
        """Update lists of tensors; `step` counts from 1 and is a float64 tensor if the count lives on the device."""
        decoupled = bool(self.adam_w_mode)
        hyper = adam_hyperparameters(group, step, decoupled=decoupled)
        cautious, encoded = bool(group.get("cautious_weight_decay")), self.state_format != "float32"
        if cautious or encoded:
            seed = StateSeed(seed_of(step)) if encoded else None
            flags = decoupled, cautious, encoded
            lists.apply(rules.GUARDED_ADAM, hyper, flags, noop=noop, grad_scale=scale, seed=seed)
            return
        rule = rules.ADAM_AMSGRAD if self.amsgrad else rules.ADAM
        lists.apply(rule, hyper, (decoupled, self.amsgrad), noop=noop, grad_scale=scale)

    def _check_capture(self) -> None:
        """Raise an error if a CUDA graph is being captured whose replays would repeat the same step."""
        if self.capturable or not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
            return
        raise RuntimeError(
            f"a step of {type(self).__name__} cannot be captured in a CUDA graph: its step count is on the host, and "
            "every replay would be the same step; make the optimizer with capturable=True"
        )

    def param_sync(self) -> None:
        """Wait until all parameters have their new values."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            self._parameters.synchronize()
            for param in self._locations if self.overlap_param_sync else ():
                release(param)

    def _postpone_params(self) -> None:
        """Make parameters wait for their values when they are first used."""
        self._await = {
            param: {(arena_index, bucket) for bucket in self._parameters.arenas[arena_index].layout.buckets_of[index]}
            for param, (arena_index, index) in self._locations.items()
        }
        for param, keys in self._await.items():
            if keys:
                postpone(param, functools.partial(self._arrive, param))

    def _arrive(self, param: Tensor) -> None:
        """Wait for a parameter's values, and release all parameters whose values have arrived."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            self._parameters.wait_for(self._await[param])
            left = self._parameters.left
            for other, keys in self._await.items():
                if is_pending(other) and not keys & left:
                    release(other)
