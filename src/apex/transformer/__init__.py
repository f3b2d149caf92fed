"""Parts of large transformers, split over processes or not; subpackages are imported at first use."""

from .._lazy import lazy_subpackages
from .enums import AttnMaskType, AttnType, LayerType, ModelType

_SUBPACKAGES = ["enums", "functional", "parallel_state", "tensor_parallel", "utils"]

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType", "enums", "functional", "parallel_state"]
__all__ += ["tensor_parallel", "utils"]

__getattr__, __dir__ = lazy_subpackages(__name__, _SUBPACKAGES)
