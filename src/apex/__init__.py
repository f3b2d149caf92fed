"""Apex: mixed precision, fused optimizers, norms and kernels for PyTorch, without a compiler.

Subpackages are imported at first use, so that `import apex` is quick and starts no CUDA context.
"""

from __future__ import annotations

import sys
import warnings
from logging import getLogger

from ._lazy import lazy_subpackages
from ._logging import RankInfoFormatter
from ._refused import Refusals
from ._version import __version__

_library_root_logger = getLogger(__name__)

_SUBPACKAGES = frozenset(
    {
        "RNN",
        "accelerator",
        "amp",
        "booster",
        "checkpoint",
        "checkpoint_io",
        "cluster",
        "compat",
        "contrib",
        "distributed_testing",
        "dump",
        "fp16_utils",
        "fp8",
        "fused_bias_swiglu",
        "fused_dense",
        "fx",
        "git_version_info",
        "graphs",
        "initialize",
        "integrations",
        "interface",
        "kernel",
        "lazy",
        "logging",
        "mixed_precision",
        "mlp",
        "multi_tensor_apply",
        "nn",
        "normalization",
        "op_builder",
        "ops",
        "optimizers",
        "parallel",
        "pipeline",
        "reparameterization",
        "shardformer",
        "tensor",
        "testing",
        "transformer",
        "utils",
        "zero",
    }
)

# Names that belong to the package, and the modules that define them.
_MEMBERS = {
    **dict.fromkeys(("Booster", "boost"), "booster"),
    "estimate_memory": "_memory",
    **dict.fromkeys(("fuse", "unfuse"), "_fuse"),
    **dict.fromkeys(
        ("get_default_parser", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"),
        "_process_launch",
    ),
}

__all__ = [
    "DeprecatedFeatureWarning",
    "RankInfoFormatter",
    "__version__",
    "check_cudnn_version_and_warn",
    "check_if_rocm_pytorch",
    "deprecated_warning",
    *sorted(_MEMBERS),
    *sorted(_SUBPACKAGES),
]


class DeprecatedFeatureWarning(FutureWarning):
    """A warning of `deprecated_warning`."""


def deprecated_warning(msg: str) -> None:
    """Warn of a deprecated feature; in a process group only on rank 0."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)


def check_if_rocm_pytorch() -> bool:
    """Return whether this PyTorch was built for AMD GPUs."""
    import torch

    return torch.version.hip is not None


def check_cudnn_version_and_warn(global_option: str, required_cudnn_version: int) -> bool:
    """Return whether PyTorch's cuDNN is at least `required_cudnn_version`; warn if it is not."""
    import torch

    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is not None and version >= required_cudnn_version:
        return True
    problem = "cuDNN is not available" if version is None else f"cuDNN is {version}"
    warnings.warn(f"`{global_option}` needs cuDNN {required_cudnn_version} or newer, but {problem}", stacklevel=2)
    return False


sys.meta_path.append(Refusals())  # asked last: it finds nothing, and explains missing modules of Colossal-AI

__getattr__, __dir__ = lazy_subpackages(__name__, _SUBPACKAGES, _MEMBERS)
