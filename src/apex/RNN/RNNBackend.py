"""Recurrent layers that keep their hidden state from call to call, and networks of them.

Shapes: T time, B batch, I input, O output, L layers. A network takes [T, B, I], or [B, T, I] with `batch_first`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._checks import check_floats
from ..ops._library import autocast_dtype
from . import _sequences


class RNNCell(nn.Module):
    """A recurrent layer: weights, a function that computes one step, and the hidden state.

    `cell(input, hidden, w_ih, w_hh, b_ih=, b_hh=)` computes a step; `hidden` is a tensor if there is one hidden state,
    else a list. `gate_multiplier` is the number of gates (4 for LSTMs, 3 for GRUs, else 1). If `output_size` differs
    from `hidden_size`, a linear layer (`w_ho`) projects the first hidden state, and the result is the output.

    `hidden` persists between calls: `reset_hidden` zeroes it, `detach_hidden` keeps the values but ends the graph.
    """

    def __init__(
        self,
        gate_multiplier: int,
        input_size: int,
        hidden_size: int,
        cell: Callable[..., Any],
        n_hidden_states: int = 2,
        bias: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        self.gate_multiplier = gate_multiplier
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.cell = cell
        self.bias = bias
        self.output_size = hidden_size if output_size is None else output_size
        self.gate_size = gate_multiplier * hidden_size
        self.n_hidden_states = n_hidden_states
        for name in ("input_size", "hidden_size", "output_size", "n_hidden_states"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

        self.w_ih = nn.Parameter(torch.empty(self.gate_size, input_size))
        self.w_hh = nn.Parameter(torch.empty(self.gate_size, self.output_size))
        if self.is_projected:
            self.w_ho = nn.Parameter(torch.empty(self.output_size, hidden_size))
        self.b_ih = nn.Parameter(torch.empty(self.gate_size)) if bias else None
        self.b_hh = nn.Parameter(torch.empty(self.gate_size)) if bias else None
        self.hidden: list[Any] = [None] * n_hidden_states
        self.reset_parameters()

    @property
    def is_projected(self) -> bool:
        """Return whether the output's size differs from the hidden state's."""
        return self.output_size != self.hidden_size

    def new_like(self, new_input_size: int | None = None) -> RNNCell:
        """Return a new layer of the same kind and sizes, with another input size if it is given."""
        return type(self)(
            self.gate_multiplier,
            self.input_size if new_input_size is None else new_input_size,
            self.hidden_size,
            self.cell,
            self.n_hidden_states,
            self.bias,
            self.output_size,
        )

    def reset_parameters(self, gain: float = 1) -> None:
        """Draw new parameters, uniform between -1/sqrt(hidden_size) and 1/sqrt(hidden_size); `gain` is not used."""
        bound = 1 / math.sqrt(self.hidden_size)
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Set hidden states to zero if they do not exist yet or have another batch size."""
        for index, state in enumerate(self.hidden):
            if state is None or state.size(0) != bsz:
                size = self.output_size if index == 0 else self.hidden_size
                self.hidden[index] = self.w_ih.new_zeros(bsz, size)

    def reset_hidden(self, bsz: int) -> None:
        """Set all hidden states to zero."""
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Detach the hidden states, so that a backward pass stops there."""
        if any(state is None for state in self.hidden):
            raise RuntimeError("there is no hidden state to detach yet; init_hidden, reset_hidden and forward make one")
        self.hidden = [state.detach() for state in self.hidden]

    def init_inference(self, bsz: int) -> None:
        """Set all hidden states to zero, for a sequence that is fed step by step."""
        self.reset_hidden(bsz)

    def prepare_hidden(self, input: Tensor) -> None:
        """Make the hidden states fit an input [B, I]: create missing ones, and use the weights' device and dtype."""
        self.init_hidden(input.size(0))
        weight = self.w_ih
        # Autocast chooses dtypes itself, and states of its dtype must not be cast up and down at every step.
        dtype = weight.dtype if autocast_dtype(weight) is None else None
        self.hidden = [state.to(device=weight.device, dtype=dtype or state.dtype) for state in self.hidden]

    def _weights(self) -> tuple[Tensor, ...]:
        return self.w_ih, self.w_hh

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Compute one step [B, I] from the stored state; return the new state, with the output [B, O] first."""
        self.prepare_hidden(input)
        old_state = self.hidden[0] if self.n_hidden_states == 1 else self.hidden
        new_state = self.cell(input, old_state, *self._weights(), b_ih=self.b_ih, b_hh=self.b_hh)
        self.hidden = [new_state] if self.n_hidden_states == 1 else list(new_state)
        if self.is_projected:
            self.hidden[0] = F.linear(self.hidden[0], self.w_ho)
        return tuple(self.hidden)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, with detached hidden states, as both refuse non-leaf tensors."""
        hidden = [None if state is None else state.detach() for state in self.hidden]
        return {**self.__dict__, "hidden": hidden}


class _Network(nn.Module):
    """Base of networks: methods that call a method of all their parts."""

    rnns: nn.ModuleList

    def reset_parameters(self) -> None:
        """Draw new parameters in all layers."""
        self._all("reset_parameters")

    def init_hidden(self, bsz: int) -> None:
        """Set hidden states to zero if they do not exist yet or have another batch size."""
        self._all("init_hidden", bsz)

    def detach_hidden(self) -> None:
        """Detach the hidden states, so that a backward pass stops there."""
        self._all("detach_hidden")

    def reset_hidden(self, bsz: int) -> None:
        """Set all hidden states to zero."""
        self._all("reset_hidden", bsz)

    def init_inference(self, bsz: int) -> None:
        """Set all hidden states to zero, for a sequence that is fed step by step."""
        self._all("init_inference", bsz)

    def _all(self, method: str, *arguments: Any) -> None:
        for rnn in self.rnns:
            getattr(rnn, method)(*arguments)


class stackedRNN(_Network):
    """A stack of recurrent layers.

    `inputRNN` is the first layer, which the others are modelled on, or a list of `num_layers` layers. In training,
    `dropout` is the share of each layer's outputs that are set to zero; the last layer has no dropout.
    """

    def __init__(
        self, inputRNN: RNNCell | list[RNNCell], num_layers: int = 1, dropout: float = 0, batch_first: bool = False
    ) -> None:
        super().__init__()
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout is {dropout}; it must be between 0 and 1")
        self.dropout = dropout
        self.batch_first = batch_first
        self.rnns = nn.ModuleList(_layers(inputRNN, num_layers))
        self.nLayers = len(self.rnns)

    def forward(self, input: Tensor, collect_hidden: bool = False, reverse: bool = False) -> tuple[Tensor, list[Any]]:
        """Return the outputs [T, B, O], and a list of the final hidden states, each [L, B, O or H].

        With `collect_hidden`, each entry of that list is a list of T such tensors, one for each time. `reverse` goes
        through the sequence from its end to its start; outputs and collected states stay in the order of the input.
        """
        check_floats(input=input)
        if isinstance(collect_hidden, Tensor | tuple | list):
            raise TypeError("collect_hidden is a flag, and no hidden state as in torch.nn: the layers keep theirs")
        if input.dim() != 3 or not input.numel():
            layout = "[batch, time, input]" if self.batch_first else "[time, batch, input]"
            raise ValueError(f"input has shape {tuple(input.shape)}; expected is {layout}, and not empty")
        features = self.rnns[0].input_size
        if input.shape[-1] != features:  # oneDNN's LSTM does not check it and reads other memory
            raise ValueError(f"input has shape {tuple(input.shape)}; its last dimension must be input_size, {features}")
        sequence = input.transpose(0, 1) if self.batch_first else input
        if reverse:
            sequence = sequence.flip(0)
        for layer in self.rnns:
            layer.prepare_hidden(sequence[0])  # type: ignore[operator]
        states: list[Any]
        if not collect_hidden and self._has_fused():
            outputs = _sequences.run_fused(list(self.rnns), sequence, self.dropout if self.training else 0.0)
            states = [torch.stack(parts) for parts in self._hidden_by_kind()]
        else:
            outputs, states = self._step_by_step(sequence, collect_hidden)
        if reverse:
            outputs = outputs.flip(0)
            states = [entry[::-1] for entry in states] if collect_hidden else states
        return (outputs.transpose(0, 1) if self.batch_first else outputs), states

    def flatten_parameters(self) -> None:
        """Make the weights contiguous for cuDNN; otherwise it would copy them in every call."""
        if self._has_fused():
            _sequences.flatten(list(self.rnns))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> stackedRNN:
        super()._apply(fn, recurse)
        self.flatten_parameters()
        return self

    def _has_fused(self) -> bool:
        """Return whether a PyTorch function computes whole sequences; never for subclasses, which may differ."""
        return all(type(layer) is RNNCell for layer in self.rnns) and _sequences.has_fused(list(self.rnns))

    def _step_by_step(self, sequence: Tensor, collect_hidden: bool) -> tuple[Tensor, list[Any]]:
        outputs, collected = [], []
        for value in sequence:
            for index, layer in enumerate(self.rnns):
                if index and self.dropout:
                    value = F.dropout(value, self.dropout, self.training)
                value = layer(value)[0]
            outputs.append(value)
            if collect_hidden:
                collected.append([torch.stack(parts) for parts in self._hidden_by_kind()])
        if collect_hidden:
            return torch.stack(outputs), [list(entry) for entry in zip(*collected, strict=True)]
        return torch.stack(outputs), [torch.stack(parts) for parts in self._hidden_by_kind()]

    def _hidden_by_kind(self) -> list[tuple[Tensor, ...]]:
        """Return a tuple for each kind of hidden state, with the state of every layer."""
        return list(zip(*(layer.hidden for layer in self.rnns), strict=True))  # type: ignore[arg-type]


class bidirectionalRNN(_Network):
    """Two stacks of layers, one run forwards and one backwards along the sequence; their outputs are concatenated.

    Unlike in torch.nn, the directions meet only at the end: a layer's input is the layer below of its own direction.
    """

    def __init__(
        self, inputRNN: RNNCell | list[RNNCell], num_layers: int = 1, dropout: float = 0, batch_first: bool = False
    ) -> None:
        super().__init__()
        self.dropout = dropout
        other = [cell.new_like() for cell in inputRNN] if isinstance(inputRNN, list) else inputRNN.new_like()
        self.fwd = stackedRNN(inputRNN, num_layers, dropout, batch_first)
        self.bckwrd = stackedRNN(other, num_layers, dropout, batch_first)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(self, input: Tensor, collect_hidden: bool = False) -> tuple[Tensor, tuple[Any, ...]]:
        """Return the outputs [T, B, 2O], and the hidden states as in `stackedRNN`, both directions concatenated."""
        outputs, states = self.fwd(input, collect_hidden=collect_hidden)
        reversed_outputs, reversed_states = self.bckwrd(input, collect_hidden=collect_hidden, reverse=True)
        pairs = list(zip(states, reversed_states, strict=True))
        if collect_hidden:
            joined: tuple[Any, ...] = tuple(
                [torch.cat(both, -1) for both in zip(*entry, strict=True)] for entry in pairs
            )
        else:
            joined = tuple(torch.cat(both, -1) for both in pairs)
        return torch.cat((outputs, reversed_outputs), -1), joined


def _layers(input_rnn: RNNCell | list[RNNCell], count: int) -> Sequence[RNNCell]:
    if isinstance(input_rnn, list):
        if len(input_rnn) != count:
            raise ValueError(f"inputRNN has {len(input_rnn)} layers, but num_layers is {count}")
        return input_rnn
    if not isinstance(input_rnn, RNNCell):
        raise TypeError(f"inputRNN must be an RNNCell or a list of them, not {type(input_rnn).__name__}")
    if count < 1:
        raise ValueError(f"num_layers is {count}; it must be at least 1")
    return [input_rnn, *(input_rnn.new_like(input_rnn.output_size) for _ in range(count - 1))]
