"""Tensor, pipeline and data parallelism together, with `apex.transformer`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from ..._distributed.experts import is_expert
from ..._distributed.groups import own_group
from ...amp._amp_state import HALF
from ...logging import get_dist_logger
from ...parallel._flat import broadcast_from_first
from ...transformer import finalize_model_grads, parallel_state
from ...transformer._norms import counted, grad_norm
from ...transformer._resharding.gathered import gather_from_stages
from ...transformer.amp.loss_scaler import agree_on_overflows
from ...transformer.pipeline_parallel._cut import CutSequential
from ...transformer.pipeline_parallel._schedule import Placement
from ...transformer.pipeline_parallel.utils import _reconfigure_microbatch_calculator
from .._precision import CastModel
from .._whole_state import names_in
from .._zero import ExactWeights, load_plain_state, zero_optimizer
from ..mixed_precision import AmpOptimizer
from ..wrappers import ModelWrapper, unwrapped
from ._arguments import changed, note, refuse, warn, warn_of
from ._fusion_arguments import FusionArguments
from ._gradient_checkpoints import check_config, checkpoint_layers, chosen_layers
from ._process_mesh import GroupMesh, StageManager, mesh_of_all
from .low_level_zero_plugin import zero_options
from .plugin_base import PipelinePluginBase, own_precision
from .torch_ddp_plugin import DDP_ARGUMENTS, not_reduced, replicated
from .torch_ddp_plugin import ddp_options as make_ddp_options

__all__ = ["HybridParallelModel", "HybridParallelPlugin"]


class HybridParallelModel(ModelWrapper):
    """A model, or this process's pipeline stage of it; `chunks` are the stage's parts."""

    def __init__(self, chunks: list[nn.Module]) -> None:
        super().__init__(chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks))

    @property
    def chunks(self) -> list[nn.Module]:
        return list(self.module) if isinstance(self.module, nn.ModuleList) else [self.module]


class HybridParallelPlugin(PipelinePluginBase):
    """Training of a model whose layers are split over `tp_size` processes, and whose stages over `pp_size` processes.

    The remaining processes are replicas, with the same parts and different data. Make the plugin first. For
    `tp_size` > 1 build the model from layers of `apex.transformer.tensor_parallel`. For `pp_size` > 1 the model is an
    `nn.Sequential`, which is cut into stages; or this process's own stage, a module with `set_input_tensor`, or a
    ModuleList of such chunks; or any model if `custom_policy(model, stage, stages)` returns a stage of it.

    - `precision`, `initial_scale` and others of the loss scale, `max_norm`, `use_fp8`: as in `LowLevelZeroPlugin`;
    - `zero_stage`: 0, or 1 or 2 to divide the optimizer state among replicas. `zero_bucket_size_in_m`,
      `cpu_offload`, `communication_dtype`, `overlap_communication` and `overlap_allgather` are then as in
      `LowLevelZeroPlugin`;
    - `broadcast_buffers`, `ddp_bucket_cap_mb`, `find_unused_parameters`, `check_reduction`, `gradient_as_bucket_view`,
      `static_graph`: as in `TorchDDPPlugin`, without ZeRO; `ddp_options` has further arguments of torch's
      DistributedDataParallel;
    - `num_microbatches` or `microbatch_size`: the division of a batch by `execute_pipeline`; `pp_size` > 1 needs one;
    - `pp_style`: "1f1b", "interleaved" with `num_model_chunks` > 1, or "zbv" with `num_model_chunks=2`;
    - `num_layers_per_stage`: the number of layers of an `nn.Sequential` in each stage, in the order of the stages;
    - `dp_outside`: whether the ranks of a pipeline are nearer to each other than replicas are;
    - `enable_sequence_parallelism` with `sequence_parallelism_mode`: "split_gather" (None) and "ring" need layers with
      `sequence_parallel_enabled` and `tp_size` > 1; "all_to_all" and "ring_attn" split sequences over `sp_size`
      context-parallel processes and set how attention modules with `cp_comm_type` exchange heads or keys. Batches must
      be cut by `get_batch_on_this_cp_rank` of `apex.transformer.context_parallel`;
    - `enable_fused_normalization`, `enable_flash_attention`, `enable_jit_fused`, `enable_all_optimization`: replace
      norms, attention, other modules that `apex.fuse` knows except heads with their loss, or all three;
    - `gradient_checkpoint_config`: a GradientCheckpointConfig, for layers that recompute their forward pass.

    `stage_manager` (None without pipelines), `dp_group`, `tp_group`, `pp_group`, `sp_group` and `pg_mesh` describe the
    position of this process.
    """

    takes_experts = True
    ep_size = 1  # the processes that hold the experts of one layer; MoeHybridParallelPlugin sets it

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int | None = None,
        precision: Any = "fp16",
        zero_stage: int = 0,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        parallel_output: bool = True,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        broadcast_buffers: bool = True,
        ddp_bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        zero_bucket_size_in_m: float = 12,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        custom_policy: Any = None,
        pp_style: str = "1f1b",
        num_model_chunks: int = 1,
        scheduler_nodes: Any = None,
        num_layers_per_stage: list[int] | None = None,
        gradient_checkpoint_config: Any = None,
        enable_metadata_cache: bool = True,
        make_vocab_size_divisible_by: int = 64,
        dp_outside: bool = True,
        overlap_p2p: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        inner_ring_size: int | None = None,
        *,
        norm_type: float = 2.0,
        enable_sequence_overlap: bool = False,
        ddp_options: dict[str, Any] | None = None,
    ) -> None:
        overrides = changed(HybridParallelPlugin.__init__, locals())
        super().__init__()
        world = dist.get_world_size()
        self.cp_comm_type = _exchange_of(overrides, tp_size)
        self.cp_size = 1 if self.cp_comm_type is None else overrides["sp_size"]
        sizes = f"tp_size={tp_size} times pp_size={pp_size}"
        sizes += f" times sp_size={self.cp_size}" if self.cp_size > 1 else ""
        if tp_size < 1 or pp_size < 1 or world % (tp_size * pp_size * self.cp_size):
            raise ValueError(f"{sizes} must divide the number of processes, {world}")
        if zero_stage not in (0, 1, 2) or (zero_stage == 2 and pp_size > 1):
            raise ValueError(f"zero_stage={zero_stage} must be 0, 1 or 2, and at most 1 with pp_size > 1")
        if pp_size > 1 and (num_microbatches is None) == (microbatch_size is None):
            raise ValueError("with pp_size > 1 one of num_microbatches and microbatch_size is needed, and not both")
        chunks = {"1f1b": num_model_chunks == 1, "interleaved": num_model_chunks > 1, "zbv": num_model_chunks == 2}
        if not chunks.get(pp_style, False):
            raise ValueError(
                f"pp_style={pp_style!r} with num_model_chunks={num_model_chunks}: use '1f1b' with 1, 'interleaved' "
                "with more, 'zbv' with 2"
            )
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported; 2 is")
        refuse(overrides, "fp8_communication", "communication_dtype=torch.bfloat16 halves the gradients of ZeRO")
        refuse(overrides, "inner_ring_size", "keys travel around one ring of sp_size processes")
        self.precision = own_precision("HybridParallelPlugin", locals())
        self.tp_size, self.pp_size, self.zero_stage, self.max_norm = tp_size, pp_size, zero_stage, max_norm
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        self.pp_style, self.custom_policy = pp_style, custom_policy
        self.placement = Placement(pp_size, num_model_chunks if pp_size > 1 else 1, pp_style == "zbv")
        self.num_layers_per_stage, self.gradient_checkpoint_config = num_layers_per_stage, gradient_checkpoint_config
        check_config(gradient_checkpoint_config, self.placement.stages)
        self.fusion = FusionArguments.of(locals())
        exchanges = zero_options(zero_bucket_size_in_m, communication_dtype, overlap_communication, overlap_allgather)
        self.zero_options = {**exchanges, "cpu_offload": cpu_offload}
        self.ddp_options = {**make_ddp_options(locals(), ddp_bucket_cap_mb), **(ddp_options or {})}
        _warn_of_unused(overrides, tp_size, pp_size, zero_stage)
        self._join_groups(dp_outside, enable_sequence_parallelism)

    def _join_groups(self, dp_outside: bool, sequences: bool) -> None:
        """Make the process groups of `apex.transformer`, or check existing ones, and store this process's groups."""
        replicas = dist.get_world_size() // (self.tp_size * self.pp_size * self.cp_size)
        # apex.transformer's own order corresponds to dp_outside=False.
        shape = {"dp": replicas, "pp": self.pp_size, "cp": self.cp_size, "tp": self.tp_size}
        if self.cp_size == 1:
            del shape["cp"]
        mesh: Any = shape if dp_outside and min(replicas, self.pp_size) > 1 else None
        if not parallel_state.model_parallel_is_initialized():
            virtual = self.placement.chunks if self.placement.chunks > 1 else None
            mesh = mesh and mesh_of_all(tuple(mesh.values()), tuple(mesh))
            parallel_state.initialize_model_parallel(
                self.tp_size,
                self.pp_size,
                virtual,
                context_parallel_size=self.cp_size,
                expert_model_parallel_size=self.ep_size,
                device_mesh=mesh,
            )
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
        )
        wanted = (self.tp_size, self.pp_size, self.cp_size)
        if sizes != wanted:
            count = 2 if sizes[2] == wanted[2] == 1 else 3  # compare context-parallel sizes only if one is above 1
            names = ", ".join(("tp_size", "pp_size", "sp_size")[:count])
            raise ValueError(f"apex.transformer is initialised with ({names}) = {sizes[:count]}, not {wanted[:count]}")
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.dp_group = parallel_state.get_data_parallel_group()
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        context = parallel_state.get_context_parallel_group()
        self.sp_group = self.tp_group if sequences and self.cp_comm_type is None else context
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.stage_manager = StageManager(self.placement, stage) if self.pp_size > 1 else None
        # If replicas are outside, neighbouring stages of a pipeline are tp_size * cp_size ranks apart.
        stages, is_outside = dist.get_process_group_ranks(self.pp_group), dp_outside
        if replicas > 1 and self.pp_size > 1:
            is_outside = stages[1] - stages[0] == self.tp_size * self.cp_size
            if is_outside != dp_outside:
                warn(f"dp_outside={dp_outside} has no effect: apex.transformer has groups in another order already")
        axes = [(replicas, self.dp_group), (self.pp_size, self.pp_group)]
        axes = [*(axes if is_outside else axes[::-1]), (self.tp_size, self.tp_group)]
        self.pg_mesh = GroupMesh((*(size for size, _ in axes), self.cp_size), (*(group for _, group in axes), context))

    def control_precision(self) -> bool:
        return True

    def support_no_sync(self) -> bool:
        return self.pp_size == 1

    def replica_groups(self) -> list[Any]:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return [replicas, parallel_state.get_tensor_model_parallel_group()]

    def data_place(self) -> tuple[int, int]:
        return parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        self._check_layers(model)
        self._set_exchange(model)
        chunks = self._chunks(model)
        config = self.gradient_checkpoint_config
        chosen = [chosen_layers(chunk, config, self._stage(index)) for index, chunk in enumerate(chunks)]
        self.fusion.apply(chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks))
        checkpoint_layers([layer for layers in chosen for layer in layers])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        replicas = dist.get_world_size(group)
        params = [param for chunk in chunks for param in chunk.parameters()]
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers()]
        broadcast_from_first([*(param for param in params if not is_expert(param)), *buffers], group)
        broadcast_from_first(filter(is_expert, params), parallel_state.get_expert_data_parallel_group())
        names = None if optimizer is None else _drop_other_stages(optimizer, chunks, self.pp_size > 1)
        # Before anything is cast, because masters may lack the attributes that mark split parameters and experts.
        kinds = [] if optimizer is None else counted(optimizer)
        saved = None
        if optimizer is not None and self.zero_stage:
            experts = own_group(parallel_state.get_expert_data_parallel_group())
            optimizer, saved = zero_optimizer(
                optimizer, process_group=own_group(group), expert_group=experts, **self.zero_options
            )
        boosted, wrapped, criterion = self.precision.configure(chunks, optimizer, criterion)  # type: ignore[arg-type]
        if saved is not None:
            load_plain_state(optimizer, saved)
        for index, chunk in enumerate(boosted):
            is_last = self._stage(index) == self.placement.stages - 1
            if isinstance(chunk, CastModel) and not is_last:
                chunk._casts = dataclasses.replace(chunk._casts, outputs=None)
            boosted[index] = _Stage(chunk)
        if replicas > 1 and not self.zero_stage:
            boosted = [replicated(chunk, "torch", self.ddp_options, group) for chunk in boosted]
        whole = HybridParallelModel(boosted)
        whole.has_stages = self.pp_size > 1
        if wrapped is None:
            return whole, None, criterion
        wrapped.max_norm, wrapped.names, wrapped.has_stages = self.max_norm, names, self.pp_size > 1
        wrapped.measure = lambda norm_type: grad_norm(wrapped.optim, kinds, norm_type)
        averages = False if self.zero_stage else None
        wrapped.finalize = lambda: finalize_model_grads(boosted, data_parallel=averages)  # type: ignore[operator]
        if isinstance(wrapped, AmpOptimizer):
            agree_on_overflows()
        if self.zero_stage:
            whole.masters = ExactWeights(optimizer)
        return whole, wrapped, criterion

    def _stage(self, chunk: int) -> int:
        return self.placement.stage(parallel_state.get_pipeline_model_parallel_rank(), chunk)

    def _check_layers(self, model: nn.Module) -> None:
        """Raise if `tp_size` > 1 and no layer of the model is split; all processes must call it."""
        if self.tp_size == 1:
            return
        is_split = any(getattr(param, "tensor_model_parallel", False) for param in model.parameters())
        if not any(gather_from_stages(is_split)):
            raise ValueError(
                f"tp_size={self.tp_size}, but no layer of the model is split; build it from "
                "apex.transformer.tensor_parallel, or use tp_size=1"
            )

    def _set_exchange(self, model: nn.Module) -> None:
        """Set whether attention modules exchange heads or keys (`cp_comm_type`); all processes must call it."""
        if self.cp_comm_type is None:
            return
        attentions = [module for module in model.modules() if hasattr(module, "cp_comm_type")]
        if not any(gather_from_stages(bool(attentions))):
            raise ValueError(
                f"sp_size={self.cp_size}, but no attention of the model has cp_comm_type: use context_attention of "
                "apex.transformer.context_parallel in it, or sp_size=1"
            )
        for module in attentions:
            module.cp_comm_type = self.cp_comm_type  # type: ignore[assignment]

    def _chunks(self, model: Any) -> list[nn.Module]:
        """Return this process's parts of a model."""
        if self.pp_size == 1:
            return [model]
        is_cut = self.custom_policy is None and isinstance(model, nn.Sequential)
        if self.num_layers_per_stage is not None and not is_cut:
            raise ValueError(
                f"num_layers_per_stage={self.num_layers_per_stage} is for an nn.Sequential without custom_policy; the "
                f"stages of this {type(model).__name__} are made already, or by custom_policy"
            )
        stages = [self._stage(chunk) for chunk in range(self.placement.chunks)]
        if self.custom_policy is not None:
            chunks = [self.custom_policy(model, stage, self.placement.stages) for stage in stages]
        elif is_cut:
            counts = self.num_layers_per_stage
            chunks = [CutSequential(model, stage, self.placement.stages, counts) for stage in stages]
        else:
            chunks = list(model) if isinstance(model, nn.ModuleList) else [model]
        if len(chunks) != len(stages) or not all(hasattr(chunk, "set_input_tensor") for chunk in chunks):
            raise ValueError(
                f"with pp_size={self.pp_size} the model must be an nn.Sequential, or {len(stages)} modules with "
                f"set_input_tensor, this process's stages; not a {type(model).__name__}"
            )
        return chunks

    @contextlib.contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for chunk in model.chunks:
                stack.enter_context(not_reduced(chunk, optimizer if optimizer is not None else model.optimizer))
            yield

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: Any,
        criterion: Any,
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        from ...transformer.pipeline_parallel import schedules

        tensors, structure = _pytree.tree_flatten(next(data_iter))
        device = next(model.parameters()).device
        tensors = [tensor.to(device) for tensor in tensors]
        size = self._microbatch_size(tensors[0].shape[0])
        ranks = parallel_state.get_data_parallel_world_size()
        _reconfigure_microbatch_calculator(dist.get_rank(), None, tensors[0].shape[0] * ranks, size, ranks)
        outputs: list[Any] = []

        def step(microbatch: list[Tensor], chunk: nn.Module) -> Any:
            inputs = _pytree.tree_unflatten(microbatch, structure)

            def loss_of(output: Any) -> tuple[Tensor, Tensor]:
                if return_outputs:
                    outputs.append(_pytree.tree_map_only(Tensor, Tensor.detach, output))
                loss = criterion(output, inputs)
                return loss, loss.detach()

            if isinstance(unwrapped(chunk), (CutSequential, nn.Sequential)):
                return chunk(microbatch[0]), loss_of
            if isinstance(inputs, dict):
                return chunk(**inputs), loss_of
            return (chunk(*inputs) if isinstance(inputs, (list, tuple)) else chunk(inputs)), loss_of

        run: Any = schedules.forward_backward_no_pipelining
        if self.pp_size > 1:
            by_style: dict[str, Any] = {
                "1f1b": schedules.forward_backward_pipelining_without_interleaving,
                "interleaved": schedules._forward_backward_pipelining_with_interleaving,
                "zbv": schedules.forward_backward_zero_bubble,
            }
            run = by_style[self.pp_style]
        forward_only = optimizer is None or not torch.is_grad_enabled()
        with contextlib.nullcontext() if forward_only else optimizer._held():
            scaler = None
            if not forward_only:
                scaler = SimpleNamespace(scale=optimizer.scale_loss)
                # A stage without a loss must know that its gradients are scaled: scale a zero.
                optimizer.scale_loss(torch.zeros((), dtype=torch.float32, device=device))
            losses = run(step, tensors, model.chunks, forward_only=forward_only, grad_scaler=scaler)
        return {
            "loss": torch.stack(losses).mean() if losses and return_loss else None,
            "outputs": _pytree.tree_map(lambda *parts: torch.cat(parts), *outputs) if outputs else None,
        }

    def _microbatch_size(self, samples: int) -> int:
        size = self.microbatch_size or samples // (self.num_microbatches or 1)
        if not size or samples % size:
            raise ValueError(
                f"a batch of {samples} samples is not a number of microbatches; num_microbatches="
                f"{self.num_microbatches}, microbatch_size={self.microbatch_size}"
            )
        return size


# The exchange of context-parallel processes in each mode of sequence parallelism; None: over the tp_size processes.
_EXCHANGES = {None: None, "split_gather": None, "ring": None, "all_to_all": "a2a", "ring_attn": "p2p"}


def _exchange_of(overrides: dict[str, Any], tp_size: int) -> str | None:
    """Return the exchange of context-parallel processes, None without them.

    Raise for unsupported arguments of sequence parallelism; warn of arguments that have no effect.
    """
    mode, size = overrides.get("sequence_parallelism_mode"), overrides.get("sp_size", 1)
    if "enable_sequence_parallelism" not in overrides:
        if size != 1:
            raise ValueError(f"sp_size={size} needs enable_sequence_parallelism=True")
        warn_of(overrides, "sequence_parallelism_mode", "enable_sequence_parallelism is False")
        return None
    if mode not in _EXCHANGES:
        accepted = ", ".join(repr(mode) for mode in _EXCHANGES if mode)
        raise ValueError(f"sequence_parallelism_mode={mode!r} must be one of {accepted}")
    exchange = _EXCHANGES[mode]
    if exchange is not None:
        if not isinstance(size, int) or size < 2:
            raise ValueError(f"sequence_parallelism_mode={mode!r} needs sp_size > 1, the processes of a sequence")
        return exchange
    if tp_size == 1:
        raise ValueError(
            f"enable_sequence_parallelism=True needs tp_size > 1: {mode or 'split_gather'!r} splits sequences over the "
            "processes that hold the parts of a layer"
        )
    if mode is None:
        get_dist_logger().info("sequence_parallelism_mode=None means 'split_gather'", ranks=[0])
    if mode == "ring":
        warn("sequence_parallelism_mode='ring' computes as 'split_gather' does: exchanges do not overlap products")
    if size != 1:
        warn(f"no effect of sp_size={size}: with {mode or 'split_gather'!r} sequences have tp_size={tp_size} parts")
    return None


def _warn_of_unused(overrides: dict[str, Any], tp_size: int, pp_size: int, zero_stage: int) -> None:
    """Warn of arguments that have no effect in this configuration; log the ones that never have an effect."""
    decided = "the layers of the model decide"
    pipelines = "overlap_p2p pp_style num_model_chunks num_layers_per_stage custom_policy"
    zero = "cpu_offload zero_bucket_size_in_m communication_dtype overlap_communication overlap_allgather"
    ddp = f"{DDP_ARGUMENTS} ddp_bucket_cap_mb ddp_options"
    for applies, names, why in (
        (tp_size > 1, "parallel_output make_vocab_size_divisible_by", decided),
        (tp_size == 1, "parallel_output make_vocab_size_divisible_by", "nothing is split with tp_size=1"),
        (pp_size > 1, "overlap_p2p", "messages between stages always travel beside computations"),
        (pp_size == 1, pipelines, "there are no stages with pp_size=1"),
        (True, "enable_sequence_overlap", decided),
        (zero_stage > 0, ddp, f"zero_stage={zero_stage} has no DDP"),
        (zero_stage == 0, zero, "they are for ZeRO, and zero_stage=0"),
    ):
        if applies:
            warn_of(overrides, names, why)
    note(overrides, "scheduler_nodes enable_metadata_cache", "schedules are made here, shapes travel with each tensor")


class _Stage(ModelWrapper):
    """A pipeline stage that casts its input tensor as a model casts its arguments."""

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        dtype = next((param.dtype for param in self.parameters() if param.dtype in HALF), None)
        if dtype is not None:
            tensors = [x.to(dtype) if x is not None and x.is_floating_point() else x for x in tensors]
        stage = unwrapped(self)
        if hasattr(stage, "set_input_tensor"):  # not if it is a whole model
            stage.set_input_tensor(tensors)


def _drop_other_stages(optimizer: Any, chunks: list[nn.Module], has_stages: bool) -> list[str | None]:
    """Remove other stages' parameters from an optimizer; return the names of the rest in the whole model."""
    own = {id(param) for chunk in chunks for param in chunk.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in own:
                optimizer.state.pop(param, None)
        group["params"] = [param for param in group["params"] if id(param) in own]
    named: dict[int, str] = {}
    for chunk, names in zip(chunks, names_in(chunks, has_stages), strict=True):
        named.update({id(param): names[key] for key, param in chunk.named_parameters()})
    return [named.get(id(param)) for group in optimizer.param_groups for param in group["params"]]
