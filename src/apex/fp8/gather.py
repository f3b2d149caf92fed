"""Weights that FSDP2 gathers in float8, with the scales of their blocks.

Each rank casts its shard and sends float8 numbers and inverse scales, half the bytes of bfloat16. Blocks of 128 x 128
lie within a shard if its rows are a multiple of 128, so that no rank needs another's largest magnitude. Other shards
are gathered in the usual dtype, and the layer casts the whole weight.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..ops import float8

_aten = torch.ops.aten
# Operators whose results FSDP2 and checkpoints expect to be shards of the same kind.
_KEEP = {
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
}


class ShardedWeight(Tensor):
    """A weight, or a shard of it, that FSDP2 gathers in float8; it computes like the tensor that it holds."""

    _tensor: Tensor
    _power_of_2: bool

    @staticmethod
    def __new__(cls, tensor: Tensor, power_of_2: bool) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: Tensor, power_of_2: bool) -> None:
        self._tensor, self._power_of_2 = tensor, power_of_2

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self._tensor!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor of state dicts and checkpoints as an ordinary one, so that they load without apex.fp8."""
        return (
            super().__reduce_ex__(protocol) if isinstance(self, nn.Parameter) else self._tensor.__reduce_ex__(protocol)
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_tensor"], self._power_of_2

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], power_of_2: bool, *_: Any) -> ShardedWeight:
        return ShardedWeight(inner["_tensor"], power_of_2)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options: set[bool] = set()

        def unwrapped(weight: ShardedWeight) -> Tensor:
            options.add(weight._power_of_2)
            return weight._tensor

        args, kwargs = tree_map_only(ShardedWeight, unwrapped, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func not in _KEEP:
            return result
        return tree_map_only(Tensor, lambda tensor: ShardedWeight(tensor, True in options), result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the tensors that every rank sends, and whether they are float8."""
        shard, (rows, columns) = self._tensor, outer_size
        if mesh.size() == 1:  # nothing is sent; from 2.11 on, PyTorch copies only the first tensor then
            return (shard.to(mp_policy.param_dtype or shard.dtype),), False
        if rows % (mesh.size() * float8.BLOCK) or columns % float8.BLOCK:
            dtype = mp_policy.param_dtype or shard.dtype
            warnings.warn(
                f"a weight of {rows} x {columns} is gathered in {dtype}, not in float8: its rows are no multiple of "
                f"{float8.BLOCK} times {mesh.size()} ranks, so that a block would lie in two shards",
                stacklevel=2,
            )
            missing = -(-rows // mesh.size()) - shard.shape[0]  # FSDP2 gathers shards of one size
            shard = nn.functional.pad(shard, (0, 0, 0, missing)) if missing else shard
            return (shard.to(dtype),), False
        number, _ = float8.formats(shard.device)
        copy, _, inverse, _ = float8.cast_blocks(shard.contiguous(), True, self._power_of_2, number)
        return (copy, whole_rows(inverse)), True

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], is_float8: bool, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the whole weight and its tensors; `out` is an earlier result that FSDP2 has filled again."""
        if out is not None:
            return None
        return (GatheredWeight(outputs[0], outputs[1], dtype) if is_float8 else outputs[0]), outputs


class GatheredWeight(Tensor):
    """A whole weight that was gathered as float8 numbers with the inverse scales of its square blocks.

    `numbers` is float8 [rows, columns]. `scales` are the inverse scales, float32 [rows / 128, a multiple of 4].
    `apex.fp8.linear` multiplies with them. Other operators get the numbers that they represent.
    """

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(cls, numbers.size(), dtype=dtype, device=numbers.device)  # type: ignore[attr-defined]

    def __init__(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.numbers, self.scales = numbers, scales

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({self.numbers!r})"

    def copy_and_scales(self) -> tuple[Tensor, Tensor]:
        """Return the float8 weight and its inverse scales, as `float8.cast_blocks` returns them."""
        return self.numbers, self.scales[:, : self.numbers.shape[1] // float8.BLOCK]

    def transposed_and_scales(self) -> tuple[Tensor, Tensor]:
        """Return the transposed float8 weight and its inverse scales: square blocks need no cast to be transposed."""
        rows, columns = self.numbers.shape
        _, inverse = self.copy_and_scales()
        turned = float8.empty_scales(columns, rows, True, self.numbers.device).copy_(inverse.t())
        return self.numbers.t().contiguous(), turned

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (_aten.detach.default, _aten.as_strided.default):
            weight = args[0]
            return GatheredWeight(weight.numbers, weight.scales, weight.dtype)

        def widened(weight: GatheredWeight) -> Tensor:
            return float8.widened_blocks(*weight.copy_and_scales()).to(weight.dtype)

        args, kwargs = tree_map_only(GatheredWeight, widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def whole_rows(inverse: Tensor) -> Tensor:
    """Return inverse scales of square blocks with the padding at the end of each row: a contiguous view."""
    return inverse.as_strided((inverse.shape[0], inverse.stride(0)), (inverse.stride(0), 1))


def gather_in_float8(module: nn.Module, power_of_2: bool) -> None:
    """Make FSDP2 gather a layer's weight in float8."""
    weight: Any = module.weight
    if not isinstance(weight, ShardedWeight):
        module.weight = nn.Parameter(ShardedWeight(weight.detach(), power_of_2), requires_grad=weight.requires_grad)


def gather_as_usual(module: nn.Module) -> None:
    """Undo `gather_in_float8`."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(weight, ShardedWeight):
        module.weight = nn.Parameter(weight._tensor.detach(), requires_grad=weight.requires_grad)
