"""Parameters that are pruned, and the tensors that belong to each: masks, master weights, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops._host import HOST
from ...ops.multi_tensor import mask as apply_masks
from ...ops.multi_tensor.flat import flat, is_dense
from ...optimizers._buckets import local


class SparsityError(AssertionError, RuntimeError):
    """ASP was called in an order, or found masks, that it cannot go on with."""


class SparseParameter(NamedTuple):
    """A parameter of a module; its mask and pruned values are buffers of that module, looked up whenever used."""

    module_name: str
    module: nn.Module
    name: str

    @property
    def full_name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.module_name}.{self.name}".lstrip(".")

    @property
    def param(self) -> Tensor:
        """The parameter."""
        return getattr(self.module, self.name)

    @property
    def mask(self) -> Tensor:
        """True where weights are kept; shaped, laid out and sharded like the parameter."""
        return self._buffer("mask")

    @property
    def pruned(self) -> Tensor | None:
        """What was pruned, zero elsewhere, in the host's memory; None where nothing is kept for a recomputation."""
        return self._buffer("pruned_p") if f"__{self.name}_mma_pruned_p" in self.module._buffers else None

    def _buffer(self, kind: str) -> Tensor:
        key = f"__{self.name}_mma_{kind}"
        found = self.module._buffers[key]
        assert found is not None
        if hasattr(self.param, "placements") and not hasattr(found, "placements"):  # sharded since
            found = self.module._buffers[key] = shard_like(found, self.param)
        return found

    def register(self, keeps_pruned: bool) -> None:
        """Adds the buffers: a mask of ones and, if asked for, pruned values of zeros."""
        param = self.param.detach()
        self.module.register_buffer(f"__{self.name}_mma_mask", torch.ones_like(param, dtype=torch.bool))
        if keeps_pruned:
            zeros = torch.zeros_like(param, device=None if hasattr(param, "placements") else HOST)
            self.module.register_buffer(f"__{self.name}_mma_pruned_p", zeros)

    def unregister(self) -> None:
        """Removes the buffers."""
        for kind in ("mask", "pruned_p"):
            self.module._buffers.pop(f"__{self.name}_mma_{kind}", None)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor's values in full; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]


def shard_like(tensor: Tensor, param: Any) -> Tensor:
    """What this process holds of a tensor that every process has in full, sharded like the parameter."""
    if not hasattr(param, "placements"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    replicated = DTensor.from_local(tensor.to(param.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, param.placements)


def optimizer_chain(optimizer: Any) -> list[Any]:
    """An optimizer and what it wraps (LARC, FP16_Optimizer), innermost last."""
    chain = [optimizer]
    while not isinstance(chain[-1], torch.optim.Optimizer):
        inner = getattr(chain[-1], "optim", None) or getattr(chain[-1], "optimizer", None)
        if inner is None:
            break
        chain.append(inner)
    return chain


def masters_of(optimizers: Iterable[Any]) -> dict[Tensor, Tensor]:
    """The float32 master of each half-precision parameter that has one: of amp's, or of an FP16_Optimizer."""
    found: dict[Tensor, Tensor] = {}
    for holder in (each for optimizer in optimizers for each in optimizer_chain(optimizer)):
        stash = getattr(holder, "_amp_stash", None)
        if stash is not None:
            found.update(zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True))
        masters = getattr(holder, "fp32_from_fp16_groups", None) or getattr(holder, "fp32_groups", None)
        for halves, copies in zip(getattr(holder, "fp16_groups", ()), masters or (), strict=False):
            found.update(zip(halves, copies, strict=True))
    return found


def is_sharded(optimizer: Any) -> bool:
    """Whether the optimizer keeps flat shards of its state (ZeRO)."""
    return hasattr(optimizer_chain(optimizer)[-1], "_takes_gradients")


class Tied(NamedTuple):
    """Tensors of one parameter: copies of its values (itself, masters), state of its shape, gradients."""

    values: list[Tensor]
    state: list[Tensor]
    gradients: list[Tensor]


def tied_tensors(param: Tensor, optimizers: Sequence[Any], masters: dict[Tensor, Tensor]) -> Tied:
    """What has an element for each element of the parameter."""
    holders = [param, masters[param]] if param in masters else [param]
    tied = Tied([holder.detach() for holder in holders], [], [])
    for holder in holders:
        if holder.grad is not None and holder.grad.layout == torch.strided:
            tied.gradients.append(holder.grad.detach())
        for optimizer in optimizers:
            state = getattr(optimizer_chain(optimizer)[-1], "state", {})
            for name, value in state[holder].items() if holder in state else ():
                if isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point():
                    (tied.values if name == "master_param" else tied.state).append(value)
    return tied


def zero_shards(
    params: Sequence[SparseParameter], optimizers: Sequence[Any]
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Of ZeRO's flat shards what belongs to pruned parameters, its mask and, of weights, what was pruned there."""
    by_param = {sparse.param: sparse for sparse in params}
    for optimizer in filter(is_sharded, optimizers):
        for state in getattr(optimizer_chain(optimizer)[-1], "_states", ()):
            for part in state.arena.parts:
                sparse = by_param.get(state.arena.params[part.param])
                if sparse is None or not is_dense(sparse.mask):
                    continue
                elements, pruned = slice(part.start, part.stop), sparse.pruned
                for name, shard in state.shards().items():
                    if shard.is_floating_point():
                        stored = flat(pruned)[elements] if pruned is not None and name == "params_shard" else None
                        yield shard[part.flat : part.flat + part.size], flat(sparse.mask)[elements], stored


def mask_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Zeroes what masks prune, with one call for all tensors of a device and dtype."""
    tensors, masks = [], []
    for tensor, mask in pairs:
        tensors.append(local(tensor))
        mask = local(mask)
        masks.append(mask if mask.device == tensors[-1].device else mask.to(tensors[-1].device))
    if tensors:
        apply_masks(tensors, masks)
