"""Weight normalization."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .reparameterization import Reparameterization


class WeightNorm(Reparameterization):
    """Weight normalization: `g v / ‖v‖`, with the magnitude g and the direction v as parameters.

    `dim` is the dimension with one norm for each index, or None for the norm of the whole weight.
    """

    @classmethod
    def check(cls, name: str, weight: Tensor, dim: int | None) -> None:
        """Raise a ValueError if `dim` is not a dimension of the weight."""
        if dim is not None and not -weight.dim() <= dim < weight.dim():
            raise ValueError(f"dim={dim} is not a dimension of {name!r}, whose shape is {list(weight.shape)}")

    def compute_weight(self, module: nn.Module | None = None, name: str | None = None) -> Tensor:
        """Return the weight `name` of a module from its parameters `name_g` and `name_v`."""
        holder, name = Reparameterization.get_module_and_name(module or self.module, name or self.name)
        magnitude, direction = getattr(holder, f"{name}_g"), getattr(holder, f"{name}_v")
        if self.dim is None:
            return direction * (magnitude / direction.norm())
        return torch._weight_norm(direction, magnitude, self.dim % direction.dim())

    def reparameterize(self, name: str, weight: Tensor, dim: int | None) -> tuple[list[str], list[nn.Parameter]]:
        """Return names and values of the magnitude and the direction of a weight."""
        others = None if dim is None else [each for each in range(weight.dim()) if each != dim % weight.dim()]
        norm = torch.linalg.vector_norm(weight.detach(), dim=others, keepdim=dim is not None)
        parameters = [nn.Parameter(each, weight.requires_grad) for each in (norm, weight.detach())]
        return [f"{name}_g", f"{name}_v"], parameters
