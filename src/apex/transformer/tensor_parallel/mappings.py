"""Differentiable collectives around tensor-parallel layers.

Each mapping does one collective in the forward pass and another in the backward pass. The backward pass of each is the
forward pass of another, so second derivatives are right too. With one rank a mapping returns its input.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._arguments import checked
from ..._distributed import exchange
from ..parallel_state import get_tensor_model_parallel_group, get_tensor_model_parallel_world_size


def _over_ranks(run: Callable[..., Tensor], input_: Tensor, description: str, *dim: int) -> Tensor:
    if get_tensor_model_parallel_world_size() == 1:
        return input_
    return run(input_, get_tensor_model_parallel_group(), description, *dim)


def _reduce(input_: Tensor) -> Tensor:
    """Return the sum over the ranks."""
    return _over_ranks(exchange.sum_over, input_, "the all-reduce of a tensor-parallel layer")


def _split_along_last_dim(input_: Tensor) -> Tensor:
    """Return this rank's part of the last dimension."""
    return _over_ranks(exchange.part, input_, "splitting the last dimension", -1)


def _split_along_first_dim(input_: Tensor) -> Tensor:
    """Return this rank's part of the first dimension, the sequence."""
    return _over_ranks(exchange.part, input_, "splitting the sequence", 0)


def _gather_along_last_dim(input_: Tensor) -> Tensor:
    """Return all ranks' parts, concatenated along the last dimension."""
    return _over_ranks(exchange.gather, input_, "the all-gather of a last dimension", -1)


def _gather_along_first_dim(input_: Tensor) -> Tensor:
    """Return all ranks' parts, concatenated along the first dimension, the sequence."""
    return _over_ranks(exchange.gather, input_, "the all-gather of a sequence", 0)


def _reduce_scatter_along_first_dim(input_: Tensor) -> Tensor:
    """Return this rank's part, along the first dimension, of the sum over the ranks."""
    return _over_ranks(exchange.sum_of_part, input_, "the reduce-scatter of a sequence")


def _mapping(name: str, run: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Any:
    """Return an autograd function with `run` as forward pass and the mapping `backward` as backward pass."""
    methods = {
        "forward": staticmethod(lambda ctx, input_: run(input_)),
        "backward": staticmethod(lambda ctx, gradient: backward(gradient)),
        "__module__": __name__,
    }
    return types.new_class(name, (torch.autograd.Function,), exec_body=lambda body: body.update(methods))


def _mapped(function: Any, input_: Tensor) -> Tensor:
    return input_ if get_tensor_model_parallel_world_size() == 1 else function.apply(input_)


@checked
def copy_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Return the input; the backward pass sums its gradient over the ranks."""
    return _mapped(_CopyToModelParallelRegion, input_)


@checked
def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Return the sum over the ranks; the backward pass passes the gradient on unchanged."""
    return _mapped(_ReduceFromModelParallelRegion, input_)


@checked
def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Return this rank's part of the last dimension; the backward pass gathers the gradients."""
    return _mapped(_ScatterToModelParallelRegion, input_)


@checked
def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Gather the last dimension; the backward pass returns this rank's part of the gradient."""
    return _mapped(_GatherFromModelParallelRegion, input_)


@checked
def scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """Return this rank's part of the first dimension; the backward pass gathers the gradients."""
    return _mapped(_ScatterToSequenceParallelRegion, input_)


@checked
def gather_from_sequence_parallel_region(input_: Tensor, to_model_parallel: bool = True) -> Tensor:
    """Gather the first dimension.

    With `to_model_parallel` the ranks compute different results from the whole, and the backward pass returns this
    rank's part of the gradient's sum over the ranks. Otherwise it returns this rank's part of its own gradient.
    """
    if to_model_parallel:
        return _mapped(_GatherFromSequenceParallelRegion, input_)
    return _mapped(_GatherWholeSequence, input_)


@checked
def reduce_scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """Return this rank's part, along the first dimension, of the sum; the backward pass gathers the gradients."""
    return _mapped(_ReduceScatterToSequenceParallelRegion, input_)


def _gather_whole_sequence(input_: Tensor) -> Tensor:
    return gather_from_sequence_parallel_region(input_, to_model_parallel=False)


def _identity(input_: Tensor) -> Tensor:
    return input_.view_as(input_)


_CopyToModelParallelRegion = _mapping("_CopyToModelParallelRegion", _identity, reduce_from_tensor_model_parallel_region)
_ReduceFromModelParallelRegion = _mapping(
    "_ReduceFromModelParallelRegion", _reduce, copy_to_tensor_model_parallel_region
)
_ScatterToModelParallelRegion = _mapping(
    "_ScatterToModelParallelRegion", _split_along_last_dim, gather_from_tensor_model_parallel_region
)
_GatherFromModelParallelRegion = _mapping(
    "_GatherFromModelParallelRegion", _gather_along_last_dim, scatter_to_tensor_model_parallel_region
)
_ScatterToSequenceParallelRegion = _mapping(
    "_ScatterToSequenceParallelRegion", _split_along_first_dim, _gather_whole_sequence
)
_GatherWholeSequence = _mapping("_GatherWholeSequence", _gather_along_first_dim, scatter_to_sequence_parallel_region)
_GatherFromSequenceParallelRegion = _mapping(
    "_GatherFromSequenceParallelRegion", _gather_along_first_dim, reduce_scatter_to_sequence_parallel_region
)
_ReduceScatterToSequenceParallelRegion = _mapping(
    "_ReduceScatterToSequenceParallelRegion", _reduce_scatter_along_first_dim, gather_from_sequence_parallel_region
)
