"""Fully sharded data parallelism: parameters, gradients and optimizer state divided among processes (FSDP2)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..._distributed.groups import make_mesh
from ..._env import processes_on_machine
from ...lazy._recorded import LazyTensor, materialize, replay, take_lazy
from ...ops._host import HOST
from ...optimizers import OffloadedOptimizer
from ...parallel._flat import broadcast_from_first
from ...transformer._resharding.gathered import local_part
from ..mixed_precision import FP32Precision, MixedPrecision, Precision, mixed_precision_factory
from ..wrappers import ModelWrapper
from ._arguments import changed, refuse, warn_of
from .plugin_base import DPPluginBase

__all__ = ["TorchFSDPModel", "TorchFSDPPlugin"]


class TorchFSDPModel(ModelWrapper):
    """A model whose parameters are sharded (`torch.distributed.fsdp.FSDPModule`)."""


class TorchFSDPPlugin(DPPluginBase):
    """Sharding with `torch.distributed.fsdp.fully_shard`, which keeps parameter groups and optimizer state.

    The sharded weights are float32. A precision's dtype is used to gather them and to compute.

    - `process_group`: the group of processes, by default all;
    - `sharding_strategy`: a `torch.distributed.fsdp.ShardingStrategy` or its name. SHARD_GRAD_OP keeps gathered
      parameters until the backward pass; NO_SHARD shards nothing; HYBRID_SHARD shards among the processes of each
      machine, and _HYBRID_SHARD_ZERO2 combines it with SHARD_GRAD_OP;
    - `cpu_offload`: whether parameters, gradients and state are in the host's memory;
    - `auto_wrap_policy`: the modules to gather separately: classes, a function of a module, or a policy of
      `torch.distributed.fsdp.wrap`; by default the elements of every `nn.ModuleList`;
    - `mixed_precision`: a precision, by name or as an object, or a policy with `param_dtype`, `reduce_dtype` and
      `buffer_dtype`; None for the Booster's precision;
    - `ignored_modules`: modules that are not sharded;
    - `sync_module_states`: whether all processes start from the weights of the first; the original's default is False.
    """

    copies = 1  # of the sharded parameters
    takes_lazy = True

    def __init__(
        self,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Any = None,
        sync_module_states: bool = True,
        fp8_communication: bool = False,
    ) -> None:
        overrides = changed(TorchFSDPPlugin.__init__, locals())
        super().__init__()
        refuse(
            overrides, "param_init_fn", "FSDP2 shards models that are on a device; initialise the model before boost"
        )
        refuse(overrides, "fp8_communication", "FSDP2 sends parameters in the precision's type; use bf16")
        warn_of(overrides, "backward_prefetch", "FSDP2 gathers the next parameters during a backward pass by itself")
        self.process_group = process_group
        strategy = str(getattr(sharding_strategy, "name", sharding_strategy or "FULL_SHARD"))
        if strategy not in STRATEGIES:
            raise ValueError(
                f"sharding_strategy={sharding_strategy!r} is not known; use one of {', '.join(STRATEGIES)}"
            )
        self.reshard_after_forward = strategy not in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
        if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            if process_group is not None:
                raise ValueError(f"sharding_strategy={strategy} is of all processes; process_group must be None")
            world = dist.get_world_size()
            self.copies = world if strategy == "NO_SHARD" else world // (processes_on_machine() or world)
        self.cpu_offload = bool(getattr(cpu_offload, "offload_params", cpu_offload))
        self.auto_wrap_policy = auto_wrap_policy
        self.sync_module_states = sync_module_states
        self.ignored_modules = list(ignored_modules or [])
        self.precision = (
            mixed_precision_factory(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
        )
        if not isinstance(self.precision, Precision | None) and not hasattr(self.precision, "param_dtype"):
            raise ValueError(
                f"mixed_precision={mixed_precision!r} must be a name or a precision of apex.booster.mixed_precision, a "
                "policy with param_dtype, or None; give Booster a MixedPrecision of your own"
            )
        self.max_norm = 0.0

    def control_precision(self) -> bool:
        return self.precision is not None

    def settings_group(self) -> Any:
        return self.process_group

    def support_no_sync(self) -> bool:
        return True

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        if isinstance(optimizer, OffloadedOptimizer):
            raise ValueError(
                "an OffloadedOptimizer does not take sharded parameters; boost the plain optimizer, and keep its state "
                "in the host's memory with TorchFSDPPlugin(cpu_offload=True) or GeminiPlugin(offload_optim_frac=1.0)"
            )
        chosen = self.precision or precision or FP32Precision()
        replaces_layers = isinstance(chosen, Precision) and type(chosen).prepare is not Precision.prepare
        # Other layers are made from values; without synchronisation each process has values of its own.
        materialize(model.buffers())
        if replaces_layers or not self.sync_module_states:
            materialize(model.parameters())
        device = next(model.parameters()).device
        recorded = take_lazy(model)
        if self.sync_module_states:
            broadcast_from_first([*(param for param in model.parameters() if not param.is_meta), *model.buffers()])
        if isinstance(chosen, Precision):
            chosen.prepare(model)
        _cast_buffers(model, getattr(chosen, "buffer_dtype", None))
        before = dict(model.named_parameters())
        self._shard(model, chosen, device.type)
        if recorded:
            self._fill(model, recorded, HOST if self.cpu_offload else device)
        if optimizer is not None:
            _exchange(
                optimizer, {old: new for old, (_, new) in zip(before.values(), model.named_parameters(), strict=True)}
            )
        as_precision = chosen if isinstance(chosen, Precision) else FP32Precision()
        model, optimizer, criterion = as_precision.configure_sharded(model, optimizer, criterion)
        if optimizer is not None:
            optimizer.max_norm = self.max_norm
        return TorchFSDPModel(model), optimizer, criterion

    def _fill(self, model: nn.Module, recorded: dict[str, LazyTensor], device: torch.device) -> None:
        """Give sharded parameters without data the values that a LazyInitContext recorded, one parameter at a time.

        The first process computes the values of each whole parameter and sends the others their parts.
        """
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        is_first = dist.get_rank(self.process_group) == 0
        for name, param in model.named_parameters():
            if name in recorded:
                lazy = recorded.pop(name)
                whole = replay([lazy])[0] if is_first else torch.empty(lazy.shape, dtype=lazy.dtype, device=lazy.device)
                if not hasattr(param, "placements"):  # it belongs to one of ignored_modules
                    broadcast_from_first([whole], self.process_group)
                with torch.no_grad():
                    param.copy_(local_part(whole, param, None))

    def _shard(self, model: nn.Module, precision: Any, device: str) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        param_dtype = precision.dtype if isinstance(precision, Precision) else getattr(precision, "param_dtype", None)
        reduce_dtype = None if isinstance(precision, MixedPrecision) else getattr(precision, "reduce_dtype", None)
        if self.process_group is not None:
            mesh = DeviceMesh.from_group(self.process_group, device)
        else:
            ranks = self.data_place()[0]
            shape, names = ((ranks,), ("shard",)) if self.copies == 1 else ((self.copies, ranks // self.copies), COPIES)
            mesh = make_mesh(device, shape, names)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.reshard_after_forward}
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        skipped = {id(param) for module in self.ignored_modules for param in module.parameters()}
        if skipped:
            options["ignored_params"] = {param for param in model.parameters() if id(param) in skipped}
        inner = MixedPrecisionPolicy(param_dtype, reduce_dtype or torch.float32)
        outer = MixedPrecisionPolicy(
            param_dtype, reduce_dtype or torch.float32, None if param_dtype is None else torch.float32
        )
        for module in list(model.modules()):
            if module is model or module in self.ignored_modules:
                continue
            if isinstance(module, _BatchNorm) and param_dtype is not None:
                fully_shard(module, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        for module in _blocks(model, self.auto_wrap_policy):
            fully_shard(module, mp_policy=inner, **options)
        fully_shard(model, mp_policy=outer, **options)

    @contextlib.contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Iterator[None]:
        if not isinstance(model, TorchFSDPModel):
            raise ValueError(f"no_sync needs the model that boost returned, not {type(model).__name__}")
        sharded: Any = model.unwrap()
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
COPIES = ("replicate", "shard")


def _cast_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the floating-point buffers of a model, except for batch norms' statistics, which stay in float32."""
    for module in [] if dtype is None else list(model.modules()):
        for name, buffer in [] if isinstance(module, _BatchNorm) else list(module._buffers.items()):
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _blocks(model: nn.Module, policy: Any) -> list[nn.Module]:
    """Return the modules to gather separately, inner ones first."""
    if policy is None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        elements = {id(element) for module_list in lists for element in module_list}
        wanted: Callable[[nn.Module], bool] = lambda module: id(module) in elements  # noqa: E731
    elif isinstance(policy, (set, frozenset, list, tuple)):
        kinds = tuple(policy)
        wanted = lambda module: isinstance(module, kinds)  # noqa: E731
    elif "recurse" in inspect.signature(policy).parameters:  # a policy of torch.distributed.fsdp.wrap
        wanted = lambda module: policy(  # noqa: E731
            module=module, recurse=False, nonwrapped_numel=sum(param.numel() for param in module.parameters())
        )
    else:
        wanted = policy
    blocks = [module for module in model.modules() if module is not model and wanted(module)]
    return [module for module in reversed(blocks) if any(True for _ in module.parameters())]


def _exchange(optimizer: Any, new_of: dict[Tensor, Tensor]) -> None:
    """Replace parameters by their sharded ones in an optimizer's groups, and shard their state."""
    for group in optimizer.param_groups:
        group["params"] = [new_of.get(param, param) for param in group["params"]]
    for old, new in new_of.items():
        state = optimizer.state.pop(old, None)
        if state is None:
            continue
        optimizer.state[new] = {
            name: local_part(value, new, None) if isinstance(value, Tensor) and value.shape == old.shape else value
            for name, value in state.items()
        }
