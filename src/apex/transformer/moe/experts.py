"""The experts that a rank holds, computed together. Letters: E experts of this rank, F width, H hidden size."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..._arguments import checked
from ...ops._checks import values_at_hand
from ...ops._host import HOST
from ...ops.moe import moe_experts, moe_experts_main_grad
from .._marks import MarkedModule
from ..tensor_parallel import backward_part
from ..tensor_parallel.layers import set_tensor_model_parallel_attributes
from ._groups import ExpertGroups, rank_in, size_of
from .options import FIRST_EXPERT, seeded


def expert_width(config: Any) -> int:
    """Return the width of an expert."""
    return config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size


class GroupedMLP(MarkedModule):
    """Gated experts, down @ (silu(gate) * value), as two stacks of matrices.

    `weight1` is [E, 2F, H], rows of gates before rows of values, `weight2` [E, H, F], as in Hugging Face's models. With
    expert tensor parallelism F is this rank's part of the width. Loading also takes Megatron's [H, E * 2F] and
    [E * F, H]. With `gradient_accumulation_fusion` gradients are added to `main_grad`. Weights are drawn on the host
    with a seed for each expert, so they do not depend on the ranks.
    """

    @checked
    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any = None, *, layer_number: int | None = None
    ) -> None:
        super().__init__()
        self.config, self.groups = config, ExpertGroups.of(pg_collection)
        self.num_local_experts = num_local_experts
        parts, width, hidden = size_of(self.groups.expt_tp), expert_width(config), config.hidden_size
        if width % parts:
            raise ValueError(f"the width {width} of an expert is not divisible by {parts} expert-tensor-parallel ranks")
        shapes = ((2 * width // parts, hidden), (hidden, width // parts))
        self.weight1, self.weight2 = (
            nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=HOST))
            for shape in shapes
        )
        self._draw(width, hidden, layer_number or 0)
        # Ranks that split experts like dense layers, and hold all of them, treat them as dense.
        is_expert = size_of(self.groups.ep) > 1 or parts != size_of(self.groups.tp)
        for weight, dim, stride in ((self.weight1, 1, 2), (self.weight2, 2, 1)):
            set_tensor_model_parallel_attributes(weight, True, dim, stride)
            weight.allreduce = not is_expert  # type: ignore[attr-defined]
        self.register_load_state_dict_pre_hook(_from_megatron)

    @torch.no_grad()
    def _draw(self, width: int, hidden: int, layer: int) -> None:
        parts, part = size_of(self.groups.expt_tp), rank_in(self.groups.expt_tp)
        std = self.config.init_method_std
        first = self.num_local_experts * rank_in(self.groups.ep)
        for number in range(self.num_local_experts):
            generator = seeded(self.config.seed, layer, FIRST_EXPERT + first + number)
            up, down = (torch.empty(s, dtype=torch.float32, device=HOST) for s in ((2, width, hidden), (hidden, width)))
            nn.init.normal_(up, std=std, generator=generator)
            nn.init.normal_(down, std=std / math.sqrt(2.0 * self.config.num_layers), generator=generator)
            self.weight1[number] = up.chunk(parts, 1)[part].flatten(0, 1)
            self.weight2[number] = down.chunk(parts, 1)[part]

    @checked
    def forward(
        self, rows: Tensor, tokens_per_expert: Tensor | None, probs: Tensor, *, index: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the results [N, H] of rows sorted by expert, times `probs` [N]; rows past the last expert's are zero.

        With `index` [T, K], rows are tokens and `probs` [T, K]: return the results of `routed`. With expert tensor
        parallelism results are this rank's terms of a sum over the ranks.
        """
        if index is not None:
            return self.routed(rows, index, probs), None
        if tokens_per_expert is None:
            raise ValueError("tokens_per_expert is None: rows sorted by expert need the number of each expert's")
        if tokens_per_expert.shape != (self.num_local_experts,):
            raise ValueError(
                f"tokens_per_expert has shape {list(tokens_per_expert.shape)}, expected a number for each of "
                f"{self.num_local_experts} experts"
            )
        counts = values_at_hand(tokens_per_expert)
        if counts is not None and (min(counts, default=0) < 0 or sum(counts) > rows.shape[0]):
            raise ValueError(f"tokens_per_expert={counts} does not fit {rows.shape[0]} rows")
        ends = tokens_per_expert.to(rows.device).cumsum(0)
        numbers = torch.arange(rows.shape[0], dtype=ends.dtype, device=rows.device)
        index = torch.searchsorted(ends, numbers, right=True)
        return self.routed(rows, index[:, None], probs.reshape(-1, 1)), None

    def routed(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted sum [T, H] of the experts `index` [T, K] of each token; the index E means no expert."""
        arguments = (x, self.weight1, self.weight2, index, weight)
        if self.config.gradient_accumulation_fusion and torch.is_grad_enabled():
            return moe_experts_main_grad(*arguments, wanted=backward_part.wanted)
        return moe_experts(*arguments)


def _from_megatron(module: GroupedMLP, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Convert Megatron's layout, the memory of [E, H, 2F] and [E, F, H] with the shapes of matrices."""
    for name in ("weight1", "weight2"):
        saved = state_dict.get(prefix + name)
        weight = getattr(module, name)
        if saved is not None and saved.dim() == 2 and saved.numel() == weight.numel():
            rows = weight.shape[2]
            state_dict[prefix + name] = saved.reshape(module.num_local_experts, rows, -1).transpose(1, 2).contiguous()


# Megatron has one class for each library that multiplies; here there is one.
TEGroupedMLP = SequentialMLP = GroupedMLP
