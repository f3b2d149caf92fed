"""Compiled fused blocks in bfloat16 keep no more bytes for backward than compiled plain blocks under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import apex
from apex.ops import _library

WIDTH, HEADS = 64, 4


class _Counted(BaseException):
    """Ends a compilation once the kept bytes are known. No `Exception`, which the compiler would wrap."""


class FloatNorm(nn.LayerNorm):
    """A layer norm in float32, as autocast computes it on a GPU; on a CPU it does not."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.layer_norm(input.float(), self.normalized_shape, self.weight.float(), bias, self.eps)


class Block(nn.Module):
    """A pre-norm block of a decoder."""

    def __init__(self, norm: type[nn.LayerNorm], gelu: str = "tanh") -> None:
        super().__init__()
        self.ln_1, self.ln_2 = norm(WIDTH), norm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(gelu), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


def encoder_layer(norm: type[nn.LayerNorm]) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, activation="gelu", batch_first=True)
    layer.self_attn.dropout = 0.0  # attention with dropout has no fused kernel on a CPU
    layer.norm1, layer.norm2 = norm(WIDTH), norm(WIDTH)
    return layer


def kept_bytes(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes that a compiled function keeps for its backward pass, without its inputs."""
    counted: list[int] = []

    def partition(graph: Any, inputs: Any, **options: Any) -> Any:
        forward, _ = min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)
        *_, output = forward.graph.nodes
        values = [node.meta["val"] for node in output.args[0][options["num_fwd_outputs"] :]]
        given = [node.meta["val"] for node in forward.graph.nodes if node.op == "placeholder"]
        storages = [
            {each._cdata: each.nbytes() for each in (t.untyped_storage() for t in tensors if isinstance(t, Tensor))}
            for tensors in (values, given)
        ]
        counted.append(sum(size for key, size in storages[0].items() if key not in storages[1]))
        raise _Counted

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph, partition_fn=partition, decompositions=select_decomp_table()
    )
    torch._dynamo.reset()
    with pytest.raises(_Counted):
        torch.compile(function, backend=backend, fullgraph=True)(x)
    return counted[0]


def block_with_exact_gelu(norm: type[nn.LayerNorm]) -> nn.Module:
    return Block(norm, "none")


@pytest.mark.parametrize("make", [Block, block_with_exact_gelu, encoder_layer])
def test_fused_blocks_keep_no_more_bytes(make: Callable[[type[nn.LayerNorm]], nn.Module]) -> None:
    plain, fused = make(FloatNorm).train(), make(nn.LayerNorm).train()
    x = torch.randn(2, 32, WIDTH)

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x)

    expected = kept_bytes(under_autocast, x.clone().requires_grad_())
    report = apex.fuse(fused, verbose=False)
    assert any(not row.reason for row in report)
    fused.bfloat16()
    with _library.implementation("triton"):
        kept = kept_bytes(fused, x.bfloat16().requires_grad_())
    assert 0 < kept <= expected
