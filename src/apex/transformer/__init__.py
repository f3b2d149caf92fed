"""Parts of large transformers; subpackages are imported at first use."""

from .._lazy import lazy_subpackages
from .enums import AttnMaskType, AttnType, LayerType, ModelType

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType", "enums", "functional", "parallel_state"]

__getattr__, __dir__ = lazy_subpackages(__name__, ["enums", "functional", "parallel_state"])
