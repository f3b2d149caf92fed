"""ColoParameter: PyTorch's Parameter."""

from torch.nn import Parameter as ColoParameter

__all__ = ["ColoParameter"]
