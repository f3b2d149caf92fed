"""The configuration of a standalone model, and the layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..._arguments import Count, check_fields
from ...ops._host import HOST
from .. import parallel_state
from ..context_parallel.attention import COMMUNICATIONS
from ..layers import FusedLayerNorm
from ..moe.options import MoEOptions
from ..pipeline_parallel._schedule import Placement
from ..utils import divide
from . import global_vars


@dataclass(frozen=True)
class TransformerConfig(MoEOptions):
    """The sizes and options of a model.

    - `position_embedding`: "learned", or "rope", which rotates queries and keys.
    - `activation`: "gelu" (tanh form) or "swiglu".
    - `attention`: "softmax" (materialised scores and the fused softmax) or "sdpa" (PyTorch's).
    - `num_query_groups`: heads of keys and values, each shared by as many heads of queries; None: one for each.
    - `cp_comm_type`: what context-parallel ranks exchange, "p2p" (a ring), "all_gather" or "a2a"; see
      `apex.transformer.context_parallel.context_attention`.
    - `recompute`: None, "selective" (attention only) or "full" (whole layers). With the method "uniform", full
      recomputation checkpoints `recompute_num_layers` layers at a time; with "block" it recomputes that many layers of
      a stage.
    - `distribute_saved_activations`: each tensor-parallel rank saves only its part of the inputs of full recomputation.
    - `num_moe_experts`, `moe_*`: layers with experts in place of MLPs; see `apex.transformer.moe.MoEOptions`.
    """

    num_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    vocab_size: Count
    max_position_embeddings: Count
    ffn_hidden_size: Count | None = None
    kv_channels: Count | None = None
    num_query_groups: Count | None = None
    position_embedding: str = "learned"
    activation: str = "gelu"
    attention: str = "softmax"
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method_std: float = 0.02
    seed: int = 1234
    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    gradient_accumulation_fusion: bool = False
    recompute: str | None = None
    recompute_method: str = "uniform"
    recompute_num_layers: Count = 1
    distribute_saved_activations: bool = False
    cp_comm_type: str = "p2p"

    def __post_init__(self) -> None:
        check_fields(self, TransformerConfig)
        for name, accepted in (
            ("position_embedding", ("learned", "rope")),
            ("activation", ("gelu", "swiglu")),
            ("attention", ("softmax", "sdpa")),
            ("recompute", (None, "selective", "full")),
            ("recompute_method", ("uniform", "block")),
            ("cp_comm_type", COMMUNICATIONS),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {accepted}, got {getattr(self, name)!r}")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}: "
                "choose a multiple of it, or give kv_channels, the channels of each head"
            )

        if self.num_attention_heads % self.key_heads:
            raise ValueError(
                f"num_query_groups={self.num_query_groups} must divide num_attention_heads={self.num_attention_heads}"
            )
        self.check_experts(self.activation, self.num_layers)

    @property
    def key_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """Return the number of channels of an attention head."""
        return self.kv_channels or divide(self.hidden_size, self.num_attention_heads)

    @property
    def splits_sequence(self) -> bool:
        """Return True if tensor-parallel ranks hold parts of the sequence between split layers."""
        return self.sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1

    def generator(self, layer: int) -> torch.Generator:
        """Return the random number generator for the weights of a layer.

        Layers count from 0; -1 is the embedding and `num_layers` the head.
        """
        return torch.Generator(HOST).manual_seed(self.seed + 1 + layer)

    def column(self) -> dict[str, Any]:
        """Return the options of layers that split their outputs."""
        return {
            **self.row(),
            "gather_output": False,
            # Sequence-parallel layers use reduce-scatters, so no all-reduce can be made asynchronous.
            "no_async_tensor_model_parallel_allreduce": self.splits_sequence,
        }

    def row(self) -> dict[str, Any]:
        """Return the options of layers that split their inputs."""
        return {
            "params_dtype": self.params_dtype,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": self.gradient_accumulation_fusion,
            "sequence_parallel_enabled": self.splits_sequence,
        }

    def norm(self) -> FusedLayerNorm:
        """Return a new layer norm."""
        return FusedLayerNorm(
            self.hidden_size, self.layernorm_epsilon, sequence_parallel_enabled=self.splits_sequence
        ).to(self.params_dtype)


# Options with the same name in Megatron's command line and in the configuration.
_SAME_NAMES = """
num_layers hidden_size num_attention_heads max_position_embeddings ffn_hidden_size kv_channels layernorm_epsilon
hidden_dropout attention_dropout init_method_std seed params_dtype sequence_parallel gradient_accumulation_fusion
recompute_num_layers distribute_saved_activations
"""


def config_from_args(args: Any = None) -> TransformerConfig:
    """Return the configuration of Megatron's command line; `args.padded_vocab_size` must be set."""
    args = global_vars.get_args() if args is None else args
    return TransformerConfig(
        vocab_size=args.padded_vocab_size,
        num_moe_experts=args.num_experts,
        recompute=args.recompute_granularity,
        recompute_method=args.recompute_method or "uniform",
        **{name: getattr(args, name) for name in _SAME_NAMES.split()},
    )


def stage_layers(config: TransformerConfig, folded: bool = False) -> range:
    """Return the layer numbers of this rank's stage, or of the chunk that is being built.

    `folded` is for chunks of `build_model(..., placement="v")`.
    """
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    placement = Placement(ranks, chunks, folded)
    if config.num_layers % placement.stages:
        raise ValueError(
            f"num_layers must be a multiple of {placement.stages} pipeline stages, got {config.num_layers}"
        )
    count = config.num_layers // placement.stages
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    first = count * placement.stage(parallel_state.get_pipeline_model_parallel_rank(), chunk)
    return range(first, first + count)
