"""Permutes the channels of a model so that pruning loses less; the model's results stay the same.

`_channels.py` and `_graph.py` find which channels can be permuted together; `permutation_search_kernels` finds orders.
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

from ..._distributed.collectives import gather_objects
from ...ops._host import HOST
from ._channels import ChannelGraph, Group
from ._graph import LAYERS, Walk, trace
from .permutation_search_kernels import accelerated_search_for_good_permutation, sum_after_2_to_4
from .sparse_masklib import as_matrix

# A group is not permuted if plain 2:4 pruning loses a smaller share of its magnitude.
_LEAST_LOSS = 1e-3
# Accepted differences of outputs after a permutation, which reorders sums, relative to the largest output.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}

Tied = Callable[[Tensor], list[Tensor]]


class Permutation:
    """The permutation of one model; all methods are class methods."""

    # Seconds for all searches of a model; wider groups get a larger share.
    time_budget = 300.0
    __seed = 1
    __saving: tuple[bool, bool, str] = (True, False, ".")
    __sparse: tuple[tuple[nn.Module, str], ...] = ()
    __verbosity = 0
    __stats: tuple[list[str], list[str], list[str]] = ([], [], [])

    @classmethod
    def set_identical_seed(cls, identical_seed: int = 1) -> None:
        """Set the seed of the searches; PyTorch's and Python's generators are not touched."""
        cls.__seed = int(identical_seed)

    @classmethod
    def reset_seed(cls) -> None:
        """Restore the default seed of the searches."""
        cls.__seed = 1

    @classmethod
    def set_tcpstore_port(cls, tcpstore_port: int) -> None:
        """Do nothing: processes share their results over their process group."""

    @classmethod
    def set_permutation_saving_params(
        cls, allow_permutation: bool = True, save_permutation_graph: bool = False, permutation_output_dir: str = "."
    ) -> None:
        """Set whether to permute, whether to write JSON files that describe the result, and the folder for these."""
        cls.__saving = (allow_permutation, save_permutation_graph, permutation_output_dir)

    @classmethod
    def set_permutation_params_from_asp(
        cls, model: nn.Module, sparse_parameters: Sequence[tuple], all_parameters: Sequence[tuple], verbosity: int
    ) -> None:
        """Set the parameters to prune: tuples that begin with a module's name, the module and a parameter's name."""
        cls.__sparse, cls.__verbosity = tuple((entry[1], entry[2]) for entry in sparse_parameters), verbosity

    @classmethod
    def get_permutation_stats(cls) -> tuple[list[str], list[str], list[str]]:
        """Return three lists of parameters' names: input channels permuted, output channels permuted, missed."""
        return cls.__stats

    @classmethod
    @torch.no_grad()
    def permute_model(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_permutation_graph.json",
        example_inputs: Any = None,
        tied: Tied = lambda tensor: [tensor.detach()],
    ) -> bool:
        """Permute the channels of `model`; return False, without a change, if the model cannot be traced.

        `example_inputs` are a tensor or a tuple of the model's arguments. They let more of the graph be understood and
        the result be checked: if a group of layers changes the output, its permutation is undone. `tied` returns all
        tensors to permute together with a tensor of the model, including that tensor.
        """
        cls.__stats = ([], [], [])
        examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
        if not cls.__saving[0]:
            return False
        channels = ChannelGraph()
        try:
            with _evaluating(model):
                graph = trace(model, examples)
                Walk(model, graph, channels)
            training = trace(model, None) if model.training else graph
            if [(node.op, node.target) for node in training.nodes] != [(node.op, node.target) for node in graph.nodes]:
                Walk(model, training, channels)
        except Exception as error:  # a model's code may raise anything when it gets a proxy
            reason = f"torch.fx cannot trace {type(model).__name__} ({type(error).__name__}: {error})"
            warnings.warn(f"the model is pruned without permuting its channels: {reason}", stacklevel=2)
            return False
        sparse = {id(getattr(module, name)) for module, name in cls.__sparse}
        chosen = [group for group in channels.groups() if _matrix(group, sparse) is not None]
        permuted = []
        with _evaluating(model):
            original_outputs = None if examples is None else _outputs(model, examples)
            for group, order in zip(chosen, cls.__search(chosen, sparse), strict=True):
                if order is None or not _permute(group, order, tied):
                    continue
                if original_outputs is None or _same(original_outputs, _outputs(model, examples)):
                    permuted.append(_names(model, group))
                else:
                    _permute(group, torch.argsort(order), tied)
                    print(f"[ASP] {_names(model, group)} stay in order: permuted, they change the model's output")
        parameters = dict(model.named_parameters())
        for kind, names in zip("CK", cls.__stats, strict=False):
            every = dict.fromkeys(name for group in permuted for name in group[kind])
            names += [name for name in every if name in parameters]
        if cls.__verbosity > 1:
            columns, rows, _ = map(len, cls.__stats)
            print(f"[ASP] permuted input channels of {columns}, output channels of {rows} parameters")
        cls.__save(graph, permuted, save_dumped_fx_graph if dump_fx_graph else None)
        return True

    @classmethod
    def __search(cls, groups: Sequence[Group], sparse: set[int]) -> list[Tensor | None]:
        """Return an order of each group's channels, or None; ranks with the same groups share the work."""
        rank, world = 0, 1
        sizes_by_rank = gather_objects([group.size for group in groups], "sharing searches for permutations")
        if len(sizes_by_rank) > 1 and all(sizes == sizes_by_rank[0] for sizes in sizes_by_rank):
            rank, world = distributed.get_rank(), len(sizes_by_rank)
        deadline = time.monotonic() + cls.time_budget
        orders: dict[int, Tensor | None] = {}
        for number in range(rank, len(groups), world):
            matrix: Any = _matrix(groups[number], sparse)
            # The group's share of the remaining time is its share of the remaining pairs of channels.
            pairs = [group.size**2 for group in groups[number::world]]
            options = {"time_budget": (deadline - time.monotonic()) * pairs[0] / sum(pairs), "seed": cls.__seed}
            kept, total = sum_after_2_to_4(matrix), float(matrix.abs().sum(dtype=torch.float64))
            orders[number] = None
            if kept < (1 - _LEAST_LOSS) * total:
                order = accelerated_search_for_good_permutation(matrix, options, cls.__verbosity - 2)
                orders[number] = torch.tensor(order, dtype=torch.int64, device=HOST)
        for source in range(world if world > 1 else 0):
            shared = [orders if source == rank else None]
            distributed.broadcast_object_list(shared, src=source)
            orders.update(shared[0] or {})
        return [orders[number] for number in range(len(groups))]

    @classmethod
    def __save(cls, graph: fx.Graph, groups: Sequence[dict[str, list[str]]], dump: str | None) -> None:
        """Write the traced graph, the groups, and the parameters that produce and read the same channels, as JSON."""
        nodes = [[node.name, node.op, str(node.target), [n.name for n in node.all_input_nodes]] for node in graph.nodes]
        contents = {
            "model_offline_permutation_graph": nodes,
            "model_graph_find_real_parent": {name: group["K"] for group in groups for name in group["C"]},
            "model_graph_find_real_children": {name: group["C"] for group in groups for name in group["K"]},
            "model_graph_permutation_graph": groups,
        }
        _, saves, folder = cls.__saving
        files = [(Path(folder, f"{name}.json"), content) for name, content in contents.items() if saves]
        for path, content in [*files, (Path(dump), nodes)] if dump else files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1))


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the context; on exit restore each module's own mode."""
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
        float((expected.double() - actual.double()).abs().max())
        <= _TOLERANCES.get(expected.dtype, 0.0) * float(expected.abs().max())
        for expected, actual in zip(first, second, strict=True)
    )


def _matrix(group: Group, sparse: set[int]) -> Tensor | None:
    """Return all pruned weights that read the channels of a group, stacked: [rows, channels].

    Returns None if a permutation cannot help. It can if the channels fill two or more whole stripes of 4.
    """
    parts = []
    for axis, positions in group.positions:
        for copy in positions if axis.dim == 1 and id(axis.tensor) in sparse else ():
            if int(copy[0]) % 4 or not bool((copy.diff() == 1).all()):
                return None
            parts.append(as_matrix(axis.part(axis.tensor.detach()))[:, int(copy[0]) :][:, : group.size].float())
    if not parts or group.size < 8 or group.size % 4:
        return None
    return torch.cat([part.to(parts[0].device) for part in parts])


def _permute(group: Group, order: Tensor, tied: Tied) -> bool:
    """Move channel order[i] of the group to the position of channel i, in every tensor.

    Returns False, before any change, if a tensor does not have these channels in the expected dimension.
    """
    tied_by_axis = [(axis, positions, tied(axis.tensor)) for axis, positions in group.positions]
    for axis, _, tensors in tied_by_axis:
        widths = (1, len(axis.ids))
        if any(tensor.dim() != axis.tensor.dim() or tensor.shape[axis.dim] not in widths for tensor in tensors):
            return False
    for axis, positions, tensors in tied_by_axis:
        index = torch.arange(len(axis.ids), dtype=torch.int64, device=HOST)
        for copy in positions:
            index[copy] = copy[order]
        for tensor in tensors:
            if tensor.shape[axis.dim] == len(index):
                part = axis.part(tensor)
                part.copy_(part.index_select(axis.dim, index.to(tensor.device)))
    return True


def _names(model: nn.Module, group: Group) -> dict[str, list[str]]:
    """Return the names of the parameters and buffers whose input (C) and output (K) channels are permuted."""
    named = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    of_layers = {id(param) for module in model.modules() if isinstance(module, LAYERS) for param in module.parameters()}
    names: dict[str, list[str]] = {"C": [], "K": []}
    for axis, _ in group.positions:
        names["C" if axis.dim == 1 and id(axis.tensor) in of_layers else "K"].append(named.get(id(axis.tensor), "?"))
    return names
