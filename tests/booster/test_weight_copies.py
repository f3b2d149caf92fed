"""Half-precision copies of weights are found, left out and dropped as a model's forward pass demands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, normalize
from torch.utils._python_dispatch import _get_current_dispatch_mode

import apex
from apex import optimizers

FIRST_CALLS = 4  # they find the weights that fit


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apex.booster._shorthand._runs_on_accelerator", lambda device: True)


def boosted(inner: nn.Module, lr: float = 0.125) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([param for param in inner.parameters() if param.requires_grad], lr=lr)
    apex.fuse(optimizer, verbose=False)
    return apex.boost(inner, optimizer, device="cpu")[:2]


def train(model: Any, optimizer: Any, inputs: Tensor, calls: int = FIRST_CALLS) -> None:
    for _ in range(calls):
        optimizer.zero_grad()
        optimizer.backward(model(inputs).square().mean())
        optimizer.step()


def copied(model: Any) -> set[str]:
    """Return the names of the weights that have copies."""
    weights = set(model._copies.weights)
    return {name for name, param in model.named_parameters() if param in weights}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Uses(nn.Module):
    """A model of a table and a layer, whose subclasses use the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 4)

    def hidden(self, inputs: Tensor) -> Tensor:
        return inputs @ self.table

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.hidden(inputs))


class Changed(Uses):
    def hidden(self, inputs: Tensor) -> Tensor:
        self.table.data.clamp_(-0.5, 0.5)
        return super().hidden(inputs)


class Renormed(Uses):
    def hidden(self, inputs: Tensor) -> Tensor:
        return embedding(inputs.abs().argmax(1), self.table, max_norm=0.5)


class Replaced(Uses):
    def hidden(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.table.copy_(normalize(self.table))
        return super().hidden(inputs)


class Squared(Uses):
    def hidden(self, inputs: Tensor) -> Tensor:
        return super().hidden(inputs) + 0.01 * self.table.square().sum()


class Sparse(Uses):
    """A graph network, whose sparse matrix has no storage."""

    def hidden(self, inputs: Tensor) -> Tensor:
        return super().hidden(torch.sparse.mm(torch.eye(len(inputs)).to_sparse(), inputs))


@pytest.mark.parametrize("kind", [Uses, Sparse])
def test_weights_of_products_are_copied(kind: Any) -> None:
    model, optimizer = boosted(kind())
    train(model, optimizer, numbers(8, 8))
    assert copied(model) == {"table", "last.weight", "last.bias"}
    assert model.table.dtype == torch.float32
    optimizer.zero_grad()
    optimizer.backward(model(numbers(8, 8)).sum())
    assert model.table.grad.dtype == (torch.bfloat16 if hasattr(Tensor, "grad_dtype") else torch.float32)


@pytest.mark.parametrize("kind", [Changed, Renormed, Replaced, Squared])
def test_weights_that_a_forward_pass_changes_are_not_copied(kind: Any) -> None:
    """A change of a copy would be lost, and with a sum of squares in half precision its digits would."""
    model, optimizer = boosted(kind())
    plain, inputs = kind(), numbers(8, 8)
    other = torch.optim.SGD(plain.parameters(), lr=0.125)
    for _ in range(FIRST_CALLS):
        train(model, optimizer, inputs, 1)
        other.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = plain(inputs)
        outputs.float().square().mean().backward()
        other.step()
    assert copied(model) == {"last.weight", "last.bias"}
    for param, truth in zip(model.parameters(), plain.parameters(), strict=True):
        assert (param - truth).norm() <= 0.01 * truth.norm()


class Methods(Uses):
    """A model whose methods change a weight that its forward pass multiplies, and use it in other ways."""

    def set_table(self, values: Tensor) -> None:
        self.table.data.copy_(values)

    def penalty(self, inputs: Tensor) -> Tensor:
        return self.table.square().sum() * inputs.mean()

    def encode(self, inputs: Tensor) -> Tensor:
        return self.hidden(inputs)


def test_methods_have_copies_of_their_own() -> None:
    model, optimizer = boosted(Methods())
    plain, inputs = Methods(), numbers(8, 8)
    train(model, optimizer, inputs)
    for number in range(FIRST_CALLS):
        values = numbers(8, 8) / (3 + number)
        model.set_table(values)
        plain.set_table(values)
        assert torch.equal(model.table, values)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model.penalty(inputs), plain.penalty(inputs))
            assert torch.equal(model.encode(inputs), plain.encode(inputs).float())
    optimizer.zero_grad()
    model.encode(inputs).sum().backward()
    assert model.table.grad.dtype == (torch.bfloat16 if hasattr(Tensor, "grad_dtype") else torch.float32)
    assert model.last.weight.grad is None
    assert copied(model) == {"table", "last.weight", "last.bias"}


def test_frozen_weights_get_no_gradients_until_they_are_unfrozen() -> None:
    inner = Uses()
    inner.table.requires_grad_(False)
    model, optimizer = boosted(inner)
    train(model, optimizer, numbers(8, 8))
    seen: list[Any] = []
    model.register_forward_hook(lambda module, *_: seen.append((module.table.dtype, module.table.requires_grad)))
    model(numbers(8, 8))
    assert seen == [(torch.bfloat16, False)], "a gradient of a frozen weight costs a product"
    inner.table.requires_grad_(True)
    train(model, optimizer, numbers(8, 8), 1)
    optimizer.backward(model(numbers(8, 8)).sum())
    assert inner.table.grad is not None


class Float32Only(Uses):
    """A model that gives rows of a table to an operator without half precision, as Fourier transforms on a GPU."""

    def hidden(self, inputs: Tensor) -> Tensor:
        return torch.special.erfcx(embedding(inputs.abs().argmax(1), self.table).abs())


class Watched(Uses):
    def hidden(self, inputs: Tensor) -> Tensor:
        if _get_current_dispatch_mode() is not None:
            raise NotImplementedError("no rule for this mode")
        return super().hidden(inputs)


class Random(Watched):
    """A model whose forward pass draws random numbers and counts, before an operator without half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def hidden(self, inputs: Tensor) -> Tensor:
        return super().hidden(self.norm(nn.functional.dropout(inputs)))


@pytest.mark.parametrize("kind", [Float32Only, Watched, Random])
def test_a_pass_that_fails_with_copies_is_one_of_autocast(kind: Any) -> None:
    model, optimizer = boosted(kind())
    plain = kind()
    for _ in range(FIRST_CALLS):
        torch.manual_seed(1)
        outputs = model(numbers(6, 8))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(numbers(6, 8)).float()
        assert torch.equal(outputs, expected)
    assert copied(model) == set()
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    train(model, optimizer, numbers(6, 8))


def test_a_call_that_raises_leaves_the_next_ones_copies() -> None:
    model, optimizer = boosted(Uses())
    train(model, optimizer, numbers(8, 8), 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shape"):
            model(numbers(8, 7))
    assert model.table.dtype == torch.float32
    train(model, optimizer, numbers(8, 8))
    assert copied(model) == {"table", "last.weight", "last.bias"}
    with pytest.raises(RuntimeError, match="shape"):
        model(numbers(8, 7))
    assert model.table.dtype == torch.float32


class OutOfMemory(torch.autograd.Function):
    """The identity, whose first backward passes fail."""

    failures = 0

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if OutOfMemory.failures:
            OutOfMemory.failures -= 1
            raise torch.OutOfMemoryError("no memory is left")
        return gradient


class Large(Uses):
    def dtype_of_table(self, inputs: Tensor) -> torch.dtype:
        return self.table.dtype

    def hidden(self, inputs: Tensor) -> Tensor:
        return OutOfMemory.apply(super().hidden(inputs))


def test_a_backward_pass_that_fails_leaves_no_copies_in_the_model() -> None:
    """Users skip a batch for which the memory does not suffice."""
    model, optimizer = boosted(Large())
    train(model, optimizer, numbers(8, 8))
    OutOfMemory.failures = 1
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, numbers(8, 8))
    before = model(numbers(8, 8)).detach()
    assert model.table.dtype == torch.float32
    with torch.no_grad():
        model.table.zero_()
    assert not torch.equal(model(numbers(8, 8)), before)
    train(model, optimizer, numbers(8, 8))
    OutOfMemory.failures = 1
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, numbers(8, 8))
    assert model.dtype_of_table(numbers(1)) == torch.float32


def test_torch_func_sees_the_parameters() -> None:
    model, optimizer = boosted(Uses())
    train(model, optimizer, numbers(8, 8))
    inputs = numbers(8, 8)
    halves = {name: param / 2 for name, param in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        plain = model.unwrap()
        expected = torch.func.functional_call(plain, halves, (inputs,)).float()
        mapped = torch.func.vmap(plain)(inputs).float()
    optimizer.zero_grad()
    outputs = torch.func.functional_call(model, halves, (inputs,))
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    outputs.sum().backward()
    assert all(param.grad is not None and param.grad.any() for param in model.parameters())
    torch.testing.assert_close(torch.func.vmap(model)(inputs), mapped, rtol=0, atol=0)
    assert torch.func.jacrev(model)(inputs).shape == (8, 4, 8, 8)
    assert copied(model) == {"table", "last.weight", "last.bias"}
    train(model, optimizer, inputs)


KINDS = {name: kind for name, kind in vars(optimizers).items() if isinstance(kind, type)}


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if issubclass(kind, torch.optim.Optimizer)])
def test_fused_optimizers_take_gradients_in_half_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They widen them as they read them, to the bits of autocast's float32 gradients."""
    results = []
    for copies in (False, True):
        monkeypatch.setattr("apex.booster._shorthand._runs_on_accelerator", lambda device, copies=copies: copies)
        inner = Uses()
        model, optimizer, _ = apex.boost(inner, KINDS[name](inner.parameters(), lr=2.0**-7), device="cpu")
        for number in range(2 * FIRST_CALLS):
            optimizer.zero_grad(set_to_none=True)
            optimizer.backward(model(numbers(8, 8) + number).square().mean())
            optimizer.step()
        results.append([param.detach() for param in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_gradient_is_the_float32_sum_of_those_of_micro_batches() -> None:
    """Each is rounded to bfloat16 once, as under autocast."""
    model, optimizer = boosted(Uses(), lr=0.0)
    train(model, optimizer, numbers(8, 8))
    batches, single = [numbers(8, 8) * (1 + number / 7) for number in range(9)], []
    for inputs in batches:
        optimizer.zero_grad()
        optimizer.backward(model(inputs).square().mean())
        single.append([param.grad.double() for param in model.parameters()])
    optimizer.zero_grad()
    for inputs in batches:
        optimizer.backward(model(inputs).square().mean())
    for param, *parts in zip(model.parameters(), *single, strict=True):
        assert param.grad.dtype == torch.float32
        torch.testing.assert_close(param.grad.double(), sum(parts), rtol=1e-5, atol=1e-6)
