"""The expert that all tokens use."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._arguments import checked
from ...fused_bias_swiglu import fused_bias_swiglu
from ...ops._host import HOST
from .._marks import MarkedModule
from ..tensor_parallel import ColumnParallelLinear, RowParallelLinear
from ._groups import ExpertGroups, size_of
from .options import SHARED, seeded


class SharedExpertMLP(MarkedModule):
    """A gated MLP of width `moe_shared_expert_intermediate_size` that is split like other layers, without biases.

    With `moe_shared_expert_gate`, or `gate`, its output is multiplied by a sigmoid of the token.
    """

    @checked
    def __init__(
        self, config: Any, pg_collection: Any = None, gate: bool | None = None, *, layer_number: int | None = None
    ) -> None:
        super().__init__()
        width, generator = config.moe_shared_expert_intermediate_size, seeded(config.seed, layer_number or 0, SHARED)
        std = config.init_method_std

        def init(scale: float) -> Any:
            return lambda tensor: nn.init.normal_(tensor, std=scale, generator=generator)

        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size, 2 * width, bias=False, init_method=init(std), stride=2, **config.column()
        )
        self.linear_fc2 = RowParallelLinear(
            width,
            config.hidden_size,
            bias=False,
            input_is_parallel=True,
            init_method=init(std / (2.0 * config.num_layers) ** 0.5),
            **config.row(),
        )
        self.gate_weight: nn.Parameter | None = None
        if config.moe_shared_expert_gate if gate is None else gate:
            weight = init(std)(torch.empty(1, config.hidden_size, dtype=torch.float32, device=HOST))
            self.gate_weight = nn.Parameter(weight.to(config.params_dtype))
            splits_sequence = config.sequence_parallel and size_of(ExpertGroups.of(pg_collection).tp) > 1
            self.gate_weight.sequence_parallel_enabled = splits_sequence  # type: ignore[attr-defined]

    @checked
    def forward(self, x: Tensor) -> Tensor:
        """Map [sequence, batch, hidden] to the same shape."""
        output = self.linear_fc2(fused_bias_swiglu(self.linear_fc1(x)[0]))[0]
        return output if self.gate_weight is None else output * F.linear(x, self.gate_weight).sigmoid()
