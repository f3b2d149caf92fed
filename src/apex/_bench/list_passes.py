"""Passes over all gradients: their norm, scaling with a look for overflows, clipping; ours and PyTorch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .parameter_sets import Shapes
from .problems import copied, flat, gradients, make_parameters, timed_call
from .registry import OURS, Call, Expected, Prepared

# Nearly 1, so that gradients which are scaled or clipped thousands of times stay in range.
FACTOR = 1 - 2**-12

# A pass over the gradients of these parameters, which returns what it found besides: a norm, a flag.
Pass = Callable[[], Tensor]
Maker = Callable[[list[nn.Parameter]], Pass]


@dataclass(frozen=True)
class ListPass:
    """`exact` gives the right gradients and the right return value, both in float64, for float64 gradients."""

    name: str
    bytes_per_element: int
    implementations: Mapping[str, Maker]
    exact: Callable[[list[Tensor]], tuple[list[Tensor], Tensor]]
    plants_overflow: bool = False


def _l2norm(params: list[nn.Parameter]) -> Pass:
    from ..ops.multi_tensor import l2norm

    grads = gradients(params)
    return lambda: l2norm(grads)[0]


def _torch_l2norm(params: list[nn.Parameter]) -> Pass:
    grads = gradients(params)
    return lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))


def _scale(params: list[nn.Parameter]) -> Pass:
    from ..ops.multi_tensor import scale

    grads = gradients(params)
    flag = torch.zeros(1, device=grads[0].device)

    def call() -> Tensor:
        scale(grads, grads, FACTOR, overflow=flag)
        return flag

    return call


def _torch_scale(params: list[nn.Parameter]) -> Pass:
    """What torch.amp.GradScaler does."""
    grads = gradients(params)
    flag = torch.zeros(1, device=grads[0].device)
    factor = torch.full_like(flag, FACTOR)

    def call() -> Tensor:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, factor)
        return flag

    return call


def _foreach_scale(params: list[nn.Parameter]) -> Pass:
    grads = gradients(params)

    def call() -> Tensor:
        largest = torch.stack(torch._foreach_norm(grads, float("inf")))
        torch._foreach_mul_(grads, FACTOR)
        return (~torch.isfinite(largest).all()).float().reshape(1)

    return call


def _clipping(clip: Callable[..., Tensor], params: list[nn.Parameter]) -> Pass:
    """Clips to less at every call, so that there is always something to clip."""
    limit = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients(params)))

    def call() -> Tensor:
        nonlocal limit
        limit *= FACTOR
        return clip(params, limit)

    return call


def _clip(params: list[nn.Parameter]) -> Pass:
    from ..contrib.clip_grad import clip_grad_norm_

    return _clipping(clip_grad_norm_, params)


def _torch_clip(params: list[nn.Parameter]) -> Pass:
    return _clipping(functools.partial(nn.utils.clip_grad_norm_, foreach=True), params)


def _exact_clip(grads: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    norm = flat(grads).norm()
    return [grad * (FACTOR * norm / (norm + 1e-6)) for grad in grads], norm


PASSES = (
    ListPass("l2norm", 4, {OURS: _l2norm, "torch_foreach": _torch_l2norm}, lambda grads: (grads, flat(grads).norm())),
    ListPass(
        "scale+overflow",
        8,
        {OURS: _scale, "torch": _torch_scale, "torch_foreach": _foreach_scale},
        lambda grads: ([grad * FACTOR for grad in grads], grads[0].new_zeros(1)),
        plants_overflow=True,
    ),
    ListPass("clip_grad_norm", 12, {OURS: _clip, "torch": _torch_clip}, _exact_clip),
)


def _check(which: ListPass, make: Maker, params: Sequence[nn.Parameter]) -> Call:
    def call() -> Sequence[Tensor]:
        twins = copied(params)
        run = make(twins)
        found = run().clone()
        results = [flat(gradients(twins)), found.reshape(-1)]
        if which.plants_overflow:
            gradients(twins)[-1].view(-1)[-1] = float("inf")
            results.append(run().clone().reshape(-1))
        return results

    return call


def prepare_pass(which: ListPass, timed_shapes: Shapes, checked_shapes: Shapes, device: torch.device) -> Prepared:
    """The pass checked on gradients of some shapes and timed on others."""
    checked = make_parameters(checked_shapes, device)
    exact, found = which.exact([grad.double() for grad in gradients(checked)])
    # A norm is a sum; PyTorch's own adds up without pairing, which costs it 2e-6 of the norm of 1.6 million elements.
    summands = 1 if which.plants_overflow else sum(map(Tensor.numel, exact))
    expected = [Expected(flat(exact), torch.float32), Expected(found.reshape(-1), torch.float32, summands)]
    if which.plants_overflow:
        expected.append(Expected(found.new_ones(1), torch.float32))
    params = functools.cache(functools.partial(make_parameters, timed_shapes, device))

    def time(make: Maker) -> Call:
        return timed_call(make(params()))

    makers = which.implementations
    return Prepared(
        {name: functools.partial(_check, which, make, checked) for name, make in makers.items()},
        expected,
        {name: functools.partial(time, make) for name, make in makers.items()},
    )
