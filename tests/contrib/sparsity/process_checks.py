"""Pruned models in two processes: DistributedDataParallel, ZeRO, FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from apex.contrib.optimizers import DistributedFusedAdam
from apex.contrib.sparsity import ASP
from apex.contrib.sparsity import permutation_lib as library
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


def zero(overlaps: bool) -> Check:
    def check(rank: int) -> None:
        model = make(torch.bfloat16)
        optimizer = DistributedFusedAdam(model.parameters(), lr=0.01, overlap_param_sync=overlaps, bucket_cap_mb=0.002)
        ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True)
        ASP.init_optimizer_for_pruning(optimizer)
        train(model, optimizer, rank)
        optimizer.param_sync()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ASP.compute_sparse_masks()
        assert any("state is sharded (ZeRO)" in str(warning.message) for warning in caught)
        train(model, optimizer, rank)
        assert_sparse(model)
        for state in optimizer._states:
            arena = state.arena
            for part in arena.parts:
                layer = next((each for each in model[::2] if each.weight is arena.params[part.param]), None)
                if layer is not None:
                    mask = layer.get_buffer("__weight_mma_mask").flatten()[part.start : part.stop]
                    for shard in state.shards().values():
                        assert (shard[part.flat : part.flat + part.size][~mask] == 0).all()
        ASP.restore_pruned_weights()
        train(model, optimizer, rank)
        assert all((weight != 0).float().mean() > 0.9 for weight, _ in masks(model))

    return check


def fully_sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, whole = make(), make()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    ASP.init_model_for_pruning(model, verbosity=0, mask_calculator="m4n2_2d_best", allow_recompute_mask=True)
    ASP.init_optimizer_for_pruning(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ASP.compute_sparse_masks()
    assert any("sharded (DTensor)" in str(warning.message) for warning in caught)
    assert ASP.is_sparsity_enabled()
    train(model, optimizer, 0)
    found = [(layer.weight.full_tensor(), layer.get_buffer("__weight_mma_mask").full_tensor()) for layer in model[::2]]
    ASP.reset()
    ASP.init_model_for_pruning(whole, verbosity=0, mask_calculator="m4n2_2d_best", allow_permutation=False)
    other = FusedAdam(whole.parameters(), lr=0.01)
    ASP.init_optimizer_for_pruning(other)
    ASP.compute_sparse_masks()
    train(whole, other, 0)
    for (weight, mask), (expected, expected_mask) in zip(found, masks(whole), strict=True):
        assert torch.equal(mask, expected_mask)
        torch.testing.assert_close(weight, expected)
        assert (weight[~mask] == 0).all()


def after(check: Check) -> Check:
    """The check, and a fresh ASP for the next."""

    def run(rank: int) -> None:
        ASP.reset()
        check(rank)
        ASP.reset()

    return run


CHECKS: dict[str, Check] = {
    "DistributedDataParallel": after(distributed_data_parallel),
    "ZeRO": after(zero(overlaps=False)),
    "ZeRO with parameters on their way": after(zero(overlaps=True)),
}
if torch.__version__ >= "2.7":
    CHECKS["FSDP2"] = after(fully_sharded)
