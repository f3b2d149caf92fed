"""amp on a real GPU: no wait in a step, the numbers of the CPU, models on several devices."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from apex.contrib.optimizers import DistributedFusedAdam
from apex.ops import _library
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.parallel import LARC
from tests.amp.common import assert_same, batch, loss_of, overflow_at, quiet, small_model, train, values
from tests.amp.test_fused_norms import Plain, Residual, fused
from tests.amp.test_optimizers import MAKERS, make

pytestmark = pytest.mark.gpu

FUSED = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.01, momentum=0.9),
    "FusedSGD that unscales": lambda params: FusedSGD(params, lr=0.01, momentum=0.9, materialize_master_grads=False),
    "FusedAdam that unscales": lambda params: FusedAdam(params, lr=0.01, materialize_master_grads=False),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
    "LARC(FusedSGD)": lambda params: LARC(FusedSGD(params, lr=0.01)),
}


@pytest.fixture
def no_waiting() -> Iterator[Any]:
    """Call it to make every wait for the device an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def steps_without_waiting(level: str, make_optimizer: Any, no_waiting: Any, **options: Any) -> nn.Module:
    """Train with accumulation, overflows, reports and updates without waiting for the device."""
    model = small_model(device="cuda")
    model, optimizer = quiet(model, make_optimizer(model.parameters()), opt_level=level, **options)
    data = [tuple(tensor.cuda() for tensor in batch(step)) for step in range(8)]
    factors = [torch.tensor(overflow_at(6)(step) if level in ("O1", "O2") else 1.0).cuda() for step in range(8)]

    def step(index: int) -> None:
        optimizer.zero_grad()
        for _ in range(1 + index % 2):
            loss = nn.functional.mse_loss(model(data[index][0]), data[index][1]) * factors[index]
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()

    for index in range(4):
        step(index)
    torch.cuda.synchronize()
    no_waiting()
    for index in range(4, 8):
        step(index)
    torch.cuda.set_sync_debug_mode("default")
    return model


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_divided_state(level: str, no_waiting: Any) -> None:
    """DistributedFusedAdam in one process equals FusedAdam and does not wait either."""
    found = steps_without_waiting(
        level, lambda params: DistributedFusedAdam(params, lr=0.01, store_params=level != "O3"), no_waiting
    )
    scales = dict(amp.state_dict())
    amp.shutdown()
    expected = steps_without_waiting(level, FUSED["FusedAdam"], no_waiting)
    if level in ("O1", "O2"):
        assert scales == amp.state_dict()
    for mine, wanted in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-2, atol=1e-3, check_dtype=False)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("combine", [False, True], ids=["", "combined"])
def test_a_step_does_not_wait(level: str, name: str, combine: bool, no_waiting: Any) -> None:
    model = steps_without_waiting(level, FUSED[name], no_waiting, combine_grad=combine)
    if level in ("O1", "O2"):
        # Halved for the overflow that was made, and for any that real half precision adds.
        assert 0 < amp.state_dict()["loss_scaler0"]["loss_scale"] <= 2.0**15
    assert all(torch.isfinite(param).all() for param in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", [name for name in MAKERS if "apex." in name])
def test_no_optimizer_of_apex_waits(name: str, level: str, no_waiting: Any) -> None:
    model = steps_without_waiting(level, functools.partial(make, name), no_waiting)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] <= 2.0**15
    assert all(torch.isfinite(param).all() for param in model.parameters())


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "LARC(FusedSGD)"])
def test_pytorchs_operators_do_not_wait(name: str, no_waiting: Any) -> None:
    """Without Triton, PyTorch's operators are used."""
    with _library.implementation("torch"):
        steps_without_waiting("O2", FUSED[name], no_waiting)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_fused_optimizers_of_pytorch_do_not_wait(kind: Any, level: str, no_waiting: Any) -> None:
    steps_without_waiting(level, lambda params: kind(params, lr=0.01, fused=True), no_waiting)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_nothing_waits_where_the_scale_never_changes(level: str, no_waiting: Any) -> None:
    steps_without_waiting(level, lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9), no_waiting)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_fused_batch_norms(level: str, no_waiting: Any) -> None:
    """The kernels of apex.contrib.groupbn, which need large images, train like PyTorch's operators."""
    inputs = torch.randn(8, 3, 272, 272, device="cuda").to(memory_format=torch.channels_last)
    kinds = torch.arange(8, device="cuda") % 4
    losses: dict[Any, list[Tensor]] = {Plain: [], fused: []}
    for norm, found in losses.items():
        model = Residual(norm).to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = FusedSGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = quiet(model, optimizer, opt_level=level, dynamic_init_scale=256.0)
        for step in range(6):
            if step == 3:
                torch.cuda.synchronize()
                no_waiting()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), kinds)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            found.append(loss.detach())
        torch.cuda.set_sync_debug_mode("default")
        assert model.norm1.weight.dtype == model.norm1.weight.grad.dtype == torch.float32
        amp.shutdown()
    torch.testing.assert_close(torch.stack(losses[fused]), torch.stack(losses[Plain]), rtol=0.02, atol=5e-3)


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD], ids=["SGD", "FusedSGD"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_numbers_of_the_cpu(level: str, kind: Any) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = small_model(device=device)
        model, optimizer = quiet(model, kind(model.parameters(), lr=0.05), opt_level=level)
        losses = train(model, optimizer, 5, overflow_at(2) if level in ("O1", "O2") else lambda step: 1.0)
        results.append(([value for value in losses if value < 1e9], amp.state_dict()))
        amp.shutdown()
    assert results[0][1] == results[1][1]
    assert results[0][0] == pytest.approx(results[1][0], rel=0.02)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("combine", [False, True], ids=["", "combined"])
def test_messages_arrive(level: str, combine: bool, capsys: pytest.CaptureFixture) -> None:
    model = small_model(device="cuda")
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.01), opt_level=level, combine_grad=combine)
    amp._amp_state.verbosity = 1
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
        model[3].bias.grad[1] = float("nan")
    optimizer.step()
    torch.cuda.synchronize()
    train(model, optimizer, 1)
    printed = capsys.readouterr().out
    assert "reducing loss scale to 32768.0" in printed
    assert "3.bias (1 nan)" in printed


class OnTwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4).cuda()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).cuda())


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD], ids=["SGD", "FusedSGD"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_on_two_devices(level: str, kind: Any) -> None:
    model = OnTwoDevices()
    model, optimizer = quiet(model, kind(model.parameters(), lr=0.05), opt_level=level, dynamic_init_scale=16.0)
    inputs, targets = batch(0)
    for step in range(4):
        before = values(model.parameters())
        optimizer.zero_grad()
        with amp.scale_loss(nn.functional.mse_loss(model(inputs), targets.cuda()), optimizer) as scaled:
            scaled.backward()
            if step in (1, 2):  # on one device, then on the other
                (model.first if step == 1 else model.second).bias.grad[0] = float("inf")
        optimizer.step()
        if step in (1, 2):
            assert_same(before, model.parameters())
        else:
            assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_data_parallel(level: str) -> None:
    model = small_model(device="cuda")
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.05), opt_level=level)
    wrapped = nn.DataParallel(model)
    inputs, targets = (tensor.cuda() for tensor in batch(0))
    with amp.scale_loss(nn.functional.mse_loss(wrapped(inputs), targets), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_memory_of_masters() -> None:
    """Masters take the memory of the weights that were cast: no third copy is left."""
    torch.cuda.empty_cache()
    model = nn.Linear(2048, 2048, bias=False).cuda()
    before = torch.cuda.memory_allocated()
    model, _ = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2")
    assert torch.cuda.memory_allocated() - before <= 2048 * 2048 * 2 + 65536


def test_weights_of_an_rnn_stay_in_one_piece() -> None:
    """Otherwise PyTorch copies them for cuDNN at every call, with a warning."""
    model = nn.LSTM(4, 8, num_layers=2).cuda()
    quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2")
    assert len({param.untyped_storage().data_ptr() for param in model.parameters()}) == 1
    amp.shutdown()
    assert model.weight_ih_l0.dtype == torch.float32
    assert len({param.untyped_storage().data_ptr() for param in model.parameters()}) == 1
