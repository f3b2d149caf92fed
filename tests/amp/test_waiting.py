"""Which optimizers have amp wait for the device: only those that cannot be told of an overflow there.

Tensors on PyTorch's device "meta" have no values, so whoever asks for one gets an error: the CPU's stand-in for a GPU
that must not be waited for.
"""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from tests.amp.common import assert_same, loss_of, quiet, small_model, train, values
from tests.amp.test_optimizers import MAKERS, make


def host_knows(optimizer: Any, model: nn.Module) -> bool:
    """Return whether the host knew of an overflow before the step."""
    with amp.scale_loss(loss_of(model, 0, float("inf")), optimizer) as scaled:
        scaled.backward()
    return optimizer._amp_stash.already_patched


@pytest.mark.parametrize(
    ("name", "waits"),
    [("apex.FusedAdam", False), ("apex.FusedLAMB", False), ("LARC(FusedSGD)", False), ("torch.SGD", True),
     ("LARC(torch.SGD)", True), ("contrib.FusedAdam", True)],
)  # fmt: skip
def test_only_optimizers_that_take_no_flag_wait(name: str, waits: bool) -> None:
    model = small_model()
    model, optimizer = quiet(model, make(name, model.parameters()), opt_level="O2")
    before = values(model.parameters())
    assert host_knows(optimizer, model) is waits
    assert (optimizer._amp_stash.found_inf is None) is waits
    optimizer.step()
    assert_same(before, model.parameters())
    assert optimizer._amp_stash.found_inf is None
    assert not optimizer._amp_stash.already_patched


def test_torchs_fused_adam_takes_the_flag() -> None:
    model = small_model()
    model, optimizer = quiet(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True), opt_level="O2")
    before = values(model.parameters())
    assert host_knows(optimizer, model) is False
    optimizer.step()
    assert_same(before, model.parameters())
    train(model, optimizer, 2)
    assert not torch.equal(before[0], model[0].weight)


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copies to the host never arrive."""
    monkeypatch.setattr(sys.modules["apex.amp.scaler"], "_copy_to_host", lambda tensor: (tensor, lambda: False))


def steps(name: str, level: str, **options: Any) -> None:
    """Train a model without values: accumulation, clipping, zeros and updates."""
    model = small_model(device="meta")
    model, optimizer = quiet(model, make(name, model.parameters()), opt_level=level, **options)
    for count in (2, 1):
        optimizer.zero_grad()
        for _ in range(count):
            loss = nn.functional.mse_loss(model(torch.ones(5, 6, device="meta")), torch.ones(5, 4, device="meta"))
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        if name != "FusedSGD(materialize_master_grads=False)":  # whose gradients are not on the masters
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()


FUSED = [name for name in MAKERS if "apex." in name or "FusedSGD" in name]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("without_values")
def test_no_fused_optimizer_asks_for_a_value(name: str, level: str) -> None:
    steps(name, level)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["apex.FusedAdam", "apex.FusedSGD"])
@pytest.mark.usefixtures("without_values")
def test_nor_with_combined_gradients(name: str, level: str) -> None:
    steps(name, level, combine_grad=True)


@pytest.mark.parametrize("level", ["O4", "O5"])
@pytest.mark.parametrize("name", ["torch.SGD", "torch.Adam", "torch.AdamW"])
@pytest.mark.usefixtures("without_values")
def test_nobody_asks_where_the_scale_never_changes(name: str, level: str) -> None:
    steps(name, level)


@pytest.mark.usefixtures("without_values")
def test_an_optimizer_that_takes_no_flag_asks() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        steps("torch.SGD", "O2")
