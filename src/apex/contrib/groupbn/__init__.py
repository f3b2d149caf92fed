"""Batch norm of channels-last images, with an addend and ReLU fused into it."""

from .batch_norm import BatchNorm2d_NHWC

__all__ = ["BatchNorm2d_NHWC"]
