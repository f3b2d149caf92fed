"""What every optimizer is held against, as functions: a test gives the optimizer and, in float64, the truth.

A factory takes what `torch.optim` takes (parameters, or a list of groups) and returns an optimizer:

    make = lambda params: FusedSGD(params, lr=0.1, momentum=0.9)
    check_training(make, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), route)

Where `torch.optim` lacks an algorithm, the truth is a `Reference`: the formula, written per parameter. Every gradient
is drawn from a seed that depends on the step alone, so that any two runs see the same ones.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex.ops import implementation
from tests.support.harness import Route, assert_equal_bits, routes

Factory = Callable[[Any], torch.optim.Optimizer]

# A block is 64 elements under the interpreter: two blocks, part of one, nothing.
SHAPES = ((9, 8), (5,), (0,))
STEPS = 100
# On a CPU options show in fewer steps, and one test of each optimizer takes all; Triton's interpreter takes 5 to 8 ms
# for a block of any kernel.
CPU_STEPS = 30
INTERPRETER_STEPS = 5
INTERPRETER = [parameter for parameter in routes() if parameter.id == "interpreter"]
CPU_ROUTES = [parameter for parameter in routes() if parameter.values[0].device == "cpu"]
# Norm-wise over all parameters, float32 against float64.
LIMIT = 1e-6


class Reference(torch.optim.Optimizer):
    """A plain optimizer to compare with: `update` is the formula for one parameter, changed in place.

    `group["step"]` counts from 1 the steps in which any parameter of the group had a gradient, as in the fused
    optimizers.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def prepare(self, gradients: list[Tensor]) -> None:
        """Called before the updates of a step with all gradients."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.prepare([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            group["step"] = group.get("step", 0) + bool(present)
            for p in present:
                self.update(p, p.grad.clone(), self.state[p], group)


def parameters(
    device: str = "cpu", dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0
) -> list[torch.nn.Parameter]:
    """Random parameters; the same values on every device, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def exact_copy(params: Iterable[Tensor]) -> list[torch.nn.Parameter]:
    """The same values in float64 on the CPU."""
    return [torch.nn.Parameter(p.detach().cpu().double()) for p in params]


def same_copy(params: Iterable[Tensor]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def set_gradients(
    params: Sequence[Tensor],
    step: int,
    *,
    rounded_to: torch.dtype | None = None,
    factor: float = 1.0,
    absent: Sequence[int] = (),
) -> None:
    """Gradients of this step; `rounded_to` is a dtype that holds them before they take the parameter's own.

    Parameters whose index is in `absent` get none.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    for index, p in enumerate(params):
        values = torch.randn(p.shape, generator=generator)
        if rounded_to is not None:
            values = values.to(rounded_to)
        p.grad = None if index in absent else (values.to(p.dtype) * factor).to(p.device)


def in_groups(params: Sequence[Tensor], *options: dict[str, Any]) -> Any:
    """The parameters dealt out to a group per entry of `options`; as they are without any."""
    if not options:
        return list(params)
    return [{"params": params[index :: len(options)], **option} for index, option in enumerate(options)]


def relative_error(params: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """Distance from the truth over the length of the truth, all parameters as one vector."""
    pairs = [(p.detach().cpu().double(), e.detach().double()) for p, e in zip(params, exact, strict=True)]
    distance = sum((p - e).square().sum().item() for p, e in pairs) ** 0.5
    return distance / sum(e.square().sum().item() for _, e in pairs) ** 0.5


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of every state tensor, in the order of parameters and names."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    states = (optimizer.state[p] for p in params if p in optimizer.state)
    return [state[name].clone() for state in states for name in sorted(state) if isinstance(state[name], Tensor)]


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_options(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Two state dicts have equal groups, options that are tensors included."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        return value.tolist() if isinstance(value, Tensor) else value

    for one, other in zip(first["param_groups"], second["param_groups"], strict=True):
        for name in (set(one) | set(other)) - {"differentiable"}:  # which PyTorch adds on loading
            assert plain(one[name]) == plain(other[name]), name


def default_steps(route: Route) -> int:
    if route.device != "cpu":
        return STEPS
    return INTERPRETER_STEPS if route.implementation == "triton" else CPU_STEPS


def many_steps(route: Route) -> int:
    """For the one test of an optimizer that looks at where it gets in the long run."""
    return 40 if route == Route("cpu", "triton") else STEPS


def check_training(
    make: Factory,
    make_reference: Factory,
    route: Route,
    *,
    groups: Sequence[dict[str, Any]] = (),
    absent: Callable[[int], Sequence[int]] = lambda step: (),
    before_step: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None,
    steps: int | None = None,
    limit: float = LIMIT,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> torch.optim.Optimizer:
    """Trains in float32 and holds the result against the truth; returns the optimizer.

    `groups` has the options of each parameter group, `absent(step)` the parameters that get no gradient in that step;
    `before_step` may change either optimizer, a schedule of learning rates say.
    """
    params = parameters(route.device, shapes=shapes)
    exact = exact_copy(params)
    reference = make_reference(in_groups(exact, *groups))
    with implementation(route.implementation):
        optimizer = make(in_groups(params, *groups))
        for step in range(steps or default_steps(route)):
            for each, tensors in ((optimizer, params), (reference, exact)):
                set_gradients(tensors, step, absent=absent(step))
                before_step(each, step)
                each.step()
    error = relative_error(params, exact)
    assert error <= limit, f"off by {error:.3g}"
    return optimizer


def check_master_weights(
    make: Factory,
    make_reference: Factory,
    route: Route,
    *,
    dtype: torch.dtype = torch.bfloat16,
    steps: int | None = None,
    limit: float = LIMIT,
) -> None:
    """Half-precision parameters follow float32 masters, which are as good as float32 parameters."""
    params = parameters(route.device, dtype)
    exact = exact_copy(params)
    reference = make_reference(exact)
    with implementation(route.implementation):
        optimizer = make(params)
        for step in range(steps or default_steps(route)):
            for each, tensors in ((optimizer, params), (reference, exact)):
                set_gradients(tensors, step, rounded_to=dtype)
                each.step()
    masters = [optimizer.state[p]["master_param"] for p in params]
    assert {master.dtype for master in masters} == {torch.float32}
    error = relative_error(masters, exact)
    assert error <= limit, f"off by {error:.3g}"
    for p, master in zip(params, masters, strict=True):
        if route == Route("cpu", "triton"):  # the interpreter cuts off where hardware rounds to nearest
            torch.testing.assert_close(p, master.to(dtype))
        else:
            assert torch.equal(p, master.to(dtype))


def check_resume(make: Factory, route: Route, *, dtype: torch.dtype = torch.float32, steps: int = 4) -> None:
    """A run that was saved and loaded half way ends with the same bits, and the saved state does not change."""
    with implementation(route.implementation):
        params = parameters(route.device, dtype)
        optimizer = make(params)
        for step in range(steps):
            set_gradients(params, step)
            optimizer.step()
        live = optimizer.state_dict()
        saved = through_a_file(live)
        resumed_params = same_copy(params)
        resumed = make(resumed_params)
        resumed.load_state_dict(saved)
        assert_equal_bits(state_tensors(optimizer), state_tensors(resumed))
        for step in range(steps, 2 * steps):
            for each, tensors in ((optimizer, params), (resumed, resumed_params)):
                set_gradients(tensors, step)
                each.step()
    assert_equal_bits(params, resumed_params)
    assert_equal_bits(state_tensors(optimizer), state_tensors(resumed))
    assert_same_options(optimizer.state_dict(), resumed.state_dict())


def check_scaler(make: Factory, route: Route, *, dtype: torch.dtype = torch.float32, steps: int = 6) -> None:
    """Under `torch.amp.GradScaler` a step with an overflow leaves everything alone, the others are as without it.

    These leave gradients without the scale, as PyTorch's fused optimizers do, and PyTorch has nothing to warn of.
    The first step overflows too: what begins with the first step must begin with the first that happens.
    """
    overflows = {0, 3}
    with implementation(route.implementation):
        params = parameters(route.device, dtype)
        plain_params = same_copy(params)
        optimizer, plain = make(params), make(plain_params)
        scaler = torch.amp.GradScaler(route.device, init_scale=8.0, growth_interval=1000)
        for step in range(steps):
            set_gradients(params, step, factor=scaler.get_scale())
            if step in overflows:
                params[0].grad[0, 0] = float("inf")
            scaler.scale(torch.zeros((), device=route.device))  # what creates the scale
            before = [p.detach().clone() for p in params], state_tensors(optimizer)
            gradients = [p.grad.detach().clone() for p in params]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            wanted_gradients = gradients if step in overflows else [gradient / scale for gradient in gradients]
            assert_equal_bits([p.grad for p in params], wanted_gradients)  # the scale is a power of two
            if step in overflows:
                assert_equal_bits(before[0], params)
                if before[1]:
                    assert_equal_bits(before[1], state_tensors(optimizer))
            else:
                set_gradients(plain_params, step)
                plain.step()
        # Not bit by bit: on a CPU, PyTorch's own fused loops serve the steps without a scale.
        for found, wanted in zip(
            (*params, *state_tensors(optimizer)), (*plain_params, *state_tensors(plain)), strict=True
        ):
            torch.testing.assert_close(found, wanted)
        saved, expected = optimizer.state_dict(), plain.state_dict()
        assert [int(group["step"]) for group in saved["param_groups"]] == [
            int(group["step"]) for group in expected["param_groups"]
        ]


def check_interchange(
    make: Factory, make_torch: Factory, route: Route, *, steps: int = 5, limit: float = LIMIT
) -> None:
    """Each takes up from the other's state dict and goes on as the other would have."""
    start = parameters(route.device)
    runs = {"ours": (make, same_copy(start)), "torch's": (make_torch, same_copy(start))}
    exact = exact_copy(start)
    reference = make_torch(exact)
    with implementation(route.implementation):
        optimizers = {name: factory(params) for name, (factory, params) in runs.items()}
        for step in range(2 * steps):
            if step == steps:
                saved = {name: through_a_file(optimizer.state_dict()) for name, optimizer in optimizers.items()}
                for name, other in (("ours", "torch's"), ("torch's", "ours")):
                    optimizers[name] = runs[name][0](runs[name][1])
                    optimizers[name].load_state_dict(saved[other])
            for name, (_, params) in runs.items():
                set_gradients(params, step)
                optimizers[name].step()
            set_gradients(exact, step)
            reference.step()
    for name, (_, params) in runs.items():
        error = relative_error(params, exact)
        assert error <= limit, f"{name} is off by {error:.3g}"


def check_graph(make: Factory, *, steps: int = 4) -> None:
    """Replays of a captured step end with the bits of as many plain steps; needs a GPU."""
    params = parameters("cuda")
    eager_params = same_copy(params)
    optimizer, eager = make(params), make(eager_params)
    for each, tensors in ((optimizer, params), (eager, eager_params)):
        for step in range(3):  # state is made, kernels are compiled
            set_gradients(tensors, step)
            each.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    gradients = [p.grad for p in params]
    for step in range(3, 3 + steps):
        set_gradients(eager_params, step)
        eager.step()
        for gradient, p in zip(gradients, eager_params, strict=True):
            gradient.copy_(p.grad)
        graph.replay()
    assert_equal_bits(params, eager_params)
    assert_equal_bits(state_tensors(optimizer), state_tensors(eager))
