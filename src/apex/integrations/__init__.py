"""Functions of this library under the names and signatures of other packages; subpackages are imported at first use."""

from .._lazy import lazy_subpackages

__getattr__, __dir__ = lazy_subpackages(__name__, ["trl", "verl"])
