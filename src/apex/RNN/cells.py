"""Cells: functions that compute one step of each recurrent network.

Shapes: B batch, I input, H hidden, O output (H unless it is projected), G gates (4H for LSTM, 3H for GRU, else H).

    input [B, I]   w_ih [G, I]   w_hh [G, O]   b_ih, b_hh [G]   state: h [B, O], and c [B, H] for LSTMs
    mLSTM also has w_mih [O, I] and w_mhh [O, O]

A cell returns its new state before any projection: h [B, H], and c [B, H].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._sequences import has_sequence
from .RNNBackend import RNNCell

_HALF = (torch.float16, torch.bfloat16)
States = Sequence[Tensor]


@has_sequence(torch.rnn_relu, "RNN_RELU")
def RNNReLUCell(
    input: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Compute `max(w_ih x + b_ih + w_hh h + b_hh, 0)`."""
    return torch.relu(F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh))


@has_sequence(torch.rnn_tanh, "RNN_TANH")
def RNNTanhCell(
    input: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Compute `tanh(w_ih x + b_ih + w_hh h + b_hh)`."""
    return torch.tanh(F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh))


@has_sequence(torch.gru, "GRU")
def GRUCell(
    input: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Compute one step of torch.nn.GRU, with gates in the order reset, update, new."""
    return torch.gru_cell(input, hidden, w_ih, w_hh, b_ih, b_hh)


@has_sequence(torch.lstm, "LSTM", projects=True)
def LSTMCell(
    input: Tensor, hidden: States, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one step of torch.nn.LSTM, with gates in the order input, forget, cell, output."""
    h, c = hidden
    if h.size(1) == c.size(1):
        return torch.lstm_cell(input, (h, c), w_ih, w_hh, b_ih, b_hh)
    return _lstm_state(F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh), c)


def mLSTMCell(
    input: Tensor,
    hidden: States,
    w_ih: Tensor,
    w_hh: Tensor,
    w_mih: Tensor,
    w_mhh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute an LSTM's step with `m = (w_mih x) * (w_mhh h)` instead of h."""
    h, c = hidden
    m = F.linear(input, w_mih) * F.linear(h, w_mhh)
    return _lstm_state(F.linear(input, w_ih, b_ih) + F.linear(m, w_hh, b_hh), c)


def _lstm_state(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new h and c, computed in float32 for half precision, like PyTorch's fused kernels."""
    exact = gates.float() if gates.dtype in _HALF else gates
    write, keep, new, read = exact.chunk(4, 1)
    state = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
    output = torch.sigmoid(read) * torch.tanh(state)
    return output.to(gates.dtype), state.to(c.dtype)


class mLSTMRNNCell(RNNCell):
    """A layer of a multiplicative LSTM."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = False, output_size: int | None = None) -> None:
        super().__init__(4, input_size, hidden_size, mLSTMCell, n_hidden_states=2, bias=bias, output_size=output_size)
        self.w_mih = nn.Parameter(torch.empty(self.output_size, self.input_size))
        self.w_mhh = nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.reset_parameters()

    def _weights(self) -> tuple[Tensor, ...]:
        return self.w_ih, self.w_hh, self.w_mih, self.w_mhh

    def new_like(self, new_input_size: int | None = None) -> mLSTMRNNCell:
        """Return a new layer of the same kind and sizes, with another input size if it is given."""
        size = self.input_size if new_input_size is None else new_input_size
        return type(self)(size, self.hidden_size, self.bias, self.output_size)
