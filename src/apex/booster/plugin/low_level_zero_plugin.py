"""ZeRO: optimizer state, and gradients, divided among processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...parallel._flat import broadcast_from_first
from .._zero import BYTES_OF_A_GRADIENT, ExactWeights, load_plain_state, zero_optimizer
from ..mixed_precision import FP8MixedPrecision
from ..wrappers import ModelWrapper
from .plugin_base import DPPluginBase, own_precision

__all__ = ["LowLevelZeroModel", "LowLevelZeroPlugin"]


class LowLevelZeroModel(ModelWrapper):
    """A model whose optimizer divides its state among processes."""


class LowLevelZeroPlugin(DPPluginBase):
    """ZeRO of stage 1 or 2, by the engine of `apex.contrib.optimizers.DistributedFusedAdam`.

    Takes Adam, AdamW and SGD of PyTorch's and FusedAdam and FusedSGD of apex's. Their parameter groups, and state that
    they have, go on. In stage 2 gradients are reduced and divided as they arrive; stage 1 has `no_sync` in addition.

    - `precision`: "fp16" and "bf16" have weights in that type and float32 ones in the divided state; "fp32"; the names
      of other precisions, or a MixedPrecision, have what they have without the plugin;
    - `initial_scale` and `scaling` (`min_scale`, `max_scale`, `growth_factor`, `backoff_factor`, `growth_interval`,
      `hysteresis`, `verbose`, `cast_inputs`): arguments of FP16NaiveMixedPrecision, for "fp16";
    - `max_norm`: what every step clips gradients to, 0 for nothing; `norm_type` is 2;
    - `reduce_bucket_size_in_m`: the elements of a bucket of gradients, in millions; `communication_dtype`: what
      gradients travel in; `overlap_communication`, `overlap_allgather`: whether gradients and parameters travel beside
      computations;
    - `master_weights`: False leaves out the float32 weights: updates are rounded;
    - `extra_dp_size`: how many copies of the divided state there are.
    """

    def __init__(
        self,
        stage: int = 1,
        precision: Any = "fp16",
        initial_scale: float = 2.0**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
        **scaling: Any,
    ) -> None:
        super().__init__()
        if stage not in (1, 2):
            raise ValueError(f"stage={stage} is not known; 1 and 2 are, and TorchFSDPPlugin is stage 3")
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported; 2 is")
        if cpu_offload or fp8_communication:
            raise NotImplementedError(
                "cpu_offload and fp8_communication are not there for ZeRO; GeminiPlugin has state in the host's memory"
            )
        if extra_dp_size < 1 or dist.get_world_size() % extra_dp_size:
            raise ValueError(
                f"extra_dp_size={extra_dp_size} must divide the number of processes, {dist.get_world_size()}"
            )
        self.stage, self.max_norm, self.extra_dp_size = stage, max_norm, extra_dp_size
        chosen = own_precision("LowLevelZeroPlugin", precision, {"initial_scale": initial_scale, **scaling})
        self.precision = FP8MixedPrecision() if use_fp8 else chosen
        self.zero_options: dict[str, Any] = dict(
            bucket_cap_mb=reduce_bucket_size_in_m * 1e6 * BYTES_OF_A_GRADIENT / 2**20,
            grad_sync_dtype=communication_dtype,
            overlap_grad_sync=overlap_communication,
            overlap_param_sync=overlap_allgather,
            store_params=master_weights,
        )

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
        boosted = LowLevelZeroModel(model)
        if divided is not None:
            boosted.masters = ExactWeights(divided)
        if optimizer is not None:
            optimizer.max_norm = self.max_norm
        return boosted, optimizer, criterion

    def _groups(self) -> dict[str, Any]:
        if self.extra_dp_size == 1:
            return {}
        from torch.distributed.device_mesh import init_device_mesh

        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = (accelerator or torch.get_default_device()).type
        shape = (self.extra_dp_size, dist.get_world_size() // self.extra_dp_size)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("redundant", "distributed"))
        return {f"{name}_process_group": mesh.get_group(name) for name in ("distributed", "redundant")}

    @contextlib.contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Iterator[None]:
        optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if optimizer is None:
            raise ValueError("no_sync needs the optimizer, or the model, that boost returned")
        with optimizer.no_sync():
            yield
