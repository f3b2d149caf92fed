"""Whole training steps as CUDA graphs: model, loss scaling, clipping and optimizer in one launch."""

from ._step import CapturedStep, capture

__all__ = ["CapturedStep", "capture"]
