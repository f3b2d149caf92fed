"""Random cases beside PyTorch's operators, on the CPU with tiny shapes: what is drawn, checked, written and printed."""

from __future__ import annotations

import gc
import json

import pytest
import torch
import typer

from apex._bench import sweep
from apex._bench.sweep_cases import families
from apex._cli.bench.command import run_bench
from apex._cli.console import make_console
from apex.ops._examples import Make, Random

CPU = torch.device("cpu")


def run(path, families: str, **options) -> int:
    return run_bench([], output=path, device="cpu", sweep=families, **{"cases": 3, **options})


@pytest.mark.parametrize("family", families())
def test_results_of_every_family_are_right(family, tmp_path, capsys):
    assert run(tmp_path / "r.json", family) == 0
    printed = capsys.readouterr().out
    assert f"{family}: " in printed
    assert "over 1.05: " in printed
    written = json.loads((tmp_path / "r.json").read_text())
    assert (written["sweep"], written["cases"], written["seed"]) == (family, 3, 0)
    assert len(written["passes"]) == (3 if family == "optimizers" else 6)
    for row in written["passes"]:
        assert row["error"] is None
        assert row["events_ratio"] > 0
        assert "ours" in row["events"]


def test_a_case_depends_on_seed_family_and_number_alone():
    def names(families: list[str], cases: int, seed: int, words: str | None = None) -> list[str]:
        return [name for _, name, _ in sweep.drawn_cases(families, cases, seed, torch.device("cuda"), words)]

    few, many = names(["softmax"], 5, 1), names(["rope", "softmax"], 40, 1)
    assert many[40:45] == few
    assert names(["softmax"], 5, 2) != few
    assert names(["rope", "softmax"], 40, 1, "SOFTMAX causal") == [
        name for name in many if name.startswith("softmax causal")
    ]


@pytest.mark.parametrize("layout", ["", "sliced", "oddly sliced", "offset", "transposed"])
def test_layouts(layout):
    x = Make(torch.float16, CPU, layout=layout).normal(2, 3, 10)
    assert x.shape == (2, 3, 10)
    expected = {"": (30, 10, 1), "sliced": (222, 74, 1), "oddly sliced": (39, 13, 1), "transposed": (10, 20, 1)}
    assert x.stride() == expected.get(layout, (30, 10, 1))
    assert x.storage_offset() == (layout == "offset")


def test_sizes_stay_within_the_most():
    for number in range(200):
        random = Random(str(number), 1 << 12)
        columns = random.length(32, 20000)
        assert 1 <= random.rows(columns) * columns <= 2 * random.most
        assert random.size(16, 4096, 8) % 8 == 0


def test_a_wrong_result_is_told_and_has_no_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "worst_excess", lambda actual, expected: 7.0)
    assert run(tmp_path / "r.json", "glu", cases=1) == 1
    row = json.loads((tmp_path / "r.json").read_text())["passes"][0]
    assert row["error"] == "error is 7 times the tolerance"
    assert row["events"] == {}
    assert "wrong: glu" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [0, 1])
def test_what_is_slower_is_measured_again_at_the_end_and_the_quicker_times_count(tmp_path, monkeypatch, kind):
    asked = []

    def compare(calls, device, rounds):
        asked.append(rounds)
        times = [{"ours": 0.5, "torch": 1.0}, {"ours": 0.5, "torch": 1.0}]
        if len(asked) == 1:
            times[kind] = {"ours": 2.0, "torch": 0.8}
        elif rounds == sweep.ROUNDS_WHERE_SLOWER:
            times[kind] = {"ours": 1.2, "torch": 1.0}
        return times

    monkeypatch.setattr(sweep, "compare", compare)
    run(tmp_path / "r.json", "optimizers", cases=2)
    assert asked == [sweep.ROUNDS, sweep.ROUNDS, sweep.ROUNDS_WHERE_SLOWER]
    slower, other = json.loads((tmp_path / "r.json").read_text())["passes"]
    assert slower[("gpu", "events")[kind]] == {"ours": 1.2, "torch": 0.8}
    assert (slower["gpu_ratio"], slower["events_ratio"])[kind] == 1.5
    assert other["gpu_ratio"] == other["events_ratio"] == 0.5


def test_rounds_take_turns_without_the_garbage_collector_and_the_quickest_counts(monkeypatch):
    timed, collecting = [], []
    monkeypatch.setattr(sweep, "_host", lambda call, device: call())

    def call(name, times):
        def timed_call():
            timed.append(name)
            collecting.append(gc.isenabled())
            return next(times)

        return timed_call

    calls = {"ours": call("ours", iter([9, 9, 9, 5, 3, 4])), "torch": call("torch", iter([9, 9, 9, 1, 2, 7]))}
    assert sweep.compare(calls, CPU, 3) == ({}, {"ours": 3, "torch": 1})
    assert timed[6:] == ["ours", "torch", "torch", "ours", "ours", "torch"]
    assert not any(collecting[6:])
    assert gc.isenabled()


def test_the_file_is_whole_after_every_case(tmp_path, monkeypatch):
    measured, seen = sweep._measure, []

    def measure(*arguments):
        if seen:
            seen.append(len(json.loads((tmp_path / "r.json").read_text())["passes"]))
            raise KeyboardInterrupt
        seen.append(0)
        return measured(*arguments)

    monkeypatch.setattr(sweep, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r.json", "glu")
    assert seen == [0, 2]


def test_summary_counts_and_orders(capsys):
    rows = [
        {"case": f"case {ratio}", "gpu": {"ours": 100 * ratio, "torch": 100.0}, "gpu_ratio": ratio}
        | {"events_ratio": None, "error": None}
        for ratio in (0.4, 1.3, 1.05, 2.0)
    ]
    assert sweep._ratio({"ours": 1.0, "torch": 4.0, "torch_foreach": 2.0}) == 0.5
    sweep.print_summary("glu", rows, 1.0, make_console())
    printed = capsys.readouterr().out
    assert "on the GPU: to 0.5: 1  to 0.7: 0  to 0.9: 0  to 1: 0  to 1.05: 1  to 1.2: 0  to 1.5: 1  more: 1" in printed
    assert "over 1.05: 2 of 4 (50.0%) passes" in printed
    assert printed.index("case 2.0") < printed.index("case 1.3") < printed.index("case 0.4")


def test_summary_counts_cases_by_both_passes_together(capsys):
    times = {
        "one fwd": (2.0, 1.0),
        "one bwd": (8.0, 9.5),
        "two fwd": (2.0, 1.0),
        "two bwd": (3.0, 3.5),
        "three": (1.0, 1.0),
    }
    rows = [
        {"case": case, "events": {"ours": ours, "torch": 20.0, "torch_foreach": best}, "events_ratio": ours / best}
        | {"gpu_ratio": None, "error": None}
        for case, (ours, best) in times.items()
    ]
    sweep.print_summary("glu", rows, 1.0, make_console())
    printed = capsys.readouterr().out
    assert "over 1.05: 2 of 5 (40.0%) passes" in printed
    assert "over 1.05: 1 of 3 (33.3%) cases" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sweep": "nrom"}, "no sweep of nrom; known: all, "),
        ({"sweep": "glu"}, "named with --sweep"),
        (
            {"sweep": "rope,glu", "filter": "nothing", "cases": 2},
            "no case matches 'nothing'; .*--sweep rope,glu --list",
        ),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises(typer.BadParameter, match=message):
        run_bench(["norm"] if options["sweep"] == "glu" else [], device="cpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("family", families())
def test_on_a_gpu(family, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "GPU_ELEMENTS", 1 << 18)
    assert run_bench([], output=tmp_path / "r.json", device="cuda", sweep=family, cases=3) == 0
    assert all(row["gpu_ratio"] > 0 for row in json.loads((tmp_path / "r.json").read_text())["passes"])
