"""Every argument of every plugin: its default is accepted in silence; another value acts, warns, is logged or raises.

Plugins are made, and models boosted, in one process that believes to be the first of four: torch's fake process group
exchanges nothing. `hybrid_checks`, `process_checks` and `four_checks` train in real ones.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp
from apex._fuse.rule import RULES, FusedModule
from apex.booster import plugin as plugins
from apex.booster.mixed_precision import FP8MixedPrecision
from apex.booster.plugin import GradientCheckpointConfig, PipelineGradientCheckpointConfig, _arguments
from apex.booster.plugin._fusing import HEAD
from apex.booster.plugin._gradient_checkpoints import checkpoint_layers, chosen_layers
from apex.transformer import parallel_state
from apex.transformer import tensor_parallel as tp

from .problem import adam, net
from .problem import booster as make

WORLD = 4
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


@pytest.fixture(scope="module", autouse=True)
def fake_processes() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    amp.shutdown()
    parallel_state.destroy_model_parallel()


# What a boosted model and its optimizer show of an argument --------------------------------------------------------


SIMPLE = (int, float, torch.dtype)


class Layers(nn.Module):
    """A norm, attention, a gated MLP, a list of blocks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.batch_norm = nn.BatchNorm1d(16)
        self.row = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.register_buffer("table", torch.ones(3))
        self.split = tp.ColumnParallelLinear(16, 16, use_cpu_initialization=True) if _is_split() else None


def _is_split() -> bool:
    initialized = parallel_state.model_parallel_is_initialized()
    return initialized and parallel_state.get_tensor_model_parallel_world_size() > 1


def model_for(plugin: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = Layers()
    stages = getattr(plugin, "pp_size", 1)
    return layers if stages == 1 else nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])


def look(name: str, patch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, Any]:
    """Make a plugin, boost a model, and return what can be seen of the arguments."""
    sharded: list[dict[str, Any]] = []
    if name in ("TorchFSDPPlugin", "GeminiPlugin"):
        import torch.distributed.fsdp as fsdp

        patch.setattr(fsdp, "fully_shard", lambda module, **options: sharded.append({"module": module, **options}))
    broadcasts: list[Any] = []
    patch.setattr("apex.booster.plugin.torch_fsdp_plugin.broadcast_from_first", lambda *given: broadcasts.append(given))
    plugin = getattr(plugins, name)(**arguments)
    model = model_for(plugin)
    # The names of parameters in other stages are unknown here: no optimizer.
    given = None if getattr(plugin, "pp_size", 1) > 1 else torch.optim.AdamW(model.parameters())
    boosted, optimizer, *_ = make(plugin=plugin).boost(model, given)
    seen: dict[str, Any] = {
        "plugin": plugin,
        "max_norm": getattr(optimizer, "max_norm", None),
        "fp8": isinstance(getattr(plugin, "precision", None), FP8MixedPrecision),
        "dtypes": {param.dtype for param in boosted.parameters()},
        "buffer": getattr(model, "table", torch.ones(1)).dtype,
        "fused": [type(each).__name__ for each in model.modules() if isinstance(each, FusedModule)],
        "checkpointed": [name for name, each in model.named_modules() if "forward" in vars(each)],
        "layers": list(boosted.unwrap().state_dict()),
        "synced": any(
            isinstance(each, nn.SyncBatchNorm) or "Sync" in type(each).__name__ for each in boosted.modules()
        ),
        "broadcasts": len(broadcasts),
    }
    if optimizer is not None:
        seen |= {key: value for key, value in vars(optimizer.unwrap()).items() if isinstance(value, SIMPLE)}
    if getattr(optimizer, "scaler", None) is not None:
        seen |= {f"scaler.{key.strip('_')}": value for key, value in vars(optimizer.scaler).items()}
    for each in boosted.modules():
        if isinstance(each, nn.parallel.DistributedDataParallel):
            seen |= {f"ddp.{key}": value for key, value in vars(each).items()}
            seen["ddp.buffers"] = getattr(each, "forward_sync_buffers", getattr(each, "broadcast_buffers", None))
        if hasattr(each, "_casts"):
            seen["inputs"] = each._casts.inputs
    if sharded:
        last = sharded[-1]
        seen |= {"units": len(sharded), "mesh": tuple(last["mesh"].shape), "policy": last["mp_policy"]}
        seen |= {"resharded": last["reshard_after_forward"], "offloads": "offload_policy" in last}
        seen["ignored"] = len(last.get("ignored_params", ()))
    return seen


# What becomes of each argument ----------------------------------------------------------------------------------------


@dataclass
class Acts:
    """`key` of what is seen is `expected` with this value of the argument, and something else with the default."""

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
    """As torch.distributed.fsdp.MixedPrecision."""

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
        "cpu_offload": Raises(True, NotImplementedError, "cpu_offload=True is not supported: GeminiPlugin"),
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
            *[
                Raises(mode, NotImplementedError, f"mode='{mode}' is not there", {"enable_sequence_parallelism": True})
                for mode in ("ring", "all_to_all", "ring_attn")
            ],
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
        "cpu_offload": Raises(True, NotImplementedError, "cpu_offload=True is not supported: GeminiPlugin"),
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


def signature(name: str) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(getattr(plugins, name).__init__).parameters)
    del found["self"]
    return found


ARGUMENTS = [(name, argument) for name in ORIGINAL for argument in signature(name)]


@pytest.mark.parametrize("name", ORIGINAL)
def test_arguments_are_those_of_the_original_in_its_order(name: str) -> None:
    found = signature(name)
    assert list(found) == [*ORIGINAL[name], *OURS.get(name, [])]
    differ = {"sync_module_states"}  # without it processes would train different models
    for argument, default in ORIGINAL[name].items():
        assert found[argument].default == default or argument in differ, argument
        assert found[argument].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    with pytest.raises(TypeError, match=rf"{name}.__init__\(\) got an unexpected keyword argument 'no_such'"):
        getattr(plugins, name)(no_such=1)


@pytest.mark.parametrize("name", ORIGINAL)
def test_defaults_of_the_original_are_accepted_in_silence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(_arguments.get_dist_logger()._logger, "log", lambda level, message: logged.append(message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Only .* of buckets are used")  # of a tiny model
        for argument, default in ORIGINAL[name].items():
            getattr(plugins, name)(**{argument: default})
        getattr(plugins, name)(**ORIGINAL[name])
        look(name, monkeypatch, **ORIGINAL[name])
    assert not logged


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_another_value_acts_warns_is_logged_or_raises(
    name: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = CASES[name][argument]
    for case in cases if isinstance(cases, list) else [cases]:
        parallel_state.destroy_model_parallel()
        value = case.value() if type(case.value) is type(lambda: 0) else case.value
        given = {**case.others, argument: value}
        assert value != signature(name)[argument].default
        if isinstance(case, Acts):
            found = _entry(look(name, monkeypatch, **given), case.key)
            assert found == case.expected, case
            parallel_state.destroy_model_parallel()
            if case.key == "plugin.placement.folded":  # pp_style and num_model_chunks belong together
                case.others["pp_style"] = "interleaved"
            assert _entry(look(name, monkeypatch, **case.others), case.key) != found, case
        elif isinstance(case, Warns):
            with pytest.warns(UserWarning, match=case.match):
                look(name, monkeypatch, **given)
        elif isinstance(case, Raises):
            with pytest.raises(case.kind, match=case.match):
                look(name, monkeypatch, **given)
        else:
            logged: list[str] = []
            monkeypatch.setattr(
                _arguments.get_dist_logger()._logger,
                "log",
                lambda level, message: logged.append(message),  # noqa: B023
            )
            getattr(plugins, name)(**given)
            assert [line for line in logged if re.search(rf"no effect of {argument}=", line)] == logged
            assert len(logged) == 1


def _entry(seen: dict[str, Any], key: str) -> Any:
    """Return an entry, an attribute of one, or the number of what is in it."""
    if key in seen:
        return seen[key]
    first, *names = key.split(".")
    if key == "plugin.pipeline":
        return dist.get_process_group_ranks(seen["plugin"].pp_group)
    found = seen.get(first)
    for name in names:
        found = getattr(found, name, None)
        found = found() if callable(found) else found
    return len(found) if isinstance(found, list) else found


# Beyond single arguments ----------------------------------------------------------------------------------------------


def test_plain_layers_are_refused_with_tensor_parallelism() -> None:
    """Every process would train the whole model."""
    booster = make(plugin=plugins.HybridParallelPlugin(tp_size=2))
    model = net()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"tp_size=2, but no layer of the model is split; build it from apex\.transf"):
        booster.boost(model, adam(model))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("outside", "pipeline", "replicas"), [(True, [0, 1], [0, 2]), (False, [0, 2], [0, 1])])
def test_attributes_that_scripts_read(outside: bool, pipeline: list[int], replicas: list[int]) -> None:
    plugin = plugins.HybridParallelPlugin(1, 2, num_microbatches=2, dp_outside=outside)
    ranks = dist.get_process_group_ranks
    assert plugin.dp_size == plugin.pp_size == plugin.stage_manager.num_stages == 2
    assert (ranks(plugin.pp_group), ranks(plugin.dp_group)) == (pipeline, replicas)
    assert ranks(plugin.tp_group) == ranks(plugin.sp_group) == [0]
    assert plugin.pg_mesh.shape == plugin.pg_mesh.size() == (2, 2, 1, 1)
    assert plugin.pg_mesh.coordinate() == (0, 0, 0, 0)
    assert plugin.pg_mesh.get_ranks_in_group(plugin.pg_mesh.get_group_along_axis(1)) == (
        pipeline if outside else replicas
    )
    manager = plugin.stage_manager
    assert (manager.stage, manager.is_first_stage(), manager.is_last_stage()) == (0, True, False)
    parallel_state.destroy_model_parallel()
    plugin = plugins.HybridParallelPlugin(1, 2, num_microbatches=2, pp_style="zbv", num_model_chunks=2)
    assert plugin.stage_manager.is_last_stage()
    assert not plugin.stage_manager.is_last_stage(ignore_chunk=True)
    parallel_state.destroy_model_parallel()
    assert plugins.HybridParallelPlugin().stage_manager is None
    for name in ORIGINAL:
        parallel_state.destroy_model_parallel()
        assert getattr(plugins, name)().dp_size == WORLD
        assert getattr(plugins, name)().logger.info


def test_groups_in_another_order_are_warned_of() -> None:
    parallel_state.initialize_model_parallel(1, 2)
    with pytest.warns(UserWarning, match="dp_outside=True has no effect: apex.transformer has groups in another order"):
        plugin = plugins.HybridParallelPlugin(1, 2, num_microbatches=2)
    assert dist.get_process_group_ranks(plugin.pg_mesh.get_group_along_axis(0)) == [0, 2]


def test_fusing_warns_if_there_is_nothing_to_fuse() -> None:
    for argument in ("enable_fused_normalization", "enable_flash_attention", "enable_jit_fused"):
        with pytest.warns(UserWarning, match=f"{argument}=True changes nothing"):
            make(plugin=plugins.HybridParallelPlugin(**{argument: True})).boost(nn.Linear(2, 2))
    everything = plugins.HybridParallelPlugin(enable_all_optimization=True)
    with pytest.warns(UserWarning, match="enable_all_optimization=True changes nothing"):
        make(plugin=everything).boost(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(plugin=everything).boost(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


class Model(nn.Module):
    """The inside of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.norm(self.words(input_ids)))


def test_heads_of_language_models_keep_their_logits() -> None:
    assert [rule.name for rule in RULES].count(HEAD) == 1
    head = next(rule for rule in RULES if rule.name == HEAD)
    place, model = RULES.index(head), Model()
    # As if apex.fuse took this model for a language model whose head it can fuse.
    RULES[place] = head._replace(matches=lambda module: isinstance(module, Model), reason=lambda module: "")
    try:
        make(plugin=plugins.HybridParallelPlugin(enable_all_optimization=True)).boost(model)
    finally:
        RULES[place] = head
    assert type(model) is Model
    assert isinstance(model.norm, FusedModule)


@pytest.mark.parametrize(("strategy", "reshards"), [("HYBRID_SHARD", True), ("_HYBRID_SHARD_ZERO2", False)])
def test_a_machine_is_a_shard_group(strategy: str, reshards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    seen = look("TorchFSDPPlugin", monkeypatch, sharding_strategy=strategy)
    assert (seen["mesh"], seen["resharded"]) == ((2, 2), reshards)
    with pytest.raises(ValueError, match=f"sharding_strategy={strategy} is of all processes; process_group must be"):
        plugins.TorchFSDPPlugin(dist.group.WORLD, strategy)


class Config:
    _attn_implementation = "eager"


class Attending(nn.Linear):
    """As a model of Hugging Face's."""

    def __init__(self, knows: bool) -> None:
        super().__init__(2, 2)
        self.knows, self.config = knows, Config()

    def set_attn_implementation(self, name: str) -> None:
        if not self.knows:
            raise ValueError(f"no {name}")
        self.config._attn_implementation = name


def test_flash_attention_takes_sdpa_of_hugging_face() -> None:
    plugin = plugins.HybridParallelPlugin(enable_flash_attention=True)
    model = Attending(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(plugin=plugin).boost(model)
    assert model.config._attn_implementation == "sdpa"
    with pytest.warns(UserWarning, match="enable_flash_attention=True changes nothing"):
        make(plugin=plugin).boost(Attending(False))


class Dropping(nn.Module):
    """A layer that draws from PyTorch's stream and from one of tensor parallelism's, and counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        with tp.get_cuda_rng_tracker().fork():
            x = nn.functional.dropout(x, 0.5)
        return nn.functional.dropout(self.linear(x), 0.5) * scale


def test_checkpointed_layers_draw_the_same_numbers_again() -> None:
    parallel_state.initialize_model_parallel(1, 1)
    gradients, calls, after = [], [], []
    for config in (None, GradientCheckpointConfig(0.7)):
        torch.manual_seed(0)
        model = nn.ModuleList([Dropping() for _ in range(3)])
        checkpoint_layers(chosen_layers(model, config, 0))
        tp.model_parallel_cuda_manual_seed(1)
        x = torch.linspace(-1, 1, 32).view(4, 8)
        for layer in model:
            x = layer(x, scale=2.0)
        x.sum().backward()
        gradients.append([param.grad for param in model.parameters()])
        calls.append([layer.calls for layer in model])
        after.append(tp.get_cuda_rng_tracker().get_states())
    assert calls == [[1, 1, 1], [2, 2, 1]]
    assert all(map(torch.equal, *gradients))
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])
