"""What is no tensor, or no tensor of floats, is refused by every public function with the name of the argument."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

from tests.public_calls import Call, calls

CALLS = {call.name: call for call in calls()}


def wrong_values(call: Call, name: str) -> dict[str, Any]:
    """By what they are: values that `name` may not have."""
    value = call.arguments[name]
    wrong: dict[str, Any] = {"a string": "text", "a list": [1.0], "an array": numpy.ones(3, numpy.float32)}
    if name not in call.optional:
        wrong["None"] = None
    if value.is_floating_point() and name not in call.any_dtype:
        wrong["integers"] = value.detach().long()
    return wrong


@pytest.mark.parametrize("name", CALLS)
def test_wrong_values_are_refused_by_name(name: str) -> None:
    call = CALLS[name]
    call()
    before = {key: value.detach().clone() for key, value in call.tensors().items()}
    failures = []
    for argument in (key for key, value in call.arguments.items() if isinstance(value, torch.Tensor)):
        for what, value in wrong_values(call, argument).items():
            try:
                call(**{argument: value})
            except (TypeError, ValueError) as error:
                if not re.search(rf"\b{argument.strip('_')}", str(error)):
                    failures.append(f"{what} for {argument}: {error}")
            except Exception as error:
                failures.append(f"{what} for {argument}: {type(error).__name__}: {error}")
            else:
                failures.append(f"{what} for {argument} is accepted")
    assert not failures, "\n".join(failures)
    for key, value in call.tensors().items():
        assert torch.equal(value.nan_to_num(7), before[key].nan_to_num(7)), f"{key} has changed"
