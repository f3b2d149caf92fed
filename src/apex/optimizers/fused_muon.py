"""FusedMuon: Muon for matrices, and AdamW or Lion for all other parameters, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from .._distributed.shards import is_sharded, shard_groups
from ..ops.multi_tensor import rules
from ..ops.newton_schulz import METHODS
from ._base import CommonOptions, EncodingOptimizer, LossScaling, StateOptions
from ._buckets import Group, UpdateBucket
from ._checks import check_options
from ._muon_directions import WORKSPACE, Directions, blocks_in_memory, blocks_of, options_of_directions, triples

ALGORITHMS = ("muon", "adamw", "lion")
ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
# Options that a group of `torch.optim.Muon` has.
_TORCH_OPTIONS = {
    *("params", "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
}


class MuonOptions(CommonOptions, StateOptions, total=False):
    """Keyword options that FusedMuon shares with other fused optimizers."""


class FusedMuon(EncodingOptimizer):
    """Muon (https://kellerjordan.github.io/posts/muon): momentum whose singular values are replaced by 1.

    The first nine arguments are `torch.optim.Muon`'s, and give the same numbers:

    - `ns_coefficients`: one triple (a, b, c) for all `ns_steps` of the Newton-Schulz iteration, a list of triples,
      whose last one is repeated, or "you" or "polar_express" for published lists of five;
    - `adjust_lr_fn`: the factor of the learning rate for a matrix of A x B; None and "original" are
      sqrt(max(1, A / B)), "match_rms_adamw" is 0.2 sqrt(max(A, B)) and keeps AdamW's learning rate and weight decay,
      "spectral_unclamped" is sqrt(A / B);
    - `ns_method`: "standard" or "gram" (see `apex.ops.newton_schulz`); "auto" takes "gram" where kernels run;
    - `ns_dtype`: the dtype of its products, by default bfloat16 or, for "gram", float16;
    - `betas`, `adam_eps`: of groups that AdamW or Lion update;
    - `cautious_weight_decay`: decay only elements whose decay has the sign of their update.

    A parameter group may also have:

    - `algorithm`: "muon" (the default), "adamw" or "lion". Parameters of fewer than two dimensions in a group of
      "muon" move to a group of their own for "adamw";
    - `num_heads`: the rows are cut into this many blocks, each made orthogonal by itself;
    - `split_sizes`: the numbers of rows of such blocks;
    - `flatten`: a convolution's weight is a matrix of its output channels;
    - `beta2`: NorMuon (https://arxiv.org/abs/2510.05491). Rows of a direction are divided by the root of an average of
      their mean squares, with this decay, and the direction gets its norm back; None (the default) is plain Muon.

    Matrices that `fully_shard` cuts are sent to one process each, made orthogonal there, and sent back. Shards that
    consist of whole matrices (experts, heads) stay where they are.

    A parameter of three dimensions is a stack of matrices, such as experts. `muon_groups(model)` makes the groups.
    `FusedOptimizer` describes the keyword options, docs/state_formats.md `state_format` and `master_bits`.
    """

    _encodable: Mapping[str, str] = MappingProxyType(
        {"momentum_buffer": "signed", "exp_avg": "signed", "exp_avg_sq": "root"}
    )
    # Whether Muon updates the group whose buckets are being made, and how many elements its matrices have so far.
    _is_muon, _elements = False, 0
    # A default for pickles of earlier versions, which lack the attribute.
    _betas: tuple[float, float] = (0.9, 0.95)

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
        **options: Unpack[MuonOptions],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, eps=eps)
        defaults |= dict(ns_coefficients=ns_coefficients, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        defaults |= dict(ns_method=ns_method, ns_dtype=ns_dtype, adam_eps=adam_eps)
        defaults |= dict(cautious_weight_decay=cautious_weight_decay, algorithm="muon")
        defaults |= dict(num_heads=None, split_sizes=None, flatten=False, beta2=None)
        self._betas = betas
        super().__init__(params, defaults, **options)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_options_of_muon(options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its parameters of fewer than two dimensions become a second group for AdamW."""
        for group in divided_group(with_betas(param_group, self._betas), self.defaults, self.param_groups):
            super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_betas": self._betas}

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.Muon`, whose groups lack the options of this class."""
        if isinstance(state_dict, Mapping) and len(state_dict.get("param_groups", ())) == len(self.param_groups):
            groups = [
                {**{name: value for name, value in own.items() if name not in _TORCH_OPTIONS}, "step": 0, **saved}
                if own["algorithm"] == "muon" and "algorithm" not in saved
                else saved
                for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True)
            ]
            state_dict = {**state_dict, "param_groups": groups}
        super()._load(state_dict)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        algorithm = group["algorithm"]
        if algorithm == "muon":
            return ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq") if algorithm == "adamw" else ("exp_avg",)

    def _before_buckets(self, index: int, group: dict[str, Any]) -> None:
        self._is_muon, self._elements = group["algorithm"] == "muon", 0

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        """Return the number of a parameter's bucket; a new one begins if the directions exceed the workspace."""
        if not self._is_muon:
            return None
        # The average number of elements per process, because all processes must make the same buckets.
        self._elements += param.numel() // math.prod(map(dist.get_world_size, shard_groups(param)))
        return self._elements // WORKSPACE

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        if group["algorithm"] != "muon":
            encoded = self.state_format != "float32"
            update_others(bucket.lists, group, step, encoded=encoded, seed=seed, **scaling.arguments)
            return
        # In a captured step `group` holds numbers that change; how parameters are divided does not.
        own = next(own for own in self.param_groups if own["params"] is group["params"])
        directions = bucket.cache.get("directions")
        if directions is None or directions.options != options_of_directions(own):
            workspaces = self.__dict__.setdefault("_workspaces", {})  # copies and loaded optimizers start without any
            directions = bucket.cache["directions"] = Directions(own, bucket, workspaces)
        slots = bucket.current_slots()  # keeps new gradient tensors alive: lists may store only addresses
        lists = directions.lists(*slots)
        lists.noise_places = bucket.lists.noise_places
        directions.update(lists, group, seed=seed, **scaling.arguments)


def check_options_of_muon(options: Mapping[str, Any]) -> None:
    """Raise an error if hyperparameters that only Muon has are invalid."""
    if options["algorithm"] not in ALGORITHMS:
        raise ValueError(f"algorithm={options['algorithm']!r} is none of {', '.join(ALGORITHMS)}")
    if options["adjust_lr_fn"] not in ADJUSTMENTS:
        raise ValueError(f"adjust_lr_fn={options['adjust_lr_fn']!r} is none of {ADJUSTMENTS}")
    if options["ns_method"] not in METHODS:
        raise ValueError(f"ns_method={options['ns_method']!r} is none of {', '.join(METHODS)}")
    steps = options["ns_steps"]
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps={steps!r} is not a number from 0 to 99")
    check_options({"momentum": options["momentum"]})  # a number
    if not options["momentum"] < 1:
        raise ValueError(f"momentum={options['momentum']} is not in [0, 1)")
    triples(options["ns_coefficients"], steps)
    dtype = options["ns_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"ns_dtype={dtype!r} is not a floating-point dtype")
    if dtype is not None and dtype.itemsize < 2:
        raise ValueError(f"ns_dtype={dtype} has no products of matrices; use torch.bfloat16 or torch.float16")
    if options["ns_method"] == "gram" and dtype == torch.bfloat16:
        raise ValueError("ns_method='gram' in bfloat16 is off by 16%; use ns_dtype=torch.float16, or 'standard'")
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


def with_betas(param_group: Any, betas: tuple[float, float]) -> Any:
    """Return a parameter group with AdamW's betas.

    They are not among the defaults, because schedulers that cycle momentum (OneCycleLR) would cycle them instead of the
    momentum of matrices.
    """
    return {"betas": betas, **param_group} if isinstance(param_group, dict) else param_group


def divided_group(param_group: Any, defaults: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> list[Any]:
    """Return the groups of a parameter group: matrices for Muon, and its other parameters for AdamW.

    Raise an error if options are invalid or do not fit the shape of a parameter, or if PyTorch would refuse a parameter
    beside the groups `others`. PyTorch gets the two groups one after the other, and would keep the first.
    """
    if not isinstance(param_group, dict) or param_group.get("algorithm", defaults["algorithm"]) != "muon":
        return [param_group]
    options = {**defaults, **param_group}
    check_options_of_muon(options)
    params = param_group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    tensors = [param[1] if isinstance(param, tuple) else param for param in params]  # named parameters
    is_matrix = [not isinstance(tensor, Tensor) or tensor.dim() >= 2 for tensor in tensors]
    known = {id(param) for group in others for param in group["params"]}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            if tensor.dim() >= 2 and not is_sharded(tensor):
                blocks_in_memory(tensor, options)
            blocks_of(tensor.shape, options)
            if not (tensor.is_leaf or tensor.retains_grad):
                raise ValueError(f"a tensor of shape {list(tensor.shape)} is no leaf: it is computed from others")
            if id(tensor) in known:
                raise ValueError(f"a parameter of shape {list(tensor.shape)} is in another parameter group already")
    groups: list[tuple[dict[str, Any], list[Any]]] = [
        ({}, [param for param, keep in zip(params, is_matrix, strict=True) if keep]),
        ({"algorithm": "adamw"}, [param for param, keep in zip(params, is_matrix, strict=True) if not keep]),
    ]
    return [
        {**param_group, **more, "params": members} for more, members in groups if members or (not params and not more)
    ]


def update_others(lists: Any, group: Mapping[str, Any], step: Any, *, encoded: bool = False, **arguments: Any) -> None:
    """Take a step of AdamW or Lion; `arguments` are for `apply`, and `encoded` says that moments have a codec."""
    beta1, beta2 = group["betas"]
    cautious = bool(group["cautious_weight_decay"])
    hyper = {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2}
    if group["algorithm"] == "lion":
        lists.apply(rules.LION, hyper, (cautious,), **arguments)
        return
    hyper |= {"eps": group["adam_eps"], "step": step}
    if encoded or cautious:
        lists.apply(rules.GUARDED_ADAM, hyper, (True, cautious, encoded), **arguments)
    else:
        lists.apply(rules.ADAM, hyper, (True, False), **arguments)


def muon_groups(
    model: nn.Module, lr: float = 1e-3, adam_lr: float | None = None, *, adjust_lr_fn: str | None = "match_rms_adamw"
) -> list[dict[str, Any]]:
    """Return parameter groups for `FusedMuon`: the weights of linear and convolution layers, and all others.

    Embeddings, weights tied to them, depthwise convolutions and the last linear layer, which is the head, are for
    AdamW with `adam_lr` (by default `lr`), as are norms and biases. Prints the division.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
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
