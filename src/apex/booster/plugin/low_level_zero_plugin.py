"""ZeRO: optimizer state, and in stage 2 gradients, are divided among processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...parallel._flat import broadcast_from_first
from .._precision import CastModel
from .._zero import BYTES_OF_A_GRADIENT, ExactWeights, load_plain_state, zero_optimizer
from ..wrappers import ModelWrapper
from ._arguments import changed, refuse
from ._process_mesh import mesh_of_all
from .plugin_base import DPPluginBase, own_precision

__all__ = ["LowLevelZeroModel", "LowLevelZeroPlugin"]


class LowLevelZeroModel(ModelWrapper):
    """A model whose optimizer divides its state among processes."""


class LowLevelZeroPlugin(DPPluginBase):
    """ZeRO of stage 1 or 2, with the engine of `apex.contrib.optimizers.DistributedFusedAdam`.

    Supports torch's Adam, AdamW and SGD, and apex's FusedAdam and FusedSGD. The ZeRO optimizer takes over their
    parameter groups and state. Stage 2 reduces and divides gradients as they arrive; stage 1 also has `no_sync`.

    - `precision`: "fp16" and "bf16" mean weights of that dtype and float32 weights in the divided state; "fp32" has no
      casts; the names of other precisions, or a MixedPrecision, mean the same as without the plugin;
    - `initial_scale`, `min_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `hysteresis`, `max_scale`,
      `verbose`: the loss scale of "fp16", as in FP16NaiveMixedPrecision;
    - `cast_inputs`: whether inputs of the model are cast to "fp16" or "bf16";
    - `max_norm`: the gradient norm that every step clips to, 0 for no clipping; `norm_type` must be 2;
    - `reduce_bucket_size_in_m`: the size of a gradient bucket in millions of elements;
    - `communication_dtype`: the dtype that gradients are exchanged in;
    - `overlap_communication`, `overlap_allgather`: whether exchanges of gradients and of parameters overlap with
      computation;
    - `cpu_offload`: whether the state, with the float32 weights, is in the host's memory. The device updates it over
      the bus, with the same numbers;
    - `master_weights`: whether the state has float32 weights; without them updates are rounded to half precision;
    - `use_fp8`: use FP8MixedPrecision instead of `precision`;
    - `extra_dp_size`: the number of copies of the divided state.
    """

    def __init__(
        self,
        stage: int = 1,
        precision: Any = "fp16",
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
    ) -> None:
        overrides = changed(LowLevelZeroPlugin.__init__, locals())
        super().__init__()
        if stage not in (1, 2):
            raise ValueError(f"stage={stage} is not known; 1 and 2 are, and TorchFSDPPlugin is stage 3")
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported; 2 is")
        refuse(
            overrides, "fp8_communication", "gradients travel in communication_dtype; use torch.bfloat16 for half of it"
        )
        if extra_dp_size < 1 or dist.get_world_size() % extra_dp_size:
            raise ValueError(
                f"extra_dp_size={extra_dp_size} must divide the number of processes, {dist.get_world_size()}"
            )
        self.stage, self.max_norm, self.extra_dp_size = stage, max_norm, extra_dp_size
        self.cast_inputs = cast_inputs
        self.precision = own_precision("LowLevelZeroPlugin", locals())
        self.zero_options: dict[str, Any] = {
            **zero_options(reduce_bucket_size_in_m, communication_dtype, overlap_communication, overlap_allgather),
            "store_params": master_weights,
            "cpu_offload": cpu_offload,
        }

    def control_precision(self) -> bool:
        return True

    def support_no_sync(self) -> bool:
        return self.stage == 1

    def support_lora(self) -> bool:
        return True

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        broadcast_from_first([*model.parameters(), *model.buffers()])
        divided = saved = None
        if optimizer is not None:
            divided, saved = zero_optimizer(optimizer, **self.zero_options, **self._groups())
        model, optimizer, criterion = self.precision.configure(model, divided, criterion)
        if divided is not None and saved is not None:
            load_plain_state(divided, saved)
        if not self.cast_inputs and isinstance(model, CastModel):
            model._casts = dataclasses.replace(model._casts, inputs=None)
        boosted = LowLevelZeroModel(model)
        if divided is not None:
            boosted.masters = ExactWeights(divided)
        if optimizer is not None:
            optimizer.max_norm = self.max_norm
        return boosted, optimizer, criterion

    def _groups(self) -> dict[str, Any]:
        if self.extra_dp_size == 1:
            return {}
        shape = (self.extra_dp_size, dist.get_world_size() // self.extra_dp_size)
        mesh = mesh_of_all(shape, ("redundant", "distributed"))
        return {f"{name}_process_group": mesh.get_group(name) for name in ("distributed", "redundant")}

    @contextlib.contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Iterator[None]:
        optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if optimizer is None:
            raise ValueError("no_sync needs the optimizer, or the model, that boost returned")
        with optimizer.no_sync():
            yield


def zero_options(
    bucket_size_in_m: float, communication_dtype: torch.dtype | None, overlap_grads: bool, overlap_params: bool
) -> dict[str, Any]:
    """Return the arguments of `zero_optimizer` for its collectives; a bucket's size is in millions of elements."""
    return {
        "bucket_cap_mb": bucket_size_in_m * 1e6 * BYTES_OF_A_GRADIENT / 2**20,
        "grad_sync_dtype": communication_dtype,
        "overlap_grad_sync": overlap_grads,
        "overlap_param_sync": overlap_params,
    }
