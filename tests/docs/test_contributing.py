"""The op that CONTRIBUTING.md shows in full works as it stands there, in every command and every common test."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import apex
import apex.ops
from apex._bench import sweep
from apex._bench.check import worst_excess
from apex._bench.selection import select
from apex._cli.build.calls import parse_call
from apex.ops import _compile_ahead, _library, all_families
from apex.ops._examples import Example, all_examples, self_check
from tests import test_arguments
from tests.ops import test_examples as common
from tests.support import public_calls
from tests.support.harness import Route, opcheck, routes

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    """The page's files, in folders that belong to the packages `apex` and `apex.ops`."""
    pytest.importorskip("triton")
    source = tmp_path_factory.mktemp("src")
    files = re.findall(r"`src/(apex/[\w/]+\.py)`.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(files) == 6
    for path, code in files:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(code)
    apex.__path__.append(str(source / "apex"))
    apex.ops.__path__.append(str(source / "apex/ops"))
    importlib.invalidate_caches()
    (example,) = all_examples()["squared_relu"]
    yield example
    apex.__path__.pop()
    apex.ops.__path__.pop()
    for name in [name for name in sys.modules if "squared_relu" in name]:
        del sys.modules[name]
    _library.FAMILIES.pop("squared_relu")


@pytest.mark.parametrize("route", routes())
def test_common_tests_take_it(example: Example, route: Route) -> None:
    common.test_results_are_exact_and_the_same_twice(example, route)
    common.test_memory_layouts(example, route)
    common.test_strided_tensors_and_gradients(example, route)
    common.test_no_rows(example, route)
    common.test_each_gradient_alone(example, route)
    common.test_activation_checkpointing(example, route)
    with _library.implementation(route.implementation):
        assert self_check(all_families()["squared_relu"], torch.device(route.device)) <= 1
        opcheck(route, torch.ops.apex.squared_relu.default, (torch.randn(3, 40, device=route.device),))


def test_derivatives(example: Example) -> None:
    common.test_the_peer_of_benchmarks_is_right(example)
    common.test_derivatives(example)


def test_wrong_arguments_of_the_public_function_are_refused(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {call.name: call for call in public_calls.calls()}
    monkeypatch.setattr(test_arguments, "CALLS", calls)
    test_arguments.test_wrong_values_are_refused_by_name("squared_relu")


def test_commands_know_it(example: Example) -> None:
    for _, case in select(["squared_relu"], CPU):
        prepared = case.make(CPU)
        for make in prepared.implementations.values():
            assert worst_excess(make()(), prepared.expected) <= 1
    assert [case.name for _, case in select(["squared_relu"], torch.device("cuda"))] == [
        "squared_relu bfloat16 16384x4096 fwd",
        "squared_relu bfloat16 16384x4096 bwd",
    ]
    ((_, name, make),) = sweep.drawn_cases(sweep.sweep_families("squared_relu"), 1, 0, CPU)
    assert name.startswith("squared_relu squared_relu ")
    assert set(make()) == {"fwd", "bwd"}
    with _compile_ahead.planning(_compile_ahead.GPUS["sm_90"]) as launches:
        parse_call("squared_relu:64x512", "bfloat16").run(torch.device("meta"))
    names = [launch.prepared.kernel.name for launch in launches]
    assert names == ["squared_relu_forward", "squared_relu_backward"]
