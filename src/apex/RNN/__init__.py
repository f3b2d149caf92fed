"""Recurrent networks from cells that keep their hidden state: LSTM, GRU, ReLU, Tanh and multiplicative LSTM."""

from .models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]
