"""Optimizers, amp and training in several processes, by name, for `test_defaults.py`; see `default_functions.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apex import amp, fp16_utils, optimizers, parallel
from apex.contrib import optimizers as contrib_optimizers
from apex.contrib.openfold_triton import FusedAdamSWA
from tests.support.default_functions import Call, Case, drawn, integers, lists


def tensors_of(optimizer: Any) -> list[Any]:
    return [[state[name] for name in sorted(state)] for state in optimizer.state.values()]


def optimizer(make: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> Case:
    """Three steps, the last one by a copy that loaded a state dict."""

    def case(device: torch.device) -> Call:
        values, *gradients = lists(4, device, dtype)
        params = [nn.Parameter(value) for value in values]

        def call() -> list[Any]:
            ours = make(params)
            for step, new in enumerate(gradients):
                if step == 2:
                    saved = ours.state_dict()
                    ours = make(params)
                    ours.load_state_dict(saved)
                for param, gradient in zip(params, new, strict=True):
                    param.grad = gradient
                ours.step()
            return [*params, *tensors_of(ours)]

        return call

    return case


def with_average(device: torch.device) -> Call:
    params, computed, averages, gradients = [[nn.Parameter(each) for each in some] for some in lists(4, device)]

    def call() -> list[Any]:
        ours = FusedAdamSWA(params, computed, averages, 0.9)
        for each, gradient in zip(computed, gradients, strict=True):
            each.grad = gradient.detach()
        ours.step()
        return [*params, *computed, *averages, *tensors_of(ours)]

    return call


def model(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Small, and with the same parameters in every call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(device, dtype)


def trained(
    wrap: Callable[[nn.Module], tuple[Any, Any, Callable[[Any], None]]], dtype: torch.dtype = torch.float32
) -> Case:
    """Three steps of a model; `wrap` makes the model, its optimizer and what differentiates a loss."""

    def case(device: torch.device) -> Call:
        bare, inputs = model(device, dtype), [drawn(5, 4, seed=seed).to(device, dtype) for seed in range(3)]

        def call() -> list[Any]:
            wrapped, ours, backward = wrap(bare)
            found = []
            for each in inputs:
                ours.zero_grad()
                loss = wrapped(each).float().square().mean()
                backward(loss)
                ours.step()
                found.append(loss)
            saved = ours.state_dict()
            ours.load_state_dict(saved)
            return [*found, *bare.state_dict().values(), saved]

        return call

    return case


def with_old_masters(kind: Any) -> Callable[[nn.Module], Any]:
    def wrap(bare: nn.Module) -> Any:
        inner = contrib_optimizers.FusedAdam if kind is contrib_optimizers.FP16_Optimizer else torch.optim.SGD
        ours = kind(inner(bare.parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False)
        return bare, ours, ours.backward

    return wrap


def divided(make: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> Case:
    return trained(lambda bare: (bare, make(bare.parameters()), Tensor.backward), dtype)


# Names without options are public classes of apex.optimizers; FP16_Optimizer is that of fp16_utils.
OPTIMIZERS: dict[str, Case] = {
    **{
        kind.__name__: optimizer(lambda params, kind=kind: kind(params, lr=0.1))
        for kind in (getattr(optimizers, name) for name in optimizers.__all__ if name != "FP16_Optimizer")
    },
    "FusedAdam in half precision": optimizer(
        lambda params: optimizers.FusedAdam(params, lr=0.1, master_weights=True, capturable=True), torch.float16
    ),
    "FusedAdam stochastic": optimizer(
        lambda params: optimizers.FusedAdam(params, lr=0.1, stochastic_rounding=True), torch.bfloat16
    ),
    "FusedSGD with momentum": optimizer(
        lambda params: optimizers.FusedSGD(params, lr=0.1, momentum=0.9), torch.bfloat16
    ),
    "FusedNovoGrad in half precision": optimizer(
        lambda params: optimizers.FusedNovoGrad(params, lr=0.1, weight_decay=0.1), torch.bfloat16
    ),
    "FusedMixedPrecisionLamb reduced": optimizer(
        lambda params: optimizers.FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.bfloat16),
        torch.bfloat16,
    ),
    "NpuFusedBertAdam with warmup": optimizer(
        lambda params: optimizers.NpuFusedBertAdam(params, lr=0.1, warmup=0.1, t_total=10)
    ),
    "LARC": optimizer(lambda params: parallel.LARC(torch.optim.SGD(params, lr=0.1))),
    "FusedAdamSWA": with_average,
    "contrib FusedAdam": optimizer(lambda params: contrib_optimizers.FusedAdam(params, lr=0.1)),
    "contrib FusedLAMB": optimizer(lambda params: contrib_optimizers.FusedLAMB(params, lr=0.1)),
    "contrib FusedSGD": optimizer(lambda params: contrib_optimizers.FusedSGD(params, lr=0.1, momentum=0.9)),
    "contrib FP16_Optimizer": trained(with_old_masters(contrib_optimizers.FP16_Optimizer), torch.float16),
    "fp16_utils FP16_Optimizer": trained(with_old_masters(fp16_utils.FP16_Optimizer), torch.float16),
    "contrib DistributedFusedAdam": divided(contrib_optimizers.DistributedFusedAdam),
    "contrib DistributedFusedMuon": divided(contrib_optimizers.DistributedFusedMuon),
    "contrib DistributedFusedAdam capturable": divided(
        lambda params: contrib_optimizers.DistributedFusedAdam(params, capturable=True), torch.bfloat16
    ),
    "contrib DistributedFusedAdam scaled": divided(
        lambda params: contrib_optimizers.DistributedFusedAdam(
            params, dtype=torch.float16, with_scaled_states=True, grad_sync_dtype=torch.float32
        ),
        torch.bfloat16,
    ),
}


def shards_of_ranks(bare: nn.Module) -> Any:
    ours = contrib_optimizers.DistributedFusedAdam(bare.parameters(), lr=0.1)

    def backward(loss: Tensor) -> None:
        loss.backward()
        ours.load_state_dict(ours.state_dict(state_dict_format=1))

    return bare, ours, backward


def distributed_lamb(bare: nn.Module) -> Any:
    ours = contrib_optimizers.DistributedFusedLAMB(bare.parameters(), lr=0.1)
    ours.set_global_scale(2.0)

    def backward(loss: Tensor) -> None:
        (loss * 2).backward()
        ours.complete_reductions()

    return bare, ours, backward


def combined(device: torch.device) -> Call:
    params, gradients = lists(2, device)
    params = [nn.Parameter(param) for param in params]

    def call() -> list[Any]:
        ours = optimizers.NpuFusedAdam(params, lr=0.1)
        norms = [ours.clip_optimizer_grad_norm_fused(0.1)]  # of no gradients
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        norms.append(ours.clip_optimizer_grad_norm_fused(0.1))
        ours.step()
        return [*norms, *params, *ours.get_optimizer_combined_grads(), *ours.get_optimizer_combined_grad_masks()]

    return call


OPTIMIZERS |= {
    "NpuFusedAdam combined": combined,
    "contrib DistributedFusedAdam by ranks": trained(shards_of_ranks),
    "contrib DistributedFusedLAMB": trained(distributed_lamb),
}


def with_amp(level: str, make: Callable[[Any], Any]) -> Case:
    def wrap(bare: nn.Module) -> Any:
        cast, ours = amp.initialize(bare, make(bare.parameters()), opt_level=level, verbosity=0)

        def backward(loss: Tensor) -> None:
            with amp.scale_loss(loss, ours) as scaled:
                scaled.backward()

        return cast, ours, backward

    return trained(wrap)


def with_overflow(device: torch.device) -> Call:
    bare, inputs = model(device), drawn(5, 4).to(device)

    def call() -> list[Any]:
        cast, ours = amp.initialize(bare, optimizers.FusedAdam(bare.parameters()), opt_level="O2", verbosity=0)
        for factor in (1.0, float("inf"), 1.0):
            ours.zero_grad()
            with amp.scale_loss(cast(inputs).float().square().mean() * factor, ours) as scaled:
                scaled.backward()
            ours.step()
        saved = amp.state_dict()
        amp.load_state_dict(saved)
        return [*bare.parameters(), *amp.master_params(ours), repr(saved)]

    return call


def with_sparse_gradients(device: torch.device) -> Call:
    torch.manual_seed(1)
    bare, rows = nn.Embedding(5, 3, sparse=True).to(device), integers(1, 3, 1).to(device)

    def call() -> list[Any]:
        table, ours = amp.initialize(bare, torch.optim.SGD(bare.parameters(), lr=0.1), opt_level="O1", verbosity=0)
        for _ in range(2):  # of which the second is added to the first
            with amp.scale_loss(table(rows).square().sum(), ours) as scaled:
                scaled.backward()
        ours.step()
        return [*bare.parameters(), bare.weight.grad.to_dense()]

    return call


def in_parallel(make: Callable[[nn.Module], Any]) -> Case:
    def wrap(bare: nn.Module) -> Any:
        return make(bare), torch.optim.SGD(bare.parameters(), lr=0.1), Tensor.backward

    return trained(wrap)


def reduced(bare: nn.Module) -> Any:
    reducer = parallel.Reducer(bare)

    def backward(loss: Tensor) -> None:
        loss.backward()
        reducer.reduce()

    return bare, torch.optim.SGD(bare.parameters(), lr=0.1), backward


def checked(bare: nn.Module) -> Any:
    ours = optimizers.FusedSGD(bare.parameters(), lr=0.1, momentum=0.9)
    check = parallel.ReplicaCheck(bare, ours, every=1)

    def backward(loss: Tensor) -> None:
        loss.backward()
        check()

    return bare, ours, backward


def with_flat_masters(device: torch.device) -> Call:
    bare, inputs = fp16_utils.network_to_half(model(device)), drawn(5, 4).to(device)

    def call() -> list[Any]:
        params, masters = fp16_utils.prep_param_lists(bare, flat_master=True)
        bare(inputs).float().square().mean().backward()
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=True)
        torch.optim.SGD(masters, lr=0.1).step()
        fp16_utils.master_params_to_model_params(params, masters, flat_master=True)
        return [*params, *masters]

    return call


TRAINING: dict[str, Case] = {
    **{
        f"amp {level} {kind.__name__}": with_amp(level, lambda params, kind=kind: kind(params, lr=0.1))
        for level in ("O0", "O1", "O2", "O3", "O4", "O5")
        for kind in (torch.optim.SGD, optimizers.FusedAdam, optimizers.NpuFusedSGD)
    },
    "amp with overflow": with_overflow,
    "amp with sparse gradients": with_sparse_gradients,
    "DistributedDataParallel": in_parallel(parallel.DistributedDataParallel),
    "DistributedDataParallel delayed": in_parallel(
        lambda bare: parallel.DistributedDataParallel(bare, delay_allreduce=True, allreduce_always_fp32=True)
    ),
    "convert_syncbn_model": in_parallel(parallel.convert_syncbn_model),
    "Reducer": trained(reduced),
    "prep_param_lists": with_flat_masters,
    "ReplicaCheck": trained(checked),
}
