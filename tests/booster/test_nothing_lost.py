"""A boosted model acts as the user's own module: nothing that is set on it, added to it or changed in it is lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

FIRST_CALLS = 4  # they find the weights to copy


class Head(nn.Linear):
    pass


class Net(nn.Module):
    """A model with everything that users set and replace."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = Head(8, 4)
        self.gain = nn.Parameter(torch.rand(8))
        self.register_buffer("shift", torch.ones(4))
        self.calls = 0

    def encode(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) * self.gain

    def freeze(self) -> Net:
        self.body.requires_grad_(False)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.encode(inputs)) * self.temperature + self.shift * float(self.training)


Model = Any


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def layer(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs)


def step(model: Model, optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.backward((model(numbers(6, 8)) - 1).square().mean())
    optimizer.step()


@pytest.fixture
def pair(boost: Callable[..., Any], way: str) -> tuple[Model, Net, Any]:
    """Return a boosted model after some steps, a copy of the user's model, and the boosted optimizer."""
    inner = Net()
    model, optimizer, _ = boost(inner, torch.optim.SGD(inner.parameters(), lr=0.125))
    for _ in range(FIRST_CALLS):
        step(model, optimizer)
    optimizer.zero_grad()
    assert way == "as on a CPU" or len(model._copies.weights) == len([*inner.parameters()])
    return model, copy.deepcopy(inner), optimizer


def assert_alike(model: Model, plain: nn.Module) -> None:
    """Raise unless the models compute the same, under autocast, and have the same state.

    A copy of `gain` leaves activations in bfloat16 that it widens under autocast: their errors are 2^-8.
    """
    inputs = numbers(5, 8) + 0.5
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(inputs)
    close = {"rtol": 0.01, "atol": 0.01} if model._copies is not None else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(model(inputs), expected.float(), **close)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert [*ours] == [*theirs]
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=0)
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in theirs.items()}


def hooked(register: str) -> Callable[[Model], Any]:
    """Return a use of a method that registers a hook; it returns what the hook saw in a forward and backward pass."""

    def use(model: Model) -> Any:
        seen: list[str] = []
        handle = getattr(model, register)(lambda module, *_: seen.append(type(module).__name__))
        with torch.autocast("cpu", torch.bfloat16):
            model(numbers(2, 8).requires_grad_()).float().sum().backward()
        handle.remove()
        model(numbers(2, 8))
        return seen

    return use


def hooked_state(register: str) -> Callable[[Model], Any]:
    def use(model: Model) -> Any:
        seen: list[str] = []
        getattr(model, register)(lambda *args: seen.append(register))
        model.load_state_dict(model.state_dict())
        return seen

    return use


def names(items: Any) -> list[Any]:
    return [
        (name, type(value).__name__ if isinstance(value, nn.Module) else tuple(value.shape)) for name, value in items
    ]


def and_state(use: Callable[[Model], Any]) -> Callable[[Model], Any]:
    """Return a use that also returns the parameters' dtypes, gradients and values."""

    def used(model: Model) -> Any:
        result = use(model)
        assert result is None or result is model, "methods that return the module return the boosted model"
        params = [(name, param.dtype, param.requires_grad, param.grad) for name, param in model.named_parameters()]
        return params, [module.training for module in model.modules()], model.state_dict()

    return used


def zeroed(model: Model) -> Any:
    model(numbers(2, 8)).sum().backward()
    model.zero_grad()


# Uses of names of nn.Module, and what they return, on a boosted model and on the user's own.
USES: dict[str, Callable[[Model], Any]] = {
    "T_destination": lambda model: model.T_destination,
    "add_module": and_state(lambda model: model.add_module("more", layer(2, 2))),
    "apply": and_state(lambda model: model.apply(lambda module: module.train(isinstance(module, nn.Linear)))),
    "bfloat16": and_state(lambda model: model.bfloat16()),
    "buffers": lambda model: [[*model.buffers()], [*model.buffers(recurse=False)]],
    "call_super_init": lambda model: model.call_super_init,
    "children": lambda model: [type(child).__name__ for child in model.children()],
    "compile": lambda model: model.compile(backend="eager"),
    "cpu": and_state(lambda model: model.cpu()),
    "double": and_state(lambda model: model.double()),
    "dump_patches": lambda model: model.dump_patches,
    "eval": and_state(lambda model: model.eval()),
    "extra_repr": lambda model: model.extra_repr(),
    "float": and_state(lambda model: model.float()),
    "get_buffer": lambda model: model.get_buffer("shift"),
    "get_parameter": lambda model: (model.get_parameter("gain"), model.get_parameter("body.0.weight")),
    "get_submodule": lambda model: names([("", model.get_submodule("body.0"))]),
    "half": and_state(lambda model: model.half()),
    "load_state_dict": lambda model: str(model.load_state_dict({"gain": torch.zeros(8)}, strict=False)),
    "modules": lambda model: [type(module).__name__ for module in model.modules()],
    "named_buffers": lambda model: names(model.named_buffers("prefix")),
    "named_children": lambda model: names(model.named_children()),
    "named_modules": lambda model: names(model.named_modules(prefix="prefix")),
    "named_parameters": lambda model: [names(model.named_parameters("p", flag)) for flag in (True, False)],
    "parameters": lambda model: [[*model.parameters()], [*model.parameters(recurse=False)]],
    "register_backward_hook": hooked("register_full_backward_hook"),
    "register_buffer": and_state(lambda model: model.register_buffer("more", torch.ones(3))),
    "register_forward_hook": hooked("register_forward_hook"),
    "register_forward_pre_hook": hooked("register_forward_pre_hook"),
    "register_full_backward_hook": hooked("register_full_backward_hook"),
    "register_full_backward_pre_hook": hooked("register_full_backward_pre_hook"),
    "register_load_state_dict_post_hook": hooked_state("register_load_state_dict_post_hook"),
    "register_load_state_dict_pre_hook": hooked_state("register_load_state_dict_pre_hook"),
    "register_module": and_state(lambda model: model.register_module("more", layer(2, 2))),
    "register_parameter": and_state(lambda model: model.register_parameter("more", nn.Parameter(torch.ones(2)))),
    "register_state_dict_post_hook": hooked_state("register_state_dict_post_hook"),
    "register_state_dict_pre_hook": hooked_state("register_state_dict_pre_hook"),
    "requires_grad_": and_state(lambda model: model.requires_grad_(False)),
    "set_submodule": and_state(lambda model: model.set_submodule("body.1", nn.ReLU())),
    "share_memory": and_state(lambda model: model.share_memory()),
    "state_dict": lambda model: [
        *model.state_dict(prefix="prefix."),
        *model.state_dict(destination={}, keep_vars=True),
    ],
    "to": and_state(lambda model: model.to("cpu", torch.float64)),
    "to_empty": lambda model: names(model.to_empty(device="cpu").named_parameters()),
    "train": and_state(lambda model: model.train(False)),
    "type": and_state(lambda model: model.type(torch.float64)),
    "zero_grad": and_state(zeroed),
}
# Names without a test of their own.
OTHERS = {
    **dict.fromkeys(("cuda", "ipu", "mtia", "xpu"), "as `cpu`, with a device that is not here"),
    **dict.fromkeys(("get_extra_state", "set_extra_state"), "they are called by state_dict, of the user's model"),
    "forward": "the calls of all tests here",
}


@pytest.mark.parametrize("name", [name for name in dir(nn.Module) if not name.startswith("_") and name not in OTHERS])
def test_every_method_of_a_module_does_as_on_the_user_s_own(name: str, pair: Any) -> None:
    assert name in USES, f"add a use of nn.Module.{name}, and see that wrappers delegate it (booster/wrappers.py)"
    model, plain, _ = pair
    assert comparable(USES[name](model)) == comparable(USES[name](plain))


def comparable(value: Any) -> Any:
    """Return a value with lists in place of tensors."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [comparable(item) for item in value]
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value


def set_attribute(model: Model) -> None:
    model.temperature = 0.25
    assert model.temperature == 0.25


def delete_attribute(model: Model) -> None:
    model.temperature = 3.0
    del model.temperature
    assert model.temperature == 1.0


def replace_module(model: Model) -> None:
    model.head = layer(8, 4)


def replace_inner_module(model: Model) -> None:
    model.body[2] = layer(16, 8)


def remove_module(model: Model) -> None:
    del model.body
    model.body = nn.Identity()


def replace_parameter(model: Model) -> None:
    model.gain = nn.Parameter(torch.full((8,), 0.75))
    model.head.weight = nn.Parameter(torch.full((4, 8), 0.5))


def replace_buffer(model: Model) -> None:
    model.shift = torch.full((4,), 2.0)


def replace_method(model: Model) -> None:
    model.encode = lambda inputs: inputs * 2


def set_training(model: Model) -> None:
    model.training = False


def add_hooks(model: Model) -> None:
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    model.head.register_forward_hook(lambda module, inputs, outputs: outputs + 1)


def parametrize(model: Model) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.head)
    model.head.parametrizations.weight.original0.data.mul_(2)


def prune(model: Model) -> None:
    torch.nn.utils.prune.l1_unstructured(model.head, "weight", amount=0.5)


def clamp(model: Model) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.125, 0.125)


def clamp_data(model: Model) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.125, 0.125)


def set_data(model: Model) -> None:
    for param in model.parameters():
        param.data[..., :2] = 0.3


def exchange_data(model: Model) -> None:
    for param in model.parameters():
        param.data = param.data / 3


def set_vector(model: Model) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) / 3, model.parameters())


def initialise(model: Model) -> None:
    torch.manual_seed(2)
    model.apply(lambda module: nn.init.orthogonal_(module.weight) if isinstance(module, nn.Linear) else None)
    model.body[0].reset_parameters()


def add_noise(model: Model) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(3)) * 2.0**-12)


def resize(model: Model) -> None:
    """Resize a layer as resize_token_embeddings of transformers does: the parameter stays, and its data is another."""
    model.head.weight.data = torch.cat([model.head.weight.data, torch.full((2, 8), 0.5)])
    model.head.bias.data = torch.cat([model.head.bias.data, torch.full((2,), 0.5)])
    model.shift = torch.ones(6)


class Adapted(nn.Module):
    """A layer with an adapter, as those of PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.adapter = base.requires_grad_(False), layer(base.in_features, base.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.adapter(inputs)


def adapt(model: Model) -> None:
    model.head = Adapted(model.head)


def merge(model: Model) -> None:
    adapt(model)
    model(numbers(2, 8)).sum().backward()
    model.zero_grad()
    merged, adapter = model.head.base, model.head.adapter
    merged.weight.data += adapter.weight.data
    merged.bias.data += adapter.bias.data
    model.head = merged


def load(model: Model) -> None:
    model.load_state_dict(state())


def load_part(model: Model) -> None:
    model.body.load_state_dict({name[5:]: value for name, value in state().items() if name.startswith("body.")})


def load_some(model: Model) -> None:
    """Load as PEFT's set_peft_model_state_dict does."""
    model.load_state_dict({"head.weight": state()["head.weight"]}, strict=False)


def load_assigned(model: Model) -> None:
    model.load_state_dict(state(), assign=True)


def state() -> dict[str, Tensor]:
    return {name: value * 1.001 for name, value in Net().state_dict().items()}


CHANGES = [
    *(set_attribute, delete_attribute, replace_module, replace_inner_module, remove_module, replace_parameter),
    *(replace_buffer, replace_method, set_training, add_hooks, parametrize, prune, resize, adapt, merge),
    *(clamp, clamp_data, set_data, exchange_data, set_vector, initialise, add_noise),
    *(load, load_part, load_some, load_assigned),
]


@pytest.mark.parametrize("through", ["wrapper", "old name"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_holds(change: Callable[[Model], None], through: str, pair: Any) -> None:
    """It holds in forward and state dict at once, and after steps that move no weight."""
    model, plain, optimizer = pair
    change(model if through == "wrapper" else model.unwrap())
    change(plain)
    model.calls = plain.calls = 0
    assert_alike(model, plain)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        step(model, optimizer)
    assert_alike(model, plain)


def test_a_changed_weight_is_trained_from_there(pair: Any) -> None:
    model, plain, optimizer = pair
    other = torch.optim.SGD(plain.parameters(), lr=0.125)
    for _ in range(3):
        clamp_data(model)
        clamp_data(plain)
        step(model, optimizer)
        other.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = plain(numbers(6, 8))
        (outputs.float() - 1).square().mean().backward()
        other.step()
    for param, truth in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, truth, rtol=1e-3, atol=1e-4)


def test_containers_are_containers(boost: Callable[..., Any]) -> None:
    inner = nn.Sequential(layer(8, 8), nn.Tanh(), layer(8, 4))
    model, optimizer, _ = boost(inner, torch.optim.SGD(inner.parameters(), lr=0.125))
    for _ in range(FIRST_CALLS):
        step(model, optimizer)
    assert len(model) == 3
    assert [*model] == [*inner]
    assert model[-1] is inner[-1]
    assert bool(model)
    model[1] = nn.ReLU()
    assert type(inner[1]) is nn.ReLU
    del model[1]
    assert model.append(nn.Flatten()) is model
    assert len(inner) == 3
    assert model.insert(0, nn.Identity()) is model
    assert_alike(model, copy.deepcopy(inner))
    named = nn.ModuleDict({"first": nn.Identity()})
    named.forward = lambda inputs: inputs  # type: ignore[method-assign]
    named.append(layer(2, 2)) if hasattr(named, "append") else named.update({"last": layer(2, 2)})
    model, *_ = boost(named, torch.optim.SGD(named.parameters(), lr=0.125))
    assert "first" in model
    assert "second" not in model
    assert [*model.keys()] == [*named.keys()]


@pytest.mark.parametrize("way_to_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_model_of_its_own(way_to_copy: Any, pair: Any) -> None:
    model, plain, optimizer = pair
    twin = way_to_copy(model)
    inner = way_to_copy(model.unwrap())
    clamp(model)
    step(model, optimizer)
    for copied in (twin, inner):
        assert {type(param) for param in copied.parameters()} == {nn.Parameter}
        assert_alike(twin, plain)
    own = torch.optim.Adam(twin.parameters(), lr=1e-3)
    twin(numbers(6, 8)).square().mean().backward()
    own.step()
    assert all(param.grad.dtype == torch.float32 for param in twin.parameters() if param.grad is not None)


def test_methods_of_the_model_compute_in_its_precision(pair: Any) -> None:
    model, plain, _ = pair
    inputs = numbers(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain.encode(inputs)
    torch.testing.assert_close(model.encode(inputs), expected.float(), rtol=0.01, atol=0.01)
    assert not torch.equal(expected.float(), plain.encode(inputs))
    model.encode(inputs).sum().backward()
    assert model.body[0].weight.grad is not None
    # A layer by itself is the user's, with float32 weights.
    torch.testing.assert_close(model.body(inputs), plain.body(inputs), rtol=0, atol=0)
    assert model.freeze() is model
    assert not model.body[0].weight.requires_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exported_models_compute_the_same(pair: Any) -> None:
    model, _, _ = pair
    inputs = numbers(3, 8)
    if torch.__version__ >= "2.9":  # export of 2.6 does not trace calls of parameters()
        program = torch.export.export(model, (inputs,)).module()
        torch.testing.assert_close(program(inputs), model(inputs), rtol=0.01, atol=0.01)
    with pytest.raises(RuntimeError, match=r"trace model.unwrap\(\)"):
        torch.jit.trace(model, inputs)
    traced = torch.jit.trace(model.unwrap(), inputs)
    torch.testing.assert_close(traced(inputs), model.unwrap()(inputs))


def test_the_old_name_of_the_model_is_the_float32_model(pair: Any) -> None:
    model, plain, _ = pair
    net, inputs = model.unwrap(), numbers(3, 8)
    torch.testing.assert_close(net(inputs), plain(inputs), rtol=0, atol=0)
    assert {value.dtype for value in net.state_dict().values()} == {torch.float32}
    net(inputs).sum().backward()
    assert {param.grad.dtype for param in net.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_steps_of_the_old_name_of_the_optimizer(precision: str, boost: Callable[..., Any]) -> None:
    """With a loss scale they would apply gradients that are multiplied by 65536."""
    results = []
    for old in (False, True):
        inner = Net()
        own = torch.optim.SGD(inner.parameters(), lr=0.125)
        model, optimizer, _ = boost(inner, own, precision)
        for _ in range(FIRST_CALLS):
            optimizer.zero_grad()
            optimizer.backward(model(numbers(6, 8)).square().mean())
            if old and precision == "fp16":
                before = copy.deepcopy(inner.state_dict())
                with pytest.raises(RuntimeError, match=r"call step\(\) of the optimizer that boost returned"):
                    own.step()
                torch.testing.assert_close(inner.state_dict(), before, rtol=0, atol=0)
                optimizer.step()
            else:
                (own if old else optimizer).step()
        results.append([param.detach() for param in inner.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
