"""DistributedFusedMuon: Muon with state and gradients divided among processes (ZeRO-2), without cutting a matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...ops.multi_tensor import Lists
from ...ops.multi_tensor.codecs import Encodings
from ...ops.multi_tensor.flat import flat
from ...ops.multi_tensor.torch_lists import StateSeed, seed_of
from ...optimizers._muon_directions import (
    SQUARES,
    WORKSPACE,
    Directions,
    WholeMatrices,
    blocks_of,
    options_of_directions,
)
from ...optimizers.fused_muon import check_options_of_muon, divided_group, update_others, with_betas
from ._zero.arena import Arena
from ._zero.layout import Layout, Piece, WholeLayout
from ._zero.state import ArenaState, Format, format_of
from ._zero.weights import Weights, weights_of
from .distributed_fused_adam import DistributedFusedAdam

_STATE = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


class ZeroOptions(TypedDict, total=False):
    """Options of `DistributedFusedAdam` that do not belong to Adam; it describes them."""

    dtype: torch.dtype
    grad_sync_dtype: torch.dtype | None
    param_sync_dtype: torch.dtype | None
    device: Any
    process_group: Any
    distributed_process_group: Any
    redundant_process_group: Any
    average_grad_sync: bool
    overlap_grad_sync: bool
    overlap_param_sync: bool
    bucket_cap_mb: float
    pipeline_size: int
    contiguous_param_buffer: bool
    contiguous_grad_buffer: bool
    store_params: bool
    store_param_remainders: bool
    nccl_ub: bool
    capturable: bool
    state_format: str


class DistributedFusedMuon(DistributedFusedAdam):
    """`apex.optimizers.FusedMuon` with its state divided among processes; the same numbers for averaged gradients.

    Every matrix belongs to one process, which reduces its gradient, keeps its momentum, makes its direction orthogonal
    and sends the updated matrix to the others. Matrices are divided so that processes have about the same work. State
    of groups for AdamW and Lion is divided as by `DistributedFusedAdam`, which also describes the options after
    `cautious_weight_decay`, gradients, clipping, loss scaling and state dicts. The other options, and the options of
    parameter groups, are `FusedMuon`'s. State dicts can be exchanged with `FusedMuon` and
    `torch.optim.Muon`, and load on any number of processes.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[Any] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_method: str = "auto",
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        cautious_weight_decay: bool = False,
        **options: Unpack[ZeroOptions],
    ) -> None:
        if unknown := options.keys() - ZeroOptions.__optional_keys__:
            raise TypeError(f"{type(self).__name__} got unexpected keyword arguments: {', '.join(sorted(unknown))}")
        self._muon_defaults: dict[str, Any] = dict(momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        self._muon_defaults |= dict(ns_coefficients=ns_coefficients, adjust_lr_fn=adjust_lr_fn, ns_method=ns_method)
        self._muon_defaults |= dict(ns_dtype=ns_dtype, adam_eps=adam_eps, cautious_weight_decay=cautious_weight_decay)
        self._muon_defaults |= dict(algorithm="muon", num_heads=None, split_sizes=None, flatten=False, beta2=None)
        # Memory for directions, by device and dtype.
        self._workspaces: dict[Any, Tensor] = {}
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)

    def _group_defaults(self, defaults: dict[str, Any]) -> dict[str, Any]:
        defaults = {**defaults, **self._muon_defaults}
        del defaults["bias_correction"]
        self._betas = defaults.pop("betas")
        check_options_of_muon(defaults)
        return defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its parameters of fewer than two dimensions become a second group for AdamW.

        All processes must add the same one.
        """
        if isinstance(param_group, dict):
            check_options_of_muon({**self.defaults, **param_group})
        for group in divided_group(with_betas(param_group, self._betas), self.defaults, self.param_groups):
            super().add_param_group(group)

    def state_dict(self, **options: Any) -> dict[str, Any] | None:  # type: ignore[override]
        """Return the state as `DistributedFusedAdam.state_dict` does; format 2 has NorMuon's averages once per row."""
        saved = super().state_dict(**options)
        if saved is None or saved.get("format") != 2:
            return saved
        for group, packed in zip(self.param_groups, saved["param_groups"], strict=True):
            for key in packed["params"]:
                state = saved["state"].get(key, {})
                if SQUARES in state:
                    state[SQUARES] = _narrowed(state[SQUARES], group).clone()
        return saved

    def _kind(self, group: dict[str, Any]) -> Any:
        return group["algorithm"]

    def _layout_of(self, params: list[Tensor], group_of: list[int]) -> Callable[..., Layout]:
        groups = [self.param_groups[number] for number in group_of]
        if groups[0]["algorithm"] != "muon":
            return Layout
        blocks = [blocks_of(param.shape, group) for param, group in zip(params, groups, strict=True)]
        return functools.partial(WholeLayout, work=[sum(block.work for block in each) for each in blocks])

    def _new_state(self, arena: Arena) -> ArenaState:
        stores = self.store_params or (self.store_param_remainders and arena.dtypes != self._dtypes)
        weights = weights_of(arena, stores, self.store_param_remainders and not stores)
        algorithm = self.param_groups[arena.group_of[0]]["algorithm"]
        if algorithm == "muon":
            return MatrixState(arena, weights, self.param_groups, self._workspaces, format_of(self, arena))
        return ArenaState(arena, _STATE[algorithm], weights, format=format_of(self, arena))

    def _update_arena(self, state: Any, counts: dict[int, Any], noop: Tensor | None, scale: Tensor | None) -> None:
        def update(key: Any, lists: Lists) -> None:
            if isinstance(state, MatrixState):
                group = self.param_groups[key[0]]
                state.directions[key].update(lists, group, noop=noop, grad_scale=scale)
            else:
                encoded, step = self.state_format != "float32", counts[key]
                seed = StateSeed(seed_of(step)) if encoded else None
                group = self.param_groups[key]
                update_others(lists, group, step, encoded=encoded, noop=noop, grad_scale=scale, seed=seed)

        if isinstance(state, MatrixState):
            state.groups = self.param_groups
        state.apply(self._gradients, update, noop)


class MatrixState(ArenaState):
    """The momentum of this rank's matrices, and the workspace that makes their directions orthogonal.

    Keys of `units` and `directions` are a parameter group's number and the number of a batch, which fits into the
    workspace.
    """

    def __init__(
        self,
        arena: Arena,
        weights: Weights,
        groups: Sequence[dict[str, Any]],
        workspaces: dict[Any, Tensor],
        format: Format | None,
    ) -> None:
        # Groups of the optimizer, whose options may change between steps.
        self.groups = groups
        # NorMuon's averages of the rows of each matrix, by the parameter's index.
        self._squares: dict[int, dict[str, Any]] = {part.param: {} for part in arena.parts}
        super().__init__(arena, _STATE["muon"], weights, arena.parts, format)
        self.units = {
            (group, batch): members for group, units in self.units.items() for batch, members in _batches(units)
        }
        self._workspaces = workspaces
        self.directions: dict[Any, Directions] = {}

    def _lists_of(self, group: Any, units: list[Piece], gradients: Any, where: tuple[int, list[int]]) -> Lists:
        """Return the lists of a key of `units`, with directions that fit the options of the parameter group."""
        known, options = self.directions.get(group), self.groups[group[0]]
        if known is None or known.options != options_of_directions(options):
            params, states = zip(
                *((self.arena.params[unit.param], self._squares[unit.param]) for unit in units), strict=True
            )
            matrices = WholeMatrices(list(params), list(states), self.arena.device)
            self.directions[group] = Directions(options, matrices, self._workspaces)
            self._lists.pop(group, None)
        return super()._lists_of(group, units, gradients, where)

    def _slots(self, group: Any, gradients: list[Tensor]) -> tuple[list[list[Tensor] | None], Any, Encodings]:
        slots, *others = super()._slots(group, gradients)
        slots[3] = list(map(flat, self.directions[group].views))
        return (slots, *others)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the state; in all processes alike, also if none of their matrices has averages yet."""
        groups = (self.groups[number] for number in self.arena.group_of)
        has_squares = any(group["beta2"] is not None for group in groups)
        return (*super().names, SQUARES) if has_squares else super().names

    def read(self, name: str) -> Tensor:
        """Return a flat shard, as `ArenaState.read` does; every element has the average of its row."""
        if name != SQUARES:
            return super().read(name)
        values = self.arena.new_shard(torch.float32)
        for part in self.arena.parts:
            squares = self._squares[part.param].get(SQUARES)
            if squares is not None:
                whole = _expanded(squares, self.arena.params[part.param])
                values[part.flat : part.flat + part.size] = flat(whole)
        return values

    def write(self, name: str, values: Tensor) -> None:
        """Set the values of a flat shard; of averages, those in the first element of each row."""
        if name != SQUARES:
            super().write(name, values)
            return
        for part in self.arena.parts:
            whole = torch.empty_like(self.arena.params[part.param], dtype=torch.float32)
            flat(whole).copy_(values[part.flat : part.flat + part.size])
            squares = _narrowed(whole, self.groups[self.arena.group_of[part.param]])
            state = self._squares[part.param]
            if SQUARES in state:
                state[SQUARES].copy_(squares)
            else:
                state[SQUARES] = squares.contiguous()


def _expanded(squares: Tensor, param: Tensor) -> Tensor:
    """Return averages of rows for each element of a parameter."""
    missing = param.dim() - squares.dim() + 1
    return torch.empty_like(param, dtype=torch.float32, device=squares.device).copy_(
        squares.reshape(*squares.shape[:-1], *(1 for _ in range(missing)))
    )


def _narrowed(whole: Tensor, group: dict[str, Any]) -> Tensor:
    """Return averages of rows, one for each row, as `FusedMuon` keeps them."""
    rows = whole.flatten(1) if group["flatten"] else whole
    return rows[..., :1] if rows.shape[-1] else rows.new_zeros(*rows.shape[:-1], 1)


def _batches(units: list[Piece]) -> list[tuple[int, list[Piece]]]:
    """Return batches of matrices, numbered, whose directions fit into the workspace; a batch has at least one."""
    batches: list[list[Piece]] = []
    for unit in units:
        if not batches or sum(other.size for other in batches[-1]) + unit.size > WORKSPACE:
            batches.append([])
        batches[-1].append(unit)
    return list(enumerate(batches))
