"""Parts of large transformers; subpackages are imported at first use."""

from .._lazy import lazy_subpackages

__getattr__, __dir__ = lazy_subpackages(__name__, ["functional"])
