"""A wrong or failing implementation gets no time and stops nothing."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from apex._bench import registry, runner, timing
from apex._bench.check import mean_excess, worst_excess
from apex._bench.registry import Case, Expected, Prepared
from apex._bench.results import CaseResult, Measurement, Report
from apex._cli.bench.table import print_report

CPU = torch.device("cpu")
EFFORT = timing.Effort(warmup=0.1, repeat=0.5, wall_rounds=2, host_batches=1)
RIGHT = torch.arange(1.0, 9.0)


def run(implementations, *, kind="device", recorded=None, reduction=1):
    expected = [Expected(RIGHT.double(), torch.float32, reduction)]
    case = Case("doubling float32 8 fwd", 64, lambda device: Prepared(implementations, expected), kind)
    return runner.run_case(case, "test", CPU, EFFORT, 50.0, recorded)


def returning(*tensors):
    return lambda: lambda: tensors


def printed(result) -> str:
    report = Report({"device": {"name": "x"}, "versions": {}}, 50.0, cases=[result])
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    return console.file.getvalue()


@pytest.mark.parametrize("kind", ["device", "wall"])
def test_right_implementations_get_a_time(kind):
    result = run({"ours": returning(RIGHT), "torch": returning(RIGHT)}, kind=kind)
    assert {m.status for m in result.measurements.values()} == {"ok"}
    assert result.microseconds("ours") > 0
    assert result.best_peer == "torch"
    assert result.ratio == pytest.approx(result.microseconds("ours") / result.microseconds("torch"))
    assert result.floor == pytest.approx(64 / 50e9 * 1e6)
    assert result.bandwidth("ours") == pytest.approx(64 / result.microseconds("ours") / 1e3)
    assert result.percent_of_copy("ours") == pytest.approx(2 * result.bandwidth("ours"))


@pytest.mark.parametrize(("kind", "expected"), [("device", 2.0), ("wall", 3.0)])
def test_a_slow_first_turn_burdens_nobody_on_a_device(kind, expected, monkeypatch):
    expectations = [Expected(RIGHT.double(), torch.float32)]
    turns = iter([[9.0, 3.0, 8.0], [1.0, 2.0, 3.0]])
    for name in ("device_samples", "wall_samples"):
        monkeypatch.setattr(timing, name, lambda call, device, effort: next(turns))
    effort = timing.Effort(warmup=0, repeat=0, wall_rounds=2, host_batches=1, device_rounds=2)
    case = Case("x", 64, lambda device: Prepared({"ours": returning(RIGHT)}, expectations), kind)
    assert runner.run_case(case, "test", CPU, effort, 50.0).microseconds("ours") == expected


def test_an_implementation_can_have_expectations_of_its_own():
    expected, other = ([Expected(value.double(), torch.float32)] for value in (RIGHT, RIGHT + 1))
    implementations = {"ours": returning(RIGHT), "torch": returning(RIGHT + 1), "liger": returning(RIGHT + 1)}
    prepared = Prepared(implementations, expected, expected_of={"torch": other})
    result = runner.run_case(Case("x", 64, lambda device: prepared), "test", CPU, EFFORT, 50.0, None)
    assert [m.status for m in result.measurements.values()] == ["ok", "ok", "wrong"]


@pytest.mark.parametrize("wrong", [RIGHT + 1, RIGHT[:4], RIGHT * torch.nan], ids=["value", "shape", "nan"])
def test_wrong_results_get_no_time(wrong):
    calls = []
    result = run({"ours": lambda: lambda: calls.append(1) or (wrong,), "torch": returning(wrong)})
    assert len(calls) == 1
    assert [m.status for m in result.measurements.values()] == ["wrong", "wrong"]
    assert result.microseconds("ours") is None
    assert result.best_peer is None
    assert result.ratio is None
    assert not result.ours_is_sound
    row = next(line for line in printed(result).splitlines() if line.strip().startswith("doubling"))
    assert row.split()[5:] == ["wrong", "-", "-", "-", "-", "wrong", "-", "-"]


def test_a_missing_result_is_wrong():
    assert run({"ours": returning()}).measurements["ours"].status == "wrong"


def test_only_peers_are_judged_on_average():
    one_off = RIGHT.clone()
    one_off[3] += 2e-5
    expected = [Expected(RIGHT.double(), torch.float32)]
    assert mean_excess([one_off], expected) < 1 < worst_excess([one_off], expected)
    result = run({"ours": returning(one_off), "torch": returning(one_off)})
    assert [m.status for m in result.measurements.values()] == ["wrong", "ok"]
    assert result.measurements["torch"].worst_error > 1


def test_a_failure_is_recorded_and_the_rest_goes_on():
    def cannot_build():
        raise ImportError("no\nsuch   module")

    def cannot_call():
        raise RuntimeError("out of luck")

    result = run({"compile": cannot_build, "liger": lambda: cannot_call, "ours": returning(RIGHT)})
    assert result.measurements["compile"].error == "ImportError: no such module"
    assert result.measurements["liger"].error == "RuntimeError: out of luck"
    assert result.ours_is_sound
    text = printed(result)
    assert text.count("failed") == 4  # two cells, two lines that say why
    assert "out of luck" in text


def test_a_failure_while_timing_is_recorded():
    calls = []

    def call():
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("broke")
        return (RIGHT,)

    result = run({"ours": lambda: call, "torch": returning(RIGHT)})
    assert result.measurements["ours"].status == "failed"
    assert result.measurements["torch"].status == "ok"


@pytest.mark.parametrize(("kind", "rounds"), [("device", 1), ("wall", 2)])
def test_what_is_timed_is_made_after_the_check_and_dropped_before_the_next(kind, rounds):
    alive, most, made = [], [], []

    class Timed:
        def __init__(self):
            alive.append(1)
            made.append(1)

        def __call__(self):
            most.append(len(alive))
            return ()

        def __del__(self):
            alive.pop()

    checked = {"ours": returning(RIGHT), "torch": returning(RIGHT), "liger": returning(RIGHT + 1)}
    timed = {"ours": Timed, "torch": Timed, "liger": lambda: pytest.fail("made, though it is wrong")}
    prepared = Prepared(checked, [Expected(RIGHT.double(), torch.float32)], timed)
    result = runner.run_case(Case("a", 64, lambda device: prepared, kind), "test", CPU, EFFORT, 50.0)
    assert [m.status for m in result.measurements.values()] == ["ok", "ok", "wrong"]
    assert result.microseconds("torch") > 0
    assert max(most) == 1
    assert not alive
    assert len(made) == 2 * rounds


def test_a_failure_to_make_what_is_timed_is_recorded():
    def cannot_build():
        raise MemoryError("too large")

    prepared = Prepared({"ours": returning(RIGHT)}, [Expected(RIGHT.double(), torch.float32)], {"ours": cannot_build})
    result = runner.run_case(Case("a", 64, lambda device: prepared), "test", CPU, EFFORT, 50.0)
    assert result.measurements["ours"].error == "MemoryError: too large"


def test_a_case_that_cannot_be_built_fails_alone():
    def make(device):
        raise MemoryError("too large")

    result = runner.run_case(Case("large", 8, make), "test", CPU, EFFORT, 50.0)
    assert result.measurements["ours"].status == "failed"


def test_recorded_peers_count_as_peers():
    recorded = {"nvidia apex": Measurement("nvidia apex", "recorded", microseconds=1e-6)}
    result = run({"ours": returning(RIGHT)}, recorded=recorded)
    assert result.best_peer == "nvidia apex"
    assert "nvidia apex us" in printed(result)


def test_results_keep_the_order_of_registration():
    result = run(
        {"ours": returning(RIGHT), "torch": returning(RIGHT)}, recorded={"nvidia apex": Measurement("x", "ok")}
    )
    assert list(result.measurements) == [registry.OURS, "torch", "nvidia apex"]


def test_a_narrow_terminal_cuts_nothing():
    peer = Measurement("nvidia apex_fast", "recorded", microseconds=123.45)
    ours = Measurement("ours", "ok", microseconds=100.0)
    case = CaseResult("layer_norm bfloat16 16384x1024 fwd", "norm", "device", 64, 50.0, {"ours": ours, "nvidia": peer})
    console = Console(file=io.StringIO(), width=80)
    print_report(Report({}, 50.0, cases=[case]), console)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    row = next(line for line in text.splitlines() if "layer_norm" in line)
    assert row.split() == ["layer_norm", "bfloat16", "16384x1024", "fwd", "100.0", "nvidia", "123.5", "0.81"]
