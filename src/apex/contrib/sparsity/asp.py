"""ASP, automatic sparsity: prunes a trained model to 2 of 4 weights and keeps it pruned during further training."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from ..._arguments import checked
from ...ops._host import HOST
from . import _parameters as parameters
from ._graph import LAYERS
from ._parameters import SparseParameter, SparsityError, shard_like, whole
from ._semi_structured import to_semi_structured
from .permutation_lib import Permutation
from .sparse_masklib import create_mask, find_pattern

Companions = Callable[[Tensor], tuple[list[Tensor], list[Tensor], list[Tensor]]]
_PRUNED_NAMES: dict[type, Sequence[str]] = dict.fromkeys(LAYERS, ("weight",))
_PRUNED_NAMES[nn.MultiheadAttention] = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight")


def eligible_modules(
    model: nn.Module,
    whitelist_layer_types: Iterable[type],
    allowed_layer_names: Iterable[str] | None,
    disallowed_layer_names: Iterable[str],
) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the modules of these types or their subclasses whose names are allowed.

    Warn of a name that no such module has: a layer in a wrapper or below the named module would still be pruned.
    """
    types: Any = tuple(whitelist_layer_types)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, types)}
    allowed, disallowed = (
        set(modules if allowed_layer_names is None else allowed_layer_names),
        {*disallowed_layer_names},
    )
    if unknown := sorted((allowed | disallowed) - modules.keys()):
        warnings.warn(f"no layer that could be pruned is called {', '.join(unknown)}", stacklevel=4)
    allowed -= disallowed
    return [(name, module) for name, module in modules.items() if name in allowed]


def _obstacle(param: Any) -> str | None:
    """Return why a parameter cannot be pruned for tensor cores, or None if it can."""
    if not isinstance(param, nn.Parameter):
        return "it is no parameter, but missing or computed from others (a parametrization)"
    if not param.requires_grad:
        return "it is frozen (requires_grad is False)"
    if not param.is_floating_point() or not 2 <= param.dim() <= 5:
        return f"it is {param.dtype} with {param.dim()} dimensions; floating-point ones of two to five can be pruned"
    if param.shape[0] % 8 or param.shape[1] % 16:
        return f"its shape {list(param.shape)} is not a multiple of 8 by a multiple of 16"
    return None


def _check_optimizer(optimizer: Any, model: nn.Module) -> Any:
    """Return the innermost optimizer; raise if there is none, or if it updates nothing of the model."""
    inner = parameters.optimizer_chain(optimizer)[-1]
    if not hasattr(inner, "register_step_pre_hook"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or wrap one, got {type(optimizer).__name__}")
    if not parameters.updates(optimizer, model):
        raise ValueError(
            f"none of the parameters of the optimizer ({type(inner).__name__}) belongs to the model "
            f"({type(model).__name__}) that ASP prunes; make the optimizer from this model's parameters()"
        )
    return inner


class ASP:
    """Automatic sparsity of one model per process; all methods are class methods.

    `init_model_for_pruning` chooses the parameters and registers their masks as buffers of the model, so that they are
    part of checkpoints. `init_optimizer_for_pruning`, called for each optimizer, makes its steps keep pruned weights
    zero. `compute_sparse_masks` prunes. `reset` forgets the model.
    """

    __model: nn.Module | None = None
    __calculate: Callable[[Tensor], Tensor]
    __verbosity = 3
    __permutes = True
    __optimizers: tuple[Any, ...] = ()
    __hooks: tuple[Any, ...] = ()
    __averages: tuple[nn.Module, ...] = ()
    __parameters: tuple[SparseParameter, ...] = ()
    __skipped: dict[str, str] = {}  # noqa: RUF012  replaced, never changed in place

    to_semi_structured = staticmethod(to_semi_structured)

    @classmethod
    @checked
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[[Tensor], Tensor] = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type] = LAYERS,
        allowed_layer_names: Iterable[str] | None = None,
        disallowed_layer_names: Iterable[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: Mapping[type, Sequence[str]] | None = None,
        allow_permutation: bool = True,
    ) -> None:
        """Choose the parameters of `model` to prune and register a mask for each.

        `mask_calculator` is the name of a pattern of `sparse_masklib`, or a function from a parameter to its mask.
        `custom_layer_dict` names the parameters to prune in further types of layers. With `allow_recompute_mask`,
        pruned values are kept in host memory, so that masks can be computed again. With `allow_permutation`, channels
        are reordered first so that pruning loses less; the model's results stay the same.
        """
        if cls.__model is not None:
            raise SparsityError("ASP has been initialized already; ASP.reset() forgets the model that it has")
        if isinstance(mask_calculator, str):
            find_pattern(mask_calculator)  # raises an error if the name is unknown
            mask_calculator = functools.partial(create_mask, pattern=mask_calculator)
        for layer, listed in (custom_layer_dict or {}).items():
            if not isinstance(layer, type) or isinstance(listed, str) or not all(isinstance(n, str) for n in listed):
                raise TypeError(f"custom_layer_dict must have lists of names by class, got {{{layer!r}: {listed!r}}}")
        names = {**_PRUNED_NAMES, **(custom_layer_dict or {})}
        types = (*whitelist, *(custom_layer_dict or ()))
        chosen = dict(eligible_modules(model, types, allowed_layer_names, disallowed_layer_names))
        chosen_parameters: dict[int, SparseParameter] = {}
        skipped: dict[str, str] = {}
        for module_name, module in eligible_modules(model, types, None, ()):
            parameter_names = next((names[base] for base in type(module).__mro__ if base in names), None)
            if parameter_names is None:
                kind = type(module).__name__
                raise ValueError(f"whitelist has {kind}: name what to prune with custom_layer_dict={{{kind}: [...]}}")
            if module_name not in chosen:
                skipped[module_name] = "its name is disallowed, or not among those allowed"
                continue
            existing = [name for name in parameter_names if getattr(module, name, None) is not None]
            for name in existing or parameter_names[:1]:
                param = getattr(module, name, None)
                full_name, reason = f"{module_name}.{name}".lstrip("."), _obstacle(param)
                if id(param) in chosen_parameters:
                    reason = f"it is the same parameter as {chosen_parameters[id(param)].full_name}"
                if reason is None:
                    chosen_parameters[id(param)] = SparseParameter(full_name, module, name)
                else:
                    skipped[full_name] = reason
        if not chosen_parameters:
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in skipped.items())
            raise ValueError(f"no parameter of the model can be pruned{reasons or ': it has no layer of these types'}")
        cls.__model, cls.__parameters, cls.__skipped = model, tuple(chosen_parameters.values()), skipped
        cls.__calculate, cls.__verbosity, cls.__permutes = mask_calculator, verbosity, allow_permutation
        for full_name, module, name in cls.__parameters:
            param = getattr(module, name).detach()
            module.register_buffer(f"__{name}_mma_mask", torch.ones_like(param, dtype=torch.bool))
            if allow_recompute_mask:
                zeros = torch.zeros_like(param, device=None if hasattr(param, "placements") else HOST)
                module.register_buffer(f"__{name}_mma_pruned_p", zeros)
            cls.__say(3, f"will prune {full_name}, {list(param.shape)} {param.dtype}")
        for name, reason in skipped.items():
            cls.__say(2, f"will not prune {name}: {reason}")

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Return whether `init_model_for_pruning` was called."""
        return cls.__model is not None

    @classmethod
    def skipped_layers(cls) -> dict[str, str]:
        """Return the layers and parameters that are not pruned, by name, each with the reason."""
        return dict(cls.__skipped)

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: Any) -> None:
        """Make each step of the optimizer mask gradients before it, and weights, master weights and state after it."""
        model = cls.__check_model("init_optimizer_for_pruning")
        if any(optimizer is known for known in cls.__optimizers):
            raise SparsityError("this optimizer has been initialized for pruning already")
        inner = _check_optimizer(optimizer, model)
        hooks = [
            inner.register_step_pre_hook(lambda *_: cls.__mask(gradients=True)),
            inner.register_step_post_hook(lambda *_: cls.__mask()),
        ]
        for sparse in cls.__parameters if hasattr(inner, "param_sync") else ():  # ZeRO reduces them in backward
            hooks.append(sparse.param.register_hook(lambda grad, each=sparse: grad.masked_fill(~each.buffer(), 0)))
        cls.__optimizers, cls.__hooks = (*cls.__optimizers, optimizer), (*cls.__hooks, *hooks)

    @classmethod
    @checked
    def add_copy(cls, model: nn.Module) -> None:
        """Register a copy of the model, such as a moving average of its weights, to be permuted and masked with it."""
        pruned = parameters.copies_of(cls.__check_model("add_copy"), (), [model])
        for sparse in cls.__parameters:
            shapes = [list(each.shape) for each in pruned.get(sparse.param, ())]
            if shapes != [list(sparse.param.shape)]:
                found = f"one of shape {shapes[0]}" if shapes else "none"
                raise ValueError(
                    f"model must have a {sparse.full_name} of shape {list(sparse.param.shape)}, it has {found}"
                )
        cls.__averages = (*cls.__averages, model)

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls, example_inputs: Any = None) -> None:
        """Prune the model: permute channels if allowed, then compute masks and apply them.

        A tuple of `example_inputs` lets the permutation be checked: if a group of layers changes the model's output,
        its permutation is undone. With `allow_recompute_mask`, an already pruned model is first made dense again.
        """
        model = cls.__check_model("compute_sparse_masks")
        if cls.__permutes and any(hasattr(sparse.param, "placements") for sparse in cls.__parameters):
            raise SparsityError(
                "channels of sharded parameters (FSDP2) cannot be permuted: call compute_sparse_masks before "
                "fully_shard, or initialize ASP with allow_permutation=False"
            )
        if any(sparse.param.is_meta for sparse in cls.__parameters):
            raise SparsityError("parameters on the meta device have no values to prune: give them some first")
        if not isinstance(example_inputs, Tensor | tuple | list | None):
            raise TypeError(f"example_inputs must be a tensor, a tuple of them or None, got {example_inputs!r:.80}")
        if cls.__permutes and not cls.__known_pattern():
            for sparse in cls.__parameters:  # a failing mask function must fail before channels are permuted
                cls.__new_mask(sparse)
        if not all(bool(whole(sparse.buffer()).all()) for sparse in cls.__parameters):
            cls.restore_pruned_weights()
        if cls.__permutes:
            inner = model
            while isinstance(wrapped := getattr(inner, "module", getattr(inner, "_orig_mod", None)), nn.Module):
                inner = wrapped  # inside DistributedDataParallel or torch.compile
            Permutation.set_permutation_params_from_asp(inner, cls.__parameters, (), cls.__verbosity)
            of_calculator: Any = getattr(cls.__calculate, "tied_tensors", lambda tensor: [])
            with cls.__companions() as companions:
                tied = lambda tensor: [*itertools.chain(*companions(tensor)), *of_calculator(tensor)]  # noqa: E731
                Permutation.permute_model(inner, example_inputs=example_inputs, tied=tied)
        for sparse, mask in [(sparse, cls.__new_mask(sparse)) for sparse in cls.__parameters]:
            param, pruned = sparse.param.detach(), sparse.buffer("pruned_p")
            sparse.buffer().copy_(shard_like(mask, param))
            if pruned is not None:
                pruned.copy_(param * ~sparse.buffer())
            cls.__say(2, f"keeps {float(mask.float().mean()):.1%} of {sparse.full_name}")
        cls.__mask(gathers=True)

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Restore pruned values: the model is dense again, and its masks keep all weights."""
        cls.__check_model("restore_pruned_weights")
        if any(sparse.buffer("pruned_p") is None for sparse in cls.__parameters):
            raise SparsityError("pruned values were not kept: initialize ASP with allow_recompute_mask=True")
        with cls.__companions() as companions:
            for sparse in cls.__parameters:
                mask, pruned = sparse.buffer(), sparse.buffer("pruned_p")
                for value in companions(sparse.param)[0]:
                    value.copy_(torch.where(mask.to(value.device), value, pruned.to(value.device, value.dtype)))
                mask.fill_(True)
                pruned.zero_()

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Return whether the model is pruned: False if all masks keep everything, True if all follow the pattern."""
        shares = {sparse.full_name: float(whole(sparse.buffer()).double().mean()) for sparse in cls.__parameters}
        if all(share == 1 for share in shares.values()):
            return False
        exact = cls.__known_pattern() in ("m4n2_1d", "m4n2_2d_best")
        wrong = {name: share for name, share in shares.items() if (share != 0.5 if exact else share == 1)}
        if wrong:
            raise SparsityError(f"masks do not agree whether the model is pruned; these keep other shares: {wrong}")
        return True

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: Any) -> None:
        """Prune 2 of 4 weights of a trained model's linear layers, convolutions and attention, for further training."""
        if isinstance(model, nn.Module):  # else the next call names it
            _check_optimizer(optimizer, model)
        types = [nn.Linear, nn.Conv2d, nn.MultiheadAttention]
        cls.init_model_for_pruning(model, verbosity=2, whitelist=types)
        try:
            cls.init_optimizer_for_pruning(optimizer)
            cls.compute_sparse_masks()
        except SparsityError:  # raised before weights change: masks and hooks are taken off again
            cls.reset()
            raise

    @classmethod
    @checked
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = True,
        save_permutation_graph: bool = False,
        permutation_output_dir: str | os.PathLike[str] = ".",
    ) -> None:
        """Set whether channels are permuted, whether JSON files describe the result, and the folder for these."""
        cls.__permutes = allow_permutation
        Permutation.set_permutation_saving_params(
            allow_permutation, save_permutation_graph, str(permutation_output_dir)
        )

    @classmethod
    def reset(cls) -> None:
        """Forget model and optimizers and remove masks and hooks; weights keep their values."""
        for hook in cls.__hooks:
            hook.remove()
        for sparse, kind in itertools.product(cls.__parameters, ("mask", "pruned_p")):
            sparse.module._buffers.pop(f"__{sparse.name}_mma_{kind}", None)
        cls.__model, cls.__skipped = None, {}
        cls.__optimizers, cls.__hooks, cls.__averages, cls.__parameters = (), (), (), ()

    @classmethod
    @contextlib.contextmanager
    def __companions(cls, gathers: bool = True) -> Iterator[Companions]:
        """Yield a function that returns a parameter's `tied_tensors`; if `gathers`, with the state that ZeRO shards."""
        copies = parameters.copies_of(cls.__check_model("step"), cls.__optimizers, cls.__averages)
        with parameters.states_of(cls.__optimizers, gathers) as states:
            yield lambda tensor: parameters.tied_tensors(tensor, copies, states)

    @classmethod
    def __mask(cls, gradients: bool = False, gathers: bool = False) -> None:
        """Mask the gradients, or else the weights, master weights, averages and optimizer state."""
        pairs = []
        with cls.__companions(gathers) as companions:
            for sparse in cls.__parameters:
                values, state, grads = companions(sparse.param)
                pairs += [(tensor, sparse.buffer()) for tensor in (grads if gradients else values + state)]
            parameters.mask_all(pairs)

    @classmethod
    def __known_pattern(cls) -> str | None:
        """Return the name of the pattern of `sparse_masklib`, or None if a function of the user computes masks."""
        return getattr(cls.__calculate, "keywords", {}).get("pattern")

    @classmethod
    def __new_mask(cls, sparse: SparseParameter) -> Tensor:
        """Return a new mask for a parameter, without a change of either; raise ValueError if it has another shape."""
        param = sparse.param.detach()
        mask = cls.__calculate(whole(param))
        if not isinstance(mask, Tensor) or mask.shape != param.shape:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"mask_calculator gave {shape} for {sparse.full_name} of shape {list(param.shape)}")
        return mask.bool()

    @classmethod
    def __check_model(cls, method: str) -> nn.Module:
        if cls.__model is None:
            raise SparsityError(f"ASP.{method} needs a model: call ASP.init_model_for_pruning first")
        return cls.__model

    @classmethod
    def __say(cls, level: int, text: str) -> None:
        alone = not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
        if cls.__verbosity >= level and alone:
            print(f"[ASP] {text}")
