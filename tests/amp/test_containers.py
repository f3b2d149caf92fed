"""Containers of tensors that models take and return: cast inside, and of the same type as before."""

import copy
import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.amp._containers import applier, to_type
from tests.amp.common import quiet


@dataclasses.dataclass
class Output:
    logits: Tensor
    count: int = 0
    hidden: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor
    total: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        assert self.total is None, "made anew instead of copied"
        object.__setattr__(self, "total", self.logits + 1)


@dataclasses.dataclass(slots=True)
class Slots:
    logits: Tensor
    unset: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    logits: Tensor


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """A container like Hugging Face's: items are attributes too, and dict methods that change it raise."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("closed")

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Batch(dict):
    """A dict with a constructor and an attribute of its own."""

    def __init__(self, size: int, **items: Any) -> None:
        super().__init__(**items)
        self.size = size


class Images(list):
    def __init__(self, sizes: Any, items: Any) -> None:
        super().__init__(items)
        self.sizes = sizes


class Movable:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, dtype: torch.dtype) -> "Movable":
        return Movable(self.tensor.to(dtype))


@dataclasses.dataclass
class MovableData:
    tensor: Tensor

    def to(self, dtype: torch.dtype) -> "MovableData":
        return MovableData(self.tensor.to(dtype))


Point = namedtuple("Point", "x y")

# Functions that put two tensors into a container, and functions that take them out.
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "dict": (lambda a, b: {"a": a, "b": [b]}, lambda c: (c["a"], c["b"][0])),
    "OrderedDict": (lambda a, b: OrderedDict(b=b, a=a), lambda c: tuple(c.values())[::-1]),
    "defaultdict": (lambda a, b: defaultdict(list, {"a": [a], "b": [b]}), lambda c: (c["a"][0], c["b"][0])),
    "UserDict": (lambda a, b: UserDict(a=a, b=b), lambda c: (c["a"], c["b"])),
    "mappingproxy": (lambda a, b: MappingProxyType({"a": a, "b": b}), lambda c: (c["a"], c["b"])),
    "ModelOutput": (lambda a, b: ModelOutput(loss=a, logits=(b,)), lambda c: (c.loss, c["logits"][0])),
    "Batch": (lambda a, b: Batch(3, a=a, b=b), lambda c: (c["a"], c["b"])),
    "list": (lambda a, b: [a, {"b": b}], lambda c: (c[0], c[1]["b"])),
    "Images": (lambda a, b: Images((1, 2), [a, b]), tuple),
    "UserList": (lambda a, b: UserList([a, b]), tuple),
    "deque": (lambda a, b: deque([a, b], maxlen=2), tuple),
    "tuple": (lambda a, b: (a, (b,)), lambda c: (c[0], c[1][0])),
    "namedtuple": (lambda a, b: Point(a, deque([b])), lambda c: (c.x, c.y[0])),
    "dataclass": (lambda a, b: Output(a, 3, {"b": b}), lambda c: (c.logits, c.hidden["b"])),
    "frozen dataclass": (lambda a, b: Frozen(a), lambda c: (c.logits, c.total)),
    "dataclass with slots": (lambda a, b: Slots(FrozenSlots(a)), lambda c: (c.logits.logits,) * 2),
    "SimpleNamespace": (lambda a, b: SimpleNamespace(a=a, b=[b], name="n"), lambda c: (c.a, c.b[0])),
    "object with to": (lambda a, b: [Movable(a), Movable(b)], lambda c: (c[0].tensor, c[1].tensor)),
    "dataclass with to": (lambda a, b: [MovableData(a), MovableData(b)], lambda c: (c[0].tensor, c[1].tensor)),
}


def halved(value: Any) -> Any:
    return applier(value, lambda each: to_type(torch.float16, each))


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_type(name: str) -> None:
    make, tensors = CONTAINERS[name]
    original = make(torch.ones(2), torch.zeros(3))
    result = halved(original)
    assert type(result) is type(original)
    assert [each.dtype for each in tensors(result)] == [torch.float16] * 2
    assert [each.dtype for each in tensors(original)] == [torch.float32] * 2
    assert [list(each.shape) for each in tensors(result)] == [list(each.shape) for each in tensors(original)]


@pytest.mark.parametrize("name", CONTAINERS)
def test_models_take_and_return_them(name: str) -> None:
    make, tensors = CONTAINERS[name]

    class Model(nn.Module):
        def forward(self, value: Any) -> Any:
            assert [each.dtype for each in tensors(value)] == [torch.float16] * 2
            return value

    given = make(torch.ones(2), torch.zeros(3))
    result = quiet(Model(), opt_level="O2")(given)
    assert type(result) is type(given)
    assert [each.dtype for each in tensors(result)] == [torch.float32] * 2


def test_other_contents_of_containers_are_kept() -> None:
    ones = torch.ones(1)
    made = halved(defaultdict(list, a=ones))
    assert made["missing"] == []
    assert halved(deque([ones, ones], maxlen=2)).maxlen == 2
    assert halved(Batch(3, a=ones)).size == 3
    assert halved(Images((1, 2), [ones])).sizes == (1, 2)
    assert halved(Output(ones, 7)).count == 7
    assert halved(SimpleNamespace(a=ones, name="n")).name == "n"
    output = halved(ModelOutput(loss=ones, logits=ones))
    assert output.loss is output["loss"]
    assert list(output) == ["loss", "logits"]
    largest = halved(torch.max(torch.ones(2, 2), dim=0))
    assert largest.values.dtype == torch.float16
    assert largest.indices.dtype == torch.int64


def test_values_without_tensors_are_passed_on() -> None:
    """Objects may be large, compared by identity, or impossible to copy."""

    class Singleton:
        def __copy__(self) -> None:
            raise AssertionError("copied")

    for value in (
        Output(torch.ones(2, dtype=torch.int64)),
        Output(torch.ones(2).half()),
        defaultdict(list, a=[1, {"b": (2, "text")}]),
        deque([Singleton()]),
        SimpleNamespace(a=Singleton(), b=Output),
        torch.Size((2, 3)),
        Batch(3),
        Singleton(),
        range(3),
        b"bytes",
    ):
        assert halved(value) is value


def test_circles() -> None:
    """A tree whose nodes refer to their parent is cast once, and the references back are kept."""
    parent, child = SimpleNamespace(value=torch.ones(1)), Output(torch.ones(1))
    parent.children, child.hidden = [child], parent
    result = halved(parent)
    assert result.value.dtype == result.children[0].logits.dtype == torch.float16
    assert result.children[0].hidden is parent


def test_functions_that_users_registered_look_inside_too() -> None:
    from apex import amp

    seen = []

    @amp.promote_function
    def function(*args: Any) -> None:
        seen.extend(args)

    quiet(nn.Linear(1, 1), opt_level="O1")
    function(Output(torch.ones(1).half()), deque([torch.ones(1)]))
    assert seen[0].logits.dtype == seen[1][0].dtype == torch.float32


@pytest.mark.parametrize("name", ["dict", "OrderedDict", "list", "tuple", "namedtuple", "defaultdict", "dataclass"])
def test_compiled_models(name: str) -> None:
    make, tensors = CONTAINERS[name]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return make(self.linear(x), x)

    torch._dynamo.reset()
    model = quiet(Model(), opt_level="O2")
    expected = tensors(model(torch.ones(1, 2)))
    result = torch.compile(copy.deepcopy(model), backend="eager")(torch.ones(1, 2))
    assert type(result) is type(make(torch.ones(1), torch.ones(1)))
    for found, value in zip(tensors(result), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, value)


@pytest.mark.skipif(torch.__version__ < "2.11", reason="Dynamo traces fewer constructors of dicts there")
def test_a_dict_that_is_a_dataclass_does_not_split_the_graph_of_a_model_and_its_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> ModelOutput:
            return ModelOutput(logits=self.linear(x))

    def loss(x: Tensor) -> Tensor:
        outputs = model(x)
        assert list(outputs) == ["logits"]
        return outputs.logits.square().sum()

    torch._dynamo.reset()
    model = quiet(Model(), opt_level="O2")
    inputs = torch.ones(1, 2)
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(inputs), loss(inputs))
