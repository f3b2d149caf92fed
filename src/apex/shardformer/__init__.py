"""Records of Colossal-AI's model sharding. Models are divided by HybridParallelPlugin, not by class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from ..booster.plugin._arguments import changed, warn_of
from ..booster.plugin._fusion_arguments import FusionArguments
from ..booster.plugin._gradient_checkpoints import (
    GradientCheckpointConfig,
    PipelineGradientCheckpointConfig,
    check_config,
    checkpoint_layers,
    chosen_layers,
)

__all__ = ["GradientCheckpointConfig", "PipelineGradientCheckpointConfig", "ShardConfig", "ShardFormer"]


@dataclass
class ShardConfig:
    """Options of ShardFormer, with Colossal-AI's names and defaults."""

    tensor_parallel_process_group: Any = None
    sequence_parallel_process_group: Any = None
    pipeline_stage_manager: Any = None
    enable_tensor_parallelism: bool = True
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    gradient_checkpoint_config: GradientCheckpointConfig | None = None
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    sp_axis: int | None = None
    pg_mesh: Any = None
    inner_ring_size: int | None = None
    moe_dp_group: Any = None
    ep_group: Any = None
    fp8_communication: bool = False

    @property
    def tensor_parallel_size(self) -> int:
        """The number of processes that share each layer; 1 without tensor parallelism."""
        connected = dist.is_available() and dist.is_initialized()
        if not (self.enable_tensor_parallelism and connected):
            return 1
        return dist.get_world_size(self.tensor_parallel_process_group)


# Options for divided models.
_FOR_PARTS = (
    "enable_sequence_parallelism sequence_parallelism_mode parallel_output make_vocab_size_divisible_by "
    "inner_ring_size fp8_communication"
)


class ShardFormer:
    """A divider of models, which here optimizes models that are not to be divided and refuses others."""

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(self, model: nn.Module, policy: Any = None) -> tuple[nn.Module, list[Any]]:
        """Fuse and checkpoint modules of the model in place, as HybridParallelPlugin does with the same options.

        Return the model and an empty list. Raise if the configuration asks to divide the model.
        """
        config = self.shard_config
        if config.tensor_parallel_size > 1 or config.pipeline_stage_manager is not None:
            from .policies.auto_policy import no_policy

            raise no_policy(model)
        check_config(config.gradient_checkpoint_config, 1)
        FusionArguments.of(vars(config)).apply(model)
        if config.gradient_checkpoint_config is not None:
            checkpoint_layers(chosen_layers(model, config.gradient_checkpoint_config, 0))
        warn_of(changed(ShardConfig, vars(config)), _FOR_PARTS, "the model is not divided")
        return model, []
