"""GroupNorm for any number of groups and channels, in both layouts, with an optional fused SiLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import init

from ...ops.group_norm import group_norm
from ...ops.group_norm.op import ACTIVATIONS


def torch_group_norm(x: Tensor, g: int, w: Tensor | None, b: Tensor | None, eps: float, act: str = "") -> Tensor:
    """Compute group norm and the activation `act` by PyTorch's operators, for inputs and parameters of any dtypes."""
    dtype = x.dtype if w is None else torch.promote_types(x.dtype, w.dtype)
    weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in (w, b))
    y = nn.functional.group_norm(x.to(dtype), g, weight, bias, eps)
    if act in ("silu", "swish"):
        y = nn.functional.silu(y)
    return y.to(x.dtype)


class GroupNorm(nn.Module):
    """Group norm of [N, C, ...], then `act`: "" or None for nothing, "silu" or "swish".

    Statistics are float32. Input and parameters may have different dtypes; the output has the input's dtype and layout.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"num_channels={num_channels} must be divisible by num_groups={num_groups}")
        self.act = (act or "").lower()
        if self.act not in ACTIVATIONS:
            raise ValueError(f"act={act!r} is not known; None (or ''), 'silu' and 'swish' are")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        if affine:
            self.weight = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weights to 1 and biases to 0."""
        if self.affine:
            init.ones_(self.weight)
            init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.act)

    def extra_repr(self) -> str:
        text = f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
        return f"{text}, act={self.act}" if self.act else text
