"""Boosted steps on a GPU: captured ones equal eager ones bit for bit, compiled ones within bfloat16's precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apex
from apex.booster._step import EAGER
from apex.booster.mixed_precision import BF16MixedPrecision
from tests.booster import problem
from tests.booster.test_steps import LOOPS, Training, assert_equal, loss_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(problem, "DEVICE", "cuda")
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "O5"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_captured_loop_trains_as_without_capture(loop: Any, copies: bool) -> None:
    precision = BF16MixedPrecision(weight_copies=True) if copies else None
    boosted, expected = Training(precision=precision, fuse=True, capture=True), Training(precision=precision, fuse=True)
    for training in (boosted, expected):
        loop(training)
    assert_equal(boosted.results(), expected.results())
    capture = boosted.booster.report()[-1]
    assert capture.done, capture.text
    assert " 0 replays" not in capture.text


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "O5"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_compiled_and_captured_loop_trains_alike(loop: Any, copies: bool) -> None:
    """Losses and the change of the weights agree to 5%, as bfloat16's do in docs/booster.md."""
    start = torch.cat([value.flatten() for value in problem.net().state_dict().values()])
    precision = BF16MixedPrecision(weight_copies=True) if copies else None
    boosted = Training(precision=precision, fuse=True, compile=True, capture=True)
    expected = Training(precision=precision, fuse=True)
    for training in (boosted, expected):
        loop(training)
    torch.testing.assert_close(torch.stack(boosted.losses), torch.stack(expected.losses), rtol=0.05, atol=0.0)
    moved, right = (torch.cat([value.flatten() for value in each.params()]) - start for each in (boosted, expected))
    assert (moved - right).norm() <= 0.05 * right.norm()
    assert boosted.booster.report()[-1].done, str(boosted.booster.report())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2)
        )
        self.head = nn.Linear(16, problem.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, problem.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


@pytest.mark.parametrize(
    ("make", "shape"), [(Images, (32, 3, 16, 16)), (Sequences, (16, 24, 64)), (problem.Net, (64, problem.FEATURES))]
)
def test_boost_alone(make: Any, shape: tuple[int, ...]) -> None:
    """The quickest variant is chosen after every one was measured, and the loss falls as under torch.amp."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(shape, device="cuda"), torch.randint(0, problem.CLASSES, shape[:1], device="cuda")
    falls = []
    for is_boosted in (True, False):
        torch.manual_seed(1)
        model: Any = make().cuda()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step: Any = None
        if is_boosted:
            model, optimizer, step = apex.boost(model, optimizer, "bf16")

        def train_step(
            inputs: Tensor,
            targets: Tensor,
            model: Any = model,
            optimizer: Any = optimizer,
            plain: bool = not is_boosted,
        ) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=plain):
                loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run: Any = step(train_step) if is_boosted else train_step
        losses = [float(run(inputs, targets).detach()) for _ in range(30)]
        falls.append((losses[0], losses[-1]))
        if is_boosted:
            print(step.report())
            assert len(run.seconds) == 3
            assert run.choice != EAGER or run.seconds[EAGER] == min(run.seconds.values())
    torch.testing.assert_close(torch.tensor(falls[0]), torch.tensor(falls[1]), rtol=0.1, atol=0.02)
