"""Whole sequences through PyTorch's own recurrent networks, where these compute what a stack of layers does.

A loop in Python launches a handful of kernels for each time and layer; PyTorch's networks run all of it in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops._library import autocast_dtype

if TYPE_CHECKING:
    from .RNNBackend import RNNCell


@dataclass(frozen=True)
class _Fused:
    """PyTorch's function for a kind of cell."""

    run: Callable[..., Any]
    mode: str  # cuDNN's name for it
    projects: bool = False


def _fused_of(layer: RNNCell) -> _Fused | None:
    from . import cells  # which imports the layers, which import this

    known = {
        cells.LSTMCell: _Fused(torch.lstm, "LSTM", projects=True),
        cells.GRUCell: _Fused(torch.gru, "GRU"),
        cells.RNNReLUCell: _Fused(torch.rnn_relu, "RNN_RELU"),
        cells.RNNTanhCell: _Fused(torch.rnn_tanh, "RNN_TANH"),
    }
    return known.get(layer.cell)


def has_fused(layers: Iterable[Any]) -> bool:
    """Whether PyTorch has a function for these layers: of one kind and size, with nothing hooked in between."""
    first, *others = layers
    fused = _fused_of(first)
    if fused is None or (first.is_projected and not fused.projects):
        return False
    same = all(_kind(layer) == _kind(first) and layer.input_size == first.output_size for layer in others)
    return same and all(_is_plain(layer) for layer in (first, *others))


def _kind(layer: RNNCell) -> tuple[Any, ...]:
    return layer.cell, layer.hidden_size, layer.output_size, layer.bias, layer.gate_size, layer.n_hidden_states


def _is_plain(layer: RNNCell) -> bool:
    """Not a subclass, which may compute something else, and without hooks, which would not be called."""
    from .RNNBackend import RNNCell

    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is RNNCell and not any(hooks)


def run_fused(layers: Iterable[Any], sequence: Tensor, dropout: float) -> Tensor:
    """The outputs [T, B, O] for a sequence [T, B, I]; updates the layers' hidden states."""
    layers = list(layers)
    fused = _fused_of(layers[0])
    assert fused is not None
    states = [torch.stack(parts) for parts in zip(*(layer.hidden for layer in layers), strict=True)]
    weights = [weight for layer in layers for weight in _weights(layer)]
    # What a backward pass needs is kept only in training, and one may follow in evaluation too.
    options = (layers[0].bias, len(layers), dropout, torch.is_grad_enabled(), False, False)
    dtype = autocast_dtype(sequence)
    if dtype is not None and not torch.backends.cudnn.is_acceptable(sequence):
        # PyTorch's cast ends in oneDNN, which has no LSTM in half precision on some CPUs (torch 2.13 on aarch64).
        sequence, states, weights = _autocast(sequence, states, weights, dtype)
        with torch.autocast(sequence.device.type, enabled=False):
            outputs, *states = fused.run(sequence, states if len(states) > 1 else states[0], weights, *options)
    else:
        outputs, *states = fused.run(sequence, states if len(states) > 1 else states[0], weights, *options)
    for index, layer in enumerate(layers):
        layer.hidden = [state[index] for state in states]
    return outputs


def _autocast(
    sequence: Tensor, states: list[Tensor], weights: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Everything in `dtype`; in float64 if the weights are, which autocast leaves alone."""
    wanted = torch.float64 if weights[0].dtype == torch.float64 else dtype
    return sequence.to(wanted), [state.to(wanted) for state in states], [weight.to(wanted) for weight in weights]


def _weights(layer: RNNCell) -> list[Tensor]:
    found: list[Tensor] = [layer.w_ih, layer.w_hh]
    if layer.b_ih is not None and layer.b_hh is not None:
        found += [layer.b_ih, layer.b_hh]
    return [*found, layer.w_ho] if layer.is_projected else found


@torch.no_grad()
def flatten(layers: Iterable[Any]) -> None:
    """Lays the weights one after the other in memory, as cuDNN wants them; does nothing where it is not used."""
    layers = list(layers)
    weights = [weight for layer in layers for weight in _weights(layer)]
    first = weights[0]
    alike = all(weight.dtype == first.dtype and weight.device == first.device for weight in weights)
    shared = len({weight.data_ptr() for weight in weights}) < len(weights)
    if not alike or shared or not torch.backends.cudnn.is_acceptable(first) or not has_fused(layers):
        return
    if not torch._use_cudnn_rnn_flatten_weight():
        return
    from torch.backends.cudnn import rnn

    fused, layer = _fused_of(layers[0]), layers[0]
    assert fused is not None
    projection = layer.output_size if layer.is_projected else 0
    with torch.cuda.device_of(first):
        torch._cudnn_rnn_flatten_weight(
            weights,
            len(weights) // len(layers),
            layer.input_size,
            rnn.get_cudnn_mode(fused.mode),
            layer.hidden_size,
            projection,
            len(layers),
            False,
            False,
        )
