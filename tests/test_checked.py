"""Arguments of other kinds than the annotations say are refused by name, before anything happens."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import os
import pkgutil
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from apex import _arguments
from apex._arguments import AtLeast, Count, HasGroups, Index, Stateful, checked
from apex._memory import estimate_memory
from apex.booster import Booster
from apex.booster.checkpoint_io import CheckpointIO
from apex.checkpoint import Series
from apex.contrib.sparsity import ASP
from apex.fp8 import Converted
from apex.transformer.enums import AttnMaskType, ModelType
from apex.transformer.moe import MoESubmodules

# All functions of these are checked, but for those below.
PACKAGES = ("apex.transformer", "apex.fp8")
ELSEWHERE = [estimate_memory, *(each for owner in (Booster, CheckpointIO, ASP) for each in vars(owner).values())]
UNCHECKED = {
    "sum_over_model, shapes_of_stages, only, wanted, check_scaling, make_history": "called by the library alone",
    "GradScaler.__init__, FusedScaleMaskSoftmax.forward": "check their arguments themselves",
    "Float8Linear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward": "call functions that check",
    "FusedScaleMaskSoftmax.is_kernel_available, GenericFusedScaleMaskSoftmax.is_kernel_available": "ignore them",
    "FusedScaleMaskSoftmax.forward_fused_softmax, FusedScaleMaskSoftmax.forward_torch_softmax": "are parts of forward",
    "NumMicroBatchesCalculator.update": "is abstract",
    "PackedSeqParams.__init__": "is read by attention, which checks",
    "TopKRouter.route, GroupedMLP.routed, MoEOptions.check_experts, MoEOptions.has_experts": "called by layers",
    "seeded, own_random_numbers": "called by layers too",
    "MoESubmodules.__init__": "is read by MoELayer, which calls the classes",
    "MoEOptions.__init__": "is part of TransformerConfig, which checks its values by name",
    "gather_as_usual, gather_in_float8, size_divisor, whole_rows, GatheredWeight.__init__": "called by apex.fp8 alone",
    "ShardedWeight.__init__, ShardedWeight.fsdp_pre_all_gather, ShardedWeight.fsdp_post_all_gather": "called by FSDP2",
}
_DISPATCHERS = ("MoETokenDispatcher", "MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher")
_STEPS = ("prepare", "dispatch_preprocess", "token_dispatch", "dispatch_postprocess")
_STEPS += ("combine_preprocess", "token_combine", "combine_postprocess", "__init__")
UNCHECKED[", ".join(f"{name}.{step}" for name in _DISPATCHERS for step in _STEPS)] = "called by MoELayer"
VALUES: dict[str, Any] = {
    "None": None,
    "a string": "text",
    "a list": [object()],
    "an array": numpy.ones(3, numpy.float32),
    "an object": object(),
    "a fraction": 1.5,
    "zero": 0,
    "a negative number": -1,
    "a tensor": torch.ones(2, 3),
    "a dtype": torch.float32,
}
ACCEPTED: dict[Any, str] = {
    Tensor: "a tensor",
    type(None): "None",
    str: "a string",
    bool: "zero, a negative number",
    int: "zero, a negative number",
    float: "zero, a negative number, a fraction",
    torch.dtype: "a dtype",
}
GOOD: dict[Any, Any] = {
    Tensor: torch.ones(2, 3),
    nn.Module: nn.Linear(2, 2),
    type(None): None,
    str: "text",
    bool: True,
    int: 1,
    float: 1.0,
    torch.dtype: torch.float32,
    Any: None,
    Stateful: torch.optim.SGD([torch.zeros(1)]),
    HasGroups: torch.optim.SGD([torch.zeros(1)]),
    ModelType: ModelType.encoder_or_decoder,
    AttnMaskType: AttnMaskType.padding,
    os.PathLike: "path",
    Converted: Converted("layer", 1, 1, ""),
    Series: Series("folder", sharded=True),
    MoESubmodules: MoESubmodules(),
}


def public_functions() -> dict[str, Callable[..., Any]]:
    """Return the functions, constructors and methods that public modules of the packages define, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for package in PACKAGES:
        root = importlib.import_module(package)
        names = [package, *(each.name for each in pkgutil.walk_packages(root.__path__, f"{package}."))]
        for name in names:
            if "._" not in name and ".testing" not in name:
                for key, value in vars(importlib.import_module(name)).items():
                    if not key.startswith("_") and getattr(value, "__module__", "") in names:
                        found.update(_callables(key, value))
    return {name: each for name, each in found.items() if "._" not in each.__module__}


def _callables(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    if inspect.isfunction(value):
        yield name, value
    elif inspect.isclass(value) and not issubclass(value, torch.autograd.Function):
        for key, attribute in vars(value).items():
            method = getattr(attribute, "__func__", attribute)
            if inspect.isfunction(method) and (key == "__init__" or not key.startswith("_")):
                yield f"{value.__name__}.{key}", method


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of all arguments, those of `Unpack` included, in the order of the signature."""
    hints = typing.get_type_hints(function, include_extras=True)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hints.get(name)) is Unpack:
            found.update(typing.get_type_hints(typing.get_args(hints[name])[0], include_extras=True))
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            found[name] = hints.get(name, Any)
    return found


def leaves(hint: Any) -> list[Any]:
    return list(typing.get_args(hint)) if typing.get_origin(hint) in (typing.Union, types.UnionType) else [hint]


def good(hint: Any) -> Any:
    """Return a value that an annotation accepts."""
    hint = leaves(hint)[0]
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return 1
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Iterable):
        return [good(typing.get_args(hint)[0])]
    if origin is collections.abc.Callable or hint is Callable:
        return print
    if origin is type or hint is type:
        return nn.Linear
    if origin in (dict, collections.abc.Mapping):
        return {}
    return GOOD[origin or hint]


def wrong(hint: Any) -> dict[str, Any]:
    """Return values that an annotation does not accept, by what they are."""
    left = dict(VALUES)
    for leaf in leaves(hint):
        if leaf in (Any, object):
            return {}
        accepted = ACCEPTED.get(leaf, "")
        if typing.get_origin(leaf) is typing.Annotated:
            least = next(each.least for each in typing.get_args(leaf) if isinstance(each, AtLeast))
            accepted = "" if least else "zero"
        elif leaf is object or (typing.get_origin(leaf) in (list, Sequence) and Any in typing.get_args(leaf)):
            accepted = "a list"
        for name in accepted.split(", "):
            left.pop(name, None)
    return left


FUNCTIONS = public_functions()
OTHERS = [getattr(each, "__func__", each) for each in ELSEWHERE]
FUNCTIONS |= {each.__qualname__: each for each in OTHERS if getattr(each, "is_checked", False)}


def test_public_functions_are_checked() -> None:
    listed = {name for names in UNCHECKED for name in names.split(", ")}
    missing = [
        name
        for name, function in FUNCTIONS.items()
        if any(map(wrong, hints_of(function).values()))
        and not getattr(function, "is_checked", False)
        and name not in listed
    ]
    assert not missing, f"put @checked of apex._arguments before {', '.join(missing)}"
    assert len(FUNCTIONS) > 150


@pytest.mark.parametrize("name", [name for name, each in FUNCTIONS.items() if getattr(each, "is_checked", False)])
def test_wrong_kinds_are_refused_by_name(name: str) -> None:
    function = FUNCTIONS[name]
    hints = hints_of(function)
    values = {key: good(hint) for key, hint in hints.items()}
    failures = []
    for key, hint in hints.items():
        for what, value in wrong(hint).items():
            try:
                function(**{**values, key: value})
            except (TypeError, ValueError) as error:
                place = traceback.extract_tb(error.__traceback__)[-1].filename
                if not str(error).startswith(f"{key} must be ") or place != _arguments.__file__:
                    failures.append(f"{what} for {key}: {error}")
            except Exception as error:
                failures.append(f"{what} for {key}: {type(error).__name__}: {error}")
            else:
                failures.append(f"{what} for {key} is accepted")
    assert not failures, "\n".join(failures)


@checked
def everything(
    tensor: Tensor | None = None,
    count: Count = 1,
    index: Index | None = None,
    number: float = 0.0,
    flag: bool = False,
    sizes: Sequence[Index] = (),
    names: list[str] | str = "a",
    function: Callable[..., Any] = print,
    *others: Any,
    dtype: torch.dtype = torch.float32,
) -> str:
    return "called"


@pytest.mark.parametrize(
    "values",
    [
        {
            "tensor": nn.Parameter(torch.ones(1)),
            "count": numpy.int64(3),
            "index": torch.tensor(0),
            "sizes": torch.Size([1]),
        },
        {"number": numpy.float32(1), "flag": numpy.bool_(True), "names": ["a", "b"], "function": nn.ReLU()},
        {"number": torch.tensor(2.0), "flag": 1, "sizes": [0], "names": ("a",), "function": len},
        {"number": 3, "flag": torch.tensor(True), "sizes": ()},
    ],
)
def test_values_that_mean_the_same_are_accepted(values: dict[str, Any]) -> None:
    assert everything(**values) == "called"
    assert everything(*[values.get(name) for name in ("tensor",)], **{k: v for k, v in values.items() if k != "tensor"})


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"count": 0}, ValueError, "count must be an integer of at least 1, got 0"),
        ({"index": -1}, ValueError, "index must be an integer of at least 0 or None, got -1"),
        (
            {"sizes": [3, -1]},
            ValueError,
            r"sizes must be a list of elements that are each .* at least 0, got \[3, -1\]",
        ),
        ({"sizes": "12"}, TypeError, "sizes must be a list"),
        ({"names": [1]}, TypeError, r"names must be a list of elements that are each a string or a string, got \[1\]"),
        ({"tensor": [torch.ones(2)]}, TypeError, r"tensor must be a tensor or None, got \[a tensor of shape \[2\] and"),
        ({"number": torch.ones(2)}, TypeError, "number must be a number, got a tensor of shape"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got 'float32'"),
        ({"flag": torch.ones(1)}, TypeError, "flag must be True or False, got a tensor"),
    ],
)
def test_messages(values: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        everything(**values)


def test_arguments_by_position_are_checked() -> None:
    with pytest.raises(TypeError, match="tensor must be a tensor or None, got 3"):
        everything(3)
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got -2"):
        everything(None, -2)
    assert everything(None, 2, 0, 1.0, True, (), "a", print, object(), object()) == "called"


def test_checked_functions_are_those_they_were() -> None:
    assert everything.__name__ == "everything"
    assert list(inspect.signature(everything).parameters)[:3] == ["tensor", "count", "index"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        everything(unknown=1)  # type: ignore[call-arg]
