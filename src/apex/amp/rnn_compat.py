"""Recurrent layers under amp. PyTorch's autocast casts them; nothing is replaced."""

from __future__ import annotations

from typing import Any

# The operators of `torch.nn.RNN`, GRU and LSTM; they and their cells (`lstm_cell`, ...) run in half precision.
RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Whether recurrent layers are those of PyTorch 0.4: no."""
    return False


def whitelist_rnn_cells(handle: Any, verbose: bool) -> None:
    """Does nothing: recurrent cells are cast like every operator."""
