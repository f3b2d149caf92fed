"""Batch norm of channels-last images, fused with an addend and ReLU."""

from .batch_norm import BatchNorm2d_NHWC

__all__ = ["BatchNorm2d_NHWC"]
