"""Functions that make recurrent networks: LSTM, GRU, ReLU, Tanh, mLSTM."""

from __future__ import annotations

from .cells import GRUCell, LSTMCell, RNNReLUCell, RNNTanhCell, mLSTMCell, mLSTMRNNCell
from .RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

__all__ = [
    "GRU",
    "LSTM",
    "GRUCell",
    "LSTMCell",
    "RNNCell",
    "RNNReLUCell",
    "RNNTanhCell",
    "ReLU",
    "Tanh",
    "bidirectionalRNN",
    "mLSTM",
    "mLSTMCell",
    "mLSTMRNNCell",
    "stackedRNN",
    "toRNNBackend",
]

Network = stackedRNN | bidirectionalRNN


def toRNNBackend(
    inputRNN: RNNCell | list[RNNCell],
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0,
    batch_first: bool = False,
) -> Network:
    """Make a network of `num_layers` layers like the cell `inputRNN`, or of the cells in a list."""
    kind = bidirectionalRNN if bidirectional else stackedRNN
    return kind(inputRNN, num_layers, dropout=dropout, batch_first=batch_first)


def LSTM(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0,
    bidirectional: bool = False,
    output_size: int | None = None,
) -> Network:
    """Make a long short-term memory; if `output_size` differs from `hidden_size`, outputs are projected to it."""
    cell = RNNCell(4, input_size, hidden_size, LSTMCell, 2, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


# The other functions take the same arguments as LSTM.


def GRU(
    input_size, hidden_size, num_layers, bias=True, batch_first=False, dropout=0, bidirectional=False, output_size=None
) -> Network:
    """Make a network of gated recurrent units; `output_size` must be `hidden_size`, because gates mix old and new."""
    if output_size not in (None, hidden_size):
        raise ValueError(
            f"output_size is {output_size}, but a GRU adds its old output to its new state, so that both need the size "
            f"hidden_size ({hidden_size}); put a linear layer behind it for another size"
        )
    cell = RNNCell(3, input_size, hidden_size, GRUCell, 1, bias)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def ReLU(
    input_size, hidden_size, num_layers, bias=True, batch_first=False, dropout=0, bidirectional=False, output_size=None
) -> Network:
    """Make a plain recurrent network with activation max(x, 0); `output_size` as in `LSTM`."""
    cell = RNNCell(1, input_size, hidden_size, RNNReLUCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def Tanh(
    input_size, hidden_size, num_layers, bias=True, batch_first=False, dropout=0, bidirectional=False, output_size=None
) -> Network:
    """Make a plain recurrent network with activation tanh; `output_size` as in `LSTM`."""
    cell = RNNCell(1, input_size, hidden_size, RNNTanhCell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def mLSTM(
    input_size, hidden_size, num_layers, bias=True, batch_first=False, dropout=0, bidirectional=False, output_size=None
) -> Network:
    """Make a multiplicative LSTM (https://arxiv.org/abs/1609.07959); `output_size` as in `LSTM`."""
    cell = mLSTMRNNCell(input_size, hidden_size, bias=bias, output_size=output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)
