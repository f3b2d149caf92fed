"""Execution of pipeline schedules: one executor runs the list of actions of any schedule.

Forward passes call the user's step function, backward passes call autograd. A message is posted when the executor
reaches its action, and waited for when a pass needs it. Before the first message between two stages, the sender
announces the shapes and dtypes of its tensors. All later messages must have the same shapes and dtypes.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._arguments import Count, Index
from ..._distributed.comparison import check_settings
from .. import parallel_state
from .._groups.device import parameter_device
from ..context_parallel._parts import size_and_rank
from ..enums import ModelType
from ..moe._losses import MoEAuxLossAutoScaler
from ._gradient_sync import PipelineGradientSync
from ._messages import Link, TensorSpec, Transfer, read_announcement, spec_of
from ._schedule import Action, ActionKind, schedule
from ._split_backward import backward_input
from ._steps import Batch, FwdStepFunc, backward_step, forward_step, free_output_tensor
from .utils import REPLICATED, get_kth_microbatch, get_model_type, get_num_microbatches, unwrap_model

Shapes = Callable[[int], "list[tuple[int, ...]] | None"]


class StepOptions(TypedDict, total=False):
    """Keyword options of the functions in `schedules`.

    Each function documents the options that it uses and ignores the others. Other names are ignored with a warning.

    - `tensor_shape`: shape of a microbatch between stages; if it is given, sender and receiver check it. For an
      encoder-decoder it is the encoder's shape, and `decoder_sequence_length` gives the decoder's length. With
      `sequence_parallel_enabled` each rank holds a part of the sequence.
    - `dtype`: float16 or bfloat16 enables autocast, unless `disable_autocast` is set. `grad_scaler` scales the loss.
    - `deallocate_pipeline_outputs`: frees the memory of outputs after they have been sent.
    - `custom_sync_context_handler`: makes a context that suppresses gradient reduction; `custom_grad_sync_func` is
      called after it. Modules in DistributedDataParallel need neither.
    - `num_micro_batches_with_partial_activation_checkpoints`: how many of the microbatches in flight on a stage are
      checkpointed only in part. `forward_step_func` then gets a third argument, which is False for these microbatches.

    The last four options are accepted for compatibility and have no effect, because messages never synchronize the
    device.
    """

    tensor_shape: Sequence[Count] | None
    decoder_sequence_length: Count | None
    sequence_parallel_enabled: bool
    dtype: torch.dtype | None
    disable_autocast: bool
    grad_scaler: Any
    deallocate_pipeline_outputs: bool
    custom_sync_context_handler: Callable[[], Any] | None
    custom_grad_sync_func: Callable[..., Any] | None
    custom_param_sync_func: Callable[[list[Tensor]], Any] | None
    num_micro_batches_with_partial_activation_checkpoints: Index | None
    async_comm: bool
    sync_batch_comm: bool
    overlap_p2p_comm: bool
    batch_p2p_comm: bool


class PassSettings:
    """Settings of a step that its passes and messages read.

    `shapes(stage)` returns the shapes that a stage sends, if the caller has declared them. If a rank has n forward
    passes in flight over all its chunks, `partial_checkpoints` of every n are checkpointed only in part. `param_sync`
    is called with the parameters of a chunk before the preceding chunk runs for the first time.
    """

    def __init__(self, forward_only: bool, options: StepOptions, shapes: Shapes | None = None) -> None:
        unknown = sorted(options.keys() - StepOptions.__annotations__.keys())
        if unknown:
            warnings.warn(  # upstream takes and ignores them, too
                f"ignoring unknown keyword arguments {', '.join(unknown)}; a step takes "
                f"{', '.join(sorted(StepOptions.__annotations__))}",
                stacklevel=3,
            )
        self.forward_only = forward_only
        self.dtype = options.get("dtype")
        self.grad_scaler = options.get("grad_scaler")
        self.disable_autocast = options.get("disable_autocast", False)
        self.deallocate = options.get("deallocate_pipeline_outputs", False)
        self.shapes = shapes
        self.partial_checkpoints: int | None = None
        self.param_sync: Callable[[list[Tensor]], Any] | None = None


def _check_step(microbatches: int, model: Sequence[nn.Module]) -> None:
    """Raise an error if there is nothing to run, or if a chunk cannot be given its input."""
    if microbatches < 1:
        raise ValueError(
            "the number of microbatches is 0: the global batch size is below the microbatch size times the "
            "data-parallel size (see rampup_batch_size)"
        )
    for chunk in unwrap_model(list(model), REPLICATED):  # the Booster's wrappers have methods of stages
        if not hasattr(chunk, "set_input_tensor"):
            raise TypeError(
                f"model must have a method set_input_tensor(tensors), which gets the list of a stage's inputs, [None] "
                f"in the first stage; {type(chunk).__name__} has none"
            )


class Step:
    """A training step, or a forward pass alone, of one rank."""

    def __init__(
        self,
        name: str,
        forward_step_func: FwdStepFunc,
        batch: Batch,
        model: Sequence[nn.Module],
        options: PassSettings,
        sync: PipelineGradientSync,
    ) -> None:
        self.microbatches, ranks, self.rank = get_num_microbatches(), 1, 0
        _check_step(self.microbatches, model)
        self.link: Link | None = None
        if name != "no_pipelining":
            ranks = parallel_state.get_pipeline_model_parallel_world_size()
            self.rank = parallel_state.get_pipeline_model_parallel_rank()
        if ranks > 1:
            self.link = Link(parallel_state.get_pipeline_model_parallel_group())
            self._compare(name, len(model), options.forward_only)
        self.placement, actions = schedule(name, ranks, len(model), self.microbatches, options.forward_only)
        self.actions = actions[self.rank]
        passes = (action.kind for action in self.actions if action.kind in _PASSES)
        self.forwards_in_flight = len(list(itertools.takewhile(lambda kind: kind is ActionKind.FORWARD, passes)))
        self.forwards = itertools.count()
        self.forward_step_func, self.batch, self.model = forward_step_func, batch, model
        self.options, self.sync = options, sync
        self.model_type: ModelType = get_model_type(model[0])
        self.losses: list[Any] = []
        if self.link is not None:
            self._start_communicator()
        # Tensors by (microbatch, chunk). `incoming` holds received inputs and gradients, or their transfers.
        self.incoming: dict[tuple[ActionKind, int, int], list[Tensor | Transfer]] = {}
        self.inputs: dict[tuple[int, int], list[Tensor | None]] = {}
        self.outputs: dict[tuple[int, int], list[Tensor]] = {}
        self.gradients: dict[tuple[int, int], list[Tensor]] = {}
        self.weight_passes: dict[tuple[int, int], tuple[Callable[[], None], Tensor | None]] = {}
        self.specs: dict[int, list[TensorSpec]] = {}  # shapes and dtypes that each stage sends forward
        self.synchronized: set[int] = set()
        self.backwards_left = Counter(
            action.chunk for action in self.actions if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        )

    def run(self, leave_sync_before: Action | None = None) -> list[Any]:
        """Run all actions and return the second results of the loss function, which only the last stage has.

        If anything fails, all ranks of the pipeline fail, and every context is left.
        """
        virtual = parallel_state.get_virtual_pipeline_model_parallel_rank()
        try:
            get_kth_microbatch(self.batch, self.microbatches - 1)  # raises if the batch is too short
            with torch.no_grad() if self.options.forward_only else self.sync.step(), self._router_losses():
                for action in self.actions:
                    if action == leave_sync_before:
                        self.sync.leave()
                    self.act(action)
                if self.link is not None:
                    self.link.finish()
        except BaseException:
            if self.link is not None:
                self.link.break_off()
            raise
        finally:
            parallel_state.set_virtual_pipeline_model_parallel_rank(virtual)
        return self.losses

    @contextlib.contextmanager
    def _router_losses(self) -> Iterator[None]:
        """Scale the losses of routers like the main loss, in every stage.

        The main loss is divided by the microbatches, and gradients by the context-parallel ranks; a router's loss is a
        sum over the parts of a sequence.
        """
        before = MoEAuxLossAutoScaler.loss_scale()
        if not self.options.forward_only:
            factor = size_and_rank(None)[0] / self.microbatches
            scale = torch.full((1,), factor, dtype=torch.float64, device=parameter_device())
            scaler = self.options.grad_scaler
            MoEAuxLossAutoScaler.set_loss_scale(scale if scaler is None else scaler.scale(scale))
        try:
            yield
        finally:
            MoEAuxLossAutoScaler.set_loss_scale(before)

    def _compare(self, schedule_name: str, chunks: int, forward_only: bool) -> None:
        """Raise in all ranks of the pipeline if their steps differ, because the ranks would wait forever.

        On Gloo every step is compared. Other backends must read the result back from the device, so they compare only
        the first step of a group.
        """
        assert self.link is not None
        if self.link.backend != dist.Backend.GLOO and self.link.group in _compared:
            return
        _compared.add(self.link.group)
        settings = {
            "schedule": schedule_name,
            "number of microbatches": self.microbatches,
            "number of model chunks": chunks,
            "forward_only": forward_only,
        }
        check_settings(settings, "pipeline steps", self.link.group)

    def _start_communicator(self) -> None:
        """Start NCCL's communicator, which NCCL creates at the first use of a group by all of its ranks at once."""
        assert self.link is not None
        if self.link.backend == dist.Backend.NCCL:
            dist.all_reduce(
                torch.zeros(1, dtype=torch.int32, device=parameter_device()), group=self.link.group, async_op=True
            )

    def act(self, action: Action) -> None:
        """Execute one action of the schedule."""
        kind, microbatch, chunk = action
        if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        if kind in _PASSES and self.link is not None:
            self.link.flush()
        getattr(self, kind.name.lower())(microbatch, chunk)

    def forward(self, microbatch: int, chunk: int) -> None:
        stage = self.placement.stage(self.rank, chunk)
        self._synchronize_parameters(chunk)
        inputs: list[Tensor | None] = [None]
        if stage:
            inputs = self._received(ActionKind.RECEIVE_FORWARD, microbatch, chunk)
            if not self.options.forward_only:
                for tensor in inputs:
                    if tensor is not None and tensor.is_floating_point():
                        tensor.requires_grad_(True)
        partial = self.options.partial_checkpoints
        outputs = forward_step(
            self.forward_step_func,
            get_kth_microbatch(self.batch, microbatch),
            self.model[chunk],
            inputs,
            self.losses,
            self.options.dtype,
            self.options.disable_autocast,
            None if partial is None else next(self.forwards) % self.forwards_in_flight >= partial,
            last_stage=stage == self.placement.stages - 1,
            num_microbatches=self.microbatches,
        )
        self.inputs[microbatch, chunk], self.outputs[microbatch, chunk] = inputs, outputs
        sent = self._hand_over(ActionKind.RECEIVE_FORWARD, stage + 1, microbatch, outputs)
        if self.options.forward_only:
            del self.inputs[microbatch, chunk]
            if not sent:
                del self.outputs[microbatch, chunk]

    def backward(self, microbatch: int, chunk: int) -> None:
        inputs, outputs, gradients = self._for_backward(microbatch, chunk)
        with self._last_backward(chunk, outputs[0]):
            input_gradients = backward_step(
                inputs,
                outputs,
                gradients,
                self.model_type,
                grad_scaler=self.options.grad_scaler,
                deallocate_pipeline_outputs=self.options.deallocate,
            )
        self._keep_gradients(microbatch, chunk, inputs, input_gradients)

    def backward_input(self, microbatch: int, chunk: int) -> None:
        if self.placement.stage(self.rank, chunk) == 0:
            self.backward(microbatch, chunk)  # the first stage sends no input gradient
            return
        inputs, (output, *_), (gradient, *_) = self._for_backward(microbatch, chunk)
        if gradient is None and self.options.grad_scaler is not None:
            output = self.options.grad_scaler.scale(output)
        tensors = [tensor for tensor in inputs if tensor is not None]
        input_gradients, weight_pass = backward_input(output, gradient, tensors)
        last = microbatch == self.microbatches - 1
        self.weight_passes[microbatch, chunk] = weight_pass, output if last else None
        self._keep_gradients(microbatch, chunk, inputs, input_gradients)

    def backward_weight(self, microbatch: int, chunk: int) -> None:
        if (microbatch, chunk) in self.weight_passes:
            weight_pass, output = self.weight_passes.pop((microbatch, chunk))
            with self._last_backward(chunk, output):
                weight_pass()

    @contextlib.contextmanager
    def _last_backward(self, chunk: int, output: Tensor | None) -> Iterator[None]:
        """Count the backward passes of a chunk, and reduce its gradients in the last one."""
        self.backwards_left[chunk] -= 1
        with contextlib.nullcontext() if self.backwards_left[chunk] else self.sync.last_backward(chunk, output):
            yield

    def _for_backward(self, microbatch: int, chunk: int) -> tuple[list[Any], list[Any], list[Any]]:
        inputs, outputs = self.inputs.pop((microbatch, chunk)), self.outputs.pop((microbatch, chunk))
        gradients: list[Any] = [None]
        if self.placement.stage(self.rank, chunk) + 1 < self.placement.stages:
            gradients = self._received(ActionKind.RECEIVE_BACKWARD, microbatch, chunk)
        return inputs, outputs, gradients

    def _keep_gradients(
        self, microbatch: int, chunk: int, inputs: list[Any], input_gradients: list[Tensor | None]
    ) -> None:
        """Keep the input gradients for the previous stage; an input without a gradient gets zeros."""
        stage = self.placement.stage(self.rank, chunk)
        if stage == 0:
            return
        gradients = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(inputs, input_gradients, strict=True)
        ]
        if self._hand_over(ActionKind.RECEIVE_BACKWARD, stage - 1, microbatch, gradients):
            self.gradients[microbatch, chunk] = gradients

    def _synchronize_parameters(self, chunk: int) -> None:
        for chunk_index in range(chunk, min(chunk + 2, len(self.model))):
            if self.options.param_sync is not None and chunk_index not in self.synchronized:
                self.options.param_sync(list(self.model[chunk_index].parameters()))
                self.synchronized.add(chunk_index)

    def _hand_over(self, kind: ActionKind, stage: int, microbatch: int, tensors: Sequence[Any]) -> bool:
        """Pass tensors to a stage on this rank. Return True if the stage is on another rank and they must be sent."""
        if stage == self.placement.stages:
            return False
        rank, chunk = self.placement.holder(stage)
        if rank == self.rank:
            self.incoming[kind, microbatch, chunk] = [tensor.detach() for tensor in tensors]
        return rank != self.rank

    def _received(self, kind: ActionKind, microbatch: int, chunk: int) -> list[Any]:
        tensors = self.incoming.pop((kind, microbatch, chunk))
        return [tensor.wait() if isinstance(tensor, Transfer) else tensor for tensor in tensors]

    def _route(self, kind: ActionKind, microbatch: int, chunk: int) -> tuple[int, int, str]:
        """Return a message's peer (global rank), its tag and its description for errors.

        The tensors of the message use the tags that follow.
        """
        stage, sending = (
            self.placement.stage(self.rank, chunk),
            kind in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD),
        )
        forward = kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
        other = stage + 1 if forward == sending else stage - 1
        peer = dist.get_global_rank(parallel_state.get_pipeline_model_parallel_group(), self.placement.holder(other)[0])
        verb, direction = ("sending", "to") if sending else ("receiving", "from")
        description = ("output" if other > stage else "input") + ("" if forward else "'s gradient")
        words = f"pipeline stage {stage}: {verb} the {description} of microbatch {microbatch} {direction} stage {other}"
        return peer, 8 * (2 * (microbatch * self.placement.stages + min(stage, other)) + forward), words

    def send_forward(self, microbatch: int, chunk: int) -> None:
        assert self.link is not None
        stage, outputs = self.placement.stage(self.rank, chunk), self.outputs[microbatch, chunk]
        peer, tag, description = self._route(ActionKind.SEND_FORWARD, microbatch, chunk)
        specs = [spec_of(tensor) for tensor in outputs]
        if stage not in self.specs:
            self.specs[stage] = specs
            announcement = self.link.announce(specs, outputs[0].device, peer, tag, description)
            self.link.flush()
            try:
                self._check_shapes(stage, microbatch, specs)
            except RuntimeError:
                announcement.wait()  # the receiver then raises the same error
                raise
        elif specs != self.specs[stage]:
            raise RuntimeError(
                f"pipeline stage {stage}, microbatch {microbatch}: the output is {_listed(specs)}, but that of earlier "
                f"microbatches {_listed(self.specs[stage])}: all microbatches of a step must have the same shape"
            )
        for index, tensor in enumerate(outputs, 1):
            self.link.send(tensor, peer, tag + index, description)
        free_output_tensor(outputs, self.options.deallocate)
        if self.options.forward_only:
            del self.outputs[microbatch, chunk]

    def receive_forward(self, microbatch: int, chunk: int) -> None:
        assert self.link is not None
        stage = self.placement.stage(self.rank, chunk) - 1
        if stage not in self.specs:
            announcement = self.link.receive_announcement(
                parameter_device(), *self._route(ActionKind.RECEIVE_FORWARD, microbatch, chunk)
            )
            self.link.flush()
            self.specs[stage] = read_announcement(announcement)
            self._check_shapes(stage, microbatch, self.specs[stage])
        self._receive(ActionKind.RECEIVE_FORWARD, microbatch, chunk, self.specs[stage])

    def _receive(self, kind: ActionKind, microbatch: int, chunk: int, specs: list[TensorSpec]) -> None:
        assert self.link is not None
        peer, tag, description = self._route(kind, microbatch, chunk)
        self.incoming[kind, microbatch, chunk] = [
            self.link.receive(spec, parameter_device(), peer, tag + index, description)
            for index, spec in enumerate(specs, 1)
        ]

    def _check_shapes(self, stage: int, microbatch: int, specs: list[TensorSpec]) -> None:
        """Raise if a stage's output does not have the declared shapes; runs in the sender and in the receiver."""
        shapes = None if self.options.shapes is None else self.options.shapes(stage)
        if shapes is not None and shapes != [spec.shape for spec in specs]:
            raise RuntimeError(
                f"pipeline stage {stage}, microbatch {microbatch}: the output is {_listed(specs)}, but stage "
                f"{stage + 1} expects {', '.join(map(str, shapes))}: see tensor_shape"
            )

    def send_backward(self, microbatch: int, chunk: int) -> None:
        assert self.link is not None
        peer, tag, description = self._route(ActionKind.SEND_BACKWARD, microbatch, chunk)
        for index, tensor in enumerate(self.gradients.pop((microbatch, chunk)), 1):
            self.link.send(tensor, peer, tag + index, description)

    def receive_backward(self, microbatch: int, chunk: int) -> None:
        specs = self.specs[self.placement.stage(self.rank, chunk)]
        self._receive(ActionKind.RECEIVE_BACKWARD, microbatch, chunk, specs)


# Pipeline groups whose first step has been compared.
_compared: WeakSet[Any] = WeakSet()
_PASSES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))
