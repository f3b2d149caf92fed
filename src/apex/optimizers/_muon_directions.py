"""Directions of Muon: the matrices that parameters consist of, and the workspace that makes them orthogonal."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed.shards import distributed_like, local
from ..ops._host import HOST
from ..ops.multi_tensor import make_lists, rules
from ..ops.multi_tensor.codecs import Encodings
from ..ops.multi_tensor.flat import is_dense
from ..ops.multi_tensor.tables import upload
from ..ops.newton_schulz import newton_schulz, resolved
from ..ops.newton_schulz.config import matrices_at_once
from ._buckets import UpdateBucket
from ._muon_shards import FullMatrices, RowExchange, divided

# State of NorMuon: averages of squares of rows, [rows, 1].
SQUARES = "second_momentum_buffer"
# Coefficients that can be given by name, one triple per step. Singular values of 0.01 to 1 become 0.98 to 1.03, and
# 0.85 to 1.12; the default triple gives 0.68 to 1.13.
COEFFICIENTS: dict[str, list[tuple[float, float, float]]] = {
    "you": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    # https://arxiv.org/abs/2505.16932, for singular values that rounding makes up to 1.05 times as large.
    "polar_express": [
        (a / 1.05, b / 1.05**3, c / 1.05**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        )
    ],
}
# Most elements of directions that are made orthogonal at a time: 1 GiB in bfloat16.
WORKSPACE = 1 << 29


class Block(NamedTuple):
    """Rows of a parameter from `start` on: `matrices` matrices of `rows` x `columns`, each made orthogonal."""

    start: int
    matrices: int
    rows: int
    columns: int

    @property
    def work(self) -> int:
        """Return the work of an iteration, up to a factor: max min^2 for each matrix."""
        return self.matrices * max(self.rows, self.columns) * min(self.rows, self.columns) ** 2


def blocks_of(shape: Sequence[int], group: Mapping[str, Any]) -> list[Block]:
    """Return the matrices that a parameter of this shape consists of; none for a vector or a number."""
    shape, heads, splits = tuple(shape), group["num_heads"], group["split_sizes"]
    if len(shape) < 2:
        return []
    if group["flatten"]:
        shape = (shape[0], math.prod(shape[1:]))
    if len(shape) > 3:
        raise ValueError(
            f"a parameter of shape {list(shape)} is no matrix; use flatten=True for its output channels as rows, or "
            "algorithm='adamw'"
        )
    stack, rows, columns = (1, *shape) if len(shape) == 2 else shape
    if heads is not None:
        if not isinstance(heads, int) or heads < 1 or rows % heads:
            raise ValueError(f"num_heads={heads!r} does not divide the {rows} rows of a parameter of {list(shape)}")
        return [Block(0, stack * heads, rows // heads, columns)]
    if splits is None:
        return [Block(0, stack, rows, columns)]
    if stack > 1 or sum(splits) != rows or min(splits) < 1:
        raise ValueError(f"split_sizes={splits} do not add up to the {rows} rows of a parameter of {list(shape)}")
    starts = [sum(splits[:index]) for index in range(len(splits))]
    return [Block(start, 1, size, columns) for start, size in zip(starts, splits, strict=True)]


def factor_of(rows: int, columns: int, adjustment: str | None) -> float:
    """Return the factor of the learning rate for a matrix: see `adjust_lr_fn` of `FusedMuon`."""
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / max(1, columns)
    return math.sqrt(ratio if adjustment == "spectral_unclamped" else max(1.0, ratio))


def triples(coefficients: str | Sequence[Any], steps: int) -> list[tuple[float, float, float]]:
    """Return one triple of coefficients per step; a list that is too short repeats its last triple."""
    if isinstance(coefficients, str):
        coefficients = COEFFICIENTS.get(coefficients, coefficients)
    numbers: list[tuple[float, ...]] = []
    if isinstance(coefficients, (tuple, list)) and coefficients:
        rows = coefficients if isinstance(coefficients[0], (tuple, list)) else [coefficients]
        with contextlib.suppress(TypeError, ValueError):
            numbers = [tuple(map(float, row)) for row in rows]
    if not numbers or not all(len(row) == 3 and all(map(math.isfinite, row)) for row in numbers):
        names = " or ".join(map(repr, COEFFICIENTS))
        raise ValueError(f"ns_coefficients={coefficients!r} are no three numbers, list of such triples, or {names}")
    return [numbers[min(step, len(numbers) - 1)] for step in range(int(steps))]  # type: ignore[misc]


def workspace(memory: dict[Any, Tensor], elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for the directions of one bucket; it is kept, because graphs need addresses that stay."""
    kept = memory.get((device, dtype))
    if kept is None or kept.numel() < elements:
        kept = memory[device, dtype] = torch.empty(elements, dtype=dtype, device=device)
    return kept[:elements]


def options_of_directions(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the options of a group that `Directions` are made with: other values need new ones."""
    names = ("num_heads", "split_sizes", "flatten", "adjust_lr_fn", "ns_method", "ns_dtype")
    return (*(group[name] for name in names), group["beta2"] is None)


class WholeMatrices(NamedTuple):
    """Parameters that this process has whole, and NorMuon's state of each, for `Directions` instead of a bucket."""

    params: list[Tensor]
    states: list[dict[str, Any]]
    device: torch.device
    shard_groups: Sequence[Any] = ()
    kind: int = 0


class Directions:
    """Directions of a bucket's parameters, in a workspace.

    Parameters of one shape lie side by side, so that one batched iteration takes them all. `factors`, float32
    [parameters, 2], holds the factor of each parameter's learning rate in its first column. `views` are shaped and
    strided like the parameters. `workspaces` has the memory of all directions of an optimizer; see `workspace`.
    """

    def __init__(
        self, group: dict[str, Any], bucket: UpdateBucket | WholeMatrices, workspaces: dict[Any, Tensor]
    ) -> None:
        params = bucket.params
        self.options = options_of_directions(group)
        blocks = [blocks_of(param.shape, group) for param in params]
        rates = [[factor_of(block.rows, block.columns, group["adjust_lr_fn"]) for block in parts] for parts in blocks]
        own, self._exchanges = divided(params, blocks, bucket.kind)
        by_shape: dict[Any, list[int]] = {}
        for index in own:
            shard = local(params[index])
            by_shape.setdefault((params[index].shape, shard.shape, shard.stride()), []).append(index)
        sizes = [exchange.elements for exchange in self._exchanges]
        size = sum(local(params[index]).numel() for index in own)
        dtype = _direction_dtype(params[0], group["ns_dtype"])
        memory = workspace(workspaces, size + sum(sizes), dtype, bucket.device)
        own_memory, *exchanged = memory.split([size, *sizes])
        self.views: list[Tensor] = [own_memory] * len(params)
        # Directions of equal shape, their blocks with the factor of each, and averages of squares of rows or None.
        self._stacks: list[tuple[Tensor, list[tuple[Block, float]], Tensor | None]] = []
        # Exchanges of averages of squares of rows, and this process's part of the averages.
        self._squares: list[tuple[RowExchange | FullMatrices, list[Tensor]]] = []
        # If all blocks of a parameter have the same factor, the update pass multiplies, in float32.
        common = [rate[0] if len(set(rate)) == 1 else 1.0 for rate in rates]
        factors = torch.tensor([[factor, 0.0] for factor in common], dtype=torch.float32, device=HOST)
        start = 0
        for (_, shape, stride), indices in by_shape.items():
            in_memory = blocks_in_memory(params[indices[0]], group)
            stack = own_memory[start : start + math.prod(shape) * len(indices)].view(len(indices), math.prod(shape))
            start += stack.numel()
            for position, index in enumerate(indices):
                self.views[index] = stack[position].as_strided(shape, stride)
            squares = None
            if group["beta2"] is not None:
                squares = _squares_of_rows(bucket, indices, in_memory[0], shape, group)
            self._add(stack, in_memory, rates[indices[0]], squares)
        for exchange, part in zip(self._exchanges, exchanged, strict=True):
            exchange.bind(part)
            for index, view in zip(exchange.indices, exchange.views, strict=True):
                self.views[index] = view.view(local(params[index]).shape)
            squares_of: list[Tensor | None] = [None] * len(exchange.stacks)
            if group["beta2"] is not None:
                states = [_sharded_squares(bucket, index, group) for index in exchange.indices]
                of_rows = exchange.of_rows(states)
                of_rows.bind(torch.zeros(of_rows.elements, dtype=torch.float32, device=bucket.device))
                self._squares.append((of_rows, [local(state).view(-1) for state in states]))
                squares_of = [stack.unsqueeze(2) for _, stack in of_rows.stacks]
            for (first, stack), squares in zip(exchange.stacks, squares_of, strict=True):
                self._add(stack, blocks[exchange.indices[first]], rates[exchange.indices[first]], squares)
        if group["beta2"] is not None and isinstance(bucket, UpdateBucket):
            bucket.watch(SQUARES)
        self.factors = upload(factors, torch.float32, bucket.device)  # also while a graph is captured
        self._lists: Any = None
        # If the iteration's results are float16 and can be used as they are: the directions' memory as float16, and
        # lists of it for the update pass. A copy to bfloat16 would move 4 more bytes per element.
        self._halves: list[Tensor] = []
        self._half_lists: Any = None
        if dtype == torch.bfloat16 and not self._exchanges and self._in_float16(group):
            self._halves = [view.view(torch.float16) for view in self.views]

    def _in_float16(self, group: dict[str, Any]) -> bool:
        """Return whether the iteration's result is float16 for every direction, and needs no further work."""
        options = (torch.bfloat16, self.factors.device, group["ns_method"], group["ns_dtype"])
        return group["beta2"] is None and all(
            factor == 1.0 and resolved((block.rows, block.columns), *options)[1] == torch.float16
            for _, blocks, _ in self._stacks
            for block, factor in blocks
        )

    def _add(self, stack: Tensor, blocks: list[Block], rates: list[float], squares: Tensor | None) -> None:
        """Register directions, [parameters, elements]; `rates` are the factors of the learning rate of `blocks`."""
        rows = sum(block.matrices * block.rows for block in blocks)
        factors = [1.0] * len(rates) if len(set(rates)) == 1 else rates
        matrices = stack.view(len(stack), rows, blocks[0].columns)
        self._stacks.append((matrices, list(zip(blocks, factors, strict=True)), squares))

    def lists(self, slots: list[list[Tensor] | None], copy: list[Tensor] | None, encodings: Encodings) -> Any:
        """Return lists of a bucket's slots with the directions in slot 3."""
        slots[3] = self.views
        halves: Any = ([slots[0], None, None, self._halves, None], copy, {0: encodings[0]} if 0 in encodings else None)
        if self._lists is None or not self._lists.usable():
            self._lists = make_lists(slots, copy, encodings)
            self._half_lists = make_lists(*halves) if self._halves else None
        else:
            self._lists.point_to(slots, copy, encodings)
            if self._half_lists is not None:
                self._half_lists.point_to(*halves)
        return self._lists

    def update(
        self, lists: Any, group: dict[str, Any], *, noop: Tensor | None, grad_scale: Tensor | None, seed: Any = None
    ) -> None:
        """Take a step of Muon on lists that have the directions in slot 3."""
        momentum = {"momentum": group["momentum"]}
        lists.apply(rules.MUON_MOMENTUM, momentum, (bool(group["nesterov"]),), noop=noop, grad_scale=grad_scale)
        results = lists if self._half_lists is None else self._half_lists
        results.noise_places = lists.noise_places
        self.orthogonalize(group, noop, halves=results is not lists)
        hyper = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        cautious = bool(group["cautious_weight_decay"])
        results.apply(rules.MUON_UPDATE, hyper, (cautious,), whole=self.factors, noop=noop, seed=seed)

    def orthogonalize(self, group: dict[str, Any], noop: Tensor | None, *, halves: bool = False) -> None:
        """Replace the singular values of every direction by numbers near 1, in batches that bound the memory.

        With `halves` the results are float16 numbers in the same memory.
        """
        for of_rows, own in self._squares:
            torch._foreach_copy_(of_rows.views, own)
        for exchange in (*self._exchanges, *(of_rows for of_rows, _ in self._squares)):
            exchange.gather()
        steps = triples(group["ns_coefficients"], group["ns_steps"])
        eps, method, products = float(group["eps"]), group["ns_method"], group["ns_dtype"]
        for stack, blocks, squares in self._stacks:
            for block, factor in blocks:
                rows = slice(block.start, block.start + block.matrices * block.rows)
                part = stack[:, rows].unflatten(1, (block.matrices, block.rows))
                for index in _batches(part, block, products):
                    batch = part[index]
                    matrices = batch.reshape(-1, block.rows, block.columns)
                    target = batch.view(torch.float16) if halves else batch
                    _, dtype = resolved(matrices.shape[1:], batch.dtype, batch.device, method, products)
                    if squares is None and factor == 1.0 and dtype == target.dtype and target.is_contiguous():
                        newton_schulz(matrices, steps, eps, method, products, out=target.view(matrices.shape))
                        continue
                    result = newton_schulz(matrices, steps, eps, method, products).view(batch.shape)
                    if squares is not None:
                        whole = squares.dim() == 4  # of transposed matrices, which have one block
                        seen = squares if whole else squares[:, rows].unflatten(1, (block.matrices, block.rows))
                        result = _with_even_rows(result, seen[index], group["beta2"], noop)
                    target.copy_(result if factor == 1.0 else result.mul_(factor))
                    del result  # before the next batch
        for exchange in (*self._exchanges, *(of_rows for of_rows, _ in self._squares)):
            exchange.scatter()
        for of_rows, own in self._squares:
            torch._foreach_copy_(own, of_rows.views)


def _batches(part: Tensor, block: Block, products: torch.dtype | None) -> list[tuple[slice, slice]]:
    """Return slices of `part`, [parameters, matrices, rows, columns], that are made orthogonal one after the other.

    They have nearly equal numbers of matrices. The matrices of one parameter, such as experts, are divided too.
    """
    if not part.numel():
        return []
    sizes = [part.element_size(), 0 if products is None else products.itemsize]
    limit = matrices_at_once(block.rows, block.columns, max(sizes), copies=0 if part.is_contiguous() else 1)
    params, matrices = part.shape[:2]
    chosen = [_evenly(params, max(1, limit // matrices)), _evenly(matrices, limit)]
    return [(some, these) for some in chosen[0] for these in chosen[1]]


def _evenly(count: int, limit: int) -> list[slice]:
    """Return slices of nearly equal length, at most `limit`, that cover `count` elements."""
    size = -(-count // -(-count // limit))
    return [slice(start, start + size) for start in range(0, count, size)]


def _distributed_squares(param: Tensor, squares: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return this process's averages of rows as a tensor distributed like the parameter, with one column."""
    dimensions = 1 if group["flatten"] else param.dim() - 1
    shape, own = ((*each.shape[:dimensions], 1) for each in (param, local(param)))
    return distributed_like(param, squares.view(own), shape, dimensions=dimensions)


def _sharded_squares(bucket: UpdateBucket | WholeMatrices, index: int, group: Mapping[str, Any]) -> Tensor:
    """Return the state of a parameter whose matrices are cut: averages of squares of rows, float32."""
    param, state = bucket.params[index], bucket.states[index]
    if SQUARES not in state:
        rows = math.prod(local(param).shape[: 1 if group["flatten"] else param.dim() - 1])
        squares = torch.zeros(rows, dtype=torch.float32, device=bucket.device)
        state[SQUARES] = _distributed_squares(param, squares, group)
    return state[SQUARES]


def _squares_of_rows(
    bucket: UpdateBucket | WholeMatrices, indices: list[int], block: Block, shape: Sequence[int], group: dict[str, Any]
) -> Tensor:
    """Return averages of squares of rows, float32, one after the other, and make each parameter's state a view of it.

    The shape is [parameters, rows, 1] or, for a transposed matrix, whose rows are columns in memory,
    [parameters, 1, 1, rows].
    """
    is_transposed = len(shape) == 2 and (block.rows, block.columns) == tuple(shape[::-1]) != tuple(shape)
    rows = block.columns if is_transposed else math.prod(shape[:1] if group["flatten"] else shape[:-1])
    # A bucket that is made again, for example for a graph, continues with the memory of the earlier bucket.
    states = [bucket.states[index] for index in indices]
    squares = getattr(local(states[0][SQUARES]), "_base", None) if SQUARES in states[0] else None
    if squares is not None and squares.shape == (len(indices), rows):
        starts = [local(state[SQUARES]).data_ptr() if SQUARES in state else 0 for state in states]
        if starts == [row.data_ptr() for row in squares]:
            return squares[:, None, None, :] if is_transposed else squares[:, :, None]
    squares = torch.zeros(len(indices), rows, dtype=torch.float32, device=bucket.device)
    for position, index in enumerate(indices):
        state = bucket.states[index]
        if SQUARES in state:
            squares[position].copy_(local(state[SQUARES]).reshape(-1))
        state[SQUARES] = _distributed_squares(bucket.params[index], squares[position], group)
    return squares[:, None, None, :] if is_transposed else squares[:, :, None]


def _with_even_rows(directions: Tensor, squares: Tensor, beta2: Any, noop: Tensor | None) -> Tensor:
    """Return directions whose rows are divided by roots of averages of their squares, with their old norms.

    Updates the averages, unless `noop` is set. The averages have a dimension of size 1 in place of the columns.
    """
    wide = directions.to(torch.float32)
    norm = torch.linalg.vector_norm(wide, dim=(2, 3), keepdim=True)
    mean = wide.square().mean(3 if squares.shape[3] == 1 else 2, keepdim=True)
    average = squares + (mean - squares) * (1 - float(beta2))
    squares.copy_(average if noop is None else torch.where(noop.reshape(()) != 0, squares, average))
    wide = wide / (average.sqrt() + 1e-8)
    return wide.mul_(norm / torch.linalg.vector_norm(wide, dim=(2, 3), keepdim=True).clamp_(min=1e-30))


def blocks_in_memory(param: Tensor, group: dict[str, Any]) -> list[Block]:
    """Return a parameter's blocks as they lie in memory: transposed, if need be, which stays orthogonal."""
    blocks, param = blocks_of(param.shape, group), local(param)
    if param.is_contiguous():
        first = blocks[0]
        if len(blocks) == 1:  # of a shard, which may have fewer matrices
            return [first._replace(matrices=param.numel() // max(1, first.rows * first.columns))]
        return blocks
    # With channels last, the columns of a flattened weight are permuted, which changes no singular value.
    if group["flatten"] and param.stride(0) == param[0].numel() and is_dense(param):
        return blocks
    if param.dim() == 2 and param.t().is_contiguous() and blocks == [Block(0, 1, *param.shape)]:
        return [Block(0, 1, param.shape[1], param.shape[0])]
    raise ValueError(
        f"a parameter of shape {list(param.shape)} has strides {param.stride()}, in which its matrices are not "
        "contiguous; make it contiguous"
    )


def _direction_dtype(param: Tensor, products: torch.dtype | None) -> torch.dtype:
    """Return the dtype of directions: bfloat16, as in PyTorch, unless the products are wider."""
    if param.dtype == torch.float64:
        return torch.float64
    return torch.float32 if products in (torch.float32, torch.float64) else torch.bfloat16
