"""Every public function refuses what it cannot take with the name of the argument, and changes nothing."""

from __future__ import annotations

import re
import traceback
from typing import Any

import numpy
import pytest
import torch

from tests.support.public_calls import Call, calls

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


def wrong_kinds(value: Any) -> dict[str, Any]:
    """By what they are: values that no number and no shape may have."""
    if isinstance(value, bool | torch.Tensor | None):
        return {}
    wrong = {"None": None, "a string": "text", "an object": object(), "a matrix": torch.ones(2, 2)}
    return wrong if isinstance(value, tuple) else {**wrong, "a list of a string": ["text"]}


def wrong_shapes(value: Any) -> dict[str, Any]:
    """By what they are: tensors of as good a dtype with another number of dimensions."""
    if not isinstance(value, torch.Tensor):
        return {}
    return {"a scalar": value.detach().flatten()[0].clone(), "7 dimensions": value.new_ones(1, 2, 3, 1, 2, 3, 2)}


def broadcasts(call: Call) -> bool:
    """Return whether a function takes whatever shapes PyTorch broadcasts, and leaves it to PyTorch to refuse others."""
    owner = call.function if hasattr(call.function, "__name__") else type(call.function)
    return (owner.__module__ or "").startswith("apex.contrib.llm_losses")


@pytest.mark.parametrize("name", CALLS)
def test_wrong_kinds_and_shapes_are_refused_by_name(name: str) -> None:
    """Shapes that do not fit to each other may be told of by the name of any of them."""
    call = CALLS[name]
    failures = []
    for argument, given in call.arguments.items():
        kept = getattr(call.function, "named_parameters", dict)()
        shaped = [each for each, value in call.arguments.items() if isinstance(value, torch.Tensor | tuple)]
        known = [*shaped, "input", *(key.partition("_")[0] for key, _ in kept)]
        shapes = {} if broadcasts(call) else wrong_shapes(given)
        for values, names in ((wrong_kinds(given), [argument]), (shapes, known)):
            for what, value in values.items():
                try:
                    call(**{argument: value})
                except (TypeError, ValueError) as error:
                    inside = "/apex/" in traceback.extract_tb(error.__traceback__)[-1].filename
                    if not inside or not any(re.search(rf"\b{each.strip('_')}", str(error)) for each in names):
                        failures.append(f"{what} for {argument}: {error}")
                except Exception as error:
                    if (name, argument) != ("FusedScaleMaskSoftmax", "mask"):  # the user's function applies it
                        failures.append(f"{what} for {argument}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


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
