"""Construction of models inside of `LazyInitContext`."""

from .lazy_init import LazyInitContext

__all__ = ["LazyInitContext"]
