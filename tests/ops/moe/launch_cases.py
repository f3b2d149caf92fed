"""Launches of a mixture's experts that no example reaches, to compile for every GPU."""

from __future__ import annotations

import torch

from apex.ops._device import facts
from apex.ops.moe import launches, launches_backward
from apex.ops.moe.problem import Problem

_META = torch.device("meta")


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _whole(tokens: int, experts: int, chosen: int, hidden: int, width: int, gpt_oss: bool) -> None:
    """Both passes: Mixtral's layout, or gpt-oss's."""
    first, second = (experts, 2 * width, hidden), (experts, hidden, width)
    if gpt_oss:
        first, second = (experts, hidden, 2 * width), (experts, width, hidden)
    index = _tensor(tokens, chosen, dtype=torch.int64)
    biases = (_tensor(experts, 2 * width), _tensor(experts, hidden)) if gpt_oss else (None, None)
    given = (_tensor(tokens, hidden), _tensor(*first), _tensor(*second), index, _tensor(tokens, chosen), *biases)
    settings = ("clamped" if gpt_oss else "silu", gpt_oss, gpt_oss)
    output, *kept = launches.launch_forward(*given, *settings)
    launches_backward.launch_backward(output, *given, *kept, *settings, [True] * 6)


def _added(tokens: int, experts: int, chosen: int, hidden: int, width: int) -> None:
    """The kernels behind PyTorch's products, and a gradient that is added to a float32 one."""
    problem = Problem(tokens, chosen, experts, hidden, width, "silu", False, False, torch.bfloat16, facts(_META))
    order, _, offsets, _ = launches.launch_sort(_tensor(tokens, chosen, dtype=torch.int64), problem)
    pre, dactive = _tensor(problem.rows, 2 * width), _tensor(problem.rows, width)
    dpre, *_ = launches_backward.launch_unit_backward(
        dactive, pre, _tensor(tokens, chosen, dtype=torch.float32), order, offsets, problem, True
    )
    target = _tensor(experts, 2 * width, hidden, dtype=torch.float32)
    x = _tensor(tokens, hidden)
    launches_backward.launch_matrix_gradient(dpre, x, order, offsets, target, problem, (False, True), accumulate=True)


def record() -> None:
    """Plan Mixtral's experts, gpt-oss's, few rows for many experts, and what surrounds PyTorch's products."""
    _whole(8192, 8, 2, 4096, 14336, False)
    _whole(8192, 32, 4, 2880, 2880, True)
    _whole(16, 128, 8, 2048, 768, False)
    _added(8192, 8, 2, 4096, 14336)
