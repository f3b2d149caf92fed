"""Layer norm and RMS norm: forward and backward apart, whole steps of small shapes, peak memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...normalization import FusedLayerNorm, FusedRMSNorm
from ...ops.norm import reference
from ..directions import Random, case, leaves_of, long_name, prepare, with_peers
from ..registry import OURS, Case, Expected, Family, MemoryCase, Prepared, register

EPS = 1e-5
# Ours and PyTorch's.
NORMS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "layer_norm": (FusedLayerNorm, nn.LayerNorm),
    "rms_norm": (FusedRMSNorm, nn.RMSNorm),
}
DTYPES = (torch.bfloat16, torch.float32)
GPU_SHAPES = ((16384, 1024), (16384, 4096), (8192, 8192), (4096, 16384))
GPU_STEP_SHAPES = ((128, 1024), (1024, 1024), (4096, 1024))
CPU_SHAPES = ((1024, 1024), (4096, 1024))
CPU_STEP_SHAPES = ((128, 1024), (1024, 1024))
MEMORY_SHAPE = (16384, 4096)
# Tensors of the input's size that each direction reads and writes; weights are negligible.
TENSORS_MOVED = {"fwd": 2, "bwd": 3, "step": 5}


@dataclass(frozen=True)
class Problem:
    """The tensors of one norm on `rows` rows of `columns` elements; `bias` is None for RMS norm."""

    input: Tensor
    gradient: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def leaves(self) -> list[Tensor]:
        return leaves_of((self.input, self.weight, self.bias))

    def module(self, kind: type[nn.Module], **options: object) -> nn.Module:
        """A norm of class `kind` that holds this problem's parameters."""
        module = kind(self.weight.numel(), eps=EPS, **options)
        module.register_parameter("weight", self.weight)
        module.register_parameter("bias", self.bias)
        return module


def make_problem(norm: str, dtype: torch.dtype, rows: int, columns: int, device: torch.device) -> Problem:
    """Normal inputs and gradients, weights and biases between 0.5 and 1.5."""
    random = Random(device)
    values, gradient = (random.normal(rows, columns, dtype=dtype) for _ in range(2))
    weight, bias = (nn.Parameter(random.weight(columns, dtype)) for _ in range(2))
    return Problem(values.requires_grad_(), gradient, weight, bias if norm == "layer_norm" else None)


def _liger(problem: Problem) -> Callable[[Tensor], Tensor]:
    weight, bias = problem.weight, problem.bias
    if bias is None:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

        # weight offset, casting mode, in place
        return lambda values: LigerRMSNormFunction.apply(values, weight, EPS, 0.0, "llama", False)
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # type: ignore[import-not-found]

    return lambda values: LigerLayerNormFunction.apply(values, weight, bias, EPS)


def expected_results(problem: Problem, direction: str) -> list[Expected]:
    """The output ("fwd") or the gradients of input, weight and bias, in float64."""
    rows, columns = problem.input.shape
    dtype = problem.input.dtype
    values, weight = problem.input.detach().double(), problem.weight.detach().double()
    bias = None if problem.bias is None else problem.bias.detach().double()
    settings = (columns, EPS, bias is not None, False, torch.float64, torch.float64)
    output, statistics = reference.forward(values, weight, bias, *settings)
    if direction == "fwd":
        return [Expected(output, dtype)]
    del output
    gradients = reference.backward(problem.gradient.double(), values, weight, bias, statistics, *settings)
    return [Expected(g, dtype, r) for g, r in zip(gradients, (1, rows, rows), strict=True) if g is not None]


def _prepare(norm: str, dtype: torch.dtype, shape: tuple[int, int], direction: str, device: torch.device) -> Prepared:
    problem = make_problem(norm, dtype, *shape, device)
    ours, torchs = map(problem.module, NORMS[norm])
    liger = None if direction == "step" else functools.partial(_liger, problem)
    makers = with_peers(ours, torchs, device, compile=direction != "step", liger=liger)
    expected = expected_results(problem, direction)
    return prepare(makers, (problem.input,), problem.gradient, direction, expected, problem.leaves)


def _name(norm: str, dtype: torch.dtype, shape: tuple[int, int]) -> str:
    return f"{norm} {long_name(dtype)} {shape[0]}x{shape[1]}"


def _case(norm: str, dtype: torch.dtype, shape: tuple[int, int], direction: str) -> Case:
    moved = TENSORS_MOVED[direction] * shape[0] * shape[1] * dtype.itemsize
    return case(_name(norm, dtype, shape), moved, _prepare, norm, dtype, shape, direction=direction)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Large shapes in both directions, then steps of small ones; a processor gets smaller shapes."""
    on_gpu = device.type == "cuda"
    shapes: Sequence[tuple[int, int]] = GPU_SHAPES if on_gpu else CPU_SHAPES
    step_shapes: Sequence[tuple[int, int]] = GPU_STEP_SHAPES if on_gpu else CPU_STEP_SHAPES
    if quick:
        step_shapes = step_shapes[:1]
        shapes = shapes[:1] if on_gpu else step_shapes
    apart = [_case(n, d, s, way) for d in DTYPES for s in shapes for n in NORMS for way in ("fwd", "bwd")]
    return apart + [_case(n, d, s, "step") for d in DTYPES for s in step_shapes for n in NORMS]


def _memory_steps(norm: str, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    """Steps whose norm gets an intermediate that nobody else keeps, and whose output a next layer would keep."""
    problem = make_problem(norm, dtype, *MEMORY_SHAPE, device)
    ours, torchs = NORMS[norm]

    def step(module: nn.Module) -> None:
        output = module(problem.input + 1)
        torch.autograd.grad(output, problem.leaves, problem.gradient)

    modules = {
        OURS: problem.module(ours),
        f"{OURS} memory_efficient": problem.module(ours, memory_efficient=True),
        "torch": problem.module(torchs),
    }
    return {name: functools.partial(step, module) for name, module in modules.items()}


def memory_cases(device: torch.device, quick: bool) -> Sequence[MemoryCase]:
    """One large shape per norm and dtype; only a GPU's allocator counts its peak."""
    if device.type != "cuda" or quick:
        return ()
    return [
        MemoryCase(f"{_name(n, d, MEMORY_SHAPE)} memory", functools.partial(_memory_steps, n, d))
        for d in DTYPES
        for n in NORMS
    ]


register(Family("norm", "layer norm and RMS norm", cases, memory_cases))
