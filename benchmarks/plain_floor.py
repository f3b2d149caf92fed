"""The least time that a training step needs on a device: its products, and the bytes that what lies between them moves.

Floor = operations of all products / rate of a large product of cuBLAS + bytes of the rest / rate of a copy. Products
are those of linear layers, convolutions and attention, forward and backward; half of the operations of causal attention
count. The bytes of the rest: each tensor that a product reads is written once before, and each that it writes is read
once after; parameters are no such tensors. AdamW reads a bfloat16 gradient, and reads and writes a float32 master and
two float32 moments, and writes a bfloat16 weight. Attention and convolutions do not reach the rate of a large product,
so steps do not reach the floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Bytes that AdamW moves for a parameter beside the gradient, which counts as the output of a product.
_OPTIMIZER_BYTES = 26


class ProductCounter(TorchDispatchMode):
    """Counts the operations of products, and the bytes of the tensors that they read and write."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0
        self._seen = {_storage(param) for param in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            heads = named["query"].shape[1] if "scaled_dot_product" in func.name() else None
            counted = {name: _with_heads(value, heads) if name in ("key", "value") else value
                       for name, value in named.items()}  # fmt: skip
            count = flop_registry[packet](*counted.values(), out_val=outputs)
            self.operations += count // 2 if named.get("is_causal") or named.get("causal") else count
        elif func.name() == "aten::_grouped_mm":
            self.operations += 2 * args[0].numel() * args[1].shape[-1]
        else:
            return outputs
        for tensor in tree_leaves((args, kwargs, outputs)):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._seen:
                self._seen.add(_storage(tensor))
                self.bytes += tensor.numel() * tensor.element_size()
        return outputs


def _with_heads(tensor: Tensor, heads: int | None) -> Tensor:
    """Return keys or values with the shape that they have if each head of the query has its own.

    PyTorch's count of operations knows no grouped queries.
    """
    return tensor if heads is None else tensor[:, :1].expand(-1, heads, -1, -1)


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Return a reference that is equal for views of one buffer, and for no other, although the buffer may be freed."""
    return StorageWeakRef(tensor.untyped_storage())


def _seconds(function: Callable[[], Any], is_gpu: bool) -> float:
    """Return the median of the seconds that a function takes."""
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        function()
        if is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def rates(device: str) -> dict[str, float]:
    """Return the device's TFLOP/s in a large bfloat16 product and its GB/s in a copy."""
    is_gpu = device == "cuda"
    side, length = (8192, 2**30) if is_gpu else (128, 2**20)
    one, other = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = _seconds(lambda: one @ other, is_gpu)
    source, target = (torch.empty(length, dtype=torch.uint8, device=device) for _ in range(2))
    copy = _seconds(lambda: target.copy_(source), is_gpu)
    return {"TFLOP/s": round(2 * side**3 / product / 1e12, 6), "GB/s": round(2 * length / copy / 1e9, 1)}


def floor(model: nn.Module, loss: Callable[..., Tensor], batch: Any, rate: dict[str, float]) -> dict[str, float]:
    """Return the floor of a model's step: milliseconds, of products and of the rest, and the counts."""
    model = model.bfloat16()
    counter = ProductCounter(model)
    with counter:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            value = loss(model, *batch)
        value.backward()
    parameters = sum(param.numel() for param in model.parameters())
    moved = counter.bytes + _OPTIMIZER_BYTES * parameters
    products, rest = 1e-9 * counter.operations / rate["TFLOP/s"], 1e-6 * moved / rate["GB/s"]
    found = {"ms": products + rest, "products_ms": products, "rest_ms": rest}
    found |= {"TFLOP": counter.operations / 1e12, "GB": moved / 1e9}
    return {name: round(number, 4) for name, number in found.items()}
