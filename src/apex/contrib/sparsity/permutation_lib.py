"""Permutes the channels of a model so that pruning loses less, without a change to what the model computes.

`_channels.py` and `_graph.py` find which channels can be permuted together, `permutation_search_kernels` a good order.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ...ops._host import HOST
from ._channels import Axis, Channels, Group
from ._graph import Walk, trace
from ._parameters import is_sharded
from .permutation_search_kernels import accelerated_search_for_good_permutation, sum_after_2_to_4
from .sparse_masklib import as_matrix

# A group of which plain 2:4 pruning loses less is left as it is.
_LEAST_LOSS = 1e-3
# By how much outputs may differ after a permutation, which changes the order of sums: of the largest output.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)

Tied = Callable[[nn.Module, str, Tensor], list[Tensor]]


def _itself(module: nn.Module, name: str, tensor: Tensor) -> list[Tensor]:
    return [tensor.detach()]


class Permutation:
    """The permutation of one model; all methods belong to the class."""

    # Seconds for the searches of a whole model; wider groups get more of them.
    time_budget = 300.0
    __seed = 1
    __saving: tuple[bool, bool, str] = (True, False, ".")
    __sparse: tuple[tuple[nn.Module, str], ...] = ()
    __verbosity = 0
    __stats: tuple[list[str], list[str], list[str]] = ([], [], [])

    @classmethod
    def set_identical_seed(cls, identical_seed: int = 1) -> None:
        """The seed of the searches; PyTorch's and Python's generators are left alone."""
        cls.__seed = int(identical_seed)

    @classmethod
    def reset_seed(cls) -> None:
        """The seed that searches have by default."""
        cls.__seed = 1

    @classmethod
    def set_tcpstore_port(cls, tcpstore_port: int) -> None:
        """Does nothing: processes share what they find over the process group that they have."""

    @classmethod
    def set_permutation_saving_params(
        cls, allow_permutation: bool = True, save_permutation_graph: bool = False, permutation_output_dir: str = "."
    ) -> None:
        """Whether to permute at all, and whether to write JSON files that describe it, to which folder."""
        cls.__saving = (allow_permutation, save_permutation_graph, permutation_output_dir)

    @classmethod
    def set_permutation_params_from_asp(
        cls, model: nn.Module, sparse_parameters: Sequence[tuple], all_parameters: Sequence[tuple], verbosity: int
    ) -> None:
        """What is pruned: tuples that begin with a module's name, the module and a parameter's name."""
        cls.__sparse, cls.__verbosity = tuple((entry[1], entry[2]) for entry in sparse_parameters), verbosity

    @classmethod
    def get_permutation_stats(cls) -> tuple[list[str], list[str], list[str]]:
        """Names of parameters whose input channels were permuted, whose output channels were, and that were missed."""
        return cls.__stats

    @classmethod
    @torch.no_grad()
    def permute_model(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_permutation_graph.json",
        example_inputs: Any = None,
        tied: Tied = _itself,
        optimizers: Sequence[Any] = (),
    ) -> bool:
        """Permutes the channels of `model`; False if it could not be traced, and nothing was changed.

        `example_inputs`, a tensor or a tuple of the model's arguments, let more of the graph be understood and the
        outcome be checked: a group of layers that changes the output is put back. `tied` gives all tensors that are to
        be permuted with one of the model, itself included.
        """
        cls.__stats = ([], [], [])
        examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
        if not cls.__saving[0]:
            return False
        try:
            channels, graph = _follow(model, examples, optimizers)
        except Exception as error:  # whatever a model's code does with a proxy
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"the model is pruned without permuting its channels: {reason}", stacklevel=2)
            return False
        sparse = {id(getattr(module, name)) for module, name in cls.__sparse}
        chosen = [group for group in channels.groups() if _fits(group, sparse)]
        permuted = []
        with _evaluating(model):
            before = None if examples is None else _outputs(model, examples)
            for group, order in zip(chosen, cls.__search(chosen, sparse), strict=True):
                if order is None or not _can_permute(group, tied):
                    continue
                _permute(group, order, tied)
                if before is None or _same(before, _outputs(model, examples)):
                    permuted.append(_names(model, group))
                else:
                    _permute(group, torch.argsort(order), tied)
                    print(f"[ASP] {_names(model, group)} stay in order: permuted, they change the model's output")
        parameters = dict(model.named_parameters())
        columns, rows = (
            list(dict.fromkeys(name for group in permuted for name in group[kind] if name in parameters))
            for kind in "CK"
        )
        cls.__stats = (columns, rows, [])
        if cls.__verbosity > 1:
            print(f"[ASP] permuted input channels of {len(columns)}, output channels of {len(rows)} parameters")
        cls.__save(graph, permuted, save_dumped_fx_graph if dump_fx_graph else None)
        return True

    @classmethod
    def __search(cls, groups: Sequence[Group], sparse: set[int]) -> list[Tensor | None]:
        """An order of the channels of each group, or None; ranks that have the same groups share the work."""
        rank, world = 0, 1
        if distributed.is_available() and distributed.is_initialized():
            known: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(known, [group.size for group in groups])
            if all(each == known[0] for each in known):
                rank, world = distributed.get_rank(), len(known)
        deadline = time.monotonic() + cls.time_budget
        costs = [group.size**2 * len(_columns(group, sparse)) for group in groups]
        found: dict[int, list[int] | None] = {}
        for number in range(rank, len(groups), world):
            share = (deadline - time.monotonic()) * costs[number] / sum(costs[number::world])
            found[number] = cls.__order(_columns(groups[number], sparse), max(1.0, share))
        for source in range(world if world > 1 else 0):
            shared = [found if source == rank else None]
            distributed.broadcast_object_list(shared, src=source)
            found.update(shared[0] or {})
        orders = [found[number] for number in range(len(groups))]
        return [None if order is None else torch.tensor(order, dtype=torch.int64, device=HOST) for order in orders]

    @classmethod
    def __order(cls, matrix: Tensor, budget: float) -> list[int] | None:
        total = float(matrix.abs().sum(dtype=torch.float64))
        if not total or 1 - sum_after_2_to_4(matrix) / total < _LEAST_LOSS:
            return None
        options = {"time_budget": budget, "seed": cls.__seed}
        return accelerated_search_for_good_permutation(matrix, options, cls.__verbosity - 2)

    @classmethod
    def __save(cls, graph: fx.Graph, groups: Sequence[dict[str, list[str]]], dump: str | None) -> None:
        """Writes the traced graph, the groups, and which parameters give channels to which others, as JSON."""
        nodes = [[node.name, node.op, str(node.target), [n.name for n in node.all_input_nodes]] for node in graph.nodes]
        contents: dict[str, Any] = {
            "model_offline_permutation_graph": nodes,
            "model_graph_find_real_parent": {name: group["K"] for group in groups for name in group["C"]},
            "model_graph_find_real_children": {name: group["C"] for group in groups for name in group["K"]},
            "model_graph_permutation_graph": groups,
        }
        paths = {Path(cls.__saving[2], f"{name}.json"): content for name, content in contents.items()}
        for path, content in {**(paths if cls.__saving[1] else {}), **({Path(dump): nodes} if dump else {})}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1))


def _follow(model: nn.Module, examples: Any, optimizers: Sequence[Any]) -> tuple[Channels, fx.Graph]:
    """What can be permuted by the graph of evaluation and that of training, and the former."""
    if any(hasattr(param, "placements") for param in model.parameters()):
        raise NotImplementedError("its parameters are sharded (DTensor)")
    if any(map(is_sharded, optimizers)):
        raise NotImplementedError("its optimizer's state is sharded (ZeRO); make it after compute_sparse_masks")
    channels = Channels()
    with _evaluating(model):
        graph = trace(model, examples)
        Walk(model, graph, channels)
    if model.training:
        training = trace(model, None)
        if [(node.op, node.target) for node in training.nodes] != [(node.op, node.target) for node in graph.nodes]:
            Walk(model, training, channels)
    return channels, graph


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards each module is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _outputs(model: nn.Module, examples: tuple) -> list[Tensor]:
    return [leaf.clone() for leaf in tree_leaves(model(*examples)) if isinstance(leaf, Tensor) and leaf.numel()]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(
        float((one.double() - other.double()).abs().max()) <= _TOLERANCES.get(one.dtype, 0.0) * float(one.abs().max())
        for one, other in zip(first, second, strict=True)
    )


def _sparse_positions(group: Group, sparse: set[int]) -> list[tuple[Axis, Tensor]]:
    return [
        (axis, copy)
        for axis, places in group.positions
        if axis.dim == 1 and id(axis.tensor) in sparse
        for copy in places
    ]


def _fits(group: Group, sparse: set[int]) -> bool:
    """Whether a permutation can help: pruned columns that fill whole stripes of 4, two or more of them."""
    positions = [copy for _, copy in _sparse_positions(group, sparse)]
    whole = all(int(copy[0]) % 4 == 0 and bool((copy.diff() == 1).all()) for copy in positions)
    return group.size >= 8 and group.size % 4 == 0 and bool(positions) and whole


def _columns(group: Group, sparse: set[int]) -> Tensor:
    """All pruned weights that read the channels of a group, one below the other: [rows, channels]."""
    parts = []
    for axis, copy in _sparse_positions(group, sparse):
        matrix = as_matrix(axis.tensor.detach()[slice(*axis.rows or (None,))])
        parts.append(matrix[:, int(copy[0]) : int(copy[0]) + group.size].float())
    return torch.cat([part.to(parts[0].device) for part in parts])


def _can_permute(group: Group, tied: Tied) -> bool:
    """The dry run: whether every tensor that is to be permuted has the channels where they are looked for."""
    return all(
        tensor.dim() == axis.tensor.dim() and tensor.shape[axis.dim] in (1, len(axis.ids))
        for axis, _ in group.positions
        for tensor in tied(axis.module, axis.name, axis.tensor)
    )


def _permute(group: Group, order: Tensor, tied: Tied) -> None:
    """Puts channel order[i] of the group in the place of channel i, in every tensor."""
    for axis, places in group.positions:
        index = torch.arange(len(axis.ids), dtype=torch.int64, device=HOST)
        for copy in places:
            index[copy] = copy[order]
        for tensor in tied(axis.module, axis.name, axis.tensor):
            if tensor.shape[axis.dim] == len(index):
                part = tensor[slice(*axis.rows or (None,))]
                part.copy_(part.index_select(axis.dim, index.to(tensor.device)))


def _names(model: nn.Module, group: Group) -> dict[str, list[str]]:
    """The parameters and buffers whose input (C) and output (K) channels are permuted."""
    named = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found: dict[str, list[str]] = {"C": [], "K": []}
    for axis, _ in group.positions:
        kind = "C" if axis.dim == 1 and isinstance(axis.module, _LAYERS) else "K"
        found[kind].append(named.get(id(axis.tensor), axis.name))
    return found
