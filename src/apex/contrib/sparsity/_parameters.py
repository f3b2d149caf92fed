"""Pruned parameters and the tensors that belong to each: masks, master weights, optimizer state."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.multi_tensor import mask as apply_masks
from ...optimizers._buckets import local
from ..optimizers._zero.checkpoints import edited


class SparsityError(AssertionError, RuntimeError):
    """An ASP method was called out of order, or the masks are inconsistent."""


class SparseParameter(NamedTuple):
    """A parameter of a module; its mask and pruned values are buffers of that module, looked up at each use."""

    full_name: str
    module: nn.Module
    name: str

    @property
    def param(self) -> Tensor:
        """Return the parameter."""
        return getattr(self.module, self.name)

    def buffer(self, kind: str = "mask") -> Any:
        """Return a buffer with the parameter's shape, layout and sharding, or None.

        "mask" is True for weights that are kept. "pruned_p" holds the pruned values in host memory, and zero elsewhere.
        """
        key = f"__{self.name}_mma_{kind}"
        tensor = self.module._buffers.get(key)
        if tensor is not None and hasattr(self.param, "placements") and not hasattr(tensor, "placements"):
            tensor = self.module._buffers[key] = shard_like(tensor, self.param)  # the parameter was sharded meanwhile
        return tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full values of a sharded tensor; return any other tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]


def shard_like(tensor: Tensor, param: Any) -> Tensor:
    """Shard a tensor, which every process has in full, like the parameter and return it."""
    if not hasattr(param, "placements"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    replicated = DTensor.from_local(tensor.to(param.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, param.placements)


def optimizer_chain(optimizer: Any) -> list[Any]:
    """Return an optimizer and the optimizers that it wraps (LARC, FP16_Optimizer), innermost last."""
    chain = [optimizer]
    while not isinstance(chain[-1], torch.optim.Optimizer):
        inner = getattr(chain[-1], "optim", None) or getattr(chain[-1], "optimizer", None)
        if inner is None:
            break
        chain.append(inner)
    return chain


@contextlib.contextmanager
def states_of(optimizers: Iterable[Any], gathers: bool) -> Iterator[list[Mapping[Tensor, dict[str, Any]]]]:
    """Yield the state of each optimizer, and if `gathers` ZeRO's sharded state, which is written back on exit."""
    inner = [optimizer_chain(optimizer)[-1] for optimizer in optimizers]
    for optimizer in inner:
        if getattr(optimizer, "overlap_param_sync", False):  # the all-gather of parameters may still be running
            optimizer.param_sync()
    zero = [optimizer for optimizer in inner if gathers and hasattr(optimizer, "param_sync")]
    divided = [state for optimizer in zero for state in optimizer._states]
    with edited(divided) as gathered:
        yield [*(optimizer.state for optimizer in inner), gathered]


def _plain(key: str) -> str:
    """Return a name without the prefixes that torch.compile and DistributedDataParallel add."""
    return key.replace("_orig_mod.", "").removeprefix("module.")


def copies_of(model: nn.Module, optimizers: Iterable[Any], averages: Sequence[nn.Module]) -> dict[Tensor, list[Tensor]]:
    """Return the copies of each tensor of the model.

    Copies are master weights (of amp, FP16_Optimizer, Booster) and the tensors of the same name in `averages`.
    """
    copies = defaultdict(list)
    for holder in (each for optimizer in optimizers for each in optimizer_chain(optimizer)):
        stash = getattr(holder, "_amp_stash", None)
        pairs = [] if stash is None else [(stash.all_fp16_params, stash.all_fp32_from_fp16_params)]
        masters = getattr(holder, "fp32_from_fp16_groups", None) or getattr(holder, "fp32_groups", None)
        pairs += zip(getattr(holder, "fp16_groups", ()), masters or (), strict=False)
        for half, master in (pair for halves, wide in pairs for pair in zip(halves, wide, strict=True)):
            copies[half].append(master)
        for half, master in getattr(holder, "_master_of", {}).items():
            copies[half].append(master)
    for average in averages:
        named = {_plain(key): value for key, value in average.state_dict(keep_vars=True).items()}
        for key, tensor in model.state_dict(keep_vars=True).items():
            copies[tensor] += [named[name] for name in [_plain(key)] if name in named]
    return copies


def updates(optimizer: Any, model: nn.Module) -> bool:
    """Return whether an optimizer updates a parameter of the model or its master weight, or has no parameters."""
    updated = {id(param) for group in optimizer_chain(optimizer)[-1].param_groups for param in group["params"]}
    masters = (master for copies in copies_of(model, [optimizer], ()).values() for master in copies)
    return not updated or any(id(tensor) in updated for tensor in (*model.parameters(), *masters))


def tied_tensors(
    param: Tensor, copies: Mapping[Tensor, list[Tensor]], states: Iterable[Mapping]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the tensors with one element per element of the parameter.

    They come as three lists: values (the parameter, master weights, averages), optimizer state, and gradients.
    """
    holders = [param, *copies.get(param, ())]
    values = [holder.detach() for holder in holders]
    state: list[Tensor] = []
    gradients: list[Tensor] = []
    for holder in holders:
        if holder.grad is not None and holder.grad.layout == torch.strided:
            gradients.append(holder.grad.detach())
        for name, value in (item for state_of_params in states for item in state_of_params.get(holder, {}).items()):
            if isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point():
                (values if name in ("master_param", "param") else state).append(value)
    return values, state, gradients


def mask_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set pruned elements to zero, with one call for all tensors of a device and dtype."""
    local_pairs = [(local(tensor), local(mask)) for tensor, mask in pairs]
    if local_pairs:
        apply_masks([tensor for tensor, _ in local_pairs], [mask.to(tensor.device) for tensor, mask in local_pairs])
