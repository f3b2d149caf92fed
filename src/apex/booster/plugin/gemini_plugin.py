"""Sharded parameters with the host's memory as the place for what the device has no room for."""

from __future__ import annotations

from typing import Any

from .plugin_base import own_precision
from .torch_fsdp_plugin import TorchFSDPPlugin

__all__ = ["GeminiPlugin"]

# Arguments of the original about chunks of memory and their search, which FSDP2 has no use for.
_OF_CHUNKS = (
    "chunk_config_dict chunk_init_device enable_gradient_accumulation max_prefetch warmup_non_model_data_ratio "
    "steady_cuda_cap_ratio gpu_margin_mem_ratio master_weights pin_memory force_outputs_fp32 strict_ddp_mode "
    "search_range_m hidden_dim min_chunk_size_m memstats use_fp8 enable_async_reduce"
)


class GeminiPlugin(TorchFSDPPlugin):
    """FSDP2 whose parameters, gradients and optimizer state may be in the host's memory.

    - `placement_policy`: "static" or "auto"; with "static" everything is in the host's memory if `offload_optim_frac`
      or `offload_param_frac` is more than 0: FSDP2 divides nothing between the two memories;
    - `shard_param_frac`: 0 keeps gathered parameters until the backward pass, more does not;
    - `precision`: as that of `LowLevelZeroPlugin`; `max_norm`: what steps clip gradients to;
    - `options`: the loss scale, as arguments of FP16NaiveMixedPrecision. Arguments of the original about chunks of
      memory are taken and ignored.

    Tensor parallelism is HybridParallelPlugin's.
    """

    def __init__(
        self,
        placement_policy: str = "static",
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        precision: Any = "fp16",
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        **options: Any,
    ) -> None:
        if placement_policy not in ("static", "auto"):
            raise ValueError(f"placement_policy={placement_policy!r} is not known; use 'static' or 'auto'")
        if tp_size != 1:
            raise NotImplementedError(f"tp_size={tp_size}: HybridParallelPlugin has tensor parallelism")
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported; 2 is")
        scaling = {name: value for name, value in options.items() if name not in _OF_CHUNKS.split()}
        super().__init__(
            sharding_strategy=None if shard_param_frac > 0 else "SHARD_GRAD_OP",
            cpu_offload=placement_policy == "static" and (offload_optim_frac > 0 or offload_param_frac > 0),
            mixed_precision=own_precision("GeminiPlugin", precision, scaling),
        )
        self.max_norm = max_norm
