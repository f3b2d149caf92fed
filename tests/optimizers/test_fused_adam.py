"""FusedAdam against torch.optim in float64, by every route, and everything that all fused optimizers share."""

import copy
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from apex.ops import _library
from apex.optimizers import FusedAdam
from tests.support.harness import Route, assert_equal_bits, routes

SHAPES = ((5,), (9, 8), (0,), (3, 4, 2, 2), (1,), ())


def parameters(device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def give_gradients(params: list[Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator).bfloat16()  # the same in every dtype
        param.grad = (gradient * scale).to(param.device, param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range | int) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        give_gradients(params, step)
        optimizer.step()


def distance(params: list[Tensor], expected: list[Tensor]) -> float:
    """Relative distance over all parameters."""
    flat, wanted = (torch.cat([p.detach().double().cpu().flatten() for p in ps]) for ps in (params, expected))
    return ((flat - wanted).norm() / wanted.norm()).item()


# Powers of two, so that the rounding of hyperparameters to float32 is not part of what is measured.
LR = 2.0**-7
DECAY = 2.0**-3
FLAGS = [
    {},
    {"weight_decay": DECAY},
    {"weight_decay": DECAY, "adam_w_mode": False},
    {"weight_decay": DECAY, "amsgrad": True},
    {"amsgrad": True, "adam_w_mode": False, "betas": (0.5, 0.9), "eps": 1e-3},
    {"weight_decay": DECAY, "capturable": True},
    {"lr": torch.tensor(LR)},
]


def reference(params: list[Parameter], options: dict) -> torch.optim.Optimizer:
    kept = {k: v for k, v in options.items() if k in ("weight_decay", "amsgrad", "betas", "eps", "lr")}
    kind = torch.optim.AdamW if options.get("adam_w_mode", True) else torch.optim.Adam
    return kind(params, **{"lr": LR, "weight_decay": 0.0, **kept})


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("options", FLAGS, ids=str)
def test_a_hundred_steps(options: dict, route: Route) -> None:
    ours, exact = parameters(route.device), parameters(dtype=torch.float64)
    for mine, other in zip(ours, exact, strict=True):
        other.data.copy_(mine.data)
    # The interpreter takes milliseconds per block: one case goes all the way there.
    steps = 5 if route == Route("cpu", "triton") and options else 100
    with _library.implementation(route.implementation):
        train(FusedAdam(ours, **{"lr": LR, **options}), ours, steps)
    train(reference(exact, options), exact, steps)
    assert distance(ours, exact) <= 1e-6


@pytest.mark.parametrize("route", routes())
def test_without_bias_correction(route: Route) -> None:
    ours = parameters(route.device)
    expected = [p.detach().double().cpu() for p in ours]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in expected]
    with _library.implementation(route.implementation):
        optimizer = FusedAdam(ours, lr=1e-2, bias_correction=False)
        for step in range(20):
            give_gradients(ours, step)
            optimizer.step()
            for p, (m, v), mine in zip(expected, moments, ours, strict=True):
                g = mine.grad.double().cpu()
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                p.sub_(1e-2 * m / (v.sqrt() + 1e-8))
    assert distance(ours, expected) <= 1e-6
    assert optimizer.param_groups[0]["bias_correction"] is False
    assert optimizer.param_groups[0]["step"] == 20


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_weights(dtype: torch.dtype, route: Route) -> None:
    """The masters go the way of float32 parameters that see the same gradients; parameters are their rounding."""
    ours, twin = parameters(route.device, dtype), parameters(route.device, dtype)
    twin = [Parameter(p.detach().float()) for p in twin]
    with _library.implementation(route.implementation):
        optimizer = FusedAdam(ours, lr=1e-3, weight_decay=0.1, master_weights=True)
        single = FusedAdam(twin, lr=1e-3, weight_decay=0.1)
        train(optimizer, ours, 8)
        train(single, twin, 8)
    masters = optimizer.master_parameters()
    assert all(master.dtype == torch.float32 for master in masters)
    if route.implementation == "triton":
        assert_equal_bits(masters, [p.data for p in twin])
    assert distance(masters, twin) <= 1e-6
    for param, master in zip(ours, masters, strict=True):
        torch.testing.assert_close(param.float(), master, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("route", routes())
def test_half_precision_parameters_have_single_precision_moments(route: Route) -> None:
    ours = parameters(route.device, torch.bfloat16)
    with _library.implementation(route.implementation):
        optimizer = FusedAdam(ours)
        train(optimizer, ours, 2)
    assert {t.dtype for state in optimizer.state.values() for t in state.values()} == {torch.float32}


@pytest.mark.parametrize("route", routes())
def test_stochastic_rounding_keeps_small_steps(route: Route) -> None:
    """Updates of a tenth of bfloat16's spacing: lost when rounded to nearest, kept on average otherwise."""
    with _library.implementation(route.implementation):
        moved = []
        for option in (False, True):
            param = Parameter(torch.ones(600, dtype=torch.bfloat16, device=route.device))
            optimizer = FusedAdam([param], lr=2**-7 / 10, stochastic_rounding=option)
            for _ in range(20):
                param.grad = torch.ones_like(param)
                optimizer.step()
            moved.append(1 - param.float().mean().item())
    # The interpreter cuts off instead of rounding to nearest.
    assert moved[0] == 0 or route == Route("cpu", "triton")
    assert moved[1] == pytest.approx(20 * 2**-7 / 10, rel=0.15)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="master"):
        FusedAdam(parameters(), stochastic_rounding=True, master_weights=True)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}])
def test_bad_hyperparameters(options: dict) -> None:
    with pytest.raises(ValueError, match=r"negative|betas"):
        FusedAdam(parameters(), **options)


def test_legacy_arguments_of_step_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"apex\.contrib\.optimizers"):
        FusedAdam(parameters()).step(scale=2.0)


@pytest.mark.parametrize("route", routes())
def test_groups_late_gradients_and_moved_tensors(route: Route) -> None:
    """Whatever happens between two steps, the numbers are those of torch.optim."""
    ours, exact = parameters(route.device), parameters(dtype=torch.float64)

    def groups(params: list[Parameter]) -> list[dict]:
        return [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 1e-3, "weight_decay": 0.2}]

    with _library.implementation(route.implementation):
        optimizer, expected = FusedAdam(groups(ours)), torch.optim.AdamW(groups(exact), weight_decay=0.0)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, expected)]
        for step in range(12):
            for params in (ours, exact):
                give_gradients(params, step)
            if step == 3:  # memory of a parameter replaced
                ours[0].data = ours[0].data.clone()
            if step == 4:  # state replaced
                state = optimizer.state[ours[1]]
                state["exp_avg"] = state["exp_avg"].clone()
            if step == 5:  # a gradient laid out unlike its parameter
                ours[1].grad = ours[1].grad.t().contiguous().t()
            if step == 6:
                extra = [Parameter(torch.ones(7, 3, device=route.device)), Parameter(torch.ones(7, 3).double())]
                for o, p, params in ((optimizer, extra[0], ours), (expected, extra[1], exact)):
                    o.add_param_group({"params": [p], "lr": 0.1})
                    params.append(p)
                continue
            optimizer.step()
            expected.step()
            for scheduler in schedulers:
                scheduler.step()
    assert distance(ours, exact) <= 1e-6


@pytest.mark.parametrize("route", routes())
def test_a_parameter_without_gradient_stays(route: Route) -> None:
    ours = parameters(route.device)
    with _library.implementation(route.implementation):
        optimizer = FusedAdam(ours, lr=0.1, weight_decay=0.1)
        give_gradients(ours, 0)
        ours[1].grad = None
        before = ours[1].detach().clone()
        optimizer.step()
        assert torch.equal(before, ours[1])
        assert ours[1] not in optimizer.state or not optimizer.state[ours[1]]
        give_gradients(ours, 1)
        optimizer.step()
        assert not torch.equal(before, ours[1])
        ours[0].grad = None
        still = ours[0].detach().clone()
        optimizer.step()
        assert torch.equal(still, ours[0])


def test_channels_last_parameters() -> None:
    ours, exact = (Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)) for _ in range(2))
    exact = Parameter(ours.detach().double())
    optimizer, expected = FusedAdam([ours]), torch.optim.AdamW([exact], weight_decay=0.0)
    for step in range(5):
        gradient = torch.randn(4, 3, 5, 5)
        ours.grad = gradient.to(memory_format=torch.channels_last) if step % 2 else gradient.clone()
        exact.grad = gradient.double()
        optimizer.step()
        expected.step()
    assert distance([ours], [exact]) <= 1e-6
    assert optimizer.state[ours]["exp_avg"].stride() == ours.stride()


def test_closure_hooks_and_zero_grad() -> None:
    ours = parameters()
    optimizer = FusedAdam(ours)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in ours)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() > 0
    assert calls == ["before", "after"]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in ours)
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours)
    keeping = FusedAdam(ours, set_grad_none=False)
    give_gradients(ours, 0)
    keeping.zero_grad()
    assert all(p.grad is not None for p in ours)


def roundtrip(state: dict, path) -> dict:
    torch.save(state, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"amsgrad": True}),
        (torch.bfloat16, {"master_weights": True}),
        (torch.bfloat16, {"stochastic_rounding": True}),
        (torch.float32, {"capturable": True}),
        (torch.float64, {}),
    ],
    ids=str,
)
def test_resume_is_exact(dtype: torch.dtype, options: dict, route: Route, tmp_path) -> None:
    """Ten steps, or five, a checkpoint through a file, and five more: the same bits."""
    with _library.implementation("auto" if dtype == torch.float64 else route.implementation):
        straight = parameters(route.device, dtype)
        train(FusedAdam(straight, lr=0.01, **options), straight, 10)
        broken = parameters(route.device, dtype)
        first = FusedAdam(broken, lr=0.01, **options)
        train(first, broken, 5)
        saved = roundtrip({"model": [p.data for p in broken], "optimizer": first.state_dict()}, tmp_path / "state.pt")
        resumed = [Parameter(p.to(route.device)) for p in saved["model"]]
        second = FusedAdam(resumed, lr=0.5, **options)
        second.load_state_dict(saved["optimizer"])
        train(second, resumed, range(5, 10))
    assert_equal_bits([p.data for p in resumed], [p.data for p in straight])


def test_a_saved_state_is_not_changed_by_later_steps() -> None:
    ours = parameters()
    optimizer = FusedAdam(ours, capturable=True)
    train(optimizer, ours, 2)
    saved = optimizer.state_dict()
    assert int(saved["param_groups"][0]["step"]) == 2
    train(optimizer, ours, 2)
    assert int(saved["param_groups"][0]["step"]) == 2


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_states_go_to_torch_and_back(kind: type[torch.optim.Optimizer], amsgrad: bool) -> None:
    make_theirs: Callable = lambda params: kind(params, lr=1e-2, weight_decay=0.1, amsgrad=amsgrad)  # noqa: E731
    make_ours: Callable = lambda params: FusedAdam(  # noqa: E731
        params, lr=1e-2, weight_decay=0.1, amsgrad=amsgrad, adam_w_mode=kind is torch.optim.AdamW
    )
    exact = parameters(dtype=torch.float64)
    train(make_theirs(exact), exact, 15)
    params = parameters()
    optimizer = make_theirs(params)
    train(optimizer, params, 5)
    for steps, make in ((range(5, 10), make_ours), (range(10, 15), make_theirs)):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = make(params)
        optimizer.load_state_dict(state)
        train(optimizer, params, steps)
    assert distance(params, exact) <= 1e-6


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_weight_decay_of_the_other_kind_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    """PyTorch saves the kind of decay in each group; the fused optimizer has one kind for all, and applied that."""
    decoupled = kind is torch.optim.AdamW
    params = parameters()
    theirs = kind(params, weight_decay=0.1)
    train(theirs, params, 2)
    saved = theirs.state_dict()
    saved["param_groups"][0]["decoupled_weight_decay"] = decoupled  # PyTorch 2.6 does not save it
    optimizer = FusedAdam(params, lr=0.5, adam_w_mode=not decoupled)
    with pytest.raises(ValueError, match=f"adam_w_mode={decoupled}"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        optimizer.add_param_group({"params": [], "decoupled_weight_decay": decoupled, "weight_decay": 0.1})
    without_decay = kind(params, weight_decay=0.0)
    optimizer.load_state_dict(without_decay.state_dict())


def test_copies_and_pickles() -> None:
    ours = parameters()
    optimizer = FusedAdam(ours, lr=0.1, adam_w_mode=False, weight_decay=0.1)
    train(optimizer, ours, 3)
    twin = copy.deepcopy(optimizer)
    loaded = pickle.loads(pickle.dumps(optimizer))
    for other in (twin, loaded):
        params = other.param_groups[0]["params"]
        assert params[0] is not ours[0]
        assert other.adam_w_mode == 0
        train(other, params, range(3, 5))
    train(optimizer, ours, range(3, 5))
    for other in (twin, loaded):
        assert_equal_bits([p.data for p in other.param_groups[0]["params"]], [p.data for p in ours])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=str)
def test_grad_scaler_skips_steps_that_overflow(options: dict, route: Route) -> None:
    """Scaled gradients, two of them infinite: as if these steps had never been."""
    ours, expected = parameters(route.device), parameters(route.device)
    with _library.implementation(route.implementation):
        optimizer, plain = FusedAdam(ours, lr=0.01, **options), FusedAdam(expected, lr=0.01)
        scaler = torch.amp.GradScaler(route.device, init_scale=1024.0, growth_interval=1000)
        for step in range(8):
            give_gradients(ours, step, scale=scaler.scale(torch.ones((), device=route.device)).item())
            if step in (0, 4):
                ours[1].grad[3, 3] = float("inf")
            if step == 6:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step not in (0, 4):
                give_gradients(expected, step)
                plain.step()
    assert distance(ours, expected) <= 1e-6
    assert int(optimizer.state_dict()["param_groups"][0]["step"]) == 6
    assert scaler.get_scale() == 256


@pytest.mark.gpu
def test_grad_scaler_does_not_wait_for_the_gpu() -> None:
    ours = parameters("cuda")
    optimizer = FusedAdam(ours)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    for step in range(3):
        give_gradients(ours, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_grad_scaler_passed_to_the_step(dtype: torch.dtype, route: Route) -> None:
    """As upstream's step takes it. The update has more digits than the gradient that the scale was taken out of."""
    if dtype == torch.bfloat16 and route.device == "cuda":
        pytest.skip("PyTorch's GradScaler itself takes no bfloat16 gradients on a GPU")
    param = torch.nn.Parameter(torch.ones(9, dtype=dtype, device=route.device))
    optimizer = FusedAdam([param], lr=0.5, eps=1e-8)
    scaler = torch.amp.GradScaler(route.device, init_scale=2.0**20)
    scaler.scale(torch.ones((), device=route.device))
    param.grad = torch.full_like(param, 2.0**-8)
    with _library.implementation(route.implementation):
        optimizer.step(grad_scaler=scaler)
    gradient = 2.0**-28  # 0 in float16
    torch.testing.assert_close(param, torch.full_like(param, 1 - 0.5 * gradient / (gradient + 1e-8)))
    assert torch.equal(param.grad, torch.full_like(param, gradient))
    with pytest.raises(TypeError, match="scalar"):
        optimizer.step(scalar=scaler)


def test_grad_scaler_without_gradients() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(FusedAdam([param]))
    assert torch.equal(param, torch.ones(3))


@pytest.mark.gpu
def test_what_a_graph_would_get_wrong_is_refused() -> None:
    for optimizer, message in (
        (FusedAdam(parameters("cuda")), "capturable=True"),
        (FusedAdam(parameters("cuda"), capturable=True), "before capturing"),
    ):
        give_gradients(optimizer.param_groups[0]["params"], 0)
        with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


@pytest.mark.gpu
def test_captured_steps() -> None:
    """Backward and step inside a graph, the learning rate a tensor that changes between replays."""
    ours, expected = parameters("cuda"), parameters("cuda")
    data = torch.zeros((), device="cuda")
    rate = torch.tensor(0.01, device="cuda")
    optimizer, plain = FusedAdam(ours, lr=rate, capturable=True), FusedAdam(expected, lr=0.01)

    def loss(params: list[Parameter]) -> Tensor:
        return sum(((p - data) ** 2).sum() for p in params)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.zero_grad()
        loss(ours).backward()
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    loss(expected).backward()
    plain.step()
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss(ours).backward()
        optimizer.step()
    for step in range(3):
        data.fill_(float(step))
        rate.fill_(0.01 / (step + 1))
        graph.replay()
        plain.zero_grad()
        loss(expected).backward()
        plain.param_groups[0]["lr"] = 0.01 / (step + 1)
        plain.step()
    assert distance(ours, expected) <= 1e-6
    assert optimizer.param_groups[0]["step"].item() == 4


@pytest.mark.gpu
def test_memory_of_a_step() -> None:
    """Under 1 MB beyond parameters and state, tables included for this many tensors."""
    params = [Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(16)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = FusedAdam(params)
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@pytest.mark.gpu
def test_parameters_on_two_devices() -> None:
    ours, exact = (
        [*parameters("cuda"), *parameters("cpu", seed=1)],
        [
            *parameters(dtype=torch.float64),
            *parameters(dtype=torch.float64, seed=1),
        ],
    )
    train(FusedAdam(ours, lr=0.01), ours, 10)
    train(torch.optim.AdamW(exact, lr=0.01, weight_decay=0.0), exact, 10)
    assert distance(ours, exact) <= 1e-6


def test_refusals_change_nothing() -> None:
    ours = parameters()
    optimizer = FusedAdam(ours)
    give_gradients(ours, 0)
    before = [p.detach().clone() for p in ours]
    ours[1].grad = ours[1].grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert_equal_bits([p.data for p in ours], before)
    assert optimizer.param_groups[0].get("step", 0) == 0
    numbers = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    numbers.grad = torch.ones_like(numbers)
    with pytest.raises(TypeError, match="complex64"):
        FusedAdam([numbers]).step()


@pytest.mark.parametrize("route", routes())
def test_two_runs_have_equal_bits(route: Route) -> None:
    runs = []
    with _library.implementation(route.implementation):
        for _ in range(2):
            params = parameters(route.device)
            train(FusedAdam(params, lr=0.1), params, 5)
            runs.append([p.data for p in params])
    assert_equal_bits(*runs)


@pytest.mark.parametrize("route", routes())
def test_gradients_are_let_go(route: Route) -> None:
    """An optimizer that kept a reference would keep the memory of the gradients through the next forward pass."""
    with _library.implementation(route.implementation):
        params = parameters(route.device)
        optimizer = FusedAdam(params)
        for step in range(2):
            give_gradients(params, step)
            references = [weakref.ref(p.grad) for p in params]
            optimizer.step()
            optimizer.zero_grad()
            assert not any(reference() is not None for reference in references)


def test_a_compiled_training_step_leaves_the_optimizer_out() -> None:
    ours, expected = parameters(), parameters()

    def run(params: list[Parameter], optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        sum((p.sin() * p).sum() for p in params).backward()
        optimizer.step()

    compiled = torch.compile(run, backend="eager")
    optimizer, plain = FusedAdam(ours, lr=0.01), FusedAdam(expected, lr=0.01)
    for _ in range(3):
        compiled(ours, optimizer)
        run(expected, plain)
    assert distance(ours, expected) <= 1e-6
    assert optimizer.param_groups[0]["step"] == 3


def test_subclasses_find_what_they_use() -> None:
    class Subclass(FusedAdam):
        def step(self, closure=None):
            group = self.param_groups[0]
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            lists = [
                [p.grad for p in params],
                [p.data for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
            ]
            beta1, beta2 = group["betas"]
            self.multi_tensor_adam(
                65536,
                self._dummy_overflow_buf,
                lists,
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["step"],
                self.adam_w_mode,
                group["bias_correction"],
                group["weight_decay"],
            )

    pytest.importorskip("amp_C")
    ours, expected = parameters(), parameters()
    train(Subclass(ours, lr=0.1, weight_decay=0.1), ours, 1)
    train(torch.optim.AdamW(expected, lr=0.1, weight_decay=0.1), expected, 1)
    assert distance(ours, expected) <= 1e-6
