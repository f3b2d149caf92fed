"""Optimizers, and the passes over all gradients around them: norm, scaling with overflow check, clipping."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from ...ops import _library
from .. import parameter_sets
from ..list_passes import PASSES
from ..parameter_sets import SETS, Shapes, elements
from ..problems import Algorithm, Maker, Running, gradients, make_parameters, prepared_steps
from ..registry import Case, Family, Prepared, register

LR = 0.01
GPU_SETS = ("gpt1.3b", "resnet50")
CPU_SETS = ("resnet50", "1000_small")
# Six lists: parameters, gradients, the state of one implementation and the temporaries of a foreach optimizer.
LARGE_BYTES = 6 * 4 * 1_315_719_168


def _running(optimizer: Any, params: list[nn.Parameter]) -> Running:
    return Running(optimizer.step, lambda: [list(params)])


def _ours(name: str, **options: Any) -> Maker:
    """Return a function that makes an optimizer of `apex.optimizers` for a list of parameters."""

    def make(params: list[nn.Parameter]) -> Running:
        import apex.optimizers

        return _running(getattr(apex.optimizers, name)(params, **options), params)

    return make


def _torch(name: str, **options: Any) -> Maker:
    """Return a function that makes an optimizer of `torch.optim` for a list of parameters."""
    return lambda params: _running(getattr(torch.optim, name)(params, **options), params)


def _by_operators(name: str, **options: Any) -> Maker:
    """Return a function that makes an optimizer of `apex.optimizers` and steps it with PyTorch's operators."""

    def make(params: list[nn.Parameter]) -> Running:
        fused = _ours(name, **options)(params)

        def step() -> None:
            with _library.implementation("torch"):
                fused.step()

        return Running(step, fused.results)

    return make


def _flavours(name: str, *flavours: str, **options: Any) -> dict[str, Maker]:
    """Return functions that make PyTorch's optimizer `name`, by flavour: "torch_fused", "torch_foreach"."""
    return {f"torch_{flavour}": _torch(name, **options, **{flavour: True}) for flavour in flavours}


def _adamw_with_masters(params: list[nn.Parameter]) -> Running:
    from apex.optimizers import FusedAdam

    optimizer = FusedAdam(params, lr=LR, weight_decay=0.1, master_weights=True)
    return Running(optimizer.step, lambda: [list(optimizer.master_parameters()), list(params)])


def _distributed_adamw(params: list[nn.Parameter]) -> Running:
    """Make a DistributedFusedAdam in a world of one process.

    It takes gradients away from its parameters, so it gets copies of the parameters that share their memory.
    """
    from apex.contrib.optimizers import DistributedFusedAdam

    twins = [nn.Parameter(param.detach()) for param in params]
    for twin, param in zip(twins, params, strict=True):
        twin.grad = param.grad
    return _running(DistributedFusedAdam(twins, lr=LR, weight_decay=0.1), params)


def _torch_adamw_with_masters(params: list[nn.Parameter]) -> Running:
    """Make PyTorch's usual mixed precision: a fused step of float32 copies, with gradients and values copied."""
    masters = [nn.Parameter(param.detach().float()) for param in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=0.1, fused=True)

    def step() -> None:
        with torch.no_grad():
            torch._foreach_copy_(gradients(masters), gradients(params))
            optimizer.step()
            torch._foreach_copy_([*params], [*masters])

    return Running(step, lambda: [list(masters), list(params)])


def _against_torch(
    name: str, moved: int, ours: str, torchs: str, *flavours: str, cpu_flavours: tuple[str, ...] = (), **options: Any
) -> Algorithm:
    """Return the benchmark of an algorithm beside PyTorch's optimizer with the same formula."""
    return Algorithm(
        name,
        moved,
        _ours(ours, **options),
        _torch(torchs, **options, foreach=False),
        _flavours(torchs, *flavours, **options),
        _flavours(torchs, *cpu_flavours, **options),
    )


def _against_operators(name: str, moved: int, ours: str, **eps: float) -> Algorithm:
    """Return the benchmark of an algorithm that `torch.optim` lacks, beside its formula in PyTorch's operators."""
    eager = _by_operators(ours, lr=LR, weight_decay=0.01, **eps)
    return Algorithm(name, moved, _ours(ours, lr=LR, weight_decay=0.01, **eps), eager, {"eager": eager})


_ADAMW: dict[str, Any] = {"lr": LR, "weight_decay": 0.1}
# Muon's iteration in half precision is off by up to 6% of a step. Moments of 8 bits have errors of 1/510 of the largest
# in their group, so that the steps of the smallest elements are off by up to 0.7 in ResNet-50.
_APPROXIMATE = 0.3 * LR
_EIGHT_BITS = 1.0 * LR


def _installed(package: str, module: str, name: str, **options: Any) -> dict[str, Maker]:
    """Return a function that makes another package's optimizer, by package; an empty dict if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return {}

    def make(params: list[nn.Parameter]) -> Running:
        return _running(getattr(importlib.import_module(module), name)(params, **options), params)

    return {package: make}


def _is_hidden(param: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix for Muon; embeddings are not."""
    return param.dim() == 2 and max(param.shape) < 20_000


def _muon(params: list[nn.Parameter]) -> Running:
    from apex.optimizers import FusedMuon

    matrices, others = ([param for param in params if _is_hidden(param) == wanted] for wanted in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return _running(FusedMuon([group for group in groups if group["params"]], lr=LR, weight_decay=0.1), params)


def _torch_muon(params: list[nn.Parameter]) -> Running:
    """Make PyTorch's Muon for the matrices, and its fused AdamW for all other parameters."""
    matrices, others = ([param for param in params if _is_hidden(param) == wanted] for wanted in (True, False))
    optimizers: list[Any] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=LR, weight_decay=0.1))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=LR, weight_decay=0.1, betas=(0.9, 0.95), fused=True))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return Running(step, lambda: [list(params)])


# Bytes: LAMB reads gradients for their norm, then takes a step of two passes, like AdamP; NovoGrad reads them twice.
ALGORITHMS: tuple[Algorithm, ...] = (
    _against_torch("adamw fp32", 28, "FusedAdam", "AdamW", "fused", "foreach", **_ADAMW),
    Algorithm(
        "adamw bf16+master",
        28,
        _adamw_with_masters,
        _torch("AdamW", **_ADAMW, foreach=False),
        {"torch_fused": _torch_adamw_with_masters},
        dtype=torch.bfloat16,
        result_dtypes=(torch.float32, torch.bfloat16),
    ),
    Algorithm(
        "distributed adamw fp32",
        28,
        _distributed_adamw,
        _torch("AdamW", **_ADAMW, foreach=False),
        {"fused_adam": _ours("FusedAdam", **_ADAMW), **_flavours("AdamW", "fused", **_ADAMW)},
    ),
    _against_torch("sgd momentum fp32", 20, "FusedSGD", "SGD", "fused", "foreach", lr=LR, momentum=0.9),
    _against_operators("lamb fp32", 44, "FusedLAMB", eps=1e-6),
    _against_operators("novograd fp32", 24, "FusedNovoGrad"),
    # PyTorch has a fused Adagrad for CPUs only.
    _against_torch("adagrad fp32", 20, "FusedAdagrad", "Adagrad", "foreach", cpu_flavours=("fused",), lr=LR, eps=1e-10),
    _against_torch("adadelta fp32", 28, "NpuFusedAdadelta", "Adadelta", "foreach", lr=1.0),
    _against_torch("rmsprop fp32", 20, "NpuFusedRMSprop", "RMSprop", "foreach", lr=LR),
    _against_operators("adamp fp32", 40, "NpuFusedAdamP"),
    _against_torch("nadam fp32", 28, "FusedNAdam", "NAdam", "foreach", lr=LR),
    _against_torch("radam fp32", 28, "FusedRAdam", "RAdam", "foreach", lr=LR),
    _against_operators("lion fp32", 20, "FusedLion"),
    _against_operators("ademamix fp32", 36, "FusedAdEMAMix"),
    _against_operators("schedule-free adamw fp32", 28, "FusedScheduleFreeAdamW"),
    Algorithm(
        "adamw bf16, int8 state",
        12,
        _ours("FusedAdam", **_ADAMW, state_format="int8", master_bits=24),
        _torch("AdamW", **_ADAMW, foreach=False),
        {
            **_flavours("AdamW", "fused", **_ADAMW),
            **_installed("torchao", "torchao.optim", "AdamW8bit", **_ADAMW),
            **_installed("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", **_ADAMW),
        },
        dtype=torch.bfloat16,
        result_dtypes=(torch.bfloat16,),
        slack=_EIGHT_BITS,
        gpu_only=True,
    ),
)
# PyTorch has Muon since 2.9.
if hasattr(torch.optim, "Muon"):
    ALGORITHMS += (Algorithm("muon fp32", 32, _muon, _torch_muon, {"torch": _torch_muon}, slack=_APPROXIMATE),)


def _checked_shapes(name: str, device: torch.device) -> tuple[Shapes, str | None]:
    """Return the shapes on which a set's results are checked, and a note for the reader if they differ."""
    if device.type == "cpu":
        if name == "resnet50":
            return parameter_sets.resnet50(width=16), "results are checked on a resnet50 of a quarter of the width"
    elif name == "gpt1.3b":
        return parameter_sets.resnet50(), "results are checked on the parameters of resnet50"
    return SETS[name](), None


def _prepare(algorithm: Algorithm, name: str, device: torch.device) -> Prepared:
    return prepared_steps(
        algorithm.implementations(device),
        algorithm.exact,
        make_parameters(_checked_shapes(name, device)[0], device, algorithm.dtype),
        functools.partial(make_parameters, SETS[name](), device, algorithm.dtype),
        algorithm.result_dtypes,
        algorithm.slack,
    )


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return every algorithm and pass on every parameter set."""
    timing: Literal["device", "wall"] = "wall" if device.type == "cpu" else "device"
    result = []
    for name in _set_names(device, quick):
        count, note = elements(SETS[name]()), _checked_shapes(name, device)[1]
        result += [
            Case(f"{a.name} {name}", a.bytes_per_element * count, functools.partial(_prepare, a, name), timing, note)
            for a in (*ALGORITHMS, *PASSES)
            if not (a.gpu_only and device.type == "cpu")
        ]
    return result


def _set_names(device: torch.device, quick: bool) -> list[str]:
    """Return the names of the parameter sets; a quick run, or a GPU with too little memory, omits the large set."""
    names = list(CPU_SETS if device.type == "cpu" else GPU_SETS)
    if quick:
        return ["1000_small"] if device.type == "cpu" else ["resnet50"]
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    if on_gpu and torch.cuda.get_device_properties(device).total_memory < LARGE_BYTES:
        names.remove("gpt1.3b")
    return names


register(Family("optimizers", "optimizers, and norms, scaling and clipping of gradients", cases))
