"""Connections to other packages, each in a module of the package's name, which is imported at first use."""

from .._lazy import lazy_subpackages

__getattr__, __dir__ = lazy_subpackages(__name__, ["accelerate", "kernels", "lightning", "transformers", "trl", "verl"])
