"""Sharded parameters, gradients and optimizer state that can be kept in the host's memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...lazy._recorded import materialize
from ._arguments import changed, note, refuse, warn, warn_of
from ._fusion_arguments import FusionArguments
from .plugin_base import own_precision
from .torch_fsdp_plugin import TorchFSDPPlugin

__all__ = ["GeminiPlugin"]

# Arguments of the original for its chunks of memory, which FSDP2 does not have.
_CHUNK_ARGUMENTS = (
    "chunk_config_dict chunk_init_device enable_gradient_accumulation max_prefetch warmup_non_model_data_ratio "
    "steady_cuda_cap_ratio gpu_margin_mem_ratio pin_memory strict_ddp_mode search_range_m hidden_dim min_chunk_size_m "
    "memstats enable_async_reduce"
)


class GeminiPlugin(TorchFSDPPlugin):
    """FSDP2 with parameters, gradients and optimizer state on the device or in the host's memory.

    - `placement_policy`: "static", or "auto", which moves nothing to the host. With "static" everything is in the
      host's memory if `offload_optim_frac` or `offload_param_frac` is above 0, because FSDP2 cannot split it between
      the two memories;
    - `shard_param_frac`: 0 keeps gathered parameters until the backward pass, a larger number frees them;
    - `precision`, `initial_scale` and others of the loss scale, `max_norm`, `use_fp8`: as in `LowLevelZeroPlugin`;
    - `enable_fused_normalization`, `enable_flash_attention`, `enable_jit_fused`, `enable_all_optimization`: replace
      norms, attention, other modules that `apex.fuse` knows except heads with their loss, or all three;
    - `extra_dp_size`: the number of copies of the sharded parameters.

    Arguments of the original for its chunks of memory have no effect, and a debug line lists them. For tensor
    parallelism use HybridParallelPlugin.
    """

    def __init__(
        self,
        chunk_config_dict: dict[str, Any] | None = None,
        chunk_init_device: torch.device | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: Any = "fp16",
        master_weights: bool = True,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        memstats: Any = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        extra_dp_size: int = 1,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_sequence_parallelism: bool = False,
        enable_jit_fused: bool = False,
        enable_async_reduce: bool = True,
        use_fp8: bool = False,
        verbose: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        overrides = changed(GeminiPlugin.__init__, locals())
        fractions = {name: overrides[name] for name in _FRACTIONS if name in overrides}
        if placement_policy not in ("static", "auto"):
            raise ValueError(
                f"placement_policy={placement_policy!r} is not known; use 'static', with offload_optim_frac=1.0 and "
                "offload_param_frac=1.0 for the host's memory and 0.0 for the device's, or 'auto'"
            )
        if any(not 0 <= fraction <= 1 for fraction in fractions.values()):
            raise ValueError(f"{fractions} must be from 0 to 1")
        refuse(overrides, "tp_size", "HybridParallelPlugin has tensor parallelism")
        refuse(overrides, "fp8_communication", "FSDP2 sends parameters in the precision's type; use precision='bf16'")
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported; 2 is")
        self.fusion = FusionArguments.of(locals())
        chosen = own_precision("GeminiPlugin", locals())
        super().__init__(
            sharding_strategy=None if shard_param_frac > 0 else "SHARD_GRAD_OP",
            cpu_offload=placement_policy == "static" and (offload_optim_frac > 0 or offload_param_frac > 0),
            mixed_precision=chosen,
        )
        world = dist.get_world_size()
        if extra_dp_size < 1 or world % extra_dp_size:
            raise ValueError(f"extra_dp_size={extra_dp_size} must divide the number of processes, {world}")
        if placement_policy == "auto":
            warn(
                "placement_policy='auto' moves nothing to the host's memory, whatever the fractions are; "
                "placement_policy='static' with offload_optim_frac=1.0 does"
            )
        elif any(0 < fraction < 1 for fraction in fractions.values()):
            warn(f"{fractions}: FSDP2 divides nothing between two memories, so that fractions above 0 act as 1.0")
        warn_of(overrides, "master_weights force_outputs_fp32", "weights of the optimizer and outputs are float32")
        warn_of(
            overrides, "enable_sequence_parallelism", "it is for tensor parallelism, which HybridParallelPlugin has"
        )
        note(overrides, _CHUNK_ARGUMENTS, "FSDP2 has no chunks of memory")
        self.max_norm, self.copies, self.extra_dp_size = max_norm, extra_dp_size, extra_dp_size

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        if any(self.fusion):  # replacements are tried with the weights
            materialize(model.parameters())
        self.fusion.apply(model)
        return super()._boost(model, optimizer, criterion, precision)


_FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
