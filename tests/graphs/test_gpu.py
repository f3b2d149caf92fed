"""Captured steps on a GPU: equal to eager ones bit for bit, and what usually goes wrong with graphs."""

from __future__ import annotations

import gc
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp, optimizers
from apex.graphs import CapturedStep, capture
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.parallel import LARC, DistributedDataParallel, convert_syncbn_model
from tests.graphs.common import Training, assert_equal_bits, batches, small_model

pytestmark = pytest.mark.gpu

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OVERFLOWS = (1, 5, 6, 20, 33)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.1),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "capturable": lambda params: FusedAdam(params, lr=0.01, capturable=True),
    "amsgrad": lambda params: FusedAdam(params, lr=0.01, amsgrad=True),
    "plain sgd": lambda params: FusedSGD(params, lr=0.05),
    "unscaling sgd": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, materialize_master_grads=False),
    "unscaling adam": lambda params: FusedAdam(params, lr=0.01, materialize_master_grads=False),
    "adagrad": lambda params: optimizers.FusedAdagrad(params, lr=0.01),
    "novograd": lambda params: optimizers.FusedNovoGrad(params, lr=0.01),
    "lars": lambda params: optimizers.FusedLARS(params, lr=0.05, momentum=0.9),
    "mixed lamb": lambda params: optimizers.FusedMixedPrecisionLamb(params, lr=0.01),
    "larc": lambda params: LARC(FusedSGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)),
    "npu adam": lambda params: optimizers.NpuFusedAdam(params, lr=0.01),
    "npu adamw": lambda params: optimizers.NpuFusedAdamW(params, lr=0.01),
    "npu adamp": lambda params: optimizers.NpuFusedAdamP(params, lr=0.01),
    "npu sgd": lambda params: optimizers.NpuFusedSGD(params, lr=0.05, momentum=0.9),
    "npu lamb": lambda params: optimizers.NpuFusedLamb(params, lr=0.01),
    "npu adadelta": lambda params: optimizers.NpuFusedAdadelta(params, lr=0.1),
    "npu rmsprop": lambda params: optimizers.NpuFusedRMSprop(params, lr=0.01),
    "npu rmsprop tf": lambda params: optimizers.NpuFusedRMSpropTF(params, lr=0.01),
    "npu bert adam": lambda params: optimizers.NpuFusedBertAdam(
        params, lr=0.01, warmup=0.1, t_total=60, schedule="warmup_cosine"
    ),
}
# A learning rate on the device gives PyTorch's own the same bits eagerly and captured.
TORCH: dict[str, Callable[[Any], Any]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01, device="cuda"), capturable=True),
    "fused adamw": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01, device="cuda"), capturable=True, fused=True
    ),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=torch.tensor(0.01, device="cuda"), capturable=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=torch.tensor(0.01, device="cuda"), capturable=True),
}


@pytest.fixture(autouse=True)
def amp_is_off_afterwards() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a step that runs eagerly after all warns
        warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*")
        yield
    amp.shutdown()


def compare(level: str | None, make: Callable[[Any], Any], steps: int = 50, **options: Any) -> CapturedStep:
    overflows = OVERFLOWS if level in ("O1", "O2") else ()
    eager = Training(None, level, make, **options).run(steps, overflows).outcome()
    training = Training(capture, level, make, **options).run(steps, overflows)
    assert training.step.reason is None
    assert training.step.graphs == 1, training.step.report()
    assert_equal_bits(eager, training.outcome())
    return training.step


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_fifty_steps_have_the_bits_of_eager_ones(level: str, name: str) -> None:
    compare(level, OPTIMIZERS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_optimizer(name: str) -> None:
    compare("O2", OTHERS[name], steps=25)


@pytest.mark.parametrize("level", [None, "O2"])
@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_pytorch(name: str, level: str | None) -> None:
    compare(level, TORCH[name], steps=25)


def test_rates_of_pytorch_optimizers_that_are_numbers_are_followed() -> None:
    make = lambda params: torch.optim.Adam(params, lr=0.01, capturable=True)  # noqa: E731
    eager, graph = (Training(way, None, make).run(25) for way in (None, capture))
    assert isinstance(graph.optimizer.param_groups[0]["lr"], float)
    assert graph.step.graphs == 1
    parameters = zip(eager.model.named_parameters(), graph.model.named_parameters(), strict=True)
    for (name, one), (_, other) in parameters:
        if name != "0.bias":  # a batch norm takes it off again: its gradients are rounding errors
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{"combine_grad": True}, {"loss_scale": 128.0}, {"num_losses": 2}])
def test_options_of_amp(options: dict[str, Any]) -> None:
    compare("O2", OPTIMIZERS["FusedAdam"], steps=25, **options)


def test_a_schedule_of_momentum_needs_one_graph() -> None:
    def run(way: Any) -> Training:
        training = Training(way, schedule=False, make=lambda params: FusedAdam(params, lr=0.01))
        training.schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.1, total_steps=40)
        return training.run(30)

    eager, graph = run(None).outcome(), run(capture)
    assert graph.step.graphs == 1
    assert_equal_bits(eager, graph.outcome())


def accumulate(way: Any, in_one_call: bool) -> list[Any]:
    model = small_model("cuda")
    model, optimizer = amp.initialize(model, FusedAdam(model.parameters(), lr=0.01), opt_level="O2", verbosity=0)
    torch.manual_seed(3)

    def micro_step(inputs: Tensor, targets: Tensor, last: bool) -> Tensor:
        loss = nn.functional.mse_loss(model(inputs).float(), targets) / 2
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        parts = zip(inputs.chunk(2), targets.chunk(2), strict=True)
        return sum(micro_step(*part, last=index == 1) for index, part in enumerate(parts))  # type: ignore[return-value]

    losses = []
    if in_one_call:
        run: Any = step if way is None else way(step)
        losses = [run(*batch).clone() for batch in batches("cuda", 20)]
    else:
        run = micro_step if way is None else way(micro_step)
        for index, batch in enumerate(batches("cuda", 20)):
            losses.append(run(*batch, index % 2 == 1).detach().clone())
    if way is not None:
        assert run.reason is None
        assert run.graphs <= 2, run.report()
    found = [*losses, *model.state_dict().values()]
    amp.shutdown()
    return found


@pytest.mark.parametrize("in_one_call", [True, False])
def test_gradients_are_accumulated(in_one_call: bool) -> None:
    assert_equal_bits(accumulate(None, in_one_call), accumulate(capture, in_one_call))


def test_random_numbers_are_fresh_at_every_replay() -> None:
    dropout = nn.Dropout(0.5)
    step = capture(lambda x: dropout(x))
    ones = torch.ones(1000, device="cuda")
    found = [step(ones).clone() for _ in range(8)]
    assert all(not torch.equal(one, other) for i, one in enumerate(found) for other in found[:i])
    assert step.graphs == 1


def test_other_shapes_get_other_graphs_and_share_memory() -> None:
    def run(way: Any) -> Training:
        training = Training(way, "O2")
        one = torch.ones((), device="cuda")
        for _ in range(6):
            for size in (16, 7, 32):
                for batch in batches("cuda", 1, size):
                    training.losses.append(training.step(*batch, one).detach().clone())
        return training

    eager = run(None).outcome()
    graph = run(capture)
    assert graph.step.graphs == 3
    assert_equal_bits(eager, graph.outcome())


def test_beyond_the_limit_steps_run_eagerly() -> None:
    step = capture(lambda x: x * 2, warmup=1, max_graphs=2)
    with pytest.warns(UserWarning, match=r"has 2 graphs \(max_graphs\)"):
        found = [step(torch.ones(size, device="cuda")).sum().item() for _ in range(3) for size in (1, 2, 3)]
    assert found == [2.0, 4.0, 6.0] * 3
    assert step.graphs == 2


def test_overflow_messages_name_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(capture, "O2", schedule=False)
    amp._amp_state.verbosity = 1
    training.run(12, overflows=(8,))
    torch.cuda.synchronize()
    training.run(1, first=12)
    text = capsys.readouterr().out
    assert text.count("Gradient overflow") == 1
    assert "gradients are not finite: 0.weight" in text
    assert training.step.graphs == 1


def test_waiting_for_the_device_runs_eagerly_and_names_the_line() -> None:
    model = small_model("cuda")
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    twin = small_model("cuda")
    other = FusedAdam(twin.parameters(), lr=0.01)
    calls: deque[float] = deque()  # the length of a list would be noticed

    def train(network: nn.Module, opt: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        opt.zero_grad()
        loss = nn.functional.mse_loss(network(inputs), targets)
        loss.backward()
        opt.step()
        calls.append(loss.item())  # waits
        return loss

    step = capture(lambda *batch: train(model, optimizer, *batch))
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match=r"test_gpu\.py:\d+ \(calls.append\(loss.item\(\)\)  # waits\)"):
        found = [step(*batch).clone() for batch in batches("cuda", 8)]
    assert step.reason is not None
    torch.manual_seed(5)
    expected = [train(twin, other, *batch).detach().clone() for batch in batches("cuda", 8)]
    assert_equal_bits([*found, *model.state_dict().values()], [*expected, *twin.state_dict().values()])
    assert optimizer.param_groups[0]["step"] == other.param_groups[0]["step"] == 8
    assert torch.equal(torch.rand(3, device="cuda"), torch.rand(3, device="cuda")) is False  # generators go on
    compare("O2", OPTIMIZERS["FusedAdam"], steps=12)  # and other functions can be captured


def test_an_error_of_the_function_comes_out() -> None:
    def step(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not while capturing")
        return x + 1

    captured = capture(step)
    with pytest.warns(UserWarning, match="ValueError: not while capturing"):
        found = [float(captured(torch.ones(1, device="cuda"))) for _ in range(6)]
    assert found == [2.0] * 6

    wrong = capture(lambda x: x @ x)
    with pytest.raises(RuntimeError):
        wrong(torch.ones(2, 3, device="cuda"))


def test_a_second_capture_after_invalidate() -> None:
    eager = Training(None, "O2").run(24, OVERFLOWS).outcome()
    training = Training(capture, "O2").run(12, OVERFLOWS)
    training.step.invalidate()
    assert training.step.graphs == 0
    training.run(12, OVERFLOWS, first=12)
    assert training.step.graphs == 1
    assert_equal_bits(eager, training.outcome())


def test_gradients_set_to_none_between_replays() -> None:
    def run(way: Any) -> Training:
        training = Training(way, "O1", schedule=False)
        for index in range(15):
            training.run(1, first=index)
            if index % 3 == 0:
                training.model.zero_grad(set_to_none=True)
                training.optimizer.zero_grad(set_to_none=True)
        return training

    eager, graph = run(None).outcome(), run(capture)
    assert graph.step.graphs <= 2
    assert_equal_bits(eager, graph.outcome())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_checkpoints_between_replays_resume_to_the_bit(level: str, name: str, tmp_path: Path) -> None:
    overflows = OVERFLOWS if level in ("O1", "O2") else ()
    whole = Training(None, level, OPTIMIZERS[name], dropout=0.0).run(30, overflows).outcome()
    training = Training(capture, level, OPTIMIZERS[name], dropout=0.0).run(12, overflows)

    def saved() -> dict[str, Any]:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save({**state, "amp": amp.state_dict(), "schedule": training.schedule.state_dict()}, tmp_path / "saved")
        return torch.load(tmp_path / "saved", weights_only=False)

    def load(into: Training, state: dict[str, Any]) -> None:
        into.model.load_state_dict(state["model"])
        into.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
        into.schedule.load_state_dict(state["schedule"])

    state = saved()
    training.run(5, (13,), first=12)  # steps that are taken back
    load(training, state)
    del training.losses[12:]
    training.run(8, overflows, first=12)
    assert training.step.graphs == 1, training.step.report()
    state = saved()
    losses, _ = training.losses, training.outcome()
    training = Training(capture, level, OPTIMIZERS[name], dropout=0.0)
    load(training, state)
    training.losses = losses
    training.run(10, overflows, first=20)
    assert training.step.graphs == 1
    assert_equal_bits(whole, training.outcome())


def test_memory_of_dropped_graphs_is_freed() -> None:
    weight = torch.zeros(64, 1024, device="cuda")

    def run() -> None:
        step = capture(lambda x: ((x @ weight) @ weight.t()).relu().sum(), warmup=1)
        for rows in (1 << 13, 1 << 14):
            for _ in range(3):
                step(torch.ones(rows, 64, device="cuda"))
        assert step.graphs == 2
        step.invalidate()
        assert step.graphs == 0

    run()
    before = _reserved()
    for _ in range(4):
        run()
    assert _reserved() <= before


def _reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_numbers_that_python_holds() -> None:
    settings = {"weight": 1.0}

    def step(x: Tensor) -> Tensor:
        return x * settings["weight"]

    captured = capture(step)
    ones = torch.ones(3, device="cuda")
    for weight in (1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0):
        settings["weight"] = weight
        assert float(captured(ones)[0]) == weight
    assert captured.graphs == 2

    count = 0

    def counting(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    captured = capture(counting)
    with pytest.warns(UserWarning, match="every call changes count"):
        assert [float(captured(ones)[0]) for _ in range(7)] == [1, 2, 3, 4, 5, 6, 7]


def test_evaluation_mode_is_noticed() -> None:
    model = nn.Dropout(0.5)
    step = capture(lambda x: model(x), warmup=1)
    ones = torch.ones(100, device="cuda")
    for _ in range(3):
        assert float(step(ones).min()) == 0.0
    model.eval()
    for _ in range(3):
        assert torch.equal(step(ones), ones)


def test_batches_of_the_host_and_nested_inputs() -> None:
    def step(batch: dict[str, Any], scale: float) -> dict[str, Any]:
        total = batch["x"].cuda(non_blocking=True) * scale + batch["pair"][0]
        return {"total": total, "name": "same"}

    captured = capture(step)
    for index in range(8):
        host = torch.full((4,), float(index))
        batch = {"x": host.pin_memory() if index % 2 else host, "pair": (torch.full((4,), 0.5, device="cuda"), None)}
        for scale in (2.0, 3.0):
            found = captured(batch, scale)
            assert found["name"] == "same"
            assert torch.equal(found["total"], torch.full((4,), index * scale + 0.5, device="cuda"))


def test_parameters_that_got_other_memory() -> None:
    def run(way: Any) -> Training:
        training = Training(way, None, schedule=False).run(8)
        for param in training.model.parameters():
            param.data = param.data.clone()
        return training.run(8, first=8)

    eager, graph = run(None).outcome(), run(capture)
    assert graph.step.graphs == 1
    assert_equal_bits(eager, graph.outcome())


def test_a_compiled_model() -> None:
    options: dict[str, Any] = {"dropout": 0.0, "wrap": torch.compile}
    compare("O5", OPTIMIZERS["FusedAdam"], steps=12, **options)
    torch._dynamo.reset()


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_data_parallel_and_synchronized_batch_norm(level: str, tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        wrap = lambda model: DistributedDataParallel(convert_syncbn_model(model))  # noqa: E731
        compare(level, OPTIMIZERS["FusedAdam"], steps=20, wrap=wrap)
    finally:
        torch.cuda.synchronize()
        torch.distributed.destroy_process_group()


def test_methods_and_functions_are_decorated() -> None:
    class Trainer:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        @capture(warmup=1)
        def step(self, x: Tensor) -> Tensor:
            return x * self.factor

    ones = torch.ones(2, device="cuda")
    for trainer in (Trainer(2.0), Trainer(3.0)):
        for _ in range(4):
            assert float(trainer.step(ones)[0]) == trainer.factor
        assert trainer.step.graphs == 1

    @capture
    def plain(x: Tensor) -> Tensor:
        """Adds one."""
        return x + 1

    assert plain.__doc__ == "Adds one."
    assert math.isclose(float(plain(ones)[0]), 2.0)


def test_kernels_that_finish_each_others_work_count_right_in_every_replay() -> None:
    """Their counters are filled once, so that every replay must leave them unchanged."""

    def train(way: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        norms = nn.ModuleList([FusedLayerNorm(768, memory_efficient=True) for _ in range(3)]).cuda()
        bias = nn.Parameter(torch.zeros(768, device="cuda"))
        params = [*norms.parameters(), bias]
        optimizer = FusedAdam(params, lr=0.01)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            branch, total = x, x
            for norm in norms:
                branch, total = norm(branch * 2 + 1, total, bias)
            loss = (branch * total).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run, generator = way(step), torch.Generator(device="cuda").manual_seed(1)
        losses = [run(torch.randn(2048, 768, device="cuda", generator=generator)).clone() for _ in range(12)]
        return [*losses, *(param.detach().clone() for param in params)]

    assert_equal_bits(train(lambda step: step), train(capture))
