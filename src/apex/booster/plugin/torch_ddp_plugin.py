"""Data parallelism: every process has the model, gradients are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from ..._distributed.experts import hide_experts_from_ddp, is_expert
from ...parallel import DistributedDataParallel as ApexDistributedDataParallel
from ...parallel import convert_syncbn_model
from ...parallel._flat import broadcast_from_first
from ..mixed_precision import AmpOptimizer, FP32Precision
from ..wrappers import ModelWrapper
from ._arguments import changed, refuse, warn_of
from .plugin_base import DPPluginBase

__all__ = ["TorchDDPModel", "TorchDDPPlugin"]


class TorchDDPModel(ModelWrapper):
    """A model inside of DistributedDataParallel, which is `module`."""


class TorchDDPPlugin(DPPluginBase):
    """Trains with torch's DistributedDataParallel, whose arguments it takes, or with `ddp="apex"` with apex's.

    apex's DistributedDataParallel chooses its buckets itself: the other arguments have no effect on it, and a warning
    says so. `check_reduction`, which torch has retired, turns on `find_unused_parameters`. Batch norms become
    `apex.parallel.SyncBatchNorm` unless `sync_batch_norm` is False; their tensors stay the same.
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
        given = changed(TorchDDPPlugin.__init__, locals())
        super().__init__()
        refuse(given, "fp8_communication", "gradients travel in their own type; use fp8_communication=False")
        if ddp not in ("torch", "apex"):
            raise ValueError(f"ddp={ddp!r} is not known; use 'torch' or 'apex'")
        if ddp == "apex":
            warn_of(given, DDP_ARGUMENTS, "apex's DistributedDataParallel chooses its buckets itself")
        self.ddp, self.sync_batch_norm = ddp, sync_batch_norm
        self.ddp_kwargs = ddp_options(
            broadcast_buffers,
            bucket_cap_mb,
            find_unused_parameters,
            check_reduction,
            gradient_as_bucket_view,
            static_graph,
        )

    def support_no_sync(self) -> bool:
        return True

    def support_lora(self) -> bool:
        return True

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        # Before anything is cast: master weights are made from these values.
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


def ddp_options(
    broadcast_buffers: bool,
    bucket_cap_mb: float,
    find_unused_parameters: bool,
    check_reduction: bool,
    gradient_as_bucket_view: bool,
    static_graph: bool,
) -> dict[str, Any]:
    """Return arguments of torch's DistributedDataParallel that it has no deprecation warning for."""
    options: dict[str, Any] = {
        "bucket_cap_mb": bucket_cap_mb,
        # torch has retired check_reduction: it found parameters without a gradient too.
        "find_unused_parameters": find_unused_parameters or check_reduction,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "static_graph": static_graph,
    }
    if not broadcast_buffers:  # new versions of torch warn of the name, also at its default
        options["broadcast_buffers"] = False
    return options


def replicated(model: nn.Module, ddp: str, options: dict[str, Any], group: Any = None) -> nn.Module:
    """Return the model in DistributedDataParallel, or the model itself if no parameter but experts is trained.

    Experts (parameters with `allreduce = False`) keep their own values and gradients.
    """
    if not any(param.requires_grad and not is_expert(param) for param in model.parameters()):
        return model
    if ddp == "apex":
        # In float32: sums of scaled float16 gradients would overflow long before their means do.
        return ApexDistributedDataParallel(model, allreduce_always_fp32=True)
    hide_experts_from_ddp(model)
    device = next(model.parameters()).device
    where = None if device.index is None else [device]
    return nn.parallel.DistributedDataParallel(model, device_ids=where, process_group=group, **options)


@contextlib.contextmanager
def not_reduced(module: Any, optimizer: Any) -> Iterator[None]:
    """Gradients stay in this process; those that `apex.amp` has scaled stay so, to be reduced with later ones."""
    with contextlib.ExitStack() as stack:
        if hasattr(module, "no_sync"):
            stack.enter_context(module.no_sync())
        if isinstance(optimizer, AmpOptimizer):
            optimizer.delays_unscale = True
            stack.callback(setattr, optimizer, "delays_unscale", False)
        yield
