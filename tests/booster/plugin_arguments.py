"""The arguments of Colossal-AI's plugins with their defaults, and what another value of each does here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.booster.plugin import GradientCheckpointConfig, PipelineGradientCheckpointConfig

# The arguments of the original with their defaults, in its order; Hybrid's first two have none there.
SCALING = {
    "initial_scale": 2**16,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
}
DDP = {
    "broadcast_buffers": True,
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}
ORIGINAL: dict[str, dict[str, Any]] = {
    "TorchDDPPlugin": {**DDP, "fp8_communication": False},
    "TorchFSDPPlugin": {
        "process_group": None,
        "sharding_strategy": None,
        "cpu_offload": None,
        "auto_wrap_policy": None,
        "backward_prefetch": None,
        "mixed_precision": None,
        "ignored_modules": None,
        "param_init_fn": None,
        "sync_module_states": False,
        "fp8_communication": False,
    },
    "LowLevelZeroPlugin": {
        "stage": 1,
        "precision": "fp16",
        **SCALING,
        "initial_scale": 2**32,
        "max_norm": 0.0,
        "norm_type": 2.0,
        "reduce_bucket_size_in_m": 12,
        "communication_dtype": None,
        "overlap_communication": True,
        "overlap_allgather": False,
        "cpu_offload": False,
        "master_weights": True,
        "verbose": False,
        "cast_inputs": True,
        "fp8_communication": False,
        "use_fp8": False,
        "extra_dp_size": 1,
    },
    "GeminiPlugin": {
        "chunk_config_dict": None,
        "chunk_init_device": None,
        "placement_policy": "static",
        "enable_gradient_accumulation": False,
        "max_prefetch": 0,
        "shard_param_frac": 1.0,
        "offload_optim_frac": 0.0,
        "offload_param_frac": 0.0,
        "warmup_non_model_data_ratio": 0.8,
        "steady_cuda_cap_ratio": 0.9,
        "precision": "fp16",
        "master_weights": True,
        "pin_memory": False,
        "force_outputs_fp32": False,
        "strict_ddp_mode": False,
        "search_range_m": 32,
        "hidden_dim": None,
        "min_chunk_size_m": 32,
        "memstats": None,
        "gpu_margin_mem_ratio": 0.0,
        **SCALING,
        "max_norm": 0.0,
        "norm_type": 2.0,
        "tp_size": 1,
        "extra_dp_size": 1,
        "enable_all_optimization": False,
        "enable_fused_normalization": False,
        "enable_flash_attention": False,
        "enable_sequence_parallelism": False,
        "enable_jit_fused": False,
        "enable_async_reduce": True,
        "use_fp8": False,
        "verbose": False,
        "fp8_communication": False,
    },
    "HybridParallelPlugin": {
        "tp_size": 1,
        "pp_size": 1,
        "sp_size": None,
        "precision": "fp16",
        "zero_stage": 0,
        "enable_all_optimization": False,
        "enable_fused_normalization": False,
        "enable_flash_attention": False,
        "enable_jit_fused": False,
        "enable_sequence_parallelism": False,
        "sequence_parallelism_mode": None,
        "parallel_output": True,
        "num_microbatches": None,
        "microbatch_size": None,
        **SCALING,
        "max_norm": 0,
        **{name if name != "bucket_cap_mb" else "ddp_bucket_cap_mb": value for name, value in DDP.items()},
        "zero_bucket_size_in_m": 12,
        "cpu_offload": False,
        "communication_dtype": None,
        "overlap_communication": True,
        "custom_policy": None,
        "pp_style": "1f1b",
        "num_model_chunks": 1,
        "scheduler_nodes": None,
        "num_layers_per_stage": None,
        "gradient_checkpoint_config": None,
        "enable_metadata_cache": True,
        "make_vocab_size_divisible_by": 64,
        "dp_outside": True,
        "overlap_p2p": True,
        "overlap_allgather": False,
        "fp8_communication": False,
        "use_fp8": False,
        "inner_ring_size": None,
    },
}
# Arguments that the original has not, or no more.
OURS = {
    "TorchDDPPlugin": ["ddp", "sync_batch_norm"],
    "HybridParallelPlugin": ["norm_type", "enable_sequence_overlap", "ddp_options"],
}


@dataclass
class Acts:
    """An expectation: `key` of the observations is `expected` with this value, but not with the default."""

    value: Any
    key: str
    expected: Any
    others: dict[str, Any] = field(default_factory=dict)


@dataclass
class Warns:
    value: Any
    match: str
    others: dict[str, Any] = field(default_factory=dict)


@dataclass
class IsLogged:
    """One debug line names the argument."""

    value: Any
    others: dict[str, Any] = field(default_factory=dict)


@dataclass
class Raises:
    value: Any
    kind: type[Exception]
    match: str
    others: dict[str, Any] = field(default_factory=dict)


class Prefetch:
    """Stands for an enum of the original's."""

    def __repr__(self) -> str:
        return "Prefetch"


class Policy:
    """A policy like torch.distributed.fsdp.MixedPrecision."""

    param_dtype, reduce_dtype, buffer_dtype = torch.bfloat16, torch.bfloat16, torch.float16


def scaling(others: dict[str, Any] | None = None) -> dict[str, Any]:
    values = {"initial_scale": 64.0, "min_scale": 2.0, "growth_factor": 4.0, "backoff_factor": 0.25}
    values |= {"growth_interval": 7, "hysteresis": 3, "max_scale": 2.0**33}
    names = {name: name for name in values} | {"initial_scale": "init_scale"}
    return {name: Acts(value, f"scaler.{names[name]}", value, others or {}) for name, value in values.items()}


def exchanges(bucket: str, others: dict[str, Any]) -> dict[str, Any]:
    return {
        bucket: Acts(0.001, "bucket_cap_mb", 0.001 * 4e6 / 2**20, others),
        "communication_dtype": Acts(torch.bfloat16, "grad_sync_dtype", torch.bfloat16, others),
        "overlap_communication": Acts(False, "overlap_grad_sync", False, others),
        "overlap_allgather": Acts(True, "overlap_param_sync", True, others),
        "cpu_offload": Acts(True, "offloads", True, others),
    }


def replicas(bucket: str = "bucket_cap_mb") -> dict[str, Any]:
    return {
        "broadcast_buffers": Acts(False, "ddp.buffers", False),
        bucket: Acts(1, "ddp.bucket_bytes_cap", 2**20),
        "find_unused_parameters": Acts(True, "ddp.find_unused_parameters", True),
        "check_reduction": Acts(True, "ddp.find_unused_parameters", True),
        "gradient_as_bucket_view": Acts(True, "ddp.gradient_as_bucket_view", True),
        "static_graph": Acts(True, "ddp.static_graph", True),
    }


FUSED = {
    "enable_all_optimization": Acts(True, "fused", ["LayerNorm", "MultiheadAttention", "Sequential"]),
    "enable_fused_normalization": Acts(True, "fused", ["LayerNorm"]),
    "enable_flash_attention": Acts(True, "fused", ["MultiheadAttention"]),
    "enable_jit_fused": Acts(True, "fused", ["Sequential"]),
}
NOT_SENT = Raises(True, NotImplementedError, "fp8_communication=True is not supported")
PIPELINE = {"pp_size": 2, "num_microbatches": 2}
CASES: dict[str, dict[str, Any]] = {
    "TorchDDPPlugin": {
        **replicas(),
        "fp8_communication": NOT_SENT,
        "ddp": [
            Raises("other", ValueError, "ddp='other' is not known"),
            Warns(
                "apex", r"no effect of bucket_cap_mb=1, static_graph=True", {"bucket_cap_mb": 1, "static_graph": True}
            ),
        ],
        "sync_batch_norm": Acts(False, "synced", False),
    },
    "TorchFSDPPlugin": {
        "process_group": Acts(lambda: dist.new_group([0, 1]), "mesh", (2,)),
        "sharding_strategy": [
            Acts("SHARD_GRAD_OP", "resharded", False),
            Acts("NO_SHARD", "mesh", (4, 1)),
            Raises("SOME", ValueError, "sharding_strategy='SOME' is not known; use one of FULL_SHARD"),
        ],
        "cpu_offload": Acts(True, "offloads", True),
        "auto_wrap_policy": [
            Acts({nn.LayerNorm}, "units", 2),
            Acts(lambda: lambda module: isinstance(module, nn.LayerNorm), "units", 2),
            Acts(lambda: lambda module, recurse, nonwrapped_numel: nonwrapped_numel == 32, "units", 4),
        ],
        "backward_prefetch": Warns(Prefetch(), "no effect of backward_prefetch=Prefetch"),
        "mixed_precision": [
            Acts(Policy(), "buffer", torch.float16),
            Raises(16, ValueError, "mixed_precision=16 must be a name or a precision"),
        ],
        "ignored_modules": Acts(lambda: [nn.Linear(2, 2)], "plugin.ignored_modules", 1),
        "param_init_fn": Raises(print, NotImplementedError, "param_init_fn="),
        "sync_module_states": Acts(False, "broadcasts", 0),
        "fp8_communication": NOT_SENT,
    },
    "LowLevelZeroPlugin": {
        "stage": [Acts(2, "plugin.support_no_sync", False), Raises(3, ValueError, "stage=3 is not known")],
        "precision": [
            Acts("fp32", "dtypes", {torch.float32}),
            Raises("fp4", ValueError, "precision='fp4' is not known to LowLevelZeroPlugin"),
        ],
        **scaling(),
        "max_norm": Acts(2.0, "max_norm", 2.0),
        "norm_type": Raises(1.0, ValueError, "norm_type=1.0 is not supported; 2 is"),
        **exchanges("reduce_bucket_size_in_m", {}),
        "master_weights": Acts(False, "store_params", False),
        "verbose": Acts(True, "scaler.verbose", True),
        "cast_inputs": [Acts(False, "inputs", None), Acts(False, "inputs", None, {"precision": "bf16"})],
        "fp8_communication": NOT_SENT,
        "use_fp8": Acts(True, "fp8", True),
        "extra_dp_size": [
            Acts(2, "redundant_size", 2),
            Raises(3, ValueError, "extra_dp_size=3 must divide the number of processes, 4"),
        ],
    },
    "GeminiPlugin": {
        "placement_policy": [
            Warns("auto", "placement_policy='auto' moves nothing to the host's memory"),
            Raises(
                "cuda", ValueError, r"placement_policy='cuda' is not known; use 'static', with offload_optim_frac=1.0"
            ),
        ],
        "shard_param_frac": [Acts(0.0, "resharded", False), Warns(0.5, "fractions above 0 act as 1.0")],
        "offload_optim_frac": [
            Acts(1.0, "offloads", True),
            Warns(0.5, "fractions above 0 act as 1.0"),
            Raises(2.0, ValueError, "'offload_optim_frac': 2.0} must be from 0 to 1"),
        ],
        "offload_param_frac": Acts(1.0, "offloads", True),
        "precision": [
            Acts("fp32", "policy.param_dtype", None),
            Raises("fp4", ValueError, "precision='fp4' is not known to GeminiPlugin"),
        ],
        "master_weights": Warns(False, "no effect of master_weights=False"),
        "force_outputs_fp32": Warns(True, "no effect of force_outputs_fp32=True"),
        **scaling(),
        "max_norm": Acts(2.0, "max_norm", 2.0),
        "norm_type": Raises(1.0, ValueError, "norm_type=1.0 is not supported; 2 is"),
        "tp_size": Raises(2, NotImplementedError, "tp_size=2 is not supported: HybridParallelPlugin"),
        "extra_dp_size": [
            Acts(2, "mesh", (2, 2)),
            Raises(3, ValueError, "extra_dp_size=3 must divide the number of processes, 4"),
        ],
        **FUSED,
        "enable_sequence_parallelism": Warns(True, "no effect of enable_sequence_parallelism=True"),
        "use_fp8": Acts(True, "fp8", True),
        "verbose": Acts(True, "scaler.verbose", True),
        "fp8_communication": NOT_SENT,
        "chunk_config_dict": IsLogged({"size": 1}),
        "chunk_init_device": IsLogged(torch.device("meta")),
        "enable_gradient_accumulation": IsLogged(True),
        "max_prefetch": IsLogged(1),
        "warmup_non_model_data_ratio": IsLogged(0.5),
        "steady_cuda_cap_ratio": IsLogged(0.5),
        "pin_memory": IsLogged(True),
        "strict_ddp_mode": IsLogged(True),
        "search_range_m": IsLogged(16),
        "hidden_dim": IsLogged(8),
        "min_chunk_size_m": IsLogged(16),
        "memstats": IsLogged("statistics"),
        "gpu_margin_mem_ratio": IsLogged(0.5),
        "enable_async_reduce": IsLogged(False),
    },
    "HybridParallelPlugin": {
        "tp_size": [
            Acts(2, "plugin.tp_size", 2),
            Raises(3, ValueError, "tp_size=3 times pp_size=1 must divide the number of processes, 4"),
        ],
        "pp_size": [
            Acts(2, "plugin.stage_manager.num_stages", 2, {"num_microbatches": 2}),
            Raises(2, ValueError, "one of num_microbatches and microbatch_size is needed"),
        ],
        "sp_size": [
            Raises(2, ValueError, "sp_size=2 needs enable_sequence_parallelism=True"),
            Warns(4, "no effect of sp_size=4", {"enable_sequence_parallelism": True, "tp_size": 2}),
        ],
        "precision": Acts("fp32", "dtypes", {torch.float32}),
        "zero_stage": [
            Acts(1, "distributed_size", 4),
            Raises(3, ValueError, "zero_stage=3 must be 0, 1 or 2"),
        ],
        **FUSED,
        "enable_sequence_parallelism": [
            Acts(True, "plugin.sp_group.size", 2, {"tp_size": 2}),
            Raises(True, ValueError, "enable_sequence_parallelism=True needs tp_size > 1"),
        ],
        "sequence_parallelism_mode": [
            Warns("split_gather", "no effect of sequence_parallelism_mode='split_gather'"),
            Warns("ring", "'ring' computes as 'split_gather'", {"enable_sequence_parallelism": True, "tp_size": 2}),
            *[
                Raises(mode, ValueError, f"'{mode}' needs sp_size > 1", {"enable_sequence_parallelism": True})
                for mode in ("all_to_all", "ring_attn")
            ],
            Raises("none", ValueError, "'none' must be one of", {"enable_sequence_parallelism": True}),
        ],
        "parallel_output": [
            Warns(False, "no effect of parallel_output=False"),
            Warns(False, "no effect of parallel_output=False: the layers", {"tp_size": 2}),
        ],
        "num_microbatches": Acts(4, "plugin.num_microbatches", 4),
        "microbatch_size": Acts(4, "plugin.microbatch_size", 4),
        **scaling(),
        "max_norm": Acts(2.0, "max_norm", 2.0),
        **replicas("ddp_bucket_cap_mb"),
        **exchanges("zero_bucket_size_in_m", {"zero_stage": 1}),
        "custom_policy": [
            Acts(lambda: lambda model, stage, stages: Stage(), "layers", ["own.weight"], PIPELINE),
            Warns(print, "no effect of custom_policy="),
        ],
        "pp_style": [
            Acts("zbv", "plugin.placement.folded", True, {**PIPELINE, "num_model_chunks": 2}),
            Raises("other", ValueError, "pp_style='other' with num_model_chunks=1"),
        ],
        "num_model_chunks": Raises(2, ValueError, "pp_style='1f1b' with num_model_chunks=2"),
        "scheduler_nodes": IsLogged(["F"]),
        "num_layers_per_stage": [
            Acts([1, 4], "layers", ["0.weight", "0.bias"], PIPELINE),
            Raises([1, 3], ValueError, r"num_layers_per_stage=\[1, 3\] must have 2 positive numbers", PIPELINE),
            Warns([5], r"no effect of num_layers_per_stage=\[5\]"),
        ],
        "gradient_checkpoint_config": [
            Acts(GradientCheckpointConfig(0.5), "checkpointed", ["blocks.0", "blocks.1"]),
            Acts(PipelineGradientCheckpointConfig(0.5, [1]), "checkpointed", ["blocks.0"]),
            Acts(PipelineGradientCheckpointConfig(0.0, [2, 0]), "checkpointed", ["0", "1"], PIPELINE),
            Raises(1, TypeError, "gradient_checkpoint_config=1 must be a GradientCheckpointConfig"),
            Raises(GradientCheckpointConfig(2.0), ValueError, "gradient_checkpointing_ratio=2.0 must be from 0 to 1"),
            Raises(PipelineGradientCheckpointConfig(0, [1, 1]), ValueError, "a number for each of 1 stages"),
            Raises(PipelineGradientCheckpointConfig(0, [9]), ValueError, "stage 0 has 4 layers"),
            Warns(GradientCheckpointConfig(0.1), "gradient_checkpointing_ratio=0.1 checkpoints nothing"),
        ],
        "enable_metadata_cache": IsLogged(False),
        "make_vocab_size_divisible_by": Warns(32, "no effect of make_vocab_size_divisible_by=32"),
        "dp_outside": Acts(False, "plugin.pipeline", [0, 2], PIPELINE),
        "overlap_p2p": [
            Warns(False, "no effect of overlap_p2p=False"),
            Warns(False, "no effect of overlap_p2p=False: messages", PIPELINE),
        ],
        "fp8_communication": NOT_SENT,
        "use_fp8": Acts(True, "fp8", True),
        "inner_ring_size": Raises(2, NotImplementedError, "inner_ring_size=2 is not supported"),
        "norm_type": Raises(1.0, ValueError, "norm_type=1.0 is not supported; 2 is"),
        "enable_sequence_overlap": Warns(True, "no effect of enable_sequence_overlap=True"),
        "ddp_options": Acts({"bucket_cap_mb": 1}, "ddp.bucket_bytes_cap", 2**20),
    },
}


class Stage(nn.Module):
    """A stage that a policy makes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2, bias=False)

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        pass
