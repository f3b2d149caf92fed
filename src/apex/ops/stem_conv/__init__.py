"""Convolutions of images with few channels: the first layer of a network."""

from .op import stem_conv2d, stem_fits

__all__ = ["stem_conv2d", "stem_fits"]
