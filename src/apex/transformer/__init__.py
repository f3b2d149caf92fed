"""Building blocks of transformers with tensor, sequence and pipeline parallelism; subpackages load at first use."""

from .._lazy import lazy_subpackages
from .enums import AttnMaskType, AttnType, LayerType, ModelType

_SUBPACKAGES = (
    "amp",
    "checkpoint",
    "enums",
    "functional",
    "layers",
    "log_util",
    "microbatches",
    "moe",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel",
    "testing",
    "utils",
)

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType", "finalize_model_grads", *_SUBPACKAGES]

__getattr__, __dir__ = lazy_subpackages(__name__, _SUBPACKAGES, {"finalize_model_grads": "finalize_grads"})
