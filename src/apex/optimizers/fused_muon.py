"""FusedMuon: Muon for matrices, and AdamW or Lion for all other parameters, in one optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..ops._host import HOST
from ..ops.multi_tensor import make_lists, rules
from ..ops.multi_tensor.codecs import Encodings
from ..ops.multi_tensor.flat import is_dense
from ..ops.multi_tensor.tables import upload
from ..ops.multi_tensor.torch_lists import TorchLists
from ..ops.newton_schulz import METHODS, newton_schulz
from ..ops.newton_schulz.config import matrices_at_once
from ._base import CommonOptions, EncodingOptimizer, LossScaling, StateOptions
from ._buckets import Group, UpdateBucket, local

ALGORITHMS = ("muon", "adamw", "lion")
ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
# Options that a group of `torch.optim.Muon` has.
_TORCH_OPTIONS = {
    *("params", "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
}
# State of NorMuon: averages of squares of rows, [rows, 1].
SQUARES = "second_momentum_buffer"
# Elements of directions that are made orthogonal before the next ones: 1 GiB in bfloat16.
WORKSPACE = 1 << 29


class MuonOptions(CommonOptions, StateOptions, total=False):
    """Keyword options of FusedMuon beside its own."""


class FusedMuon(EncodingOptimizer):
    """Muon (https://kellerjordan.github.io/posts/muon): momentum whose singular values are replaced by 1.

    The first nine arguments are `torch.optim.Muon`'s, and give the same numbers:

    - `ns_coefficients`: one triple (a, b, c) for all `ns_steps` of the Newton-Schulz iteration, or a list of triples,
      whose last one is repeated;
    - `adjust_lr_fn`: the factor of the learning rate for a matrix of A x B; None and "original" are
      sqrt(max(1, A / B)), "match_rms_adamw" is 0.2 sqrt(max(A, B)) and keeps AdamW's learning rate and weight decay,
      "spectral_unclamped" is sqrt(A / B);
    - `ns_method`: "standard" or "gram" (see `apex.ops.newton_schulz`); "auto" takes "gram" where kernels run;
    - `ns_dtype`: the dtype of its products, by default bfloat16 or, for "gram", float16;
    - `betas`, `adam_eps`: of groups that AdamW or Lion update;
    - `cautious_weight_decay`: decay only elements whose decay has the sign of their update, by Muon and Lion; AdamW
      decays all elements.

    A parameter group may also have:

    - `algorithm`: "muon" (the default), "adamw" or "lion". Parameters of fewer than two dimensions in a group of
      "muon" move to a group of their own for "adamw";
    - `num_heads`: the rows are so many blocks, each orthogonal by itself; `split_sizes`: blocks of so many rows;
    - `flatten`: a convolution's weight is a matrix of its output channels;
    - `beta2`: NorMuon (https://arxiv.org/abs/2510.05491). Rows of a direction are divided by the root of an average of
      their mean squares, with this decay, and the direction gets its norm back; None (the default) is plain Muon.

    A parameter of three dimensions is a stack of matrices, such as experts. `muon_groups(model)` makes the groups.
    `FusedOptimizer` describes the keyword options, docs/state_formats.md `state_format` and `master_bits`.
    """

    _encodable: Mapping[str, str] = MappingProxyType(
        {"momentum_buffer": "signed", "exp_avg": "signed", "exp_avg_sq": "root"}
    )

    _takes_shards = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[Any] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_method: str = "auto",
        ns_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        cautious_weight_decay: bool = False,
        **options: Unpack[MuonOptions],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, eps=eps)
        defaults |= dict(ns_coefficients=ns_coefficients, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        defaults |= dict(ns_method=ns_method, ns_dtype=ns_dtype, betas=betas, adam_eps=adam_eps)
        defaults |= dict(cautious_weight_decay=cautious_weight_decay, algorithm="muon")
        defaults |= dict(num_heads=None, split_sizes=None, flatten=False, beta2=None)
        super().__init__(params, defaults, **options)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if options["algorithm"] not in ALGORITHMS:
            raise ValueError(f"algorithm={options['algorithm']!r} is none of {', '.join(ALGORITHMS)}")
        if options["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn={options['adjust_lr_fn']!r} is none of {ADJUSTMENTS}")
        if options["ns_method"] not in METHODS:
            raise ValueError(f"ns_method={options['ns_method']!r} is none of {', '.join(METHODS)}")
        steps = options["ns_steps"]
        if not isinstance(steps, int) or not 0 <= steps < 100:
            raise ValueError(f"ns_steps={steps!r} is not a number from 0 to 99")
        if not 0 <= options["momentum"] < 1:
            raise ValueError(f"momentum={options['momentum']} is not in [0, 1)")
        triples(options["ns_coefficients"], steps)
        dtype = options["ns_dtype"]
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"ns_dtype={dtype!r} is not a floating-point dtype")
        beta2 = options["beta2"]
        if beta2 is not None and not (isinstance(beta2, (int, float)) and 0 <= beta2 < 1):
            raise ValueError(f"beta2={beta2!r} is not in [0, 1)")
        heads, splits = options["num_heads"], options["split_sizes"]
        if heads is not None and (not isinstance(heads, int) or heads < 1):
            raise ValueError(f"num_heads={heads!r} is not a number of blocks")
        if splits is not None and not (
            isinstance(splits, (tuple, list)) and splits and all(isinstance(rows, int) and rows > 0 for rows in splits)
        ):
            raise ValueError(f"split_sizes={splits!r} are not numbers of rows")
        if heads is not None and splits is not None:
            raise ValueError("num_heads and split_sizes both divide the rows; give one of them")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its parameters of fewer than two dimensions become a second group for AdamW."""
        if not isinstance(param_group, dict) or param_group.get("algorithm", "muon") != "muon":
            super().add_param_group(param_group)
            return
        self._check_options({**self.defaults, **param_group})
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        tensors = [param[1] if isinstance(param, tuple) else param for param in params]  # named parameters
        is_matrix = [not isinstance(tensor, Tensor) or tensor.dim() >= 2 for tensor in tensors]
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                blocks_of(tensor.shape, {**self.defaults, **param_group})
        groups = [
            ({}, [param for param, keep in zip(params, is_matrix, strict=True) if keep]),
            ({"algorithm": "adamw"}, [param for param, keep in zip(params, is_matrix, strict=True) if not keep]),
        ]
        for more, members in groups:
            if members or (not params and not more):
                super().add_param_group({**param_group, **more, "params": members})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.Muon`, whose groups lack the options of this class."""
        if isinstance(state_dict, Mapping) and len(state_dict.get("param_groups", ())) == len(self.param_groups):
            groups = [
                {**{name: value for name, value in own.items() if name not in _TORCH_OPTIONS}, "step": 0, **saved}
                if own["algorithm"] == "muon" and "algorithm" not in saved
                else saved
                for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True)
            ]
            state_dict = {**state_dict, "param_groups": groups}
        super().load_state_dict(state_dict)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        algorithm = group["algorithm"]
        if algorithm == "muon":
            return ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq") if algorithm == "adamw" else ("exp_avg",)

    def _before_buckets(self, index: int, group: dict[str, Any]) -> None:
        self._is_muon, self._elements = group["algorithm"] == "muon", 0

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        """Return the number of the bucket, so that each fits into the workspace."""
        if not self._is_muon:
            return None
        self._elements += local(param).numel()
        return self._elements // WORKSPACE

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        cautious = bool(group["cautious_weight_decay"])
        decoupled = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if group["algorithm"] == "lion":
            beta1, beta2 = group["betas"]
            hyper = {**decoupled, "beta1": beta1, "beta2": beta2}
            bucket.lists.apply(rules.LION, hyper, (cautious,), seed=seed, **scaling.arguments)
        elif group["algorithm"] == "adamw":
            beta1, beta2 = group["betas"]
            hyper = {**decoupled, "beta1": beta1, "beta2": beta2, "eps": group["adam_eps"], "step": step}
            is_plain = self.state_format == "float32"
            rule, flags = (rules.ADAM, (True, False)) if is_plain else (rules.GUARDED_ADAM, (True, False, True))
            bucket.lists.apply(rule, hyper, flags, seed=seed, **scaling.arguments)
        else:
            self._update_matrices(group, bucket, decoupled, cautious, scaling, seed)

    def _update_matrices(
        self,
        group: dict[str, Any],
        bucket: UpdateBucket,
        decoupled: dict[str, Any],
        cautious: bool,
        scaling: LossScaling,
        seed: int | None,
    ) -> None:
        directions = bucket.cache.get("directions")
        if directions is None:
            # In a captured step `group` holds numbers that change; how parameters are divided does not.
            own = next(own for own in self.param_groups if own["params"] is group["params"])
            directions = bucket.cache["directions"] = Directions(self, own, bucket)
        current = bucket.current_slots()  # held until the end: lists may know gradients by their addresses only
        lists = directions.lists(*current)
        momentum = {"momentum": group["momentum"]}
        lists.apply(rules.MUON_MOMENTUM, momentum, (bool(group["nesterov"]),), **scaling.arguments)
        directions.orthogonalize(group, scaling.found_inf)
        lists.apply(
            rules.MUON_UPDATE, decoupled, (cautious,), whole=directions.factors, noop=scaling.found_inf, seed=seed
        )

    def _workspace(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the directions of one bucket; it is kept, because graphs need addresses that stay."""
        workspaces = self.__dict__.setdefault("_workspaces", {})  # copies and loaded optimizers start without any
        workspace = workspaces.get((device, dtype))
        if workspace is None or workspace.numel() < elements:
            workspace = workspaces[device, dtype] = torch.empty(elements, dtype=dtype, device=device)
        return workspace[:elements]


class Block(NamedTuple):
    """Rows of a parameter, from `start` on, that are made orthogonal: `matrices` of `rows` x `columns`."""

    start: int
    matrices: int
    rows: int
    columns: int


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


def triples(coefficients: Sequence[Any], steps: int) -> list[tuple[float, float, float]]:
    """Return one triple of coefficients per step; the last one of a list is repeated."""
    numbers: list[tuple[float, ...]] = []
    if isinstance(coefficients, (tuple, list)) and coefficients:
        rows = coefficients if isinstance(coefficients[0], (tuple, list)) else [coefficients]
        with contextlib.suppress(TypeError, ValueError):
            numbers = [tuple(map(float, row)) for row in rows]
    if not numbers or not all(len(row) == 3 and all(map(math.isfinite, row)) for row in numbers):
        raise ValueError(f"ns_coefficients={coefficients!r} are neither three numbers nor a list of such triples")
    return [numbers[min(step, len(numbers) - 1)] for step in range(int(steps))]  # type: ignore[misc]


class Directions:
    """Directions of a bucket's parameters, in the optimizer's workspace.

    Parameters of one shape lie side by side, so that one batched iteration takes them all. `factors`, float32
    [parameters, 2], holds the factor of each parameter's learning rate in its first column.
    """

    def __init__(self, optimizer: FusedMuon, group: dict[str, Any], bucket: UpdateBucket) -> None:
        params = bucket.params
        by_shape: dict[Any, list[int]] = {}
        for index, param in enumerate(params):
            by_shape.setdefault((param.shape, param.stride()), []).append(index)
        dtype = _direction_dtype(params[0], group["ns_dtype"])
        workspace = optimizer._workspace(sum(map(Tensor.numel, params)), dtype, bucket.device)
        self._views: list[Tensor] = [workspace] * len(params)
        # Directions of equal shape, their blocks with the factor of each, and averages of squares of rows or None.
        self._stacks: list[tuple[Tensor, list[tuple[Block, float]], Tensor | None]] = []
        factors = torch.zeros(len(params), 2, dtype=torch.float32, device=HOST)
        start = 0
        for (shape, stride), indices in by_shape.items():
            blocks = _blocks_in_memory(params[indices[0]], group)
            rates = [factor_of(block.rows, block.columns, group["adjust_lr_fn"]) for block in blocks_of(shape, group)]
            are_equal = len(set(rates)) == 1  # then the update pass multiplies, in float32
            size = math.prod(shape)
            rows = sum(block.matrices * block.rows for block in blocks)
            stack = workspace[start : start + size * len(indices)].view(len(indices), rows, blocks[0].columns)
            start += stack.numel()
            for position, index in enumerate(indices):
                self._views[index] = stack[position].as_strided(shape, stride)
                factors[index, 0] = rates[0] if are_equal else 1.0
            squares = None if group["beta2"] is None else _squares_of_rows(bucket, indices, blocks[0], shape)
            factors_of = zip(blocks, [1.0] * len(rates) if are_equal else rates, strict=True)
            self._stacks.append((stack, list(factors_of), squares))
        if group["beta2"] is not None:
            bucket.watch(SQUARES)
        self.factors = upload(factors, torch.float32, bucket.device)  # also while a graph is captured
        self._lists: Any = None
        self._addresses: list[int] = []

    def lists(self, slots: list[list[Tensor] | None], copy: list[Tensor] | None, encodings: Encodings) -> Any:
        """Return lists of a bucket's slots with the directions in slot 3."""
        slots[3] = self._views
        addresses = [tensor.data_ptr() for tensors in (*slots, copy) if tensors for tensor in tensors]
        if self._lists is None or not self._lists.usable():
            self._lists = make_lists(slots, copy, encodings)
        elif addresses != self._addresses or isinstance(self._lists, TorchLists):
            self._lists.point_to(slots, copy, encodings)
        self._addresses = addresses
        return self._lists

    def orthogonalize(self, group: dict[str, Any], noop: Tensor | None) -> None:
        """Replace the singular values of every direction by numbers near 1, in batches that bound the memory."""
        steps = triples(group["ns_coefficients"], group["ns_steps"])
        options: tuple[Any, ...] = (steps, float(group["eps"]), group["ns_method"], group["ns_dtype"])
        for stack, blocks, squares in self._stacks:
            for block, factor in blocks:
                rows = slice(block.start, block.start + block.matrices * block.rows)
                part = stack[:, rows].unflatten(1, (block.matrices, block.rows))
                for place in _batches(part, block, group["ns_dtype"]):
                    batch = part[place]
                    result = newton_schulz(batch.reshape(-1, block.rows, block.columns), *options).view(batch.shape)
                    if squares is not None:
                        whole = squares.dim() == 4  # of transposed matrices, which have one block
                        seen = squares if whole else squares[:, rows].unflatten(1, (block.matrices, block.rows))
                        result = _with_even_rows(result, seen[place], group["beta2"], noop)
                    batch.copy_(result if factor == 1.0 else result.mul_(factor))
                    del result  # before the next batch


def _batches(part: Tensor, block: Block, products: torch.dtype | None) -> list[tuple[slice, slice]]:
    """Return parts of `part`, [parameters, matrices, rows, columns], that are made orthogonal one after the other.

    They have nearly equal numbers of matrices. Matrices of a single parameter are divided too, as those of experts.
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


def _squares_of_rows(bucket: UpdateBucket, indices: list[int], block: Block, shape: Sequence[int]) -> Tensor:
    """Return averages of squares of rows, float32, one after the other, and make each parameter's state a view of it.

    The shape is [parameters, rows, 1] or, for a transposed matrix, whose rows are columns in memory,
    [parameters, 1, 1, rows].
    """
    is_transposed = len(shape) == 2 and (block.rows, block.columns) == tuple(shape[::-1]) != tuple(shape)
    rows = block.columns if is_transposed else math.prod(shape) // max(1, block.columns)
    # A bucket that is made again, for a graph say, goes on with the memory of the one before.
    states = [bucket.states[index] for index in indices]
    squares = getattr(states[0].get(SQUARES), "_base", None)
    if squares is not None and squares.shape == (len(indices), rows):
        starts = [state[SQUARES].data_ptr() if SQUARES in state else 0 for state in states]
        if starts == [row.data_ptr() for row in squares]:
            return squares[:, None, None, :] if is_transposed else squares[:, :, None]
    squares = torch.zeros(len(indices), rows, dtype=torch.float32, device=bucket.device)
    for position, index in enumerate(indices):
        state = bucket.states[index]
        if SQUARES in state:
            squares[position].copy_(state[SQUARES].reshape(-1))
        state[SQUARES] = squares[position].unsqueeze(1)
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


def _blocks_in_memory(param: Tensor, group: dict[str, Any]) -> list[Block]:
    """Return the blocks of a parameter as they lie in memory; a transposed matrix is orthogonal if the matrix is."""
    blocks = blocks_of(param.shape, group)
    if param.is_contiguous():
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


def muon_groups(
    model: nn.Module, lr: float = 1e-3, adam_lr: float | None = None, *, adjust_lr_fn: str | None = "match_rms_adamw"
) -> list[dict[str, Any]]:
    """Return parameter groups for `FusedMuon`: the weights of linear and convolution layers, and all others.

    Embeddings, weights tied to them, depthwise convolutions and the last linear layer, which is the head, are for
    AdamW with `adam_lr` (by default `lr`), as are norms and biases. Prints what goes where.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    for_adamw = {id(module.weight) for module in (*tables, *linears[-1:])}
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    chosen: dict[int, bool] = {id(module.weight): False for module in linears if id(module.weight) not in for_adamw}
    for module in model.modules():
        if isinstance(module, convolutions) and not module.weight.shape[1] == 1 < module.groups:
            chosen[id(module.weight)] = True
    matrices: list[Tensor] = []
    flattened: list[Tensor] = []
    others: list[Tensor] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            flatten = chosen.get(id(param))
            (others if flatten is None else flattened if flatten else matrices).append(param)
            algorithm = "AdamW" if flatten is None else "Muon"
            print(f"{algorithm:5} {name} {list(param.shape)}")
    common: dict[str, Any] = {"lr": lr, "adjust_lr_fn": adjust_lr_fn}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "algorithm": "muon", **common},
        {"params": flattened, "algorithm": "muon", "flatten": True, **common},
        {"params": others, "algorithm": "adamw", "lr": lr if adam_lr is None else adam_lr},
    ]
    return [group for group in groups if group["params"]]
