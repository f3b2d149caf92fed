"""Max pooling of channels-last images."""

from .op import max_pool2d

__all__ = ["max_pool2d"]
