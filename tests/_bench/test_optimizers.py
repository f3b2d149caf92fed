"""The benchmark of optimizers: its parameter sets, its cases, and that all implementations agree on small sets."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from apex._bench import parameter_sets, registry, runner, selection, timing
from apex._bench.cases import optimizers
from apex._bench.list_passes import PASSES
from apex._bench.problems import Running

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EFFORT = timing.Effort(warmup=0.1, repeat=0.1, wall_rounds=1, host_batches=1)
NAMES = [algorithm.name for algorithm in (*optimizers.ALGORITHMS, *PASSES)]
ON_CPU = [algorithm.name for algorithm in (*optimizers.ALGORITHMS, *PASSES) if not algorithm.gpu_only]


def cases(device: torch.device, **options: bool) -> dict[str, registry.Case]:
    return {case.name: case for _, case in selection.select(["optimizers"], device, **options)}


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the same make, but small, and of those that are timed every fourth tensor."""
    resnet, few = parameter_sets.resnet50, parameter_sets.small_tensors
    monkeypatch.setattr(parameter_sets, "resnet50", lambda width=64: resnet(2, classes=5))
    monkeypatch.setitem(parameter_sets.SETS, "resnet50", lambda: resnet(4, classes=5)[::4])
    monkeypatch.setitem(parameter_sets.SETS, "1000_small", lambda: few(6))


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [("resnet50", 161, 25_557_032), ("gpt1.3b", 290, 1_315_719_168), ("1000_small", 1000, 912_000)],
)
def test_parameter_sets(name: str, tensors: int, elements: int) -> None:
    shapes = parameter_sets.SETS[name]()
    assert len(shapes) == tensors
    assert parameter_sets.elements(shapes) == elements


def test_the_shapes_of_resnet50_are_those_of_torchvision() -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = models.resnet50()
    assert sorted(parameter_sets.resnet50()) == sorted(tuple(param.shape) for param in model.parameters())


@pytest.mark.parametrize(
    ("device", "sets"), [(CPU, optimizers.CPU_SETS), (GPU, optimizers.GPU_SETS)], ids=["cpu", "gpu"]
)
def test_every_algorithm_on_every_set(device: torch.device, sets: tuple[str, ...]) -> None:
    names = ON_CPU if device is CPU else NAMES
    assert list(cases(device)) == [f"{name} {parameters}" for parameters in sets for name in names]


def test_a_quick_run_has_the_smaller_set() -> None:
    assert list(cases(CPU, quick=True)) == [f"{name} 1000_small" for name in ON_CPU]
    assert list(cases(GPU, quick=True)) == [f"{name} resnet50" for name in NAMES]


def test_bytes_moved() -> None:
    found = cases(GPU)
    per_element = {name: case.bytes_moved / 25_557_032 for name, case in found.items() if name.endswith("resnet50")}
    assert per_element == {
        "adamw fp32 resnet50": 28,
        "adamw bf16+master resnet50": 28,
        "distributed adamw fp32 resnet50": 28,
        "sgd momentum fp32 resnet50": 20,
        "lamb fp32 resnet50": 44,
        "novograd fp32 resnet50": 24,
        "adagrad fp32 resnet50": 20,
        "adadelta fp32 resnet50": 28,
        "rmsprop fp32 resnet50": 20,
        "adamp fp32 resnet50": 40,
        "nadam fp32 resnet50": 28,
        "radam fp32 resnet50": 28,
        "lion fp32 resnet50": 20,
        "ademamix fp32 resnet50": 36,
        "schedule-free adamw fp32 resnet50": 28,
        "adamw bf16, int8 state resnet50": 12,
        **({"muon fp32 resnet50": 32} if hasattr(torch.optim, "Muon") else {}),
        "l2norm resnet50": 4,
        "scale+overflow resnet50": 8,
        "clip_grad_norm resnet50": 12,
    }
    assert found["adamw fp32 gpt1.3b"].bytes_moved == 28 * 1_315_719_168


def test_what_is_checked_elsewhere_says_so() -> None:
    assert "resnet50" in cases(GPU)["adamw fp32 gpt1.3b"].note
    assert cases(GPU)["adamw fp32 resnet50"].note is None
    result = runner.CaseResult("a", "f", "wall", 1, 1.0, {}, "checked elsewhere")
    assert result.as_json()["note"] == "checked elsewhere"


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("parameters", optimizers.CPU_SETS)
@pytest.mark.usefixtures("small_sets")
def test_all_implementations_agree(parameters: str, name: str) -> None:
    result = runner.run_case(cases(CPU)[f"{name} {parameters}"], "optimizers", CPU, EFFORT, 50.0)
    assert result.measurements["ours"].status == "ok", result.measurements["ours"]
    assert len(result.measurements) > 1
    for measurement in result.measurements.values():
        assert measurement.status == "ok", measurement
        assert measurement.microseconds > 0


@pytest.mark.usefixtures("small_sets")
def test_a_wrong_optimizer_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = dataclasses.replace(
        optimizers.ALGORITHMS[0], ours=optimizers._ours("FusedAdam", lr=0.0101, weight_decay=0.1)
    )
    monkeypatch.setattr(optimizers, "ALGORITHMS", (algorithm,))
    result = runner.run_case(cases(CPU)["adamw fp32 1000_small"], "optimizers", CPU, EFFORT, 50.0)
    assert result.measurements["ours"].status == "wrong"
    assert result.measurements["ours"].microseconds is None
    assert result.measurements["torch_fused"].status == "ok"


@pytest.mark.usefixtures("small_sets")
def test_a_scaling_that_misses_overflows_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = next(each for each in PASSES if each.name == "scale+overflow")

    def blind(params):
        running = scaling.peers["torch_foreach"](params)
        return Running(running.step, lambda: [*running.results()[:2], [torch.zeros(1)]])

    monkeypatch.setattr(optimizers, "PASSES", (dataclasses.replace(scaling, ours=blind),))
    result = runner.run_case(cases(CPU)["scale+overflow 1000_small"], "optimizers", CPU, EFFORT, 50.0)
    assert result.measurements["ours"].status == "wrong"
    assert result.measurements["torch"].status == "ok"
