"""Instance norm over 3-D images, under the name that MONAI looks for.

PyTorch's own instance norm is a first-class operator on every device and does the work. The class provides the name and
keeps channels_last_3d inputs in their layout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops._checks import check_floats


class InstanceNorm3dNVFuser(nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, drop-in for upstream's nvFuser version."""

    def forward(self, input: Tensor) -> Tensor:
        check_floats(input=input)
        if input.dim() != 5:
            raise ValueError(f"expected a 5-D input (N, C, D, H, W), got {input.dim()}-D")
        output = F.instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
        )
        if input.is_contiguous(memory_format=torch.channels_last_3d):
            output = output.contiguous(memory_format=torch.channels_last_3d)
        return output
