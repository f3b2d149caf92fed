"""Max pooling of channels-last images."""

from .op import max_pool2d
