"""The "torchsched" backend of torch.compile, registered by importing this package, and a choice of default backend."""

from .backend import get_backend, set_default_backend

__all__ = ["get_backend", "set_default_backend"]
