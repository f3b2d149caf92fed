"""The installed version, and the usable extensions, which are all of them."""

from __future__ import annotations

import torch

from ._version import __version__ as version
from .op_builder.all_ops import ALL_OPS

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]

git_hash = "[none]"
git_branch = "[none]"
installed_ops = dict.fromkeys(ALL_OPS, True)
compatible_ops = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "hip_version": torch.version.hip or "0.0",
}
