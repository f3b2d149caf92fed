"""Steps that a Booster fuses, compiles and captures train the same numbers as steps that run as they are."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apex
from apex.booster import BoostedStep, Booster
from apex.booster._compile import CompiledStep
from apex.booster._stages import Stages
from apex.booster._step import EAGER, Variant
from apex.booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    MixedPrecision,
)
from apex.booster.plugin import TorchDDPPlugin
from apex.graphs import _step as graphs_step
from apex.ops.multi_tensor.torch_lists import TorchLists
from tests.booster import problem
from tests.graphs.recorder import CpuGraphs
from tests.support.collector import freeze

CAPTURED, COMPILED, WHOLE = Variant(False, True), Variant(True, False), Variant(True, False, whole=True)


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    freeze()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let three timed calls of a variant suffice, however busy the machine is."""
    monkeypatch.setattr("apex.booster._step._NOISY", math.inf)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU record and replay operators as a GPU does, and let "auto" compile without code generation."""
    monkeypatch.setattr(Stages, "graphs", CpuGraphs)
    monkeypatch.setattr(Stages, "compile_options", {"backend": "eager", "dynamic": False})
    monkeypatch.setattr("apex.booster._stages.has_triton", lambda: True)
    monkeypatch.setattr(TorchLists, "_calls_fused", lambda self: False)


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


class Training:
    """A model and its optimizer, boosted with these settings of fuse, compile and capture."""

    def __init__(self, make: Any = problem.adam, precision: Any = None, **stages: Any) -> None:
        model = problem.net()
        self.booster = Booster(problem.DEVICE, BF16MixedPrecision("O5") if precision is None else precision, **stages)
        self.model, self.optimizer, *_ = self.booster.boost(model, make(model))
        self.losses: list[Tensor] = []

    def run(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        self.losses.append(function(*args, **kwargs).detach().clone())

    def params(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def results(self) -> list[Tensor]:
        return [torch.stack(self.losses), *self.params()]


def plain_loop(training: Training) -> None:
    model, optimizer = training.model, training.optimizer

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    for number in range(8):
        training.run(step, *problem.batch(number))


def accumulation(training: Training) -> None:
    model, optimizer = training.model, training.optimizer

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor, last: bool) -> Tensor:
        loss = loss_of(model, inputs, targets) / 2
        optimizer.backward(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    for number in range(14):
        training.run(step, *problem.batch(number), last=number % 2 == 1)


def clipping(training: Training) -> None:
    model, optimizer = training.model, training.optimizer

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.clip_grad_by_norm(0.1)
        optimizer.step()
        return loss

    for number in range(8):
        training.run(step, *problem.batch(number))
    assert optimizer.get_grad_norm() > 0.1


def clipping_by_pytorch(training: Training) -> None:
    model, optimizer = training.model, training.optimizer

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    for number in range(8):
        training.run(step, *problem.batch(number))


def shorter_last_batch(training: Training) -> None:
    model, optimizer = training.model, training.optimizer

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    for number in range(16):
        inputs, targets = problem.batch(number)
        rows = 5 if number % 4 == 3 else len(inputs)
        training.run(step, inputs[:rows], targets[:rows])


def evaluation_and_scheduler(training: Training) -> None:
    model, optimizer = training.model, training.optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    for number in range(12):
        training.run(step, *problem.batch(number))
        scheduler.step()
        if number % 3 == 1:
            model.eval()
            with torch.no_grad():
                training.run(loss_of, model, *(part[:7] for part in problem.batch(100)))
            model.train()


LOOPS = [plain_loop, accumulation, clipping, clipping_by_pytorch, shorter_last_batch, evaluation_and_scheduler]


@functools.cache
def trained(loop: Callable[[Training], None]) -> list[Tensor]:
    """Return the results of a loop whose steps are neither compiled nor captured; needs the fixture `graphs`."""
    training = Training(fuse=True)
    loop(training)
    return training.results()


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("stages", [{"capture": True}, {"compile": "auto", "capture": "auto"}], ids=["capture", "auto"])
def test_a_loop_trains_as_without_capture(loop: Any, stages: Any, graphs: None) -> None:
    boosted = Training(fuse=True, **stages)
    loop(boosted)
    assert_equal(boosted.results(), trained(loop))
    capture = boosted.booster.report()[-1]
    assert capture.stage == "capture"
    assert "eager:" not in capture.text
    if stages.get("capture") is True:
        assert capture.done
        assert "replays" in capture.text
        assert " 0 replays" not in capture.text


@pytest.mark.parametrize(
    "precision",
    [
        BF16MixedPrecision("O5"),
        BF16MixedPrecision(weight_copies=True),
        FP8MixedPrecision(opt_level="O5", smallest_weight=1),
        FP8MixedPrecision(weight_copies=True, smallest_weight=1),
    ],
    ids=["bf16 O5", "bf16", "fp8 O5", "fp8"],
)
@pytest.mark.parametrize("make", [problem.adam, problem.sgd], ids=["adam", "sgd"])
@pytest.mark.parametrize("loop", [plain_loop, accumulation])
def test_capture_in_other_precisions_and_optimizers(loop: Any, precision: Any, make: Any, graphs: None) -> None:
    boosted = Training(make, copy.deepcopy(precision), fuse=True, capture=True)
    expected = Training(make, copy.deepcopy(precision), fuse=True)
    for training in (boosted, expected):
        loop(training)
    assert_equal(boosted.results(), expected.results())


def test_amp_is_captured(graphs: None) -> None:
    results = []
    for capture in (True, False):
        training = Training(precision=FP16ApexMixedPrecision("O5", verbosity=0), fuse=True, capture=capture)
        plain_loop(training)
        results.append(training.results())
        apex.amp.shutdown()
    assert_equal(*results)


@pytest.mark.parametrize("capture", [True, False])
def test_a_run_resumes_with_equal_bits(capture: bool, graphs: None) -> None:
    def run(training: Training, numbers: range) -> None:
        model, optimizer = training.model, training.optimizer

        @training.booster.step
        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
            return loss

        for number in numbers:
            training.run(step, *problem.batch(number))

    whole = Training(fuse=True, capture=capture)
    run(whole, range(10))
    first, second = Training(fuse=True, capture=capture), Training(fuse=True, capture=capture)
    run(first, range(6))
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    run(second, range(6, 10))
    for a, b in zip(whole.params(), second.params(), strict=True):
        assert torch.equal(a, b)


def test_loading_into_a_captured_run_is_seen_by_its_graph(graphs: None) -> None:
    training = Training(fuse=True, capture=True)
    plain_loop(training)
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    losses = []
    for _ in range(2):
        training.model.load_state_dict(saved[0])
        training.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        before = len(training.losses)
        plain_loop(training)
        losses.append(torch.stack(training.losses[before:]))
    assert torch.equal(*losses)


def test_masters_in_the_state_of_the_optimizer_start_from_the_exact_weights() -> None:
    exact = [param.detach().clone() for param in problem.net().parameters()]
    training = Training(fuse=True)
    model, optimizer = training.model, training.optimizer
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())
    for value, expected in zip(model.state_dict().values(), exact, strict=True):
        assert torch.equal(value, expected)
    saved = optimizer.state_dict()  # before the first step, too
    optimizer.load_state_dict(saved)
    assert all("master_param" in state for state in saved["state"].values())


def test_loading_a_state_without_masters_keeps_the_masters_of_the_model() -> None:
    source = Training(fuse=False)
    plain_loop(source)
    target = Training(fuse=True)
    target.model.load_state_dict(source.model.state_dict())
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    for a, b in zip(source.params(), target.params(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:fp8. no layer")
@pytest.mark.parametrize("precision", ["bf16", "fp8", None])
def test_boost_trains_as_a_booster_does(precision: str | None) -> None:
    """The change of the weights agrees, as in docs/booster.md: 5% of its norm in bfloat16, 20% in float8."""
    start = torch.cat([param.detach().flatten() for param in problem.net().parameters()])
    model = problem.net()
    model, optimizer, step = apex.boost(model, problem.adam(model), precision, device="cpu")

    @step
    def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    expected = problem.net()
    plain = problem.adam(expected)
    for number in range(problem.STEPS):
        train_step(*problem.batch(number))
        plain.zero_grad()
        loss_of(expected, *problem.batch(number)).backward()
        plain.step()
    moved = torch.cat([value.flatten() for value in model.state_dict().values()]) - start
    exact = torch.cat([param.detach().flatten() for param in expected.parameters()]) - start
    bound = {"bf16": 0.05, "fp8": 0.2, None: 1e-4}[precision]
    assert (moved - exact).norm() <= bound * exact.norm()


def test_weights_and_buffers_of_a_boosted_model_stay_in_float32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).bfloat16()
    frozen = nn.Linear(8, 8).bfloat16().requires_grad_(False)
    model.append(frozen).register_buffer("frequencies", 1e4 ** -torch.linspace(0, 1, 8))
    boosted, *_ = apex.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    assert {param.dtype for param in model[:2].parameters()} == {torch.float32}  # updates would be lost
    assert {param.dtype for param in frozen.parameters()} == {torch.bfloat16}
    assert boosted.frequencies.dtype == torch.float32


def test_boost_measures_norms_only_if_asked() -> None:
    model = problem.net()
    model, optimizer, _ = apex.boost(model, problem.adam(model), device="cpu")
    for measures in (False, True):
        optimizer.measures_norm = measures
        optimizer.backward(loss_of(model, *problem.batch(0)))
        optimizer.step()
        assert (optimizer.get_grad_norm() is not None) == measures


def test_a_cpu_runs_the_function_itself() -> None:
    model = problem.net()
    *_, step = apex.boost(model, problem.adam(model), device="cpu")

    def function() -> None: ...

    assert step(function) is function
    rows = {row.stage: row for row in step.report()}
    assert rows["precision"].done
    assert not rows["fuse"].done
    assert "GPU" in rows["fuse"].text
    assert not rows["compile"].done
    assert "GPU" in rows["compile"].text
    assert not rows["capture"].done
    assert "GPU" in rows["capture"].text
    assert "precision  yes  BF16 O4" in str(step.report())


def test_auto_measures_every_variant_and_keeps_the_quickest(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(fuse=True, compile="auto", capture="auto")
    clock, costs = [0.0], {EAGER: 2.0, CAPTURED: 1.0, Variant(True, True): 3.0}
    monkeypatch.setattr("apex.booster._step.time.perf_counter", lambda: clock[0])
    original = BoostedStep._run

    def run(self: BoostedStep, variant: Variant, *args: Any) -> Any:
        clock[0] += costs[variant]
        return original(self, variant, *args)

    monkeypatch.setattr(BoostedStep, "_run", run)
    optimizer = training.optimizer

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(training.model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    for number in range(24):
        step(*problem.batch(number))
    assert step.choice == CAPTURED
    assert step.seconds == {EAGER: 2.0, CAPTURED: 1.0, Variant(True, True): 3.0}
    rows = {row.stage: row for row in training.booster.report()}
    assert rows["capture"].done
    assert not rows["compile"].done
    assert "eager 2000.00 ms" in rows["compile"].text


def test_calls_that_others_disturb_are_timed_again(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that others use makes calls slow, and none quick: the least time of more calls decides."""
    monkeypatch.setattr("apex.booster._step._NOISY", 1.1)
    training = Training(fuse=True, compile=False, capture="auto")
    noise = {EAGER: [1.0, 1.3, 1.05, 1.1, 0.9, 1.2], CAPTURED: [4.0, 2.0, 5.0, 0.8, 1.0, 0.9]}
    clock, seconds = [0.0], {variant: iter(times) for variant, times in noise.items()}
    monkeypatch.setattr("apex.booster._step.time.perf_counter", lambda: clock[0])
    original = BoostedStep._run

    def run(self: BoostedStep, variant: Variant, *args: Any) -> Any:
        if self._calls > variant.untimed:
            clock[0] += next(seconds[variant], 0.0)
        return original(self, variant, *args)

    monkeypatch.setattr(BoostedStep, "_run", run)

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = loss_of(training.model, inputs, targets)
        loss.backward()
        training.optimizer.step()
        return loss

    for number in range(2 * 6 + EAGER.untimed + CAPTURED.untimed):
        step(*problem.batch(number))
    assert step.choice == CAPTURED
    assert step.seconds == pytest.approx({EAGER: 0.9, CAPTURED: 0.8})


def test_a_step_that_cannot_be_captured_runs_eagerly_and_the_report_names_the_line(graphs: None) -> None:
    training = Training(fuse=True, compile=False, capture="auto")
    optimizer, counts = training.optimizer, []

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(training.model, inputs, targets)
        loss.backward()
        optimizer.step()
        counts.append(1)
        return loss

    def run() -> None:
        for number in range(12):
            step(*problem.batch(number))

    with pytest.warns(UserWarning, match="runs eagerly"):
        run()
    assert step.choice == EAGER
    row = training.booster.report()[-1]
    assert not row.done
    assert "every call changes the length of counts" in row.text


def test_a_failed_compilation_leaves_the_step_as_it_was(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(torch._dynamo.exc.TorchDynamoException):
        pass

    def refuse(graph: Any, inputs: Any) -> Any:
        raise Refusal("no code for this")

    monkeypatch.setattr(Stages, "compile_options", {"backend": refuse, "dynamic": False})
    torch._dynamo.reset()
    boosted = Training(fuse=True, compile="auto")
    plain_loop(boosted)
    assert_equal(boosted.results(), trained(plain_loop))
    row = {row.stage: row for row in boosted.booster.report()}["compile"]
    assert not row.done
    assert "no code for this" in row.text
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        plain_loop(Training(fuse=True, compile={"backend": refuse}))


def test_a_compiled_step_without_memory_is_dropped(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs again without the compiler, from the state before, and the report says so."""

    def exhaust(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            graph(*args)  # which changes buffers and draws random numbers
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

        return run

    monkeypatch.setattr(Stages, "compile_options", {"backend": exhaust, "dynamic": False})
    torch._dynamo.reset()
    boosted = Training(fuse=True, compile="auto")
    plain_loop(boosted)
    assert_equal(boosted.results(), trained(plain_loop))
    row = {row.stage: row for row in boosted.booster.report()}["compile"]
    assert not row.done
    assert "the compiled step needs more memory: OutOfMemoryError: tried to allocate 2 GiB" in row.text
    torch._dynamo.reset()
    with pytest.raises(torch.OutOfMemoryError):
        plain_loop(Training(fuse=True, compile={"backend": exhaust}))


def long_loop(training: Training) -> None:
    """Accumulate and clip gradients, with a scheduler, an evaluation and a short batch after the measured calls."""
    model, optimizer = training.model, training.optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor, last: bool = True) -> Tensor:
        loss = loss_of(model, inputs, targets)
        if last:
            optimizer.backward(loss)
            optimizer.clip_grad_by_norm(0.1)
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss.backward()
        return loss

    for number in range(40):
        inputs, targets = problem.batch(number)
        rows = 5 if number == 34 else len(inputs)
        training.run(step, inputs[:rows], targets[:rows], **({"last": False} if number % 4 == 3 else {}))
        scheduler.step()
        if number == 36:
            with torch.no_grad():
                training.run(loss_of, model, *(part[:7] for part in problem.batch(100)))


@pytest.mark.parametrize("capture", [False, "auto"])
def test_a_step_of_a_model_with_large_outputs_is_also_compiled_as_a_whole(
    capture: Any, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    monkeypatch.setattr(Stages, "compile_options", {"backend": note, "dynamic": False})
    monkeypatch.setattr("apex.booster._step._LARGE_OUTPUTS", 1)
    monkeypatch.setattr("apex.booster._step.min", lambda seconds, **kwargs: [*seconds][-1], raising=False)
    torch._dynamo.reset()
    boosted = Training(fuse=True, compile="auto", capture=capture)
    long_loop(boosted)
    assert_equal(boosted.results(), trained(long_loop))
    losses = [targets for targets in compiled if any("cross_entropy" in target for target in targets)]
    assert losses
    assert all(any("linear" in target for target in targets) for targets in losses)
    row = {row.stage: row for row in boosted.booster.report()}["compile"]
    assert row.done
    assert row.text.startswith(f"step: {WHOLE._replace(capture=bool(capture))} (eager")


@pytest.mark.parametrize("outputs", ["small", "of replicas"])
def test_a_model_is_compiled_alone(outputs: str, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check it for models whose loss costs little, and for replicas, whose hooks are not for the compiler."""
    if outputs == "of replicas":
        monkeypatch.setattr("apex.booster._step._LARGE_OUTPUTS", 1)
        monkeypatch.setattr("apex.booster._stages.is_replicated", lambda model: True)
    training = Training(fuse=True, compile="auto")
    long_loop(training)
    assert "as a whole" not in str(training.booster.report())


def test_a_failed_compilation_as_a_whole_leaves_the_step_as_it_was(
    graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        if any("cross_entropy" in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError("no code for this")
        return graph.forward

    monkeypatch.setattr(Stages, "compile_options", {"backend": refuse, "dynamic": False})
    monkeypatch.setattr("apex.booster._step._LARGE_OUTPUTS", 1)
    torch._dynamo.reset()
    boosted = Training(fuse=True, compile="auto")
    long_loop(boosted)
    assert_equal(boosted.results(), trained(long_loop))


def test_a_step_that_cannot_be_captured_as_a_whole_keeps_its_other_graphs(
    graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = graphs_step.Graph

    def refuse(function: Any, *args: Any) -> Any:
        if isinstance(function, CompiledStep):
            raise NotImplementedError("not in a graph")
        return original(function, *args)

    monkeypatch.setattr(graphs_step, "Graph", refuse)
    monkeypatch.setattr("apex.booster._step._LARGE_OUTPUTS", 1)
    monkeypatch.setattr("apex.booster._step.min", lambda seconds, **kwargs: [*seconds][-1], raising=False)
    torch._dynamo.reset()
    boosted = Training(fuse=True, compile="auto", capture="auto")
    with pytest.warns(UserWarning, match="not in a graph"):
        long_loop(boosted)
    assert_equal(boosted.results(), trained(long_loop))
    row = {row.stage: row for row in boosted.booster.report()}["capture"]
    assert row.text.startswith("step: compiled and captured (eager")
    assert "not as a whole: " in row.text
    assert "not in a graph" in row.text


def test_only_the_first_shapes_run_compiled_and_evaluation_does_not(graphs: None, monkeypatch: Any) -> None:
    shapes = []

    def note(graph: Any, inputs: Any) -> Any:
        shapes.append([tuple(value.shape) for value in inputs if isinstance(value, Tensor)])
        return graph.forward

    monkeypatch.setattr(Stages, "compile_options", {"backend": note, "dynamic": False})
    torch._dynamo.reset()
    training = Training(fuse=False, compile="auto")
    monkeypatch.setattr("apex.booster._step.min", lambda *args, **kwargs: COMPILED, raising=False)
    shorter_last_batch(training)
    compiled = len(shapes)
    assert compiled
    assert all((5, problem.FEATURES) not in each for each in shapes)
    training.model.eval()
    training.model(problem.batch(0)[0][:3])
    assert len(shapes) == compiled
    assert {row.stage: row for row in training.booster.report()}["compile"].done


def test_compile_shows_progress(graphs: None, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(fuse=False, compile={"backend": "eager"})
    plain_loop(training)
    shown = capsys.readouterr().err
    assert "apex: compiling Net ..." in shown
    assert "apex: compiling Net took" in shown


def test_find_fastest_keeps_the_quickest_with_the_right_losses_and_puts_the_state_back(
    graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(fuse="auto", compile="auto", capture="auto")
    optimizer, before = training.optimizer, training.params()
    state = copy.deepcopy(optimizer.state_dict())
    clock = [0.0]
    monkeypatch.setattr("apex.booster._stages.time.perf_counter", lambda: clock[0])
    original = BoostedStep._run
    costs = {EAGER: 5.0, CAPTURED: 2.0, COMPILED: 3.0, WHOLE: 2.5, Variant(True, True): 1.0}
    costs[WHOLE._replace(capture=True)] = 2.1

    def run(self: BoostedStep, variant: Variant, *args: Any) -> Any:
        clock[0] += costs[variant]
        loss = original(self, variant, *args)
        return 2 * loss if variant == Variant(True, True) else loss  # the quickest computes something else

    monkeypatch.setattr(BoostedStep, "_run", run)

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(training.model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    report = training.booster.find_fastest(step, problem.batch(0))
    assert step.choice == CAPTURED
    rows = [row for row in report if row.stage == "find_fastest"]
    assert len(rows) == 12
    assert [row.text for row in rows if row.done] == ["captured: 2000.00 ms"]
    assert sum("losses differ" in row.text for row in rows) == 2
    for a, b in zip(training.params(), before, strict=True):
        assert torch.equal(a, b)
    again = optimizer.state_dict()
    assert again["param_groups"] == state["param_groups"]
    for key, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(again["state"][key][name], value)
    training.run(step, *problem.batch(0))


def test_find_fastest_leaves_out_what_does_not_compile(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no code for this")

    monkeypatch.setattr(Stages, "compile_options", {"backend": refuse, "dynamic": False})
    torch._dynamo.reset()
    training = Training(fuse=True, compile="auto")
    optimizer, before = training.optimizer, training.params()

    @training.booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(training.model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    rows = [row for row in training.booster.find_fastest(step, problem.batch(0)) if row.stage == "find_fastest"]
    assert [row.done for row in rows] == [False, False, True]
    assert rows[0].text == "fused, compiled: BackendCompilerFailed"
    assert rows[1].text == "fused, compiled as a whole: BackendCompilerFailed"
    assert step.choice == EAGER
    for a, b in zip(training.params(), before, strict=True):
        assert torch.equal(a, b)


def test_find_fastest_on_a_cpu_has_nothing_to_choose() -> None:
    model = problem.net()
    model, optimizer, step = apex.boost(model, problem.adam(model), device="cpu")

    def train_step(batch: Any) -> dict[str, Tensor]:
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}

    report = step.find_fastest(step(train_step), {"batch": problem.batch(0)})
    assert [row.done for row in report if row.stage == "find_fastest"] == [True]
    with pytest.raises(TypeError, match="must return the loss"):
        step.find_fastest(lambda: None, ())


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"fuse": "yes"}, "fuse='yes' is not known"),
        ({"compile": 3}, "compile=3 is not known.*dict of options"),
        ({"capture": None}, "capture=None is not known"),
        ({"capture": True, "compile": {"mode": "reduce-overhead"}}, "makes graphs of its own"),
        ({"capture": True, "mixed_precision": "fp16"}, "loss scale"),
    ],
)
def test_refused_settings(stages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Booster("cpu", **stages)


def test_torch_ddp_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchDDPPlugin, "__init__", lambda self, ddp: setattr(self, "ddp", ddp))
    with pytest.raises(ValueError, match="DistributedDataParallel starts its exchanges from the host"):
        Booster("cpu", "bf16", TorchDDPPlugin(ddp="torch"), capture=True)
    Booster("cpu", "bf16", TorchDDPPlugin(ddp="apex"), capture=True)
    Booster("cpu", "bf16", TorchDDPPlugin(ddp="torch"), capture="auto")


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_boost_refuses_a_missing_optimizer_or_model(precision: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(TypeError, match="optimizer must be the model's optimizer, got None"):
        apex.boost(model, None, precision)  # type: ignore[arg-type]
    assert model.weight.dtype == torch.float32
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got a SGD"):
        apex.boost(torch.optim.SGD(model.parameters(), 0.1), model, precision)  # type: ignore[arg-type]


class FailingPrecision(MixedPrecision):
    """A precision that cannot be used, as `amp` cannot with a model in half precision."""

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> Any:
        raise RuntimeError("not today")


def test_a_precision_that_fails_leaves_model_and_optimizer_as_they_were(graphs: None) -> None:
    model = problem.net()
    optimizer = problem.adam(model)
    kinds = [type(module) for module in model.modules()]
    groups = [{**group} for group in optimizer.param_groups]
    attributes = set(vars(optimizer))
    booster = Booster("cpu", FailingPrecision(), fuse=True)
    with pytest.raises(RuntimeError, match="not today"):
        booster.boost(model, optimizer)
    assert [type(module) for module in model.modules()] == kinds
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups == groups
    assert set(vars(optimizer)) == attributes
    given = apex.optimizers.FusedAdam(model.parameters())
    with pytest.raises(RuntimeError, match="already"):
        Booster("cpu", "fp16_apex", fuse=True).boost(model.half(), given)
    assert not given.master_weights
    assert "fuse" not in str(booster.report())


def test_refused_steps() -> None:
    booster = Booster("cpu")
    with pytest.raises(RuntimeError, match="after boost"):
        booster.step(lambda: None)
    booster.boost(problem.net())
    with pytest.raises(TypeError, match="decorates a function"):
        booster.step(3)
    with pytest.raises(TypeError, match="step must be a function"):
        booster.find_fastest(3, ())


@pytest.mark.parametrize("stages", [{"capture": True}, {"fuse": "auto", "compile": "auto", "capture": "auto"}])
def test_losses_of_all_steps_can_be_kept(stages: Any, graphs: None) -> None:
    """A replay writes its loss where the last one was."""
    kept: list[list[float]] = []
    for each in ({}, stages):
        training = Training(**each)
        model, optimizer = training.model, training.optimizer

        @training.booster.step
        def step(inputs: Tensor, targets: Tensor, model: Any = model, optimizer: Any = optimizer) -> dict[str, Tensor]:
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            optimizer.backward(loss)
            optimizer.step()
            return {"loss": loss.detach()}

        outputs = [step(*problem.batch(number)) for number in range(20)]
        kept.append([float(output["loss"]) for output in outputs])
    assert len(set(kept[0])) > 10
    assert kept[1] == pytest.approx(kept[0], rel=0.01)


def test_reset_shows_a_step_the_numbers_in_modules(graphs: None) -> None:
    class Scaled(nn.Module):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs) * self.factor

    inner = Scaled()
    booster = Booster("cpu", capture=True)
    model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), lr=0.0))

    @booster.step
    def step(inputs: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).sum()
        optimizer.backward(loss)
        optimizer.step()
        return loss

    inputs = torch.ones(2, 4)
    before = [float(step(inputs)) for _ in range(6)][-1]
    inner.factor = 3.0
    booster.step.reset()
    assert float(step(inputs)) == pytest.approx(3 * before)


def test_the_report_tells_of_calls_that_are_not_measured(graphs: None) -> None:
    training = Training(fuse="auto", compile="auto", capture="auto")
    step = training.booster.step(lambda inputs, name: training.model(inputs).sum())
    for number in range(3):
        step(problem.batch(0)[0], f"file {number}")
    [row] = [row for row in training.booster.report() if row.stage == "capture"]
    assert "2 calls were not measured: their arguments are of another kind than the first's" in row.text
