"""Messages about skipped steps that name the module whose numbers were the first that are not finite."""

import contextlib
import copy
import dataclasses
import math
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from apex.amp._overflow_buffer import MagnitudeBuffer
from apex.graphs import CapturedStep
from apex.optimizers import FusedSGD
from tests.amp.common import loss_of, overflow_at, small_model, train
from tests.graphs.recorder import CpuGraphs


class Times(torch.autograd.Function):
    """x times a number; in the backward pass times another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Tensor, backward: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(backward)
        return (x * forward).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return (dy * ctx.saved_tensors[0]).to(dy.dtype), None, None


class Large(nn.Module):
    """A layer whose output, or the gradient of whose input, is multiplied by a number on the device."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("forward_factor", torch.tensor(forward))
        self.register_buffer("backward_factor", torch.tensor(backward))

    def forward(self, x: Tensor) -> Tensor:
        return Times.apply(x, self.forward_factor, self.backward_factor)


def network(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 4))


def prepared(model: nn.Module, level: str = "O2", **options: Any) -> tuple[Any, Any]:
    optimizer = FusedSGD(model.parameters(), lr=0.01)
    return amp.initialize(model, optimizer, opt_level=level, **options)


def messages(capsys: pytest.CaptureFixture) -> list[str]:
    return [line.strip() for line in capsys.readouterr().out.splitlines() if " in the " in line or "outputs of" in line]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_first_module_of_the_forward_pass_is_named_with_its_input(
    level: str, capsys: pytest.CaptureFixture
) -> None:
    model, optimizer = prepared(network(nn.ReLU(), Large(math.inf), nn.Tanh()), level)
    seen: list[float] = []
    model[1].register_forward_hook(lambda _module, _inputs, output: seen.append(output.float().abs().max().item()))
    amp.trace_overflow(model)
    train(model, optimizer, 1)
    (line,) = messages(capsys)
    assert line.startswith("first in the forward pass: the output of 2 (Large) is ")
    assert line.endswith(f"; largest magnitude of its inputs: {seen[0]:.4g}")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_else_the_first_module_of_the_backward_pass_is_named(level: str, capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(nn.ReLU(), Large(1.0, math.inf), nn.Tanh()), level)
    amp.trace_overflow(model)
    train(model, optimizer, 1)
    (line,) = messages(capsys)
    named = "first in the backward pass: the gradient of the output of 1 (ReLU) is "
    assert line.startswith(f"all outputs are finite; {named}")
    assert "with loss scale 65536; the gradient before it, of 2 (Large), had at most " in line


def test_numbers_computed_between_modules_are_told(capsys: pytest.CaptureFixture) -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * math.inf)

    model, optimizer = prepared(Squares())
    amp.trace_overflow(model)
    train(model, optimizer, 1)
    (line,) = messages(capsys)
    assert "the output of second (Linear)" in line
    assert line.endswith("they were computed outside of leaf modules, after first (Linear)")


def test_attention_that_does_not_call_its_child(capsys: pytest.CaptureFixture) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention, self.last = nn.Linear(6, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(self.attention(query=x, key=x, value=x, need_weights=False)[0])

    model, optimizer = prepared(Attends())
    amp.trace_overflow(model)
    with torch.no_grad():
        model.attention.out_proj.bias.fill_(math.inf)
    train(model, optimizer, 1)
    (line,) = messages(capsys)
    assert line.startswith("first in the forward pass: the output of attention (MultiheadAttention) is ")


def test_a_gradient_of_a_parameter_is_told_from_gradients_of_outputs(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(nn.ReLU()))
    amp.trace_overflow(model)
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
        model[0].weight.grad.fill_(math.inf)
    optimizer.step()
    (line,) = messages(capsys)
    assert line.startswith("all outputs of modules and their gradients (at most ")
    assert "the gradient of a parameter overflowed" in line


def test_shared_and_overwriting_modules_and_tuples(capsys: pytest.CaptureFixture) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.lstm = nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LSTM(8, 8)
            self.last = nn.Linear(8, 4)
            self.large = Large(1e3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.large(self.relu(self.first(x)))
            return self.last(self.large(self.large(self.lstm(self.relu(x).abs() + 1)[0] + 10)))

    model, optimizer = prepared(Model())
    trace = amp.trace_overflow(model)
    train(model, optimizer, 1)
    (line,) = messages(capsys)
    assert "the output of large (Large, call 3)" in line
    records = trace.records
    first, relu = records[0], records[1]
    assert (relu.module, relu.inputs) == ("relu", (first.largest,))  # the value before it was overwritten
    assert [record.module for record in records if record.kind == "forward"].count("lstm") == 3
    assert {record.call for record in records if record.module == "relu"} == {1, 2}


def test_all_microbatches_of_a_step_are_looked_at(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(Large(1.0)))
    trace = amp.trace_overflow(model)
    for step, factor in enumerate((1.0, math.inf, 1.0)):
        model[1].forward_factor.fill_(factor)
        with amp.scale_loss(loss_of(model, step), optimizer, delay_unscale=step < 2) as scaled:
            scaled.backward()
    optimizer.step()
    (line,) = messages(capsys)
    assert "the output of 1 (Large, call 2)" in line
    model[1].forward_factor.fill_(1.0)
    train(model, optimizer, 1)
    assert {record.call for record in trace.records} == {1}
    assert not messages(capsys)


class Raising(nn.Module):
    """A layer that raises an error in the forward or in the backward pass while `where` says so."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise ValueError("forward")
        x.register_hook(self.raise_in_backward)
        return x * 1

    def raise_in_backward(self, _: Tensor) -> None:
        if self.where == "backward":
            raise ValueError("backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_raised_leaves_no_records(where: str, capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(Large(1.0), Raising()))
    trace = amp.trace_overflow(model)
    train(model, optimizer, 1)
    for step in range(2):
        model[1].forward_factor.fill_(1.0 if step else math.inf)
        model[2].where = "" if step else where
        raises = contextlib.nullcontext() if step else pytest.raises(ValueError, match=where)
        with raises, amp.scale_loss(loss_of(model, step) * (math.inf if step else 1.0), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    (line,) = messages(capsys)
    assert "all outputs are finite; first in the backward pass: the gradient of the output of 3 (Linear)" in line
    assert {record.call for record in trace.records} == {1}


def test_each_loss_has_gradients_of_its_own(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(), num_losses=2)
    amp.trace_overflow(model)
    output = model(torch.ones(5, 6))
    for loss_id, factor in enumerate((math.inf, 1.0)):
        with amp.scale_loss(output.mean() * factor, optimizer, loss_id=loss_id) as scaled:
            scaled.backward(retain_graph=True)
    optimizer.step()
    assert len(messages(capsys)) == 1


def test_one_step_is_traced_after_skipped_ones(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(Large(1.0)))
    trace = amp.trace_overflow(model, after_skips=3)
    on = []
    for step in range(9):
        on.append(trace.is_on)
        train(model, optimizer, [step], overflow_at(0, 1, 3, 4, 5, 6, 7))
    #                                             three skipped in a row: 3, 4, 5
    assert on == [False] * 6 + [True] + [False] * 2
    (line,) = messages(capsys)
    assert "first in the backward pass: the gradient of the output of 2 (Linear)" in line
    assert not model[0]._forward_hooks


def test_evaluation_is_not_recorded_and_removing_ends_all(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(Large(1.0)))
    with amp.trace_overflow(model) as trace:
        train(model, optimizer, 1)
        records = trace.records
        assert len(records) == 6
        with torch.no_grad():
            model.eval()(torch.full((5, 6), math.inf))
        model.train()
        train(model, optimizer, 1, overflow_at(0))
        assert "(Linear)" in messages(capsys)[0]
    assert not any(module._forward_hooks for module in model)
    train(model, optimizer, 1, overflow_at(0))
    assert not messages(capsys)
    trace = amp.trace_overflow(model)
    amp.shutdown()
    assert not trace.is_alive
    assert not any(module._forward_hooks for module in model)


def test_copies_of_a_model_are_not_traced() -> None:
    model, optimizer = prepared(network(nn.ReLU(inplace=True)))
    trace = amp.trace_overflow(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(nn.Sequential(*model)))):
        copied(torch.ones(5, 6, dtype=next(copied.parameters()).dtype))
    train(model, optimizer, 1)
    assert [(record.module, record.kind) for record in trace.records] == [
        ("0", "forward"), ("1", "forward"), ("2", "forward"), ("2", "backward"), ("1", "backward"), ("0", "backward")
    ]  # fmt: skip


def test_outputs_stay_as_they_are() -> None:
    """An output that a user pickles, or registers hooks for, has no hooks of the trace."""
    model, optimizer = prepared(network(nn.ReLU(inplace=True)), "O0", loss_scale="dynamic")
    outputs: list[Tensor] = []
    model[0].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    trace = amp.trace_overflow(model)
    train(model, optimizer, 1)
    assert len(trace.records) == 6
    assert outputs[0].grad_fn is not None
    assert outputs[0]._backward_hooks is None


def test_a_model_that_is_gone_is_forgotten() -> None:
    model, optimizer = prepared(network())
    other = network()
    trace = amp.trace_overflow(other)
    del other
    assert not trace.is_alive
    train(model, optimizer, 1, overflow_at(0))
    assert trace.records == []


def test_forward_passes_without_a_step_do_not_grow_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apex.amp._overflow_trace._MOST_RECORDS", 5)
    model, optimizer = prepared(network())
    trace = amp.trace_overflow(model)
    for _ in range(5):
        loss_of(model, 0)
    train(model, optimizer, 1)
    assert len(trace.records) <= 6
    train(model, optimizer, 1)
    assert len(trace.records) == 4


def test_double_precision_and_empty_tensors_are_measured_or_left_out() -> None:
    model, optimizer = prepared(nn.Sequential(nn.Identity(), nn.Linear(6, 4)), "O0", loss_scale="dynamic")
    trace = amp.trace_overflow(model)
    model[0](torch.full((2, 2), 1e300, dtype=torch.float64, requires_grad=True) * 1.0)
    model[0](torch.ones(0, 2))
    model[0](torch.arange(3))
    train(model, optimizer, 1)
    assert all(record.is_finite and all(map(math.isfinite, record.inputs)) for record in trace.records)


def test_a_captured_step_is_traced_at_every_replay(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(Large(1.0), nn.ReLU()))
    amp.trace_overflow(model)

    def step(inputs: Tensor, factor: Tensor) -> Tensor:
        optimizer.zero_grad()
        model[1].forward_factor.copy_(factor)
        loss = model(inputs).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss

    captured = CapturedStep(step, warmup=2, backend=CpuGraphs())
    factors = [1.0, 1.0, 1.0, 1.0, math.inf, 1.0, math.inf]
    for number, factor in enumerate(factors):
        captured(torch.ones(5, 6), torch.tensor(factor))
        lines = messages(capsys)
        assert len(lines) == (0 if math.isfinite(factor) else 1), number
        if lines:
            assert "the output of 1 (Large)" in lines[0]
    assert captured.reason is None
    assert captured.graphs == 1


def test_a_captured_step_is_traced_once_when_steps_were_skipped(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(nn.Tanh()))
    trace = amp.trace_overflow(model, after_skips=3)

    def step(inputs: Tensor, factor: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean() * factor
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss

    captured = CapturedStep(step, warmup=2, backend=CpuGraphs())
    for number in range(9):
        captured(torch.ones(5, 6), torch.tensor(math.inf if 3 <= number <= 6 else 1.0))
    (line,) = messages(capsys)
    assert "the gradient of the output of 2 (Linear)" in line
    assert not trace.is_on
    assert captured.reason is None
    assert captured.graphs == 1


def test_compare_reads_the_records(tmp_path: Any) -> None:
    pytest.importorskip("h5py")
    from typer.testing import CliRunner

    from apex._cli.app import app
    from apex.dump import compare

    files = []
    for level, factor in (("O0", 1e6), ("O2", 1e6)):
        model, optimizer = prepared(network(Large(factor), nn.Tanh()), level, loss_scale="dynamic", verbosity=0)
        trace = amp.trace_overflow(model)
        with pytest.raises(RuntimeError, match="no step has been recorded"):
            trace.save(tmp_path / "none.hdf5")
        train(model, optimizer, 1)
        files.append(tmp_path / f"{level}.hdf5")
        trace.save(files[-1])
        amp.shutdown()
    comparison = compare(*files)
    assert comparison.first is not None
    assert (comparison.first.module, comparison.first.kind) == ("1", "forward")
    assert comparison.first.note == "0 and 1 values are not finite"
    assert [row.module for row in comparison.rows if row.kind == "backward"] == ["3", "2", "1", "0"]
    assert compare(files[0], files[0]).first is None
    result = CliRunner().invoke(app, ["compare", *map(str, files), "--plot", str(tmp_path / "errors.png")])
    assert result.exit_code == 1
    assert "first difference: 1 (Large), forward" in result.output


def test_what_cannot_be_traced_is_refused() -> None:
    model = network()
    with pytest.raises(RuntimeError, match=r"before amp\.initialize"):
        amp.trace_overflow(model)
    prepared(model, "O5")
    with pytest.raises(RuntimeError, match=r"needs a dynamic loss scale.*loss_scale=1"):
        amp.trace_overflow(model)
    prepared(network(), "O2")
    with pytest.raises(TypeError, match="model"):
        amp.trace_overflow([model])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="after_skips"):
        amp.trace_overflow(model, after_skips=0)


def test_nothing_is_added_while_it_is_off() -> None:
    model, optimizer = prepared(small_model())
    trace = amp.trace_overflow(model, after_skips=3)
    train(model, optimizer, 2)
    assert not any(module._forward_hooks for module in model)
    assert not trace._buffers


def test_each_tensor_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are outputs of other modules, views of them and outputs that are views are not read again."""
    read: list[Tensor] = []
    measure = MagnitudeBuffer.measure
    monkeypatch.setattr(
        MagnitudeBuffer, "measure", lambda buffer, tensor: (read.append(tensor.detach()), measure(buffer, tensor))[1]
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.flat, self.relu, self.last = nn.Linear(6, 8), nn.Flatten(0), nn.ReLU(), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.relu(self.flat(self.first(x)).view(5, 8)).view(5, 1, 8)).squeeze(1)

    model, optimizer = prepared(Model(), "O0", loss_scale="dynamic")
    trace = amp.trace_overflow(model)
    train(model, optimizer, 1)
    forward = [record for record in trace.records if record.kind == "forward"]
    assert [record.module for record in forward] == ["first", "flat", "relu", "last"]
    # The model's input, outputs of first, relu and last, and four gradients.
    assert len(read) == 8
    assert forward[1].largest == forward[0].largest
    assert [record.inputs for record in forward[1:]] == [(record.largest,) for record in forward[:-1]]


def test_modules_in_place_show_their_inputs_from_before_and_gradients_of_both(capsys: pytest.CaptureFixture) -> None:
    """The input of the dropout is a sum that no module returned."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
            self.drop, self.relu = nn.Dropout(0.5, inplace=True), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            self.summed = (y + y).detach().clone()
            return self.last(self.relu(self.drop(y + y)))

    model, optimizer = prepared(Model(), "O0", loss_scale="dynamic")
    with torch.no_grad():
        model.first.bias.copy_(torch.tensor([-50.0, *[1.0] * 7]))
    trace = amp.trace_overflow(model)
    train(model, optimizer, 1)
    by_name = {(record.module, record.kind): record for record in trace.records}
    assert by_name["drop", "forward"].inputs == (float(model.summed.abs().max()),)
    assert by_name["relu", "forward"].inputs == (by_name["drop", "forward"].largest,)
    assert by_name["last", "forward"].inputs == (by_name["relu", "forward"].largest,)
    assert by_name["relu", "forward"].largest < by_name["drop", "forward"].largest
    assert [record.module for record in trace.records if record.kind == "backward"] == ["last", "relu", "drop", "first"]
    assert by_name["first", "backward"].largest == 4 * by_name["drop", "backward"].largest


def test_outputs_of_any_structure_and_modules_that_are_not_called(capsys: pytest.CaptureFixture) -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
            return {"twice": 2 * x, "more": (x * scale, None, [x.long(), "text"]), "nothing": None, "count": 3}

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.parts, self.nothing, self.last = nn.Linear(6, 8), Parts(), Nothing(), nn.Linear(8, 4)
            self.unused, self.tied = nn.Linear(3, 3), self.last

        def forward(self, x: Tensor) -> Tensor:
            parts = self.parts(self.first(x), scale=torch.tensor(math.inf))
            self.nothing(parts["twice"])
            return self.tied(parts["twice"]) + 0 * self.last(parts["more"][0])

    model, optimizer = prepared(Model(), "O0", loss_scale="dynamic")
    trace = amp.trace_overflow(model)
    train(model, optimizer, 1)
    (line,) = messages(capsys)
    assert line.startswith("first in the forward pass: the output of parts (Parts) is ")
    assert line.endswith(", inf; they were computed outside of leaf modules, after parts (Parts)")
    names = [(record.module, record.call) for record in trace.records if record.kind == "forward"]
    assert names == [("first", 1), ("parts", 1), ("parts", 1), ("last", 1), ("last", 2)]


@dataclasses.dataclass
class Hidden:
    states: Tensor
    parent: Any = None


class Named(OrderedDict):
    """A mapping that PyTorch does not know as a tree."""


@pytest.mark.parametrize("kind", [Hidden, Named])
def test_outputs_in_dataclasses_and_mappings(kind: type, capsys: pytest.CaptureFixture) -> None:
    class Packs(nn.Module):
        def forward(self, x: Tensor) -> Any:
            packed: Any = kind(states=x * math.inf)
            packed.parent = packed  # a cycle
            if kind is Named:
                packed["itself"] = [packed]
            return packed

    class Unpacks(nn.Module):
        def forward(self, packed: Any) -> Tensor:
            return (packed["states"] if kind is Named else packed.states) * 1

    model, optimizer = prepared(network(Packs(), Unpacks()), "O1")
    trace = amp.trace_overflow(model)
    train(model, optimizer, 1)
    (line,) = messages(capsys)
    assert line.startswith("first in the forward pass: the output of 1 (Packs) is ")
    packs, unpacks = trace.records[1:3]
    assert (packs.module, unpacks.module, unpacks.inputs) == ("1", "2", (packs.largest,))


def test_modules_that_take_no_hooks_are_left_out(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(torch.jit.script(nn.Tanh()), Large(math.inf)), "O1")
    trace = amp.trace_overflow(model)
    train(model, optimizer, 1)
    assert "the output of 2 (Large) is " in messages(capsys)[0]
    assert [record.module for record in trace.records if record.kind == "forward"] == ["0", "2", "3"]


def test_parameters_that_modules_return_have_one_hook_and_none_after_the_end() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self) -> Tensor:
            return self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.positions, self.last = nn.Linear(6, 8), Positions(), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) + self.positions())

    model, optimizer = prepared(Model(), "O0", loss_scale="dynamic")
    trace = amp.trace_overflow(model)
    for _ in range(3):
        train(model, optimizer, 1)
        names = [record.module for record in trace.records if record.kind == "backward"]
        assert sorted(names) == ["first", "last", "positions"]
        assert len(model.positions.weight._backward_hooks) == 1
    trace.remove()
    assert not model.positions.weight._backward_hooks


def test_recomputed_activations_are_traced(capsys: pytest.CaptureFixture) -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model, optimizer = prepared(network(nn.ReLU(), Large(1.0, math.inf), nn.Tanh()), verbosity=1)
        trace = amp.trace_overflow(model)
        inputs = torch.ones(5, 6, dtype=torch.float16, requires_grad=True)
        loss = checkpoint(model, inputs, use_reentrant=reentrant).float().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        (line,) = messages(capsys)
        assert "first in the backward pass: the gradient of the output of 1 (ReLU" in line
        assert {record.call for record in trace.records} == {1, 2}
        amp.shutdown()


def test_compiled_models_are_told_of(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(Large(1.0)))
    compiled = torch.compile(model, backend="eager")
    amp.trace_overflow(model)
    with amp.scale_loss(compiled(torch.ones(5, 6)).float().mean() * math.inf, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no leaf module of the traced model" in line]
    assert line.endswith("(compiled models do not call their modules)")


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("captures", [False, True])
def test_no_step_waits_for_the_device(level: str, captures: bool, capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(network(Large(1.0), nn.ReLU()).cuda(), level)
    amp.trace_overflow(model)
    inputs = torch.ones(5, 6, device="cuda")
    factors = [torch.tensor(factor, device="cuda") for factor in (1.0, 1.0, 1.0, 1.0, 1.0, math.inf, 1.0)]

    def step(inputs: Tensor, factor: Tensor) -> Tensor:
        optimizer.zero_grad()
        model[1].forward_factor.copy_(factor)
        loss = model(inputs).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss

    run: Any = CapturedStep(step, warmup=2) if captures else step
    for factor in factors[:4]:
        run(inputs, factor)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in factors[4:]:
            run(inputs, factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    run(inputs, factors[0])
    (line,) = messages(capsys)
    assert "the output of 1 (Large)" in line
    assert not captures or (run.reason is None and run.graphs == 1)
