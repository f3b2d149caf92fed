"""Fake tensors in place of a GPU's while launches are planned: the ops that `apex build` knows, both passes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from apex._cli.build.calls import _run_op, known_ops
from apex.ops import _compile_ahead, _library
from apex.ops._launch import Launch
from apex.ops.multi_tensor.flat import overlapping
from apex.optimizers import FusedAdam


def names(launches: Sequence[Launch]) -> list[str]:
    return [launch.prepared.kernel.name for launch in launches]


@pytest.mark.parametrize("name", known_ops())
def test_fake_tensors_are_launched_like_those_of_the_device_meta(name: str) -> None:
    op = known_ops()[name]
    shape = tuple(map(int, op.sizes[1].split("x")))
    with _compile_ahead.planning(_compile_ahead.GPUS["sm_90"]) as expected:
        _run_op(op, shape, torch.bfloat16, torch.device("meta"))
    with (
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        _compile_ahead.planning(_compile_ahead.GPUS["sm_90"]) as found,
    ):
        warnings.simplefilter("ignore")
        _run_op(op, shape, torch.bfloat16, torch.device("cpu"))
    assert names(found) == names(expected) != []


def test_fake_tensors_stand_for_nothing_else() -> None:
    with FakeTensorMode():
        tensor = torch.empty(3)
    assert not _library.is_stand_in(tensor)
    assert not _library.on_gpu(tensor)
    with _compile_ahead.planning(_compile_ahead.GPUS["sm_90"], keep=False) as launches:
        assert _library.is_stand_in(tensor)
        assert _library.on_gpu(tensor)
        assert not _library.is_stand_in(torch.empty(3))
        step([torch.zeros(5, device="meta")])
    assert len(launches) == 0


def step(values: list[Tensor]) -> None:
    parameters = [nn.Parameter(value) for value in values]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    FusedAdam(parameters).step()


def test_tensors_without_memory_do_not_overlap() -> None:
    values = [torch.zeros(5, device="meta"), torch.zeros(3, device="meta")]
    assert overlapping(values) == set()
    with _compile_ahead.planning(_compile_ahead.GPUS["sm_90"]) as launches:
        step(values)
    assert len(launches) == 1  # of all parameters, as on a GPU
    whole = torch.zeros(8)
    assert overlapping([whole[:5], whole[4:], torch.zeros(3)]) == {0, 1}
