"""Whole sequences through PyTorch's recurrent networks, if they compute the same result as a stack of layers.

A loop in Python launches a handful of kernels for each time step and layer; PyTorch's networks run all in one call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._library import autocast_dtype


class Fused(NamedTuple):
    """A PyTorch function that runs whole sequences of one kind of cell."""

    run: Callable[..., Any]
    mode: str  # cuDNN's name for it
    projects: bool


_fused: dict[Callable[..., Any], Fused] = {}


def has_sequence(run: Callable[..., Any], mode: str, projects: bool = False) -> Callable[[Any], Any]:
    """Register a cell: `run` computes its sequences, `mode` is cuDNN's name, `projects` if it can project outputs."""

    def mark(cell: Callable[..., Any]) -> Callable[..., Any]:
        _fused[cell] = Fused(run, mode, projects)
        return cell

    return mark


def has_fused(layers: Sequence[Any]) -> bool:
    """Return whether PyTorch has a function for these `RNNCell`s, which must have one kind and size and no hooks."""
    first, *others = layers
    fused = _fused.get(first.cell)
    if fused is None or (first.is_projected and not fused.projects):
        return False
    same = all(_kind(layer) == _kind(first) and layer.input_size == first.output_size for layer in others)
    return same and not any(map(_is_hooked, layers))


def _kind(layer: Any) -> tuple[Any, ...]:
    return layer.cell, layer.hidden_size, layer.output_size, layer.bias, layer.gate_size, layer.n_hidden_states


def _is_hooked(layer: Any) -> bool:
    """Return whether a layer has hooks, which a fused function would not call."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def run_fused(layers: Sequence[Any], sequence: Tensor, dropout: float) -> Tensor:
    """Return the outputs [T, B, O] for a sequence [T, B, I] and update the layers' hidden states."""
    states = [torch.stack(parts) for parts in zip(*(layer.hidden for layer in layers), strict=True)]
    weights = [weight for layer in layers for weight in _weights(layer)]
    dtype = autocast_dtype(sequence)
    # PyTorch's cast ends in oneDNN, which has no LSTM in half precision on some CPUs (torch 2.13 on aarch64).
    cast_here = dtype is not None and not torch.backends.cudnn.is_acceptable(sequence)
    if cast_here:
        dtype = torch.float64 if weights[0].dtype == torch.float64 else dtype  # autocast does not cast float64
        sequence, states, weights = sequence.to(dtype), [s.to(dtype) for s in states], [w.to(dtype) for w in weights]
    # `train`: PyTorch saves tensors for a backward pass only if it is True, and evaluation may need one too.
    options = (layers[0].bias, len(layers), dropout, torch.is_grad_enabled(), False, False)
    with torch.autocast(sequence.device.type, enabled=False) if cast_here else contextlib.nullcontext():
        run = _fused[layers[0].cell].run
        outputs, *states = run(sequence, states if len(states) > 1 else states[0], weights, *options)
    for index, layer in enumerate(layers):
        layer.hidden = [state[index] for state in states]
    return outputs


def _weights(layer: Any) -> list[Tensor]:
    candidates = [layer.w_ih, layer.w_hh, layer.b_ih, layer.b_hh, layer.w_ho if layer.is_projected else None]
    return [weight for weight in candidates if weight is not None]


@torch.no_grad()
def flatten(layers: Sequence[Any]) -> None:
    """Make the weights contiguous in memory, in cuDNN's order; do nothing if cuDNN is not used."""
    weights = [weight for layer in layers for weight in _weights(layer)]
    first = weights[0]
    alike = all(weight.dtype == first.dtype and weight.device == first.device for weight in weights)
    shared = len({weight.data_ptr() for weight in weights}) < len(weights)
    if not alike or shared or not torch.backends.cudnn.is_acceptable(first):
        return
    if not torch._use_cudnn_rnn_flatten_weight():
        return
    from torch.backends.cudnn import rnn

    layer = layers[0]
    projection = layer.output_size if layer.is_projected else 0
    with torch.cuda.device_of(first):
        torch._cudnn_rnn_flatten_weight(
            weights,
            len(weights) // len(layers),
            layer.input_size,
            rnn.get_cudnn_mode(_fused[layer.cell].mode),
            layer.hidden_size,
            projection,
            len(layers),
            False,
            False,
        )
