"""LazyInitContext records the construction of models, and computes the values that they would have had at once."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from apex.booster import Booster
from apex.lazy import LazyInitContext
from apex.lazy._recorded import LazyTensor


class Various(nn.Module):
    """A model whose construction has many kinds of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=1)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.recurrent = nn.LSTM(4, 4, 2)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.batch_norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8))
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.orthogonal_(self.convolution.weight)
        nn.init.constant_(self.norm.weight, 2)
        with torch.no_grad():
            self.linear.bias[2:4] = 3.0
            self.linear.bias.mul_(torch.tensor(2.0))
            torch._foreach_add_([self.norm.bias[:3], self.norm.bias[2:]], 1.0)
            self.norm.bias[0].copy_(self.norm.bias[1] + self.norm.bias.sum())
        self.rates = [*torch.linspace(0, 1, 4).tolist(), *(x.item() for x in torch.linspace(0, 1, 3))]
        self.rates += torch.linspace(0, 1, 2).numpy().tolist()
        self.drawn = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(5)))
        self.shuffled = nn.Parameter(torch.randn(6)[torch.randperm(6)])
        self.marked = nn.Parameter(torch.zeros(3))
        self.marked.mark = 7
        chosen = torch.arange(6)
        self.chosen = nn.Parameter(chosen[chosen > 2] * torch.rand(3))
        if torch.ones(2).sum() > 1:
            nn.init.normal_(self.marked)


def built(is_lazy: bool) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a model that changed after its construction, an earlier copy of it, and the next random numbers."""
    torch.manual_seed(0)
    with LazyInitContext() if is_lazy else contextlib.nullcontext():
        model = Various().half()
    model.head.weight.data[3] *= 2
    model.marked.data = model.marked.data + 1
    model.drawn.data = torch.ones(3, 3, dtype=torch.float16)
    copied = copy.deepcopy(model)
    nn.init.normal_(model.linear.weight)
    return model, copied, torch.rand(2)


def test_values_equal_those_of_models_built_outside() -> None:
    *expected, numbers = built(False)
    *found, found_numbers = built(True)
    assert torch.equal(found_numbers, numbers)
    for one, other in zip(found, expected, strict=True):
        assert all(isinstance(param, LazyTensor) and isinstance(param, nn.Parameter) for param in one.parameters())
        params = list(one.parameters())
        assert LazyInitContext.materialize(one) is one
        assert all(old is new and type(new) is nn.Parameter for old, new in zip(params, one.parameters(), strict=True))
        state = one.state_dict()
        assert state.keys() == other.state_dict().keys()
        for name, value in other.state_dict().items():
            assert torch.equal(state[name], value), name
            assert (state[name].dtype, state[name].stride()) == (value.dtype, value.stride()), name
        assert one.rates == other.rates
        assert one.head.weight is one.embedding.weight
        assert one.marked.mark == 7


def test_histories_start_where_a_whole_tensor_is_overwritten() -> None:
    with LazyInitContext():
        weight = torch.empty(8, 8)
        for _ in range(3):
            nn.init.normal_(weight)
        weight[0] = 1.0
    operation, length = weight._contents.state.operation, 0
    while operation is not None:
        operation, length = operation.leaves[0].state.operation, length + 1
    assert length == 2


def test_tensors_need_no_memory() -> None:
    with LazyInitContext():
        tensor = torch.zeros(1 << 42).view(4, -1)[1].add_(1.0)
    assert tensor.shape == (1 << 40,)
    assert tensor.device.type == "cpu"


def test_a_booster_computes_the_values() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(4, 2)
    torch.manual_seed(0)
    with LazyInitContext(default_device="cpu") as context:
        model = nn.Linear(4, 2)
    assert context.default_device == torch.device("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = Booster("cpu").boost(model, optimizer)
    assert torch.equal(boosted.unwrap().weight, expected.weight)
    optimizer.backward(boosted(torch.ones(1, 4)).sum())
    optimizer.step()
    assert not torch.equal(boosted.unwrap().weight, expected.weight)


def test_the_meta_device_stays() -> None:
    with LazyInitContext(default_device=torch.device("meta")):
        assert nn.Linear(3, 2).weight.is_meta
    with LazyInitContext():
        assert nn.Linear(3, 2, device="meta").weight.is_meta
    assert type(nn.Linear(3, 2).weight) is nn.Parameter


def test_files_are_read(tmp_path: Path) -> None:
    expected = nn.Linear(3, 2)
    torch.save(expected.state_dict(), tmp_path / "weights")
    with LazyInitContext():
        model = nn.Linear(3, 2)
        model.load_state_dict(torch.load(tmp_path / "weights"))
    LazyInitContext.materialize(model)
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)


def test_values_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    torch.manual_seed(0)
    with LazyInitContext():
        model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "weights")
    assert torch.equal(torch.load(tmp_path / "weights")["weight"], expected.weight)


def test_what_cannot_be_recorded_is_refused() -> None:
    source = torch.ones(3)
    with LazyInitContext():
        weight = torch.zeros(3)
        weight.copy_(source)
        with pytest.raises(NotImplementedError, match=r"LazyInitContext cannot record aten\.resize_"):
            torch.zeros(3).resize_(9)
        with pytest.raises(NotImplementedError, match=r"LazyInitContext cannot record prims\.copy_to.*materialize"):
            torch.ops.prims.copy_to.default(weight, source)
    model = nn.ParameterList([nn.Parameter(weight)])
    source.add_(1)
    with pytest.raises(RuntimeError, match=r"took a tensor of shape \(3,\) that has been changed"):
        LazyInitContext.materialize(model)


def test_materialize_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    with LazyInitContext():
        model = nn.Linear(3, 2)
    assert LazyInitContext.materialize(model, verbose=True) is model
    assert LazyInitContext.materialize(model) is model
