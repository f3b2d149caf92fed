"""Linear layers divided among tensor-parallel processes, made from whole layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..._lazy import lazy_subpackages
from ...transformer import parallel_state
from ...transformer.tensor_parallel import ColumnParallelLinear, RowParallelLinear

__all__ = ["Linear1D_Col", "Linear1D_Row"]


class _FromLinear:
    """A constructor from a whole linear layer, for both kinds of division."""

    _options: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def from_native_module(cls, module: nn.Linear, process_group: Any = None, **options: Any) -> Any:
        """Return this process's part of a linear layer, which must be equal in all tensor-parallel processes.

        `process_group` must be the tensor-parallel group of `HybridParallelPlugin` or None; a list holds one group.
        """
        group = process_group[0] if isinstance(process_group, list) else process_group
        own = parallel_state.get_tensor_model_parallel_group()
        if group is not None and torch.distributed.get_process_group_ranks(group) != (
            torch.distributed.get_process_group_ranks(own)
        ):
            raise ValueError("process_group must be the tensor-parallel group, plugin.tp_group")
        # The values come from `module`: nothing is drawn, and no generator of tensor parallelism is needed.
        options = {"init_method": lambda weight: weight, "use_cpu_initialization": True, **cls._options, **options}
        has_bias = module.bias is not None
        part = cls(module.in_features, module.out_features, bias=has_bias, **options)  # type: ignore[call-arg]
        rank, size = parallel_state.get_tensor_model_parallel_rank(), torch.distributed.get_world_size(own)
        with torch.no_grad():
            for name, param in part.named_parameters():  # type: ignore[attr-defined]
                whole: Tensor = getattr(module, name)
                if getattr(param, "tensor_model_parallel", False):
                    whole = whole.chunk(size, param.partition_dim)[rank]
                param.data = whole.detach().clone()
        return part

    def forward(self, input_: Tensor) -> Tensor:
        """Return the outputs with the bias added."""
        return super().forward(input_)[0]  # type: ignore[misc]


class Linear1D_Col(_FromLinear, ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer whose outputs are divided; `gather_output=True` gives all of them to every process."""

    _options = {"gather_output": False}  # noqa: RUF012


class Linear1D_Row(_FromLinear, RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are divided; `parallel_input` says that they arrive divided."""

    _options = {"input_is_parallel": True}  # noqa: RUF012


__getattr__, __dir__ = lazy_subpackages(__name__, ())  # explains the original's other layers
