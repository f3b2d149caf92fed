"""Captured steps without a GPU, on graphs that note PyTorch's operators: see `recorder.py`."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from apex import amp, optimizers
from apex.graphs import CapturedStep, capture
from apex.ops import _graph_numbers
from apex.ops._graph import CudaGraphs
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.parallel import LARC
from tests.graphs.common import Training, assert_equal_bits, batches
from tests.graphs.recorder import CpuGraphs
from tests.support.collector import freeze


def captured(function: Callable[..., Any], **options: Any) -> CapturedStep:
    return CapturedStep(function, backend=CpuGraphs(), **options)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.01),
    "FusedAdam, a rate on the host": lambda params: FusedAdam(params, lr=torch.tensor(0.01)),
    "FusedAdam, capturable": lambda params: FusedAdam(params, lr=0.01, capturable=True),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.1),
    "FusedSGD without momentum": lambda params: FusedSGD(params, lr=0.05),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
    "FusedNovoGrad": lambda params: optimizers.FusedNovoGrad(params, lr=0.01),
    "FusedAdagrad": lambda params: optimizers.FusedAdagrad(params, lr=0.01),
    "FusedLARS": lambda params: optimizers.FusedLARS(params, lr=0.05, momentum=0.9),
    "LARC": lambda params: LARC(FusedSGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)),
    "NpuFusedAdamP": lambda params: optimizers.NpuFusedAdamP(params, lr=0.01),
    "NpuFusedRMSprop": lambda params: optimizers.NpuFusedRMSprop(params, lr=0.01, momentum=0.5),
    "NpuFusedBertAdam": lambda params: optimizers.NpuFusedBertAdam(
        params, lr=0.01, warmup=0.3, t_total=30, schedule="warmup_cosine"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    freeze()


@pytest.fixture(autouse=True)
def amp_is_off_afterwards() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*")
        yield
    amp.shutdown()


def compare(steps: int = 12, overflows: tuple[int, ...] = (), **options: Any) -> CapturedStep:
    eager = Training(None, device="cpu", **options).run(steps, overflows).outcome()
    training = Training(captured, device="cpu", **options).run(steps, overflows)
    assert training.step.reason is None
    assert training.step.graphs == 1
    assert_equal_bits(eager, training.outcome())
    return training.step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_have_the_bits_of_eager_steps(name: str) -> None:
    """The learning rate changes at every step; there are clipping, dropout and a batch norm."""
    step = compare(make=OPTIMIZERS[name])
    assert step.report() == "1 graphs, 3 eager calls, 1 captures, 8 replays"


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_opt_levels(level: str) -> None:
    compare(level=level)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "NpuFusedBertAdam", "torch.optim.SGD"])
def test_overflows_skip_steps_on_the_device(name: str, level: str) -> None:
    """Check also an optimizer without an overflow flag, whose step is undone."""
    makers = {**OPTIMIZERS, "torch.optim.SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)}
    schedule = name != "torch.optim.SGD"
    compare(18, (1, 6, 7, 12), level=level, make=makers[name], schedule=schedule)


def test_static_loss_scales_and_masters() -> None:
    compare(level="O2", loss_scale=128.0, make=OPTIMIZERS["FusedSGD"])


def test_on_a_cpu_the_function_simply_runs() -> None:
    seen = []

    @capture(warmup=1)
    def step(x: Tensor, factor: float = 2.0) -> Tensor:
        seen.append(x)
        return x * factor

    x = torch.ones(2, requires_grad=True)
    for _ in range(4):
        assert step(x, factor=3.0).requires_grad
    assert seen == [x] * 4
    assert (step.graphs, step.reason) == (0, None)
    assert step.report() == "0 graphs, 4 eager calls, 0 captures, 0 replays"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this is new in PyTorch
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])  # which has neither a shape nor strides
    assert capture(lambda tensor: tensor)(nested) is nested


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_step": 3}, "train_step=3 cannot be called"),
        ({"train_step": abs, "warmup": 0}, "warmup=0 is not a whole number of at least 1"),
        ({"train_step": abs, "max_graphs": 1.5}, "max_graphs=1.5 is not a whole number"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        capture(**options)


def test_inputs_outputs_and_kinds() -> None:
    """Check that shapes, layouts, dtypes and other values select a graph, and that a replay overwrites results."""
    calls = deque()  # the length of a list would be noticed

    def step(batch: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        calls.append(scale)
        return {"sum": batch["x"] * scale + batch["pair"][0], "name": "same"}

    run = captured(step, warmup=1)
    first = None
    for index in range(4):
        for shape in ((2, 3), (3, 2)):
            for scale in (2.0, 3.0):
                x = torch.full(shape, float(index))
                found = run({"x": x, "pair": (torch.full(shape, 0.5), None)}, scale=scale)
                assert found["name"] == "same"
                assert torch.equal(found["sum"], x * scale + 0.5)
                if index == 2 and first is None:
                    first = found["sum"]
    assert run.graphs == 4
    assert len(calls) == 8  # an eager call and a capture for each
    assert first is not None
    assert float(first[0, 0]) == 6.5  # of the last replay of its graph
    transposed = torch.ones(3, 2).t()
    for _ in range(2):
        run({"x": transposed, "pair": (transposed, None)}, scale=2.0)
    assert run.graphs == 5


def test_arguments_that_no_graph_can_be_chosen_by_run_eagerly() -> None:
    run = captured(lambda x, chosen: x * len(chosen), warmup=1)
    with pytest.warns(UserWarning, match="an argument is neither a tensor nor .*: unhashable type: 'set'"):
        found = [float(run(torch.ones(1), set(range(size)))) for size in range(4)]
    assert found == [0.0, 1.0, 2.0, 3.0]


def test_more_kinds_than_graphs_run_eagerly_with_one_warning() -> None:
    run = captured(lambda x: x * 2, warmup=1, max_graphs=2)
    with pytest.warns(UserWarning, match=r"has 2 graphs \(max_graphs\)") as found:
        sums = [float(run(torch.ones(size)).sum()) for _ in range(4) for size in (1, 2, 3)]
    assert sums == [2.0, 4.0, 6.0] * 4
    assert len(found) == 1
    assert run.graphs == 2


def test_a_capture_that_fails_leaves_no_trace() -> None:
    """State in Python is as before, the step runs once, and the message names the line."""
    eager = Training(None, device="cpu", schedule=False).run(8).outcome()
    graph = Training(None, device="cpu", schedule=False)
    seen = deque()

    def reading(*batch: Tensor) -> Tensor:
        loss = graph.train_step(*batch)
        seen.append(loss.item())  # the line
        return loss

    graph.step = CapturedStep(reading, backend=CpuGraphs(forbids_reading=True))
    with pytest.warns(UserWarning, match=r"test_step\.py:\d+ \(seen.append\(loss.item\(\)\)  # the line\)") as found:
        graph.run(8)
    assert len(found) == 1
    assert found[0].filename.endswith("common.py")  # where it is called
    assert "operation not permitted" in graph.step.reason
    assert graph.optimizer.param_groups[0]["step"] == 8
    assert_equal_bits(eager, graph.outcome())
    assert len(seen) == 8


def test_an_optimizer_that_makes_state_late_is_not_captured() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    trained = [weights[0]]

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        sum((weight * x).sum() for weight in trained).backward()
        optimizer.step()
        return torch.stack(weights)

    run = captured(step, warmup=2)
    found = [run(torch.ones(3))[1, 0] for _ in range(2)]
    trained.append(weights[1])
    with pytest.warns(UserWarning, match=r"every call changes the length of SGD\.state"):
        found += [run(torch.ones(3))[1, 0] for _ in range(3)]
    torch.testing.assert_close(torch.stack(found), torch.tensor([1.0, 1.0, 0.9, 0.71, 0.439]))


def test_gradients_that_python_sets_to_none_or_replaces() -> None:
    """Check that gradients which a graph reads are copied to its memory, and that others may be anything."""

    def run(way: Any) -> Training:
        training = Training(way, device="cpu", schedule=False)
        for index in range(14):
            training.run(1, first=index)
            if index % 4 == 0:
                training.optimizer.zero_grad(set_to_none=True)
            elif index % 4 == 2:
                for param in training.model.parameters():
                    param.grad = torch.full_like(param, 5.0)
        return training

    eager, graph = run(None).outcome(), run(captured)
    assert graph.step.graphs == 1
    assert_equal_bits(eager, graph.outcome())


def test_parameters_of_others_may_have_gradients_or_no_memory_at_all() -> None:
    """Check that a captured step ignores the gradients of another model, also if it reads that there is no gradient.

    Tracing by torch.compile leaves tensors without memory.
    """
    used, unused, other = (nn.Parameter(torch.ones(3)) for _ in range(3))
    with FakeTensorMode():
        traced = nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([used, unused], lr=0.5)

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        (used * inputs).sum().backward()
        optimizer.step()

    run = captured(step, warmup=2)
    for index in range(6):
        if index == 4:
            other.grad = torch.ones(3)
        run(torch.ones(3))
        assert used.tolist() == [1 - 0.5 * (index + 1)] * 3
    assert run.graphs == 1
    assert run.reason is None
    assert traced.grad is None


@pytest.mark.parametrize("outside", [True, False])
def test_gradients_are_accumulated_over_calls(outside: bool) -> None:
    """Use two graphs that pass gradients to each other, or a graph and an optimizer that steps outside of it."""

    def run(way: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = FusedAdam(model.parameters(), lr=0.01)

        def step(inputs: Tensor, targets: Tensor, last: bool) -> Tensor:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            if last and not outside:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        each = step if way is None else way(step)
        for index, batch in enumerate(batches("cpu", 20)):
            each(*batch, index % 2 == 1)
            if outside and index % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        if way is not None:
            assert each.reason is None
            assert each.graphs == 2
        return [param.detach() for param in model.parameters()]

    assert_equal_bits(run(None), run(captured))


@pytest.mark.parametrize("clears_first", [True, False])
def test_gradients_of_a_call_that_is_not_captured_are_added(clears_first: bool) -> None:
    """Let a backward pass outside of the step leave gradients after the capture of a step that found none."""

    def run(way: Any) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = FusedAdam(model.parameters(), lr=0.01)

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            if clears_first:
                optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        each = step if way is None else way(step)
        for index, (inputs, targets) in enumerate(batches("cpu", 16)):
            if index in (6, 9, 12):
                nn.functional.mse_loss(model(inputs + 1), targets).backward()
            each(inputs, targets)
            assert all(param.grad is None for param in model.parameters())
        return [param.detach() for param in model.parameters()], each

    expected, _ = run(None)
    trained, step = run(captured)
    assert step.reason is None
    assert_equal_bits(expected, trained)


@pytest.mark.parametrize(("level", "overflows"), [(None, ()), ("O2", (1, 6, 9, 15))])
def test_state_that_is_saved_and_loaded_between_replays(level: str | None, overflows: tuple[int, ...]) -> None:
    """If overflows skip steps, the count of steps continues in the graph's memory."""
    options: dict[str, Any] = {"level": level, "device": "cpu", "dropout": 0.0}
    whole = Training(None, **options).run(20, overflows).outcome()
    training = Training(captured, **options).run(8, overflows)
    parts = [training.model, training.optimizer, training.schedule]
    state = [_copied(part.state_dict()) for part in parts]
    scales = amp.state_dict() if level else None
    training.run(4, (8, 10), first=8)  # taken back
    for part, each in zip(parts, state, strict=True):
        part.load_state_dict(each)
    if level:
        amp.load_state_dict(scales)
    del training.losses[8:]
    training.run(12, overflows, first=8)
    assert training.step.graphs == 1
    assert_equal_bits(whole, training.outcome())


def _copied(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def test_parameters_with_other_memory_are_captured_anew() -> None:
    def run(way: Any) -> Training:
        training = Training(way, device="cpu", schedule=False).run(6)
        for param in training.model.parameters():
            param.data = param.data.clone()
        return training.run(6, first=6)

    eager, graph = run(None).outcome(), run(captured)
    assert (graph.step.graphs, graph.step._captures) == (1, 2)
    assert_equal_bits(eager, graph.outcome())


def test_moved_parameters_at_max_graphs_run_eagerly_once() -> None:
    """Earlier eager calls have not made the state of a parameter that is added with the new memory."""

    def run(way: Any) -> Training:
        training = Training(way, device="cpu", schedule=False, clip=False).run(5)
        training.model[0].register_forward_hook(lambda _module, _inputs, output: output + 1.0)
        training.run(2, first=5)
        added = nn.Parameter(torch.ones(()))
        training.model[0].register_forward_hook(lambda _module, _inputs, output: output * added)
        training.optimizer.add_param_group({"params": [added]})
        training.model[0].weight.data = training.model[0].weight.data.clone()
        return training.run(5, first=7)

    eager = run(None).outcome()
    with pytest.warns(UserWarning, match="the parts or hooks of a module"):
        graph = run(lambda step: captured(step, max_graphs=1))
    assert graph.step.report() == "1 graphs, 6 eager calls, 2 captures, 4 replays"
    assert_equal_bits(eager, graph.outcome())


def test_a_replay_that_ends_with_an_error_is_a_whole_step() -> None:
    """Raise the error of gradients that overflow for too long."""
    training = Training(None, device="cpu", schedule=False)

    errors: deque[Exception] = deque()

    def report() -> None:
        while errors:
            raise errors.pop()

    def step(*batch: Tensor) -> Tensor:
        if (capture := _graph_numbers.capturing()) is not None:
            capture.after.append(report)
        return training.train_step(*batch)

    training.step = captured(step)
    training.run(5)
    training.optimizer.zero_grad()
    errors.append(FloatingPointError("gradients overflowed in 9 steps in a row"))
    with pytest.raises(FloatingPointError, match="9 steps"):
        training.run(1, first=5)
    assert training.optimizer.param_groups[0]["step"] == 6
    assert all(param.grad is not None for param in training.model.parameters())


def test_hyperparameters_that_a_graph_cannot_read_are_noticed() -> None:
    """A new weight decay selects another rule; options of PyTorch's SGD are frozen."""
    for make, name, value in (
        (lambda params: FusedLAMB(params, lr=0.01, weight_decay=0.0), "weight_decay", 0.1),
        (lambda params: torch.optim.SGD(params, lr=0.01), "lr", 0.02),
        (lambda params: LARC(torch.optim.SGD(params, lr=0.01)), "lr", 0.02),
        (lambda params: FusedAdam(params, lr=0.01), "bias_correction", False),
    ):
        results = []
        for way in (None, captured):
            training = Training(way, make=make, device="cpu", schedule=False).run(6)
            training.optimizer.param_groups[0][name] = value
            training.run(4, first=6)
            results.append(training.outcome())
        assert training.step.graphs == 2
        assert_equal_bits(*results)


def test_rates_of_pytorch_optimizers_that_are_numbers_are_followed() -> None:
    make = lambda params: torch.optim.Adam(params, lr=0.01, fused=True)  # noqa: E731
    eager, graph = (Training(way, make=make, device="cpu").run(12) for way in (None, captured))
    assert isinstance(graph.optimizer.param_groups[0]["lr"], float)
    assert graph.step.graphs == 1
    for (name, one), other in zip(eager.model.named_parameters(), graph.model.parameters(), strict=True):
        if name != "0.bias":  # a batch norm takes it off again: its gradients are rounding errors
            torch.testing.assert_close(one, other)


def test_rates_that_are_tensors_are_replaced_by_loading() -> None:
    def run(way: Any) -> Training:
        make = lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), fused=True)  # noqa: E731
        training = Training(way, make=make, device="cpu", schedule=False).run(6)
        state = _copied(training.optimizer.state_dict())
        state["param_groups"][0]["lr"].fill_(0.05)
        training.optimizer.load_state_dict(state)
        return training.run(4, first=6)

    eager, graph = run(None).outcome(), run(captured)
    assert graph.step.graphs == 1
    assert_equal_bits(eager, graph.outcome())


def test_values_that_every_call_changes_are_named() -> None:
    count = 0

    def counting(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    run = captured(counting)
    with pytest.warns(UserWarning, match="every call changes count, which no graph can"):
        found = [float(run(torch.ones(1))) for _ in range(6)]
    assert found == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]

    training = Training(None, device="cpu")

    def with_schedule(*batch: Tensor) -> Tensor:
        loss = training.train_step(*batch)
        training.schedule.step()
        return loss

    run = captured(with_schedule)
    one = torch.ones(())
    with pytest.warns(UserWarning, match=r"FusedAdam.param_groups\[0\]\['lr'\].*call the scheduler outside"):
        losses = [run(*batch, one) for batch in batches("cpu", 5)]
    assert len(losses) == 5


def test_numbers_that_change_between_calls_make_other_graphs() -> None:
    settings = {"weight": 1.0}
    run = captured(lambda x: x * settings["weight"])
    for weight in (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0):
        settings["weight"] = weight
        assert float(run(torch.ones(1))) == weight
    assert run.graphs == 2


def test_invalidate_forgets_graphs() -> None:
    run = captured(lambda x: x * 2, warmup=1)
    for _ in range(2):
        run(torch.ones(1))
    assert run.graphs == 1
    run.invalidate()
    assert run.graphs == 0
    for _ in range(3):
        assert float(run(torch.ones(1))) == 2.0
    assert run.graphs == 1


def test_methods_have_graphs_for_each_object() -> None:
    class Trainer:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def step(self, x: Tensor) -> Tensor:
            return x * self.factor

    Trainer.step = captured(Trainer.step, warmup=1)  # type: ignore[method-assign, assignment]
    for trainer in (Trainer(2.0), Trainer(3.0)):
        for _ in range(3):
            assert float(trainer.step(torch.ones(1))) == trainer.factor
        assert trainer.step.graphs == 1  # type: ignore[attr-defined]
        trainer.factor = 4.0
        assert float(trainer.step(torch.ones(1))) == 4.0
    assert functools.partial(capture, warmup=2)(abs).__name__ == "abs"


def test_methods_of_classes_and_of_objects_without_a_dict() -> None:
    class Trainer:
        __slots__ = ("factor",)

        def step(self, x: Tensor) -> Tensor:
            return x * self.factor

        @classmethod
        @capture
        def of_class(cls, x: Tensor) -> Tensor:
            return x + 1

    Trainer.step = captured(Trainer.step, warmup=1)  # type: ignore[method-assign, assignment]
    trainer = Trainer()
    for trainer.factor in (2.0, 2.0, 2.0, 3.0, 3.0, 2.0):
        assert float(trainer.step(torch.ones(1))) == trainer.factor
    assert trainer.step.graphs == 2  # type: ignore[attr-defined]
    assert float(Trainer.of_class(torch.ones(1))) == float(trainer.of_class(torch.ones(1))) == 2.0


def test_without_a_gpu_no_device_is_found() -> None:
    assert CudaGraphs.device_of([torch.ones(1)]) is None
