"""Random training steps: optimizers, amp, LARC, clipping and lists of tensors, for `test_properties.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import amp_C
from apex import amp, optimizers
from apex.contrib.clip_grad import clip_grad_norm_
from apex.multi_tensor_apply import multi_tensor_applier
from apex.parallel import LARC
from tests.support.drawn import st
from tests.support.properties import Case, Trial, draw_case, draw_tensor

Draw = Callable[[st.SearchStrategy[Any]], Any]

# The optimizers that PyTorch has too, with options that mean the same.
LIKE_TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Sequence[Any]]]] = {
    "FusedAdam": (
        lambda p, **o: optimizers.FusedAdam(p, adam_w_mode=True, **o),
        torch.optim.AdamW,
        {"betas": [(0.9, 0.999), (0.5, 0.9), (1.0, 0.9)], "eps": [1e-8, 1e-3, -1.0]},
    ),
    "FusedAdam with L2": (
        lambda p, **o: optimizers.FusedAdam(p, adam_w_mode=False, **o),
        torch.optim.Adam,
        {"betas": [(0.9, 0.999), (-0.1, 0.9)], "eps": [1e-8, 1e-3]},
    ),
    "FusedSGD": (optimizers.FusedSGD, torch.optim.SGD, {"momentum": [0.0, 0.9, -1.0], "nesterov": [False, True]}),
    "FusedAdagrad": (optimizers.FusedAdagrad, torch.optim.Adagrad, {"eps": [1e-10, 1e-3, -1.0]}),
    "NpuFusedAdam": (optimizers.NpuFusedAdam, torch.optim.Adam, {"amsgrad": [False, True]}),
    "NpuFusedAdamW": (optimizers.NpuFusedAdamW, torch.optim.AdamW, {"amsgrad": [False, True]}),
    "NpuFusedSGD": (optimizers.NpuFusedSGD, torch.optim.SGD, {"momentum": [0.0, 0.9]}),
    "NpuFusedRMSprop": (optimizers.NpuFusedRMSprop, torch.optim.RMSprop, {"alpha": [0.99, -1.0], "momentum": [0, 0.9]}),
    "NpuFusedAdadelta": (optimizers.NpuFusedAdadelta, torch.optim.Adadelta, {"rho": [0.9, 2.0]}),
}
OTHERS = [
    "FusedLAMB",
    "FusedLARS",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "Lamb",
    "NpuFusedAdamP",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSpropTF",
]


def _parameters(draw: Draw, case: Case) -> list[torch.nn.Parameter]:
    shapes = draw(st.lists(st.lists(st.sampled_from([0, 1, 3, 8]), max_size=4), min_size=1, max_size=4))
    tensors = [draw_tensor(draw, case, shape) for shape in shapes]
    return [torch.nn.Parameter(t, requires_grad=t.is_floating_point()) for t in tensors]


def _gradients(draw: Draw, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    kinds = [draw(st.sampled_from(["dense", "dense", "dense", "none", "strided"])) for _ in parameters]
    made: list[Tensor | None] = []
    for kind, p in zip(kinds, parameters, strict=True):
        values = torch.randn(p.shape, dtype=torch.float64).to(p)
        strided = p.dim() > 1 and kind == "strided"
        made.append(None if kind == "none" else values.mT.contiguous().mT if strided else values)
    return made


def _steps(optimizer: Any, parameters: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]]) -> None:
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = None if g is None else g.to(p).clone() if g.dtype != p.dtype else g.clone()
        optimizer.step()


def _copies(parameters: Sequence[Tensor]) -> list[torch.nn.Parameter]:
    """The same values in float64 on the CPU."""
    given = [torch.zeros_like(p, device="cpu") if p.is_meta else p.detach().cpu() for p in parameters]
    return [torch.nn.Parameter(p.double()) for p in given]


def optimizer(draw: Draw) -> Trial:
    case, name = draw_case(draw), draw(st.sampled_from([*LIKE_TORCH, *OTHERS]))
    parameters = _parameters(draw, case)
    options: dict[str, Any] = {"lr": draw(st.sampled_from([0.1, 1e-3, 0.1, 0.0, -1.0]))}
    options["weight_decay"] = draw(st.sampled_from([0.0, 0.1, 0.1, -0.5]))
    if name in LIKE_TORCH:
        make, torch_make, choices = LIKE_TORCH[name]
        options.update({key: draw(st.sampled_from(values)) for key, values in choices.items()})
    else:
        make, torch_make = getattr(optimizers, name), None
    half = case.dtype.itemsize < 4
    gradients = [_gradients(draw, parameters) for _ in range(1 if half else draw(st.integers(1, 3)))]
    changed = list(parameters)
    valid = torch_make is not None and _accepts(torch_make, options) and case.dtype.is_floating_point

    def call() -> list[Tensor]:
        _steps(make(parameters, **options), parameters, gradients)
        return [p.detach().clone() for p in parameters]

    def exact() -> list[Tensor]:
        twins = _copies(parameters_before)
        _steps(torch_make(twins, **options), twins, [[None if g is None else _exact(g) for g in s] for s in gradients])  # type: ignore[misc]
        return [p.detach() for p in twins]

    parameters_before = [p.detach().clone() for p in parameters]
    given = [g for step in gradients for g in step if g is not None]
    return Trial(
        case,
        call,
        exact if torch_make is not None else None,
        lambda: given,
        valid=valid,
        reduction=100,
        kept_if_refused=lambda: changed,
    )


def _exact(gradient: Tensor) -> Tensor:
    return (torch.zeros_like(gradient, device="cpu") if gradient.is_meta else gradient.cpu()).double()


def _accepts(make: Callable[..., Any], options: dict[str, Any]) -> bool:
    """Whether PyTorch takes these options."""
    try:
        make([torch.nn.Parameter(torch.zeros(1))], **options)
    except ValueError:
        return False
    return True


def clip(draw: Draw) -> Trial:
    case, order = draw_case(draw), draw(st.sampled_from([2.0, 2, float("inf"), 1.0, 3]))
    limit = draw(st.sampled_from([0.5, 1.0, 100.0, 0.0]))
    parameters = _parameters(draw, case)
    gradients = _gradients(draw, parameters)
    valid = case.dtype.is_floating_point

    def run(function: Callable[..., Tensor], given: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Any]:
        for p, g in zip(given, grads, strict=True):
            p.grad = None if g is None else g.clone()
        norm = function(given, limit, order)
        return [norm, *(p.grad for p in given)]

    def exact() -> list[Any]:
        wide = [None if g is None else _exact(g) for g in gradients]
        return run(_torch_clip, _copies(parameters), wide)

    return Trial(case, lambda: run(clip_grad_norm_, parameters, gradients), exact, lambda: parameters, valid, 100)


def _torch_clip(parameters: Sequence[Tensor], limit: float, order: float) -> Tensor:
    """PyTorch's, which has no infinity norm of nothing."""
    given = [p for p in parameters if p.grad is None or p.grad.numel()]
    return torch.nn.utils.clip_grad_norm_(given, limit, order)


def lists(draw: Draw) -> Trial:
    case, kind = draw_case(draw), draw(st.sampled_from(["scale", "axpby", "l2norm"]))
    shapes = draw(st.lists(st.lists(st.sampled_from([0, 1, 3, 8]), max_size=3), min_size=1, max_size=4))
    inputs = [[draw_tensor(draw, case, shape) for shape in shapes] for _ in range(2)]
    wrong = draw(st.integers(0, 4)) == 0
    outputs = [torch.full_like(t, 3, memory_format=torch.contiguous_format) for t in inputs[0]]
    if wrong:
        outputs = outputs[:-1]
    flag = torch.zeros(1, dtype=torch.int32, device=case.device)

    def call() -> list[Tensor]:
        if kind == "scale":
            multi_tensor_applier(amp_C.multi_tensor_scale, flag, [inputs[0], outputs], 0.5)
        elif kind == "axpby":
            multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [*inputs, outputs], 0.5, 2.0, -1)
        else:
            return [multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [inputs[0]], False)[0].reshape(())]
        return outputs

    def exact() -> list[Tensor]:
        first, second = ([_exact(t) for t in tensors] for tensors in inputs)
        if kind == "l2norm":
            return [torch.cat([t.reshape(-1) for t in first]).norm()]
        return [0.5 * a + (2.0 * b if kind == "axpby" else 0.0) for a, b in zip(first, second, strict=True)]

    valid = case.dtype.is_floating_point and (kind == "l2norm" or not wrong)
    kept = [t for tensors in inputs for t in tensors]
    return Trial(case, call, exact, lambda: kept, valid, 100, kept_if_refused=lambda: outputs)


def larc(draw: Draw) -> Trial:
    case, clips = draw_case(draw), draw(st.booleans())
    parameters, decay = _parameters(draw, case), draw(st.sampled_from([0.0, 0.1]))
    gradients, lr = _gradients(draw, parameters), draw(st.sampled_from([0.1, 1.0]))
    before = [p.detach().clone() for p in parameters]

    def call() -> list[Tensor]:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = None if g is None else g.clone()
        LARC(torch.optim.SGD(parameters, lr=lr, weight_decay=decay), clip=clips).step()
        return [p.detach().clone() for p in parameters]

    def exact() -> list[Tensor]:
        results = []
        for p, g in zip(map(_exact, before), gradients, strict=True):
            slope = torch.zeros_like(p) if g is None else _exact(g)
            length, steepness = p.norm(), slope.norm()
            if length != 0 and steepness != 0:
                rate = 0.02 * length / (steepness + length * decay + 1e-8)
                slope = (slope + decay * p) * (min(rate / lr, 1) if clips else rate)
            results.append(p - lr * slope)
        return results

    valid = case.dtype.is_floating_point
    return Trial(case, call, exact, lambda: (), valid, 100, kept_if_refused=lambda: parameters)


def mixed(draw: Draw) -> Trial:
    """A step of amp: what O0 does in float32, every other level to the digits of half precision."""
    case = draw_case(draw)._replace(device="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.float32)
    level = draw(st.sampled_from(["O0", "O1", "O2", "O3", "O4", "O5", "O7"]))
    loss_scale = draw(st.sampled_from([None, 1.0, 128.0, "dynamic", "high"]))
    fused, overflows = draw(st.booleans()), draw(st.booleans())
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).to(case.device)
    twin = copy.deepcopy(model)
    make = optimizers.FusedSGD if fused else torch.optim.SGD
    inputs = torch.randn(4, 6, device=case.device)
    if overflows:
        inputs[0, 0] = torch.inf
    options: dict[str, Any] = {} if loss_scale is None else {"loss_scale": loss_scale}
    valid = level != "O7" and loss_scale != "high"
    # Overflow is looked for where losses are scaled dynamically, which O2 and O1 do unless they are told otherwise.
    dynamic = loss_scale == "dynamic" or (loss_scale is None and level in ("O1", "O2"))
    optimizer = make(model.parameters(), lr=0.1)

    def call() -> list[Tensor]:
        try:
            trained, stepper = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
            loss = trained(inputs).float().square().mean()
            with amp.scale_loss(loss, stepper) as scaled:
                scaled.backward()
            stepper.step()
            return [p.detach().float() for p in amp.master_params(stepper)]
        finally:
            amp.shutdown()

    def exact() -> list[Tensor]:
        if overflows:
            return [p.detach().double().cpu() for p in twin.parameters()]
        wide = twin.double()
        wide(inputs.double()).square().mean().backward()
        torch.optim.SGD(wide.parameters(), lr=0.1).step()
        return [p.detach().cpu() for p in wide.parameters()]

    slack = 0.0 if level == "O0" else 6e-2
    finite = not overflows or dynamic
    kept = {"kept_if_refused": lambda: list(model.parameters())}
    return Trial(case, call, exact, lambda: [inputs], valid, 100, slack, finite, **kept)  # type: ignore[arg-type]


SUBJECTS: dict[str, Callable[[Draw], Trial]] = {
    "optimizers": optimizer,
    "clip_grad": clip,
    "multi_tensor_applier": lists,
    "LARC": larc,
    "amp": mixed,
}
