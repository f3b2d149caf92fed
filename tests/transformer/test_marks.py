"""Copies of split layers: the marks of their parameters, and the process groups of experts."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.transformer import layers, parallel_state, tensor_parallel
from apex.transformer.moe import MoELayer
from apex.transformer.moe._groups import ExpertGroups
from apex.transformer.testing.standalone_bert import BertModel
from apex.transformer.testing.standalone_gpt import GPTModel
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig


@pytest.fixture(autouse=True)
def _groups(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    try:
        yield
    finally:
        tensor_parallel.get_cuda_rng_tracker().reset()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def config(**options: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    return TransformerConfig(**sizes, max_position_embeddings=8, **options)


def experts(**options: Any) -> TransformerConfig:
    shared = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}
    return config(activation="swiglu", num_moe_experts=4, **shared, **options)


def marks_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: vars(parameter) for name, parameter in module.named_parameters()}


def test_copies_of_layers_keep_the_marks_of_their_parameters() -> None:
    made = [
        tensor_parallel.ColumnParallelLinear(4, 6, stride=2),
        tensor_parallel.RowParallelLinear(4, 6, input_is_parallel=True),
        tensor_parallel.VocabParallelEmbedding(4, 6),
        layers.FusedLayerNorm(4, sequence_parallel_enabled=True),
        layers.FastLayerNorm(4, sequence_parallel_enabled=True),
        MoELayer(experts()),
        nn.Sequential(GPTModel(config=experts()), BertModel(config=config())),
    ]
    for module in made:
        copied = copy.deepcopy(module)
        assert marks_of(copied) == marks_of(module) != {}
        assert all(a is not b for a, b in zip(copied.parameters(), module.parameters(), strict=True))
    made[0].weight.main_grad = torch.zeros(6, 4)
    assert not hasattr(copy.deepcopy(made[0]).weight, "main_grad")  # gradients of two layers would be summed


def test_copies_keep_ties() -> None:
    layer = tensor_parallel.ColumnParallelLinear(4, 4)
    layer.weight.shared_embedding = True
    tied = tensor_parallel.VocabParallelEmbedding(4, 4)
    tied.weight = layer.weight
    copied = copy.deepcopy(nn.ModuleList([layer, tied]))
    assert copied[0].weight is copied[1].weight is not layer.weight
    assert copied[0].weight.shared_embedding


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_layers_with_experts_are_copied_and_pickled(kind: str) -> None:
    layer, x = MoELayer(experts(moe_token_dispatcher_type=kind)), torch.randn(5, 2, 8)
    expected = layer(x)[0]
    copied = copy.deepcopy(layer)
    assert copied.router.groups.tp_ep is layer.router.groups.tp_ep
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert torch.equal(other(x)[0], expected)
        assert other.router.groups == ExpertGroups.of()
    own = MoELayer(experts(), pg_collection=ExpertGroups(parallel_state.get_tensor_model_parallel_group()))
    assert copy.deepcopy(own).router.groups is own.router.groups
    with pytest.raises(Exception, match=r"process groups of its own \(pg_collection\)"):
        torch.save(own, io.BytesIO())
