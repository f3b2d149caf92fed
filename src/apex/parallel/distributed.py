"""Data-parallel training: `DistributedDataParallel`, `Reducer`, and collectives over flattened tensors."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from .._distributed import unreduced
from .._distributed.comparison import check_same_everywhere, check_settings
from .._distributed.experts import is_expert
from .._distributed.groups import make_group, own_group
from .._distributed.reducer import weak_method
from .._failures import explained
from ._buckets import Arithmetic, multiply
from ._flat import (
    apply_flat_dist_call,
    broadcast_from_first,
    extract_tensors,
    flat_dist_call,
    flatten,
    split_by_type,
    split_half_float_double,
    split_half_float_double_bfloat16,
    unflatten,
)
from ._gradient_reducer import GradientReducer, signature_of

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "split_half_float_double",
    "split_half_float_double_bfloat16",
    "unflatten",
]


_NOT_PROFILED = contextlib.nullcontext()
# Attributes of `_start_fresh`, which are not copied or pickled.
_TRANSIENT = (
    *("_reducer", "_groups", "_streams", "_fallback_buffers"),
    *("_hooked", "_lock", "_in_pass", "_is_compared"),
)


def _check_process_group(who: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{who} needs a process group: call torch.distributed.init_process_group first, in processes started by "
            "`apex run` or torchrun"
        )


def _amp_settings(params: Iterable[Tensor]) -> dict[str, Any]:
    """Return the settings of an active amp session and of its optimizers that update some of the parameters."""
    if "apex.amp" not in sys.modules:
        return {}
    from ..amp._amp_state import settings_on_this_rank

    return settings_on_this_rank(params)


def _replicated(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters that all processes share: all except experts (`allreduce=False`)."""
    return [(name, param) for name, param in module.named_parameters() if not is_expert(param)]


def _take_state_of_first_rank(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all processes, except experts.

    amp's float32 master weights are copied too, because the next step would overwrite the parameters with them.
    """
    named = _replicated(module)
    check_same_everywhere(named)
    params = [param for _, param in named]
    masters: list[Tensor] = []
    if "apex.amp" in sys.modules:
        from ..amp._amp_state import masters_on_every_rank

        masters = masters_on_every_rank(params, broadcast_from_first)
    broadcast_from_first([*params, *masters, *module.buffers()])


class Reducer:
    """An explicit reducer: `reducer.reduce()` averages gradients over processes.

    `module_or_grads_list` is a module, whose parameters and buffers take the values of rank 0, or gradients in nested
    iterables. If a parameter has a gradient in some processes only, it counts as zero in the others. Experts
    (parameters with `allreduce = False`) are left unchanged.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        _check_process_group("Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        self._reducer: GradientReducer | None = None
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            _take_state_of_first_rank(self.module)
        else:
            extract_tensors(module_or_grads_list, self.grads)
            if not self.grads:
                raise ValueError(
                    f"module_or_grads_list has no tensors: {module_or_grads_list!r:.80}; gradients exist after the "
                    "first backward pass"
                )
            for gradient in self.grads:
                if not (gradient.is_floating_point() or gradient.is_complex()):
                    raise TypeError(f"module_or_grads_list has a tensor of {gradient.dtype}, which has no mean")

    def reduce(self) -> None:
        """Replace all gradients by their means over the processes."""
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
            return
        named = [(name, param) for name, param in _replicated(self.module) if param.requires_grad]
        if self._reducer is None or self._reducer.signature != signature_of([param for _, param in named]):
            self._reducer = GradientReducer(named, Arithmetic(), delay=True)
        try:
            self._reducer.reduce_all()
        except BaseException:
            self._reducer = None  # the failed reduction is incomplete, so start anew
            raise


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over all processes during `backward()`.

    Parameters and buffers take the values of rank 0 at construction. Gradients are sent in buckets while the backward
    pass continues. Call `amp.initialize` before wrapping a model.

    - `message_size`: number of elements at which a bucket is full. Buckets are filled in the order that rank 0's first
      backward pass produces gradients.
    - `delay_allreduce`: send everything at the end of the backward pass, in one bucket per type.
    - `allreduce_trigger_params`: parameters whose gradients close a bucket, instead of `message_size`.
    - `retain_allreduce_buffers`: after a backward pass `allreduce_buffers` holds the buckets' means, and gradients are
      views of them.
    - `allreduce_always_fp32`: sum half-precision gradients in float32.
    - `num_allreduce_streams`: the number of process groups, each with its own stream, that alternate between the
      buckets. `allreduce_communicators`: a list of that many groups, and a list of streams (or None).
    - `gradient_average`: divide sums by the number of processes.
    - `gradient_predivide_factor`: divide gradients by it before the sum, and by (processes / factor) after the sum.
      Without `gradient_average` sums are not divided. `gradient_average_split_factor` is its old name.
    - `prof`: name the work in profiles.

    Parameters may lack a gradient in some or all processes: see docs/parallel.md. Experts, which are parameters with
    `allreduce = False`, keep their own values and gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: None = None,
        allreduce_trigger_params: Iterable[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Sequence[Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        if shared_param is not None:
            raise ValueError(
                f"shared_param={shared_param!r} is not an option any more: shared parameters need none. To send "
                "everything at the end of the backward pass use delay_allreduce=True"
            )
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        if message_size < 1:
            raise ValueError(f"message_size must be at least 1 element, not {message_size}")
        triggers = None if allreduce_trigger_params is None else list(allreduce_trigger_params)
        if triggers is not None and delay_allreduce:
            raise ValueError("allreduce_trigger_params makes no sense with delay_allreduce=True")
        known = set(map(id, module.parameters()))
        if triggers is not None and not all(id(param) in known for param in triggers):
            raise ValueError("allreduce_trigger_params has a tensor that is not a parameter of the module")
        predivide = gradient_predivide_factor
        if gradient_average_split_factor is not None:
            if gradient_predivide_factor not in (1.0, gradient_average_split_factor):
                raise ValueError(
                    f"gradient_average_split_factor={gradient_average_split_factor} is the old name of "
                    f"gradient_predivide_factor, which is {gradient_predivide_factor}"
                )
            predivide = gradient_average_split_factor
        if not predivide > 0:
            raise ValueError(f"gradient_predivide_factor must be positive, not {predivide}")
        _check_communicators(num_allreduce_streams, allreduce_communicators, delay_allreduce)
        _check_process_group("DistributedDataParallel")

        self.module = module
        self.message_size = message_size
        self.delay_allreduce = delay_allreduce
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = predivide
        self.num_allreduce_streams = num_allreduce_streams
        self.allreduce_communicators = allreduce_communicators
        self.allreduce_trigger_params = triggers
        self.prof = prof
        self.world_size = float(dist.get_world_size())
        self._disable_allreduce = False
        self._start_fresh()
        _take_state_of_first_rank(module)
        self._connect()
        self._prepare()

    def _start_fresh(self) -> None:
        self._reducer: GradientReducer | None = None
        self._groups: Sequence[Any] | None = None
        self._streams: Sequence[Any] = (None,)
        self._fallback_buffers: list[Tensor | None] = []
        # By id, because parameters compare element by element: a reference, its dict of hooks, and the key of our hook.
        self._hooked: dict[int, tuple[weakref.ref[Tensor], dict[int, Any], int]] = {}
        # The autograd engine runs hooks in one thread per device.
        self._lock = threading.RLock()
        self._in_pass = False
        self._is_silent = False  # inside of `no_sync`
        # True after the settings were compared with other ranks, at the end of the first pass.
        self._is_compared = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without this process's groups and streams, which are made anew after loading."""
        state = {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}
        return {**state, "allreduce_communicators": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_fresh()

    def enable_allreduce(self) -> None:
        """Make backward passes reduce gradients, which is the default."""
        self._disable_allreduce = False

    def disable_allreduce(self) -> None:
        """Make backward passes leave gradients unreduced, until `enable_allreduce`."""
        self._disable_allreduce = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients unreduced in backward passes inside this context; the next pass outside reduces their sum."""
        outer = self._disable_allreduce, self._is_silent
        self._disable_allreduce = self._is_silent = True
        try:
            yield
        finally:
            self._disable_allreduce, self._is_silent = outer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and prepare the reduction for the backward pass."""
        if torch.is_grad_enabled():
            self._prepare()
        outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and not self._disable_allreduce:
            self._watch(outputs)
        return outputs

    @torch._disable_dynamo  # like torch.compiler.disable, which would import the compiler now (1.8 s)
    def _prepare(self) -> None:
        """Make new buckets if parameters have changed, and discard a failed pass."""
        if self._in_pass and torch._C._current_graph_task_id() == -1:
            self._in_pass = False
            if self._reducer is not None:
                self._reducer.abandon_pass()
        named = [(name, param) for name, param in _replicated(self.module) if param.requires_grad]
        if self._reducer is not None and self._reducer.signature == signature_of([param for _, param in named]):
            self._stay_last()
            return
        if self._groups is None:
            self._connect()
        self._reducer = None
        if named:
            self._reducer = GradientReducer(
                named,
                self._arithmetic,
                message_size=self.message_size,
                triggers=self.allreduce_trigger_params,
                retain=self.retain_allreduce_buffers,
                delay=self.delay_allreduce,
                groups=self._groups or (None,),
                streams=self._streams,
            )
            self.create_hooks()

    @property
    def _arithmetic(self) -> Arithmetic:
        return Arithmetic(self.gradient_average, self.gradient_predivide_factor, self.allreduce_always_fp32)

    def _connect(self) -> None:
        """Make the process groups for the buckets; users' own collectives never use them."""
        if self.allreduce_communicators is not None:
            self._groups, streams = self.allreduce_communicators
            self._streams = streams or (None,)
        elif self.num_allreduce_streams > 1:
            self._groups = [make_group() for _ in range(self.num_allreduce_streams)]
        else:
            self._groups = (own_group(),)

    @torch._disable_dynamo  # like torch.compiler.disable, which would import the compiler now (1.8 s)
    def _watch(self, outputs: Any) -> None:
        """Make the backward pass that reaches the outputs call `_end_pass` at its end.

        The first gradient's hook could run too early: reentrant checkpoints run backward passes of their own inside.
        """
        for output in _pytree.tree_leaves(outputs):
            # A leaf would keep the hook forever.
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(weak_method(self, DistributedDataParallel._begin_pass))

    def create_hooks(self) -> None:
        """Register hooks that report when a backward pass has added to a parameter's gradient."""
        hook = weak_method(self, DistributedDataParallel._gradient_arrived)
        for _, param in _replicated(self.module):
            known = self._hooked.get(id(param))
            if param.requires_grad and (known is None or known[0]() is not param):
                handle = param.register_post_accumulate_grad_hook(hook)
                self._hooked[id(param)] = weakref.ref(param), param._post_accumulate_grad_hooks, handle.id
        self._stay_last()

    def _stay_last(self) -> None:
        """Move our hooks behind all others, so that gradients are sent after other hooks have changed them."""
        for _, hooks, number in self._hooked.values():
            if len(hooks) > 1 and number in hooks and next(reversed(hooks)) != number:
                hooks[number] = hooks.pop(number)

    def _begin_pass(self, _gradient: Tensor | None = None) -> None:
        with self._lock:
            if not self._in_pass and not self._disable_allreduce:
                self._in_pass = True
                unreduced.WRAPPERS.discard(self)
                torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)  # type: ignore[attr-defined]

    def _gradient_arrived(self, param: Tensor) -> None:
        if self._disable_allreduce:
            if self._is_silent:
                unreduced.WRAPPERS.add(self)
            return
        with self._lock:
            if not self._in_pass:
                self._begin_pass()
            with self._profiled("apex: gradient ready"):
                self.comm_ready_buckets(param)

    def _end_pass(self) -> None:
        with self._lock, self._profiled("apex: wait for gradients"):
            self._in_pass = False
            self._fallback_buffers = []
            if self._reducer is not None:
                self._compare_settings()
                self._reducer.finish_pass()

    def _compare_settings(self) -> None:
        """Raise in all ranks, at the end of the first pass, if amp's loss scales or learning rates differ."""
        if not self._is_compared and self._reducer is not None and self._reducer.has_gradients:
            self._is_compared = True
            params = list(self.module.parameters())
            check_settings(_amp_settings(params), "settings of amp", (self._groups or (None,))[0], params)

    def _profiled(self, name: str) -> Any:
        return torch.profiler.record_function(name) if self.prof else _NOT_PROFILED

    def comm_ready_buckets(self, param: Tensor) -> None:
        """Record that a parameter's gradient is ready, and send complete buckets in order."""
        if self._reducer is not None and param.requires_grad:
            self._reducer.arrived(param)

    def sync_bucket_structure(self) -> None:
        """Use rank 0's buckets in all processes; all of them must call this in their first pass."""
        if self._reducer is not None:
            self._reducer.plan()

    def allreduce_fallback(self) -> None:
        """Reduce all gradients now, in one bucket per type, for example after `disable_allreduce`."""
        grads = [param.grad for _, param in _replicated(self.module) if param.grad is not None]
        buckets = split_half_float_double_bfloat16(grads)
        self._fallback_buffers = [None] * len(buckets) if self.retain_allreduce_buffers else []
        for index, bucket in enumerate(buckets):
            self.allreduce_maybe_retain(bucket, index, force_default_stream=True)

    @torch.no_grad()
    def allreduce_bucket(self, bucket: Sequence[Tensor], bucket_idx: int, force_default_stream: bool) -> Tensor:
        """Reduce gradients of one type now, and return the result as a vector."""
        groups = self._groups or (None,)
        flat = flatten([gradient.detach() for gradient in bucket])
        before, after = self._arithmetic.factors(int(self.world_size), flat.dtype)
        sum_buffer = torch.empty_like(flat, dtype=self._arithmetic.sum_dtype(flat.dtype))
        multiply([flat], [sum_buffer], before)
        with explained(f"the reduction of {len(bucket)} gradients"):
            dist.all_reduce(sum_buffer, group=groups[0 if force_default_stream else bucket_idx % len(groups)])
        multiply([sum_buffer], [flat], after)
        if not self.retain_allreduce_buffers:
            multiply(unflatten(flat, bucket), [gradient.detach() for gradient in bucket], 1.0)
        return flat

    def allreduce_maybe_retain(
        self, bucket: Sequence[Tensor], bucket_idx: int, force_default_stream: bool = False
    ) -> None:
        """Reduce gradients of one type now; with `retain_allreduce_buffers` they become views of the result."""
        flat = self.allreduce_bucket(bucket, bucket_idx, force_default_stream)
        if self.retain_allreduce_buffers:
            while len(self._fallback_buffers) <= bucket_idx:
                self._fallback_buffers.append(None)
            self._fallback_buffers[bucket_idx] = flat
            for view, gradient in zip(unflatten(flat, bucket), bucket, strict=True):
                gradient.data = view

    @property
    def allreduce_buffers(self) -> list[Tensor | None]:
        """Return the means of the last pass, one vector per bucket, if `retain_allreduce_buffers`."""
        if self._reducer is not None and self.retain_allreduce_buffers and not self._fallback_buffers:
            return [bucket.retained for bucket in self._reducer.buckets]
        return self._fallback_buffers

    @property
    def needs_refresh(self) -> bool:
        """Return True if the next backward pass determines the buckets."""
        return self._reducer is None or not self._reducer.buckets

    @property
    def active_i_buckets(self) -> list[list[int]]:
        """Return for each bucket the indices of its parameters among all parameters that require gradients."""
        return [] if self._reducer is None else self._reducer.members

    @property
    def bucket_sizes(self) -> list[int]:
        """Return the number of parameters of each bucket."""
        return [len(bucket) for bucket in self.active_i_buckets]

    @property
    def num_buckets(self) -> int:
        """Return the number of buckets; 0 before the first backward pass."""
        return len(self.active_i_buckets)


def _check_communicators(count: int, communicators: Sequence[Sequence[Any]] | None, delay: bool) -> None:
    if count < 1:
        raise ValueError(f"num_allreduce_streams must be at least 1, not {count}")
    if count > 1 and delay:
        raise ValueError(f"num_allreduce_streams={count} makes no sense with delay_allreduce=True")
    if communicators is None:
        return
    if len(communicators) != 2:
        raise ValueError("allreduce_communicators must be two lists: process groups, and streams")
    groups, streams = communicators
    if count < 2 or len(groups) != count or (streams is not None and len(streams) != count):
        raise ValueError(
            f"allreduce_communicators needs num_allreduce_streams={count} (at least 2) process groups and as many "
            f"streams, but has {len(groups)} and {len(streams or ())}"
        )
