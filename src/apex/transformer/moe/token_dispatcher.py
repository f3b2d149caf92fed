"""Dispatchers, which send tokens to the ranks that hold their experts, and results back.

Letters: T tokens, K experts of a token, H hidden size. `ep` ranks hold different experts, and `expt_tp` ranks parts of
the same experts. The steps of a dispatcher are called in the order of `MoETokenDispatcher`'s methods.

- `MoEAllGatherTokenDispatcher`: every rank gets all tokens and computes its own experts. Nothing waits for
  the device. It sends all tokens to all ranks, so it is for few ranks or many experts per token. All ranks must have
  the same number of tokens, as in Megatron; Gloo groups compare the numbers.
- `MoEAlltoAllTokenDispatcher`: each token is sent to the ranks of its experts only. The host must know the number of
  rows for each rank: one copy from the device per layer, unless all experts take the same number (padding to capacity),
  which needs the same number of tokens on each rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._distributed import exchange
from ...ops._host import HOST, on_host
from ._exchange import all_to_all, gather, gather_uneven, sum_of_part, sum_of_uneven_part
from ._groups import ExpertGroups, rank_in, size_of
from ._permutation import RowsOfTokens, TokensOfRows, count_rows, sort_chunks_by_idxs
from ._routing import get_capacity, sparse


class MoETokenDispatcher(ABC):
    """Base of dispatchers: from tokens to rows sorted by the experts of this rank, and back.

    An instance keeps the routing of one forward pass from `dispatch_preprocess` to `combine_postprocess`.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: Sequence[int], config: Any, pg_collection: Any = None
    ) -> None:
        self.config, self.groups = config, ExpertGroups.of(pg_collection)
        self.num_local_experts, self.topk = num_local_experts, config.moe_router_topk
        self.first_expert = local_expert_indices[0]
        if list(local_expert_indices) != list(range(self.first_expert, self.first_expert + num_local_experts)):
            raise ValueError(f"local_expert_indices must be {num_local_experts} consecutive numbers")
        self._shape: torch.Size
        self._rows: tuple[Tensor, Tensor]  # the token of each row, and the rows of each token

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare tokens [..., H] and the router's two results [T, E] for the exchange."""
        return self.prepare(hidden_states, *sparse(routing_map, probs, self.topk))

    @abstractmethod
    def prepare(self, hidden_states: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare tokens [..., H] with the experts `index` and weights [T, K]; the index E means no expert."""

    @abstractmethod
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange tokens and weights."""

    @abstractmethod
    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows sorted by expert, the number of rows of each expert, and their weights."""

    @abstractmethod
    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Undo `dispatch_postprocess` for the experts' results."""

    @abstractmethod
    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Exchange results."""

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the results in the shape of the tokens."""
        return hidden_states.view(self._shape)


def _inverse(order: Tensor) -> Tensor:
    """Return the position of each element in `order`, a permutation."""
    numbers = torch.arange(order.shape[0], dtype=order.dtype, device=order.device)
    return torch.empty_like(order).index_copy(0, order, numbers)


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """A dispatcher that gathers all tokens and sums results over the ranks that hold a layer's experts."""

    def prepare(self, hidden_states: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        self._shape, self._index = hidden_states.shape, index
        return hidden_states.reshape(-1, hidden_states.shape[-1]), weight

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        group = self.groups.tp_ep
        index = gather(self._index, group) - self.first_expert
        self.local_index = index.where((index >= 0) & (index < self.num_local_experts), self.num_local_experts)
        return gather(hidden_states, group), gather(probs, group)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows sorted by expert; rows of other ranks' experts come after the last expert's."""
        order = self.local_index.reshape(-1).sort(stable=True).indices
        self._rows = order // self.local_index.shape[1], _inverse(order).view_as(self.local_index)
        counts = count_rows(self.local_index, self.num_local_experts)
        return RowsOfTokens.apply(hidden_states, *self._rows), counts, probs.reshape(-1)[order]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return TokensOfRows.apply(hidden_states, *self._rows)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return sum_of_part(hidden_states, self.groups.tp_ep)


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """A dispatcher that sends each token to the ranks of its experts.

    Ranks that hold parts of the same experts gather the tokens of all of them, and add up their results.
    """

    _counts: Tensor  # rows of each of this rank's experts

    def prepare(self, hidden_states: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        self._shape = hidden_states.shape
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.config.moe_pad_expert_input_to_capacity:
            if size_of(self.groups.tp_ep) > 1:
                exchange.check_alike(tokens, self.groups.tp_ep, "experts' tokens that are padded to capacity")
            self._pad(tokens.shape[0], index)
            rows, rows_of = self._rows
            probs = weight.new_zeros(rows.shape[0] + 1).scatter(0, rows_of.reshape(-1), weight.reshape(-1))[:-1]
            return RowsOfTokens.apply(tokens, rows, rows_of), probs
        counts = _Counts(index, self.config.num_moe_experts, self.groups.tp_ep)
        order = index.reshape(-1).sort(stable=True).indices
        rows_of = _inverse(order).view_as(index)
        if self.config.moe_expert_capacity_factor is not None:  # fewer rows, and the host must know how many
            kept = sum(counts.on_host()[rank_in(self.groups.tp_ep)])
            order, rows_of = order[:kept], rows_of.clamp(max=kept)
        self._rows = order // index.shape[1], rows_of
        rows, probs = RowsOfTokens.apply(tokens, *self._rows), weight.reshape(-1)[order]
        self._plan(counts.on_host())
        self._counts = counts.everywhere[:, self.first_expert : self.first_expert + self.num_local_experts].sum(0)
        return rows, probs

    def _pad(self, tokens: int, index: Tensor) -> None:
        """Give each expert of each rank the same number of rows; some may belong to no token."""
        experts, chosen = self.config.num_moe_experts, index.shape[1]
        capacity = get_capacity(tokens * chosen, experts, self.config.moe_expert_capacity_factor)
        capacity = min(capacity, tokens)
        order = index.reshape(-1).sort(stable=True).indices
        expert = index.reshape(-1)[order]
        counts = count_rows(index, experts)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))  # the last: rows without an expert
        numbers = torch.arange(order.shape[0], dtype=torch.int64, device=index.device)
        slot = (expert * capacity + numbers - starts[expert]).where(expert < experts, experts * capacity)
        rows_of = torch.empty_like(order).index_copy(0, order, slot).view_as(index)
        rows = torch.full((experts * capacity + 1,), tokens, dtype=torch.int64, device=index.device)
        self._rows = rows.scatter(0, slot, order // chosen)[:-1], rows_of
        ranks = size_of(self.groups.tp_ep)
        self._plan([[capacity] * experts] * ranks)
        self._counts = torch.full((self.num_local_experts,), capacity * ranks, dtype=torch.int64, device=index.device)

    def _plan(self, counts: list[list[int]]) -> None:
        """Compute the sizes of all messages from the rows that each rank of `tp_ep` has for each expert."""
        ranks, parts = size_of(self.groups.ep), size_of(self.groups.expt_tp)
        local, first = self.num_local_experts, self.first_expert
        own = counts[rank_in(self.groups.tp_ep)]
        self._sent = [sum(own[rank * local : (rank + 1) * local]) for rank in range(ranks)]
        # Rows for this rank's experts, by part of `expt_tp` and rank of `ep`; neighbours of `tp_ep` are parts.
        mine = [[counts[rank * parts + part][first : first + local] for rank in range(ranks)] for part in range(parts)]
        self._received = [sum(chunk) for chunk in mine[rank_in(self.groups.expt_tp)]]
        self._of_parts = [sum(map(sum, part)) for part in mine]
        self._chunks = [size for part in mine for chunk in part for size in chunk]
        sources = len(self._chunks) // local
        self._order = [source * local + expert for expert in range(local) for source in range(sources)]

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        exchanged = (self.groups.ep, self._received, self._sent)
        return all_to_all(hidden_states, *exchanged), all_to_all(probs, *exchanged)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gathered = (gather_uneven(tensor, self.groups.expt_tp, self._of_parts) for tensor in (hidden_states, probs))
        rows, own_probs = sort_chunks_by_idxs(next(gathered), self._chunks, self._order, next(gathered))
        assert own_probs is not None
        return rows, self._counts, own_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        rows, _ = sort_chunks_by_idxs(hidden_states, [self._chunks[index] for index in self._order], back)
        group = self.groups.expt_tp
        return sum_of_uneven_part(rows, group, self._of_parts, rank_in(group))

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return all_to_all(hidden_states, self.groups.ep, self._sent, self._received)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sums of each token's results in the shape of the tokens."""
        return TokensOfRows.apply(hidden_states, *self._rows).view(self._shape)


class _Counts:
    """The number of rows of each rank for each expert, copied to the host while the device goes on."""

    def __init__(self, index: Tensor, experts: int, group: Any) -> None:
        counts = count_rows(index, experts)
        if size_of(group) > 1:
            counts = exchange.gather(counts, group, "the number of rows of each expert")
        self.everywhere = counts.view(-1, experts)
        self._values = self.everywhere.to(HOST, non_blocking=True)
        self._copied: Any = None
        if not on_host(counts):
            self._copied = torch.Event(counts.device.type)
            self._copied.record()

    def on_host(self) -> list[list[int]]:
        """Wait for the copy and return the counts by rank."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class MoEFlexTokenDispatcher(MoETokenDispatcher):
    """Megatron's dispatcher on DeepEP, which needs kernels of its own and is not available."""

    def __new__(cls, *_: Any, **__: Any) -> MoEFlexTokenDispatcher:
        """Raise a ModuleNotFoundError."""
        raise ModuleNotFoundError(
            'moe_token_dispatcher_type="flex" needs DeepEP, which apex does not use: take "alltoall"', name="deep_ep"
        )


DISPATCHERS: dict[str, Callable[..., MoETokenDispatcher]] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}
