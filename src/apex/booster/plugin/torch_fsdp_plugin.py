"""Fully sharded data parallelism: parameters, gradients and optimizer state divided among processes (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...parallel._flat import broadcast_from_first
from ...transformer._resharding.gathered import part
from ..mixed_precision import FP32Precision, MixedPrecision, Precision, mixed_precision_factory
from ..wrappers import ModelWrapper
from .plugin_base import DPPluginBase

__all__ = ["TorchFSDPModel", "TorchFSDPPlugin"]


class TorchFSDPModel(ModelWrapper):
    """A model whose parameters are sharded (`torch.distributed.fsdp.FSDPModule`)."""


class TorchFSDPPlugin(DPPluginBase):
    """Trains with `torch.distributed.fsdp.fully_shard`. Parameter groups and optimizer state stay what they were.

    Weights are float32 and sharded; what a precision says is the type in which they are gathered and computed with.

    - `process_group`: the processes, all of them by default;
    - `sharding_strategy`: SHARD_GRAD_OP keeps gathered parameters until the backward pass; others do not;
    - `cpu_offload`: parameters, gradients and state are in the host's memory;
    - `auto_wrap_policy`: which modules are gathered on their own: classes, or a function of a module; by default the
      elements of every `nn.ModuleList`;
    - `mixed_precision`: a precision, by name or as an object, or a policy with `param_dtype` and `reduce_dtype`; None
      for that of the Booster;
    - `ignored_modules`: modules that are not sharded.
    """

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
        super().__init__()
        if param_init_fn is not None or fp8_communication:
            raise NotImplementedError("param_init_fn and fp8_communication are not there for FSDP2")
        self.process_group = process_group
        strategy = getattr(sharding_strategy, "name", sharding_strategy)
        self.reshard_after_forward = strategy not in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
        self.cpu_offload = bool(getattr(cpu_offload, "offload_params", cpu_offload))
        self.auto_wrap_policy = auto_wrap_policy
        self.sync_module_states = sync_module_states
        self.ignored_modules = list(ignored_modules or [])
        self.precision = (
            mixed_precision_factory(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
        )
        self.max_norm = 0.0

    def control_precision(self) -> bool:
        return self.precision is not None

    def support_no_sync(self) -> bool:
        return True

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        if self.sync_module_states:
            broadcast_from_first([*model.parameters(), *model.buffers()])
        chosen = self.precision or precision or FP32Precision()
        if isinstance(chosen, Precision):
            chosen.prepare(model)
        before = dict(model.named_parameters())
        self._shard(model, chosen)
        if optimizer is not None:
            _exchange(
                optimizer, {old: new for old, (_, new) in zip(before.values(), model.named_parameters(), strict=True)}
            )
        as_precision = chosen if isinstance(chosen, Precision) else FP32Precision()
        model, optimizer, criterion = as_precision.configure_sharded(model, optimizer, criterion)
        if optimizer is not None:
            optimizer.max_norm = self.max_norm
        return TorchFSDPModel(model), optimizer, criterion

    def _shard(self, model: nn.Module, precision: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        param_dtype = precision.dtype if isinstance(precision, Precision) else getattr(precision, "param_dtype", None)
        reduce_dtype = None if isinstance(precision, MixedPrecision) else getattr(precision, "reduce_dtype", None)
        device = next(model.parameters()).device.type
        if self.process_group is not None:
            mesh = DeviceMesh.from_group(self.process_group, device)
        else:
            mesh = init_device_mesh(device, (self.data_place()[0],))
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


def _blocks(model: nn.Module, policy: Any) -> list[nn.Module]:
    """Modules that are gathered on their own, inner ones first."""
    if policy is None:
        chosen = {id(each) for module in model.modules() if isinstance(module, nn.ModuleList) for each in module}
        wanted: Callable[[nn.Module], bool] = lambda module: id(module) in chosen  # noqa: E731
    elif isinstance(policy, (set, frozenset, list, tuple)):
        kinds = tuple(policy)
        wanted = lambda module: isinstance(module, kinds)  # noqa: E731
    else:
        wanted = policy
    found = [module for module in model.modules() if module is not model and wanted(module)]
    return [module for module in reversed(found) if any(True for _ in module.parameters())]


def _exchange(optimizer: Any, new_of: dict[Tensor, Tensor]) -> None:
    """Puts sharded parameters in the place of those that they were made from, in groups and in state."""
    for group in optimizer.param_groups:
        group["params"] = [new_of.get(param, param) for param in group["params"]]
    for old, new in new_of.items():
        state = optimizer.state.pop(old, None)
        if state is None:
            continue
        optimizer.state[new] = {
            name: part(value, new, None) if isinstance(value, Tensor) and value.shape == old.shape else value
            for name, value in state.items()
        }
