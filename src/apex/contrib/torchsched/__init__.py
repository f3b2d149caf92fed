"""The backend "torchsched" of torch.compile, which importing this registers, and a default backend of one's choice."""

from .backend import get_backend, set_default_backend

__all__ = ["get_backend", "set_default_backend"]
