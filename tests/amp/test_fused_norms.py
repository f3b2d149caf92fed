"""amp around apex.contrib.groupbn: batch norms that add and clip in one pass, as fast recipes of O2 have them."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp
from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.ops import _library
from apex.optimizers import FusedSGD
from tests.amp.common import HALF, LEVELS, assert_same, quiet, values
from tests.support.harness import Route, routes


class Plain(nn.BatchNorm2d):
    """A batch norm with ReLU made of PyTorch's operators."""

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return F.relu(y if z is None else y + z)


def fused(channels: int) -> nn.Module:
    return BatchNorm2d_NHWC(channels, fuse_relu=True, torch_channels_last=True)


class Residual(nn.Module):
    """Two convolutions with a shortcut around the second."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.first(x))
        return self.last(self.norm2(self.second(x), x).mean((2, 3)))


def prepared(norm: Any, level: str, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    model = Residual(norm).to(device, memory_format=torch.channels_last)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    return quiet(model, optimizer, opt_level=level, dynamic_init_scale=256.0, **options)


def images(device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 3, 5, 5, generator=generator).to(device, memory_format=torch.channels_last)
    return x, torch.randint(4, (6,), generator=generator).to(device)


def learn(model: nn.Module, optimizer: Any, steps: int, device: str = "cpu") -> list[float]:
    x, kinds = images(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), kinds)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_half_precision_images_beside_float32_norms(level: str, route: Route) -> None:
    """Channels last from the first convolution to the last norm; parameters, statistics and gradients in float32."""
    seen = []

    def look(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((len(inputs), {each.dtype for each in (*inputs, output)}))
        assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (*inputs, output))

    with _library.implementation(route.implementation):
        model, optimizer = prepared(fused, level, route.device)
        for norm in (model.norm1, model.norm2):
            norm.register_forward_hook(look)
        x, kinds = images(route.device)
        with amp.scale_loss(F.cross_entropy(model(x), kinds), optimizer) as scaled:
            scaled.backward()
        assert seen == [(1, {HALF[level]}), (2, {HALF[level]})]
        for norm in (model.norm1, model.norm2):
            tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.weight.grad, norm.bias.grad)
            assert {tensor.dtype for tensor in tensors} == {torch.float32}
            assert norm.running_mean.any()
        before = values(model.parameters())
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_learns_as_with_pytorchs_operators(level: str) -> None:
    losses = {}
    for norm in (Plain, fused):
        model, optimizer = prepared(norm, level)
        losses[norm] = learn(model, optimizer, 6)
        amp.shutdown()
    assert losses[fused] == pytest.approx(losses[Plain], rel=0.02, abs=5e-3)
    assert losses[fused][-1] < losses[fused][0]


@pytest.mark.parametrize("norm", [fused, lambda channels: GroupBatchNorm2d(channels, 1)], ids=["groupbn", "cudnn_gbn"])
@pytest.mark.parametrize("kept", [True, False, "False"])
def test_keep_batchnorm_fp32(norm: Any, kept: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), norm(8)).to(memory_format=torch.channels_last)
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2", keep_batchnorm_fp32=kept)
    expected = torch.float32 if kept is True else torch.float16
    tensors = (model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var)
    assert {tensor.dtype for tensor in tensors} == {expected}
    with amp.scale_loss(model(images()[0]).pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(torch.isfinite(param).all() for param in model.parameters())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_state_dicts_equal_those_of_pytorchs_norm(level: str) -> None:
    """State dicts are float32 with the same names, and each network loads the other's."""
    model, optimizer = prepared(fused, level)
    learn(model, optimizer, 3)
    saved = copy.deepcopy(model.state_dict())
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float32}
    with torch.no_grad():
        expected = model.eval()(images()[0])
    amp.shutdown()
    other, other_optimizer = prepared(Plain, level)
    assert list(other.state_dict()) == list(saved)
    other.load_state_dict(saved)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(images()[0]), expected, rtol=2e-2, atol=2e-2)
    learn(other.train(), other_optimizer, 1)
    back = copy.deepcopy(other.state_dict())
    amp.shutdown()
    model, optimizer = prepared(fused, level)
    model.load_state_dict(back)
    assert_same(model.state_dict().values(), back.values())
    learn(model, optimizer, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_after_a_step(level: str) -> None:
    """A norm stores statistics of its last batch, which must not prevent copies."""
    model, optimizer = prepared(fused, level)
    learn(model, optimizer, 1)
    x = images()[0]
    with torch.no_grad():
        expected = model.eval()(x)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
