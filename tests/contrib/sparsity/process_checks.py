"""Pruned models in two processes: DistributedDataParallel, ZeRO, FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.contrib.sparsity import ASP
from apex.contrib.sparsity import permutation_lib as library
from apex.contrib.sparsity._parameters import whole
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel
from tests.parallel.processes import Check, assert_same_everywhere


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    return nn.Sequential(*layers).to(dtype)


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(4, 16, generator=generator).to(next(model.parameters()).dtype)
        (model(x) - x.roll(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def masks(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [(layer.weight.detach(), layer.get_buffer("__weight_mma_mask")) for layer in model if len(layer._parameters)]


def assert_sparse(model: nn.Module) -> None:
    for weight, mask in masks(model):
        assert (weight[~mask] == 0).all()
        assert (weight[mask] != 0).all()
        assert mask.float().mean() == 0.5
    assert_same_everywhere([tensor for pair in masks(model) for tensor in pair])


def distributed_data_parallel(rank: int) -> None:
    """Each group is searched by one process; both get the same model."""
    inner = make(torch.float64)
    x = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = inner(x)
    model = DistributedDataParallel(inner)
    searched = []
    search = library.accelerated_search_for_good_permutation

    def counted(matrix: Tensor, *arguments: Any) -> list[int]:
        searched.append(matrix.shape[1])
        return search(matrix, *arguments)

    library.accelerated_search_for_good_permutation = counted
    try:
        library.Permutation.set_permutation_params_from_asp(
            inner, [("", layer, "weight") for layer in inner[::2]], (), 0
        )
        assert library.Permutation.permute_model(inner)
    finally:
        library.accelerated_search_for_good_permutation = search
    assert searched == [[32], [48]][rank]
    torch.testing.assert_close(inner(x), expected, rtol=1e-10, atol=1e-10)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    ASP.prune_trained_model(model, optimizer)
    assert "module.0.__weight_mma_mask" in model.state_dict()
    train(model, optimizer, rank)
    assert_sparse(inner)


def shards(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield this process's part of each parameter in ZeRO's flat shards: the shard's part, the parameter, its part."""
    for state in optimizer._states:
        for part in state.arena.parts:
            for shard in state.shards().values():
                yield (
                    shard[part.flat : part.flat + part.size],
                    state.arena.params[part.param],
                    slice(part.start, part.stop),
                )


def zero(kind: type, **options: Any) -> Check:
    def check(rank: int) -> None:
        model = make(torch.bfloat16)
        optimizer = kind(model.parameters(), lr=0.01, **options)
        ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
        ASP.init_optimizer_for_pruning(optimizer)
        train(model, optimizer, rank)
        ASP.compute_sparse_masks()
        assert library.Permutation.get_permutation_stats()[0] == ["2.weight", "4.weight"]
        train(model, optimizer, rank)
        assert_sparse(model)
        by_param = {layer.weight: layer.get_buffer("__weight_mma_mask") for layer in model[::2]}
        for shard, param, part in shards(optimizer):
            if param in by_param:
                mask = by_param[param].flatten()[part]
                assert (shard[~mask] == 0).all()
                assert (shard[mask] != 0).any()
        ASP.restore_pruned_weights()
        train(model, optimizer, rank)
        assert all((weight != 0).float().mean() > 0.9 for weight, _ in masks(model))

    return check


def zero_is_permuted(kind: type, **options: Any) -> Check:
    """Training continues as without the permutation: master weights and moments follow their channels."""

    def check(rank: int) -> None:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        outputs = []
        for permutes in (False, True):
            model = make()
            optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.01, **options)
            train(model, optimizer, rank)
            ones = lambda param: torch.ones_like(param)  # noqa: E731  permutes, prunes nothing
            ASP.init_model_for_pruning(model, ones, verbosity=0, allow_permutation=permutes)
            ASP.init_optimizer_for_pruning(optimizer)
            before = model[2].weight.detach().clone()
            ASP.compute_sparse_masks()
            assert torch.equal(before, model[2].weight) != permutes
            train(model, optimizer, rank)
            outputs.append(model(x).detach())
            ASP.reset()
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)

    return check


def zero_takes_masked_gradients(rank: int) -> None:
    """The clipping norm and LAMB's norms are computed from masked gradients."""
    model, x = make(), torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    optimizer = DistributedFusedLAMB(model.parameters(), lr=0.01)
    ASP.prune_trained_model(model, optimizer)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each(x).square().mean().backward()
    optimizer.complete_reductions()
    every = [layer.weight.grad * layer.get_buffer("__weight_mma_mask") for layer in twin[::2]]
    every += [layer.bias.grad for layer in twin[::2]]
    torch.testing.assert_close(optimizer.L2_grad_norm[0], torch.cat([each.flatten() for each in every]).norm())


def fully_sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def shard(model: nn.Sequential) -> None:
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    found = []
    for shards_first in (None, True, False):
        model = make()
        if shards_first:
            shard(model)
            ASP.init_model_for_pruning(model, verbosity=0)
            before = [param.to_local().clone() for param in model.parameters()]
            with pytest.raises(RuntimeError, match="call compute_sparse_masks before fully_shard"):
                ASP.compute_sparse_masks()
            assert all(
                torch.equal(each, param.to_local()) for each, param in zip(before, model.parameters(), strict=True)
            )
            assert not ASP.is_sparsity_enabled()
            ASP.reset()
        options = {"mask_calculator": "m4n2_2d_best", "allow_recompute_mask": True, "allow_permutation": False}
        ASP.init_model_for_pruning(model, verbosity=0, **options)
        ASP.compute_sparse_masks()
        if shards_first is False:
            shard(model)
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        ASP.init_optimizer_for_pruning(optimizer)
        assert ASP.is_sparsity_enabled()
        train(model, optimizer, 0)
        found.append([tuple(whole(each.clone()) for each in pair) for pair in masks(model)])
        ASP.reset()
    for of_model in found:
        for (weight, mask), (expected, expected_mask) in zip(of_model, found[0], strict=True):
            assert torch.equal(mask, expected_mask)
            torch.testing.assert_close(weight, expected)
            assert (weight[~mask] == 0).all()


def after(check: Check) -> Check:
    """Run the check, and reset ASP for the next."""

    def run(rank: int) -> None:
        ASP.reset()
        check(rank)
        ASP.reset()

    return run


CHECKS: dict[str, Check] = {
    "DistributedDataParallel": after(distributed_data_parallel),
    "ZeRO": after(zero(DistributedFusedAdam, bucket_cap_mb=0.002)),
    "ZeRO with parameters on their way": after(
        zero(DistributedFusedAdam, bucket_cap_mb=0.002, overlap_param_sync=True)
    ),
    "ZeRO with remainders": after(
        zero(DistributedFusedAdam, store_params=False, store_param_remainders=True, param_sync_dtype=torch.bfloat16)
    ),
    "ZeRO with scaled states": after(zero(DistributedFusedAdam, with_scaled_states=True, dtype=torch.float16)),
    "LAMB": after(zero(DistributedFusedLAMB)),
    "ZeRO is permuted": after(zero_is_permuted(DistributedFusedAdam, bucket_cap_mb=0.002)),
    "LAMB is permuted": after(zero_is_permuted(DistributedFusedLAMB)),
    "ZeRO takes masked gradients": after(zero_takes_masked_gradients),
}
if torch.__version__ >= "2.7":
    CHECKS["FSDP2"] = after(fully_sharded)
