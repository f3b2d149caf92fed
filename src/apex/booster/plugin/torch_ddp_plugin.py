"""Data parallelism: every process has the whole model, and gradients are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ..._distributed.experts import hide_experts_from_ddp, is_expert
from ..._distributed.groups import own_group
from ...parallel import DistributedDataParallel as ApexDistributedDataParallel
from ...parallel import convert_syncbn_model
from ...parallel._flat import broadcast_from_first
from ..mixed_precision import AmpOptimizer, FP32Precision
from ..wrappers import ModelWrapper
from ._arguments import changed, refuse, warn_of
from .plugin_base import DPPluginBase

__all__ = ["TorchDDPModel", "TorchDDPPlugin"]


class TorchDDPModel(ModelWrapper):
    """A wrapper around DistributedDataParallel, which is its `module`."""


class TorchDDPPlugin(DPPluginBase):
    """Data parallelism with torch's DistributedDataParallel, whose arguments it takes, or with apex's if `ddp="apex"`.

    apex's DistributedDataParallel chooses its buckets itself; a warning says that the other arguments have no effect on
    it. `check_reduction`, which torch has retired, turns on `find_unused_parameters`. Batch norms become
    `apex.parallel.SyncBatchNorm` with the same parameters and buffers, unless `sync_batch_norm` is False.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        fp8_communication: bool = False,
        *,
        ddp: str = "torch",
        sync_batch_norm: bool = True,
    ) -> None:
        overrides = changed(TorchDDPPlugin.__init__, locals())
        super().__init__()
        refuse(overrides, "fp8_communication", "gradients travel in their own type; use fp8_communication=False")
        if ddp not in ("torch", "apex"):
            raise ValueError(f"ddp={ddp!r} is not known; use 'torch' or 'apex'")
        if ddp == "apex":
            warn_of(overrides, DDP_ARGUMENTS, "apex's DistributedDataParallel chooses its buckets itself")
        self.ddp, self.sync_batch_norm = ddp, sync_batch_norm
        self.ddp_kwargs = ddp_options(locals(), bucket_cap_mb)

    def support_no_sync(self) -> bool:
        return True

    def support_lora(self) -> bool:
        return True

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        # Broadcast before anything is cast, because master weights are made from these values.
        broadcast_from_first([*model.parameters(), *model.buffers()])
        if self.sync_batch_norm and dist.get_world_size() > 1:
            model = convert_syncbn_model(model)
        model, optimizer, criterion = (precision or FP32Precision()).configure(model, optimizer, criterion)
        return TorchDDPModel(replicated(model, self.ddp, self.ddp_kwargs)), optimizer, criterion

    @contextlib.contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Iterator[None]:
        if not isinstance(model, TorchDDPModel):
            raise ValueError(f"no_sync needs the model that boost returned, not {type(model).__name__}")
        with not_reduced(model.module, optimizer if optimizer is not None else model.optimizer):
            yield


DDP_ARGUMENTS = (
    "broadcast_buffers bucket_cap_mb find_unused_parameters check_reduction gradient_as_bucket_view static_graph"
)


def ddp_options(arguments: Mapping[str, Any], bucket_cap_mb: float) -> dict[str, Any]:
    """Return options of torch's DistributedDataParallel from the arguments of a plugin's constructor.

    Leaves out options at their default if torch has a deprecation warning for them.
    """
    options = {name: arguments[name] for name in ("gradient_as_bucket_view", "static_graph")}
    options["bucket_cap_mb"] = bucket_cap_mb
    # torch has retired check_reduction, which also found parameters without a gradient.
    options["find_unused_parameters"] = arguments["find_unused_parameters"] or arguments["check_reduction"]
    if not arguments["broadcast_buffers"]:  # new versions of torch warn even if the default is passed
        options["broadcast_buffers"] = False
    return options


def replicated(model: nn.Module, ddp: str, options: dict[str, Any], group: Any = None) -> nn.Module:
    """Return the model in DistributedDataParallel, or the model itself if only experts are trained.

    Experts (parameters with `allreduce = False`) keep their own values and gradients.
    """
    if not any(param.requires_grad and not is_expert(param) for param in model.parameters()):
        return model
    if ddp == "apex":
        # Reduce in float32, because sums of scaled float16 gradients overflow long before their means do.
        return ApexDistributedDataParallel(model, allreduce_always_fp32=True)
    hide_experts_from_ddp(model)
    device = next(model.parameters()).device
    options = {"process_group": own_group(group), **options}
    return nn.parallel.DistributedDataParallel(model, device_ids=None if device.index is None else [device], **options)


@contextlib.contextmanager
def not_reduced(module: Any, optimizer: Any) -> Iterator[None]:
    """Accumulate gradients of backward passes inside without reducing them.

    Gradients that `apex.amp` has scaled stay scaled, so that a later pass can reduce them together with its own.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(module, "no_sync"):
            stack.enter_context(module.no_sync())
        if isinstance(optimizer, AmpOptimizer):
            optimizer.delays_unscale = True
            stack.callback(setattr, optimizer, "delays_unscale", False)
        yield
