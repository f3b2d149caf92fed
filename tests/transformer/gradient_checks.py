"""Checks of the model-parallel loss scaler and of finalize_model_grads that run in four processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from apex import amp
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel
from apex.transformer import finalize_model_grads, parallel_state
from apex.transformer.amp import GradScaler
from apex.transformer.amp.loss_scaler import agree_on_overflows


def overflow_on_one_rank_skips_on_all(rank: int) -> None:
    for tensor, stages in ((2, 2), (1, 1), (4, 1)):
        parallel_state.initialize_model_parallel(tensor, stages)
        for make in (lambda p: torch.optim.SGD(p, lr=1.0), lambda p: FusedAdam(p, lr=1.0)):
            for unscale_first in (False, True):
                check_skipping(rank, make, unscale_first)
        parallel_state.destroy_model_parallel()


def check_skipping(rank: int, make: object, unscale_first: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    scaler = GradScaler(init_scale=8.0, growth_interval=2)
    scales = []
    for bad in (None, 3, None, None):
        before = parameter.detach().clone()
        scaler.scale(parameter.sum() * (float("inf") if rank == bad else 1.0)).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, parameter) == (bad is not None)
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0, 8.0]


def overflow_under_amp_skips_on_all(rank: int) -> None:
    for sizes in ({"tensor_model_parallel_size_": 2}, {"context_parallel_size": 4}):
        parallel_state.initialize_model_parallel(**sizes)
        layer = nn.Linear(3, 1)
        model, optimizer = amp.initialize(
            layer, torch.optim.SGD(layer.parameters(), lr=1.0), opt_level="O2", verbosity=0
        )
        agree_on_overflows()
        for bad in (None, 2):
            before = layer.weight.detach().clone()
            loss = model(torch.ones(1, 3)).sum() * (float("inf") if rank == bad else 0.25)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(before, layer.weight) == (bad is not None), sizes
        amp.shutdown()
        parallel_state.destroy_model_parallel()


def shards_of_the_optimizer(rank: int) -> None:
    """ZeRO: the rank whose shard overflows is one of four."""
    parallel_state.initialize_model_parallel()
    parameters = [nn.Parameter(torch.ones(64)) for _ in range(4)]
    optimizer = DistributedFusedAdam(parameters, lr=0.5)
    scaler = GradScaler(init_scale=4.0)
    for bad in (None, 2, None):
        before = [parameter.detach().clone() for parameter in parameters]
        loss = sum(parameter.sum() for parameter in parameters)
        scaler.scale(loss * (float("inf") if bad == rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(one, other) for one, other in zip(before, parameters, strict=True)]
        assert same == [bad is not None] * 4
    assert scaler.get_scale() == 2.0
    parallel_state.destroy_model_parallel()


def sums_and_means(rank: int) -> None:
    """Four ranks as tp 2 x dp 2, then pp 2 x dp 2, then cp 2 x dp 2 with experts."""
    parallel_state.initialize_model_parallel(2)
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
    model[1].sequence_parallel_enabled = True
    model[2].main_grad = torch.full((2,), float(rank), dtype=torch.float64)
    for parameter in list(model)[:2]:
        parameter.grad = torch.full((2,), float(rank))
    finalize_model_grads(model)
    # Replicas are ranks two apart; tensor-parallel ranks 0, 1 and 2, 3.
    assert model[0].grad.tolist() == [rank % 2 + 1.0] * 2
    assert model[1].grad.tolist() == [(0 + 1 + 2 + 3) / 2] * 2
    assert model[2].main_grad.tolist() == [rank % 2 + 1.0] * 2
    assert model[2].grad is None  # float64 is not the parameter's dtype
    shared = nn.Parameter(torch.zeros(2))  # by a fused layer and another one
    shared.main_grad, shared.grad = torch.full((2,), 1.0), torch.full((2,), float(rank))
    for _ in range(2):  # the second time there is nothing to add
        finalize_model_grads(nn.ParameterList([shared]))
        assert shared.main_grad.tolist() == [rank % 2 + 2.0] * 2
        assert shared.grad is shared.main_grad
    parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel(1, 2)
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(2)])
    model[0].shared_embedding = True
    model[0].grad = torch.full((2,), float(rank))
    model[1].grad = torch.full((2,), float(rank))
    finalize_model_grads([model], data_parallel=False)
    assert model[0].grad.tolist() == [rank % 2 * 2 + 2.0] * 2  # stages are ranks two apart
    assert model[1].grad.tolist() == [float(rank)] * 2
    finalize_model_grads([model][:1])
    parallel_state.destroy_model_parallel()

    parallel_state.initialize_model_parallel(context_parallel_size=2, expert_model_parallel_size=2)
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(2)])
    model[1].allreduce = False
    model[0].grad = torch.full((2,), float(rank))
    if rank != 3:  # its experts saw no token
        model[1].grad = torch.full((2,), float(rank))
    finalize_model_grads(model)
    assert model[0].grad.tolist() == [1.5] * 2
    assert model[1].grad.tolist() == [1.0 if rank % 2 == 0 else 0.5] * 2
    parallel_state.destroy_model_parallel()


def wrapped_models_are_reduced_once(rank: int) -> None:
    for wrap in (
        lambda m: DistributedDataParallel(m),
        lambda m: nn.parallel.DistributedDataParallel(m, process_group=parallel_state.get_data_parallel_group()),
    ):
        parallel_state.initialize_model_parallel()
        model = wrap(nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), float(rank))).sum().backward()
        finalize_model_grads(model)
        assert next(model.parameters()).grad.tolist() == [[1.5, 1.5]]
        parallel_state.destroy_model_parallel()
    dist.barrier()


CHECKS = {
    check.__name__: check
    for check in (
        overflow_on_one_rank_skips_on_all,
        overflow_under_amp_skips_on_all,
        shards_of_the_optimizer,
        sums_and_means,
        wrapped_models_are_reduced_once,
    )
}
