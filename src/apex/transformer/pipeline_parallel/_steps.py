"""The forward and the backward pass of one microbatch through a pipeline stage, and the release of sent outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from ..._arguments import checked
from ..._distributed import exchange
from .. import parallel_state
from .._groups.device import parameter_device
from ..context_parallel._parts import size_and_rank
from ..enums import ModelType
from .p2p_communication import FutureTensor
from .utils import REPLICATED, get_model_type, get_num_microbatches, unwrap_model

Batch = Any  # a tensor, tensors in a list or tuple, or None if a stage needs no data
Model = nn.Module | list[nn.Module]  # a stage, or the list of a rank's chunks
LossFunc = Callable[[Tensor], tuple[Any, ...]]
FwdStepFunc = Callable[..., tuple[Tensor, LossFunc]]
# A tensor, None, or a list of these.
Tensors = Tensor | FutureTensor | Sequence[Tensor | FutureTensor | None] | None

_AUTOCAST_DTYPES = (torch.float16, torch.bfloat16)


def _listed(tensors: Any) -> list[Any]:
    """Return tensors as a list, after waiting for futures."""
    items = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    return [tensor.get() if isinstance(tensor, FutureTensor) else tensor for tensor in items]


def _passes_encoder_on(model_type: ModelType) -> bool:
    """Return True if a stage forwards the encoder's output beside its own."""
    return model_type == ModelType.encoder_and_decoder and parallel_state.is_pipeline_stage_after_split()


def _loss_of(results: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the loss and the value to report, from the two or three `results` of a loss function.

    Gradients become means over data-parallel and context-parallel ranks. If context-parallel ranks have different
    numbers of tokens, their sums are divided by the mean number.
    """
    if not isinstance(results, tuple | list) or len(results) not in (2, 3):
        raise TypeError(
            "the loss function must return (mean loss, value to report), or (sum of losses, number of tokens, value to "
            f"report), got {results!r:.80}"
        )
    if len(results) == 2:
        return results[0], results[1]
    total, tokens, reduced = results
    ranks, _ = size_and_rank(None)
    wide = torch.float64 if total.dtype == torch.float64 else torch.float32
    count = torch.as_tensor(tokens, dtype=wide, device=total.device)
    if ranks > 1:
        group = parallel_state.get_context_parallel_group()
        count = exchange.sum_over(count, group, "the number of tokens of context-parallel ranks")
    return total * ranks / count.clamp(min=1), reduced


@checked
def forward_step(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: nn.Module,
    input_tensor: Tensors,
    losses_reduced: list[Any],
    dtype: torch.dtype | None,
    disable_autocast: bool = False,
    checkpoint_activations_micro_batch: bool | None = None,
    *,
    last_stage: bool | None = None,
    num_microbatches: int | None = None,
) -> Any:
    """Run one microbatch through a stage and return its output for the next stage, or the loss in the last stage.

    The model's `set_input_tensor` gets the inputs from the previous stage as a list. float16 or bfloat16 as `dtype`
    enables autocast. In the last stage `loss_func` returns the mean loss of this process's tokens and a value, or the
    sum of its losses, the number of its tokens and a value. The loss is divided by the number of microbatches, and the
    value is appended to `losses_reduced`. Decoder stages behind an encoder return two tensors: their output and the
    encoder's. Other stages return a list only if `input_tensor` is a list.
    """
    inputs = _listed(input_tensor)
    module = unwrap_model(model, REPLICATED)
    module.set_input_tensor(inputs)  # type: ignore[union-attr,operator]
    enabled = dtype in _AUTOCAST_DTYPES and not disable_autocast
    last = parallel_state.is_pipeline_last_stage() if last_stage is None else last_stage
    extra = () if checkpoint_activations_micro_batch is None else (checkpoint_activations_micro_batch,)
    with torch.autocast(parameter_device().type, dtype if enabled else None, enabled):
        output, loss_func = forward_step_func(batch, model, *extra)
        if last:
            loss, reduced = _loss_of(loss_func(output))
            output = loss / (get_num_microbatches() if num_microbatches is None else num_microbatches)
            losses_reduced.append(reduced)
    if _passes_encoder_on(get_model_type(module)):
        return [output, inputs[-1]]
    return [output] if isinstance(input_tensor, list) else output


@checked
def backward_step(
    input_tensor: Tensors,
    output_tensor: Tensors,
    output_tensor_grad: Tensors,
    model_type: ModelType,
    *,
    grad_scaler: Any = None,
    deallocate_pipeline_outputs: bool = False,
) -> Any:
    """Run the backward pass of one microbatch through a stage and return the gradient of its input.

    The result is a list if `input_tensor` is a list. If `output_tensor_grad` is None, the output is the loss, which
    `grad_scaler` scales.
    """
    inputs, outputs, gradients = _listed(input_tensor), _listed(output_tensor), _listed(output_tensor_grad)
    for tensor in inputs:
        if tensor is not None:
            tensor.retain_grad()
    output = outputs[0]
    if gradients[0] is None and grad_scaler is not None:
        output = grad_scaler.scale(output)
    freed = gradients[0] is not None and output.shape != gradients[0].shape
    if deallocate_pipeline_outputs and freed:
        custom_backward(output, gradients[0])
    elif gradients[0] is None or output.requires_grad:  # False if all parameters of a first stage are frozen
        torch.autograd.backward(output, grad_tensors=gradients[0])
    input_gradients = [None if tensor is None else tensor.grad for tensor in inputs]
    # Add the gradient from later decoder stages, which also used the encoder's output.
    if _passes_encoder_on(model_type) and len(gradients) > 1 and gradients[1] is not None and inputs[-1] is not None:
        input_gradients[-1] = gradients[1] if input_gradients[-1] is None else input_gradients[-1].add_(gradients[1])
    return input_gradients if isinstance(input_tensor, list) else input_gradients[0]


@checked
def free_output_tensor(output_tensors: Tensors, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the memory of outputs that have been sent; the backward pass only needs their autograd graph.

    Views are left unchanged, because the tensor that they belong to stays alive.
    """
    if not deallocate_pipeline_outputs:
        return
    for tensor in _listed(output_tensors):
        if tensor is not None and tensor._base is None and tensor.grad_fn is not None:
            tensor.data = torch.empty((1,), dtype=tensor.dtype, device=tensor.device)


@checked
def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
    """Run the backward pass of an output whose memory was freed, which `torch.autograd.backward` would refuse."""
    assert output.numel() == 1, "output should be pseudo-'freed' in schedule, to optimize memory"
    if grad_output is None:
        grad_output = torch.ones_like(output, memory_format=torch.preserve_format)
    Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        (output,), (grad_output,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
