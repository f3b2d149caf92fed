"""Tensor, pipeline and data parallelism together, by `apex.transformer`."""

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

from ...amp._amp_state import HALF
from ...parallel._flat import broadcast_from_first
from ...transformer import finalize_model_grads, parallel_state
from ...transformer._norms import counted, grad_norm
from ...transformer.amp.loss_scaler import agree_on_overflows
from ...transformer.pipeline_parallel._cut import CutSequential
from ...transformer.pipeline_parallel._schedule import Placement
from ...transformer.pipeline_parallel.utils import _reconfigure_microbatch_calculator
from .._precision import CastModel
from .._whole import names_in
from .._zero import ExactWeights, load_plain_state, zero_optimizer
from ..mixed_precision import AmpOptimizer
from ..wrappers import ModelWrapper, unwrapped
from .plugin_base import PipelinePluginBase, own_precision
from .torch_ddp_plugin import not_reduced, replicated

__all__ = ["HybridParallelModel", "HybridParallelPlugin"]

# Arguments of the original about kernels and shards of its own layers; here they are the model's.
_OF_LAYERS = (
    "sp_size enable_all_optimization enable_fused_normalization enable_flash_attention enable_jit_fused "
    "enable_sequence_overlap parallel_output make_vocab_size_divisible_by gradient_checkpoint_config dp_outside "
    "overlap_p2p overlap_communication overlap_allgather communication_dtype zero_bucket_size_in_m norm_type"
)


class HybridParallelModel(ModelWrapper):
    """A model, or this process's stage of it; `chunks` are its parts where it has several."""

    def __init__(self, chunks: list[nn.Module]) -> None:
        super().__init__(chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks))

    @property
    def chunks(self) -> list[nn.Module]:
        return list(self.module) if isinstance(self.module, nn.ModuleList) else [self.module]


class HybridParallelPlugin(PipelinePluginBase):
    """Trains a model that is divided among processes: `tp_size` have parts of each layer, `pp_size` have stages.

    The rest of the processes have the same parts and different data. A model for `tp_size` > 1 is made of layers of
    `apex.transformer.tensor_parallel`, after the plugin. With `pp_size` > 1 it is an `nn.Sequential`, which is cut into
    stages; or this process's own stage, a module with `set_input_tensor`, or a ModuleList of such chunks; or
    `custom_policy(model, stage, stages)` makes a stage of it.

    - `precision`, `initial_scale` and others of the loss scale, `max_norm`: as in `LowLevelZeroPlugin`;
    - `zero_stage`: 0, or 1 or 2 for an optimizer whose state is divided among processes with the same parts;
    - `num_microbatches` or `microbatch_size`: how `execute_pipeline` divides a batch; one is needed with `pp_size` > 1;
    - `pp_style`: "1f1b", "interleaved" with `num_model_chunks` > 1, or "zbv" with 2 of them;
    - `enable_sequence_parallelism`, with `sequence_parallelism_mode="split_gather"`: what layers with
      `sequence_parallel_enabled` need is always done; other modes are not there;
    - `ddp_options`: arguments of torch's DistributedDataParallel.
    """

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        precision: Any = "fp16",
        zero_stage: int = 0,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        max_norm: float = 0.0,
        pp_style: str = "1f1b",
        num_model_chunks: int = 1,
        custom_policy: Any = None,
        ddp_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        world = dist.get_world_size()
        if tp_size < 1 or pp_size < 1 or world % (tp_size * pp_size):
            raise ValueError(f"tp_size={tp_size} times pp_size={pp_size} must divide the number of processes, {world}")
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
        if enable_sequence_parallelism and sequence_parallelism_mode not in (None, "split_gather"):
            raise NotImplementedError(
                f"sequence_parallelism_mode={sequence_parallelism_mode!r} is not there; 'split_gather' is"
            )
        scaling = {name: value for name, value in options.items() if name not in _OF_LAYERS.split()}
        self.precision = own_precision("HybridParallelPlugin", precision, scaling)
        self.tp_size, self.pp_size, self.zero_stage, self.max_norm = tp_size, pp_size, zero_stage, max_norm
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        self.pp_style, self.custom_policy, self.ddp_options = pp_style, custom_policy, ddp_options or {}
        self.placement = Placement(pp_size, num_model_chunks if pp_size > 1 else 1, pp_style == "zbv")
        if not parallel_state.model_parallel_is_initialized():
            virtual = num_model_chunks if pp_size > 1 and num_model_chunks > 1 else None
            parallel_state.initialize_model_parallel(tp_size, pp_size, virtual)
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if found != (tp_size, pp_size):
            raise ValueError(
                f"apex.transformer is initialised with (tp_size, pp_size) = {found}, not {tp_size, pp_size}"
            )

    def control_precision(self) -> bool:
        return True

    def support_no_sync(self) -> bool:
        return self.pp_size == 1

    def data_place(self) -> tuple[int, int]:
        return parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        chunks = self._chunks(model)
        group = parallel_state.get_data_parallel_group()
        replicas = dist.get_world_size(group)
        broadcast_from_first([tensor for c in chunks for tensor in (*c.parameters(), *c.buffers())], group)
        names = None if optimizer is None else _keep_own(optimizer, chunks, self.pp_size > 1)
        # Before anything is cast: masters of half-precision parameters may not say whether these are split.
        is_counted = [] if optimizer is None else counted(optimizer)
        saved = None
        if optimizer is not None and self.zero_stage:
            optimizer, saved = zero_optimizer(optimizer, process_group=group)
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
        wrapped.measure = lambda norm_type: grad_norm(wrapped.optim, is_counted, norm_type)
        averages = False if self.zero_stage else None
        wrapped.finalize = lambda: finalize_model_grads(boosted, data_parallel=averages)  # type: ignore[operator]
        if isinstance(wrapped, AmpOptimizer):
            agree_on_overflows()
        if self.zero_stage:
            whole.masters = ExactWeights(optimizer)
        return whole, wrapped, criterion

    def _stage(self, chunk: int) -> int:
        return self.placement.stage(parallel_state.get_pipeline_model_parallel_rank(), chunk)

    def _chunks(self, model: Any) -> list[nn.Module]:
        """This process's parts of a model."""
        if self.pp_size == 1:
            return [model]
        stages = [self._stage(chunk) for chunk in range(self.placement.chunks)]
        if self.custom_policy is not None:
            found = [self.custom_policy(model, stage, self.placement.stages) for stage in stages]
        elif isinstance(model, nn.Sequential):
            found = [CutSequential(model, stage, self.placement.stages) for stage in stages]
        else:
            found = list(model) if isinstance(model, nn.ModuleList) else [model]
        if len(found) != len(stages) or not all(hasattr(chunk, "set_input_tensor") for chunk in found):
            raise ValueError(
                f"with pp_size={self.pp_size} the model must be an nn.Sequential, or {len(stages)} modules with "
                f"set_input_tensor, this process's stages; not a {type(model).__name__}"
            )
        return found

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
            run = {
                "1f1b": schedules.forward_backward_pipelining_without_interleaving,
                "interleaved": schedules._forward_backward_pipelining_with_interleaving,
                "zbv": schedules.forward_backward_zero_bubble,
            }[self.pp_style]
        forward_only = optimizer is None or not torch.is_grad_enabled()
        with contextlib.nullcontext() if forward_only else optimizer._held():
            scaler = None
            if not forward_only:
                scaler = SimpleNamespace(scale=optimizer.scale_loss)
                # Stages without a loss scale nothing, and have scaled gradients all the same.
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


# Stages ---------------------------------------------------------------------------------------------------------------


class _Stage(ModelWrapper):
    """A stage whose input, which it has from the stage before, is cast as arguments of a model are."""

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        dtype = next((param.dtype for param in self.parameters() if param.dtype in HALF), None)
        if dtype is not None:
            tensors = [each.to(dtype) if each is not None and each.is_floating_point() else each for each in tensors]
        stage = unwrapped(self)
        if hasattr(stage, "set_input_tensor"):  # a whole model has none
            stage.set_input_tensor(tensors)


def _keep_own(optimizer: Any, chunks: list[nn.Module], has_stages: bool) -> list[str | None]:
    """Leaves an optimizer the parameters that are in this process's stage; their names in the whole model."""
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
