"""Checks of the model-parallel loss scaler and of finalize_model_grads that run in four processes."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp
from apex.contrib.optimizers import DistributedFusedAdam, DistributedFusedLAMB
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel, Reducer, check_replicas
from apex.transformer import finalize_model_grads, parallel_state
from apex.transformer._norms import counted, grad_norm
from apex.transformer.amp import GradScaler
from apex.transformer.amp.loss_scaler import agree_on_overflows
from apex.transformer.pipeline_parallel import build_model
from apex.transformer.pipeline_parallel.utils import calc_params_l2_norm


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
    """With ZeRO only one of four ranks has the shard that overflows."""
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
    assert model[1].grad.tolist() == [0.5 if rank % 2 == 0 else 0.25] * 2  # sums over two ranks, divided by dp x cp = 4
    parallel_state.destroy_model_parallel()


class WithExpert(nn.Module):
    """A layer that all ranks share, and an expert that starts with the rank's own number."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 1, bias=False)
        self.expert = nn.Parameter(torch.full((2,), float(rank)))
        self.expert.allreduce = False
        self.other = nn.Module()
        self.other.expert = nn.Parameter(torch.full((2,), float(rank)))
        self.other.expert.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x).sum() + (x * (self.expert + self.other.expert)).sum()


def expert_gradients(rank: int) -> None:
    """Experts' gradients are summed over the ranks that hold them and divided by dp x cp, with any wrapper."""
    torch_ddp = nn.parallel.DistributedDataParallel
    for experts, expected in ((1, [1.5] * 4), (2, [0.5, 1.0, 0.5, 1.0]), (4, [0.0, 0.25, 0.5, 0.75])):
        for sizes in ({}, {"context_parallel_size": 2}, {"context_parallel_size": 4}):
            parallel_state.initialize_model_parallel(expert_model_parallel_size=experts, **sizes)
            for wrap in (lambda m: m, DistributedDataParallel, hidden_from_ddp):
                model = wrap(WithExpert(rank))
                bare = getattr(model, "module", model)
                for data_parallel in (None, False) if model is bare else (None,):
                    model.zero_grad()
                    model(torch.full((1, 2), float(rank))).backward()
                    finalize_model_grads(model, data_parallel=data_parallel)
                    for expert in (bare.expert, bare.other.expert):
                        assert expert.tolist() == [float(rank)] * 2  # its own values, not rank 0's
                        assert expert.grad.tolist() == [expected[rank]] * 2, (experts, sizes, wrap)
                    mean = 1.5 if data_parallel is None else float(rank)
                    assert bare.dense.weight.grad.tolist() == [[mean] * 2]
            unused = WithExpert(rank)
            finalize_model_grads(unused)
            assert (unused.expert.grad is None) == (experts == 4)  # nobody else holds it
            mixed = torch_ddp(WithExpert(rank), find_unused_parameters=True)
            with pytest.raises(ValueError, match=r"expert is an expert \(allreduce=False\), and torch's"):
                finalize_model_grads(mixed)
            parallel_state.destroy_model_parallel()


def hidden_from_ddp(model: nn.Module) -> nn.Module:
    (wrapped,) = build_model(lambda **_: model)
    # Over all ranks, because finalize_model_grads also averages over context-parallel ranks.
    return nn.parallel.DistributedDataParallel(wrapped.module)


def experts_are_no_replicas(rank: int) -> None:
    """Code that treats ranks as replicas skips experts or refuses them before anything changes."""
    model = WithExpert(rank)
    Reducer(model)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.full((1, 2), float(rank + 1))).backward()
    own = model.expert.grad.clone()
    Reducer(model).reduce()
    assert torch.equal(model.expert.grad, own)
    optimizer.step()
    check_replicas(model, optimizer)
    for kind in (DistributedFusedAdam, DistributedFusedLAMB):
        with pytest.raises(ValueError, match=rf"parameter 0 of shape \(2,\) is an expert.*{kind.__name__} would mix"):
            kind(model.parameters(), lr=0.1)
        divided = kind([model.dense.weight], lr=0.1)
        with pytest.raises(ValueError, match="is an expert"):
            divided.add_param_group({"params": [model.expert]})
        assert len(divided.param_groups) == 1
    layer = WithExpert(rank)
    layer, combined = amp.initialize(
        layer, FusedAdam(layer.parameters(), lr=0.1), opt_level="O2", verbosity=0, combine_ddp=True
    )
    loss = layer(torch.ones(1, 2))
    with pytest.raises(ValueError, match="combine_ddp would mix"), amp.scale_loss(loss, combined) as scaled:
        scaled.backward()
    amp.shutdown()


def zero_of_experts(rank: int) -> None:
    """An optimizer of experts alone divides their state among ranks with the same experts, and steps as FusedAdam."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    group = parallel_state.get_expert_data_parallel_group()
    number = parallel_state.get_expert_model_parallel_rank()
    models = [WithExpert(number) for _ in range(2)]
    experts = [[model.expert, model.other.expert] for model in models]
    divided, plain = DistributedFusedAdam(experts[0], lr=0.1, process_group=group), FusedAdam(experts[1], lr=0.1)
    for _ in range(2):
        for model, optimizer in zip(models, (divided, plain), strict=True):
            with optimizer.no_sync() if optimizer is divided else contextlib.nullcontext():
                model(torch.full((1, 2), float(rank + 1))).backward()
            finalize_model_grads(model, data_parallel=False)
        norms = [grad_norm(optimizer, counted(optimizer)) for optimizer in (divided, plain)]
        torch.testing.assert_close(*norms)
        for optimizer in (divided, plain):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(experts[0], experts[1])
    assert experts[0][0].tolist() != [float(number)] * 2
    for refused in ([models[0].dense.weight, models[0].expert], [models[0].expert, models[0].dense.weight]):
        with pytest.raises(ValueError, match=r"is an expert.*an optimizer of their own"):
            DistributedFusedAdam(refused, lr=0.1, process_group=group)
    with pytest.raises(ValueError, match="is an expert"):
        divided.add_param_group({"params": [models[0].dense.weight]})
    assert len(divided.param_groups) == 1
    parallel_state.destroy_model_parallel()


def norms_count_each_expert_once(rank: int) -> None:
    """Gradients 1, 2, 3, 4 of four experts and 2 of a dense layer give the same norm on every rank in every layout."""
    for experts in (1, 2, 4):
        for sizes in ({}, {"context_parallel_size": 2}, {"tensor_model_parallel_size_": 2}):
            if experts == 4 and "tensor_model_parallel_size_" in sizes:
                continue
            parallel_state.initialize_model_parallel(expert_model_parallel_size=experts, **sizes)
            number = parallel_state.get_expert_model_parallel_rank()
            model = WithExpert(rank)
            model.dense.weight.grad, model.expert.grad = torch.tensor([[2.0, 0.0]]), torch.tensor([number + 1.0, 0.0])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            squares = 4.0 + sum((each + 1.0) ** 2 for each in range(experts))
            optimizer = FusedAdam(model.parameters(), lr=0.1)
            assert float(grad_norm(optimizer, counted(optimizer))) == pytest.approx(squares**0.5)
            assert float(grad_norm(optimizer, counted(optimizer), torch.inf)) == max(2.0, float(experts))
            assert calc_params_l2_norm(model, bf16=False) == pytest.approx(squares**0.5)
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
        expert_gradients,
        experts_are_no_replicas,
        zero_of_experts,
        norms_count_each_expert_once,
        wrapped_models_are_reduced_once,
    )
}
