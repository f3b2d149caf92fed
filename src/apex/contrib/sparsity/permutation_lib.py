"""Permutes the channels of a model so that pruning loses less, without a change to what the model computes.

The input channels of a layer can be in any order as long as the layers before it give theirs in the same order.
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
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)

Tied = Callable[[nn.Module, str, Tensor], list[Tensor]]


def _itself(module: nn.Module, name: str, tensor: Tensor) -> list[Tensor]:
    return [tensor.detach(), *([tensor.grad] if tensor.grad is not None else [])]


class Permutation:
    """The permutation of one model; all methods belong to the class."""

    # Seconds for the searches of a whole model; wider groups get more of them.
    time_budget = 300.0
    __seed = 1
    __saves = False
    __folder = "."
    __allowed = True
    __model: nn.Module | None = None
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
        cls.__allowed, cls.__saves, cls.__folder = allow_permutation, save_permutation_graph, permutation_output_dir

    @classmethod
    def set_permutation_params_from_asp(
        cls, model: nn.Module, sparse_parameters: Sequence[tuple], all_parameters: Sequence[tuple], verbosity: int
    ) -> None:
        """The model and what is pruned: tuples that begin with a module's name, the module, a parameter's name."""
        cls.__model, cls.__verbosity = model, verbosity
        cls.__sparse = tuple((entry[1], entry[2]) for entry in sparse_parameters)

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
        if not cls.__allowed:
            return False
        examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
        reason, channels, graph = cls.__follow(model, examples, optimizers)
        if channels is None:
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
                if before is not None and not _same(before, _outputs(model, examples)):
                    _permute(group, torch.argsort(order), tied)
                    cls.__say(1, f"put back {_names(model, group)}, whose permutation changed the model's output")
                    continue
                permuted.append(group)
        cls.__count(model, permuted)
        if dump_fx_graph or cls.__saves:
            cls.__save(model, graph, permuted, Path(save_dumped_fx_graph) if dump_fx_graph else None)
        return True

    @classmethod
    def __follow(
        cls, model: nn.Module, examples: Any, optimizers: Sequence[Any]
    ) -> tuple[str, Channels | None, fx.Graph | None]:
        """What can be permuted by the graph of evaluation and that of training; or the reason why nothing can."""
        if any(hasattr(param, "placements") for param in model.parameters()):
            return "its parameters are sharded (DTensor)", None, None
        if any(map(is_sharded, optimizers)):
            return "its optimizer's state is sharded (ZeRO); make the optimizer after compute_sparse_masks", None, None
        channels = Channels()
        try:
            with _evaluating(model):
                graph = trace(model, examples)
                Walk(model, graph, channels)
            if model.training:
                training = trace(model, None)
                if _skeleton(training) != _skeleton(graph):
                    Walk(model, training, channels)
        except Exception as error:  # whatever a model's code does with a proxy
            return f"torch.fx cannot trace it: {type(error).__name__}: {error}", None, None
        return "", channels, graph

    @classmethod
    def __search(cls, groups: Sequence[Group], sparse: set[int]) -> list[Tensor | None]:
        """An order of the channels of each group, or None; ranks that have the same groups share the work."""
        rank, world = 0, 1
        if distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
            known: list[Any] = [None] * world
            distributed.all_gather_object(known, [group.size for group in groups])
            if any(each != known[0] for each in known):
                rank, world = 0, 1
        deadline = time.monotonic() + cls.time_budget
        costs = [group.size**2 * len(_columns(group, sparse)) for group in groups]
        found: dict[int, list[int] | None] = {}
        for number in range(rank, len(groups), world):
            left = deadline - time.monotonic()
            share = left * costs[number] / max(1, sum(costs[number::world]))
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
        return accelerated_search_for_good_permutation(matrix, options, max(0, cls.__verbosity - 2))

    @classmethod
    def __count(cls, model: nn.Module, permuted: Sequence[Group]) -> None:
        parameters = dict(model.named_parameters())
        groups = [_names(model, group) for group in permuted]
        columns, rows = (
            list(dict.fromkeys(name for group in groups for name in group[kind] if name in parameters)) for kind in "CK"
        )
        cls.__stats = (columns, rows, [])
        cls.__say(2, f"permuted the input channels of {len(columns)}, the output channels of {len(rows)} parameters")

    @classmethod
    def __save(cls, model: nn.Module, graph: fx.Graph | None, permuted: Sequence[Group], dump: Path | None) -> None:
        """Writes the traced graph, the groups, and which parameters give channels to which others, as JSON."""
        groups = [_names(model, group) for group in permuted]
        nodes = [
            {
                "name": node.name,
                "op": node.op,
                "target": str(node.target),
                "inputs": [n.name for n in node.all_input_nodes],
            }
            for node in (graph.nodes if graph is not None else ())
        ]
        parents = {name: group["K"] for group in groups for name in group["C"]}
        children = {name: group["C"] for group in groups for name in group["K"]}
        folder = Path(cls.__folder)
        contents = {
            "model_offline_permutation_graph": nodes,
            "model_graph_find_real_parent": parents,
            "model_graph_find_real_children": children,
            "model_graph_permutation_graph": groups,
        }
        paths = {folder / f"{name}.json": content for name, content in contents.items()} if cls.__saves else {}
        for path, content in {**paths, **({dump: nodes} if dump else {})}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1))

    @classmethod
    def __say(cls, level: int, text: str) -> None:
        if cls.__verbosity >= level:
            print(f"[ASP] {text}")


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


def _skeleton(graph: fx.Graph) -> list[tuple[str, Any]]:
    return [(node.op, node.target) for node in graph.nodes]


def _outputs(model: nn.Module, examples: tuple) -> list[Tensor]:
    return [leaf.clone() for leaf in tree_leaves(model(*examples)) if isinstance(leaf, Tensor)]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return False
        limit = _TOLERANCES.get(one.dtype, _HALF_TOLERANCE) * float(one.abs().max()) if one.numel() else 0.0
        if one.numel() and not float((one.double() - other.double()).abs().max()) <= limit:
            return False
    return True


def _sparse_positions(group: Group, sparse: set[int]) -> list[tuple[Axis, Tensor]]:
    return [(axis, places) for axis, places in group.positions if axis.dim == 1 and id(axis.tensor) in sparse]


def _fits(group: Group, sparse: set[int]) -> bool:
    """Whether a permutation can help: pruned columns that fill whole stripes of 4, two or more of them."""
    if group.size < 8 or group.size % 4:
        return False
    positions = [copy for _, places in _sparse_positions(group, sparse) for copy in places]
    return bool(positions) and all(
        int(copy[0]) % 4 == 0 and bool((copy[1:] - copy[:-1] == 1).all()) for copy in positions
    )


def _columns(group: Group, sparse: set[int]) -> Tensor:
    """All pruned weights that read the channels of a group, one below the other: [rows, channels]."""
    parts = []
    for axis, places in _sparse_positions(group, sparse):
        tensor = axis.tensor.detach() if axis.rows is None else axis.tensor.detach()[slice(*axis.rows)]
        matrix = as_matrix(tensor)
        parts += [matrix[:, int(copy[0]) : int(copy[0]) + group.size].float() for copy in places]
    return torch.cat([part.to(parts[0].device) for part in parts])


def _can_permute(group: Group, tied: Tied) -> bool:
    """The dry run: whether every tensor that is to be permuted has the channels where they are looked for."""
    for axis, _ in group.positions:
        for tensor in tied(axis.module, axis.name, axis.tensor):
            if tensor.dim() != axis.tensor.dim() or tensor.shape[axis.dim] not in (1, axis.width):
                return False
    return True


def _permute(group: Group, order: Tensor, tied: Tied) -> None:
    """Puts channel order[i] of the group in the place of channel i, in every tensor."""
    for axis, places in group.positions:
        index = torch.arange(axis.width, dtype=torch.int64, device=order.device)
        for copy in places:
            index[copy] = copy[order]
        for tensor in tied(axis.module, axis.name, axis.tensor):
            if tensor.shape[axis.dim] == axis.width:
                part = tensor if axis.rows is None else tensor[slice(*axis.rows)]
                part.copy_(part.index_select(axis.dim, index.to(tensor.device)))


def _names(model: nn.Module, group: Group) -> dict[str, list[str]]:
    """The parameters and buffers whose input (C) and output (K) channels are permuted."""
    named = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found: dict[str, list[str]] = {"C": [], "K": []}
    for axis, _ in group.positions:
        kind = "C" if axis.dim == 1 and isinstance(axis.module, LAYERS) else "K"
        found[kind].append(named.get(id(axis.tensor), axis.name))
    return found
