"""`combine_grad`: gradients in one buffer per dtype, and the same numbers as without."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from apex.optimizers import FusedAdam, NpuFusedAdam
from tests.amp.common import assert_same, loss_of, overflow_at, quiet, small_model, train, values

KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "NpuFusedAdam": lambda params: NpuFusedAdam(params, lr=0.01),
}


class WithUnused(nn.Module):
    """A model with a parameter that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.used = small_model(), nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.used else x


def run(level: str, kind: str, **options: Any) -> tuple[list[Tensor], list[float]]:
    """Train with accumulation, an overflow, unused parameters and a new group."""
    model = WithUnused()
    optimizer = KINDS[kind](model.first.parameters())
    model, optimizer = quiet(model, optimizer, opt_level=level, scale_window=3, **options)
    optimizer.add_param_group({"params": model.second.parameters()})
    losses = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model.used = step not in (1, 4)
        for part in range(1 + step % 3):
            loss = loss_of(model, 10 * step + part, overflow_at(*((3,) if level in ("O1", "O2") else ()))(step))
            with amp.scale_loss(loss, optimizer, delay_unscale=step == 5 and part == 0) as scaled:
                scaled.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    found = values(model.state_dict().values()), losses
    amp.shutdown()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_same_numbers(level: str, kind: str) -> None:
    if (level, kind) == ("O3", "Adam"):
        pytest.skip("not for float16")
    torch.manual_seed(0)
    plain = run(level, kind)
    torch.manual_seed(0)
    combined = run(level, kind, combine_grad=True)
    assert plain[1] == combined[1]
    assert_same(plain[0], combined[0])


def in_buffer(tensor: Tensor, buffers: list[Tensor]) -> bool:
    ranges = [(b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b in buffers]
    return any(start <= tensor.data_ptr() < end for start, end in ranges)


def prepared(level: str = "O2", **options: Any) -> tuple[nn.Module, Any]:
    model = small_model()
    model, optimizer = quiet(model, KINDS["Adam"](model.parameters()), opt_level=level, combine_grad=True, **options)
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    return model, optimizer


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_one_buffer_per_dtype(level: str) -> None:
    model, optimizer = prepared(level)
    buffers = optimizer._amp_stash.combined.buffers()
    # O2 and O5: one for the masters of half-precision parameters, one for the batch norm.
    assert len(buffers) == (2 if level in ("O2", "O5") else 1)
    assert all(in_buffer(p.grad, buffers) for p in amp.master_params(optimizer))
    total = torch.cat([p.grad.flatten() for p in amp.master_params(optimizer)]).abs().sum()
    torch.testing.assert_close(sum(b.abs().sum() for b in buffers), total)
    if level == "O2":
        halves = [p.grad for p in model.parameters() if p.dtype == torch.float16]
        first = min(g.data_ptr() for g in halves)
        assert max(g.data_ptr() for g in halves) - first < 2 * 256


def test_zero_grad_keeps_sharing() -> None:
    model, optimizer = prepared("O1")
    buffers = optimizer._amp_stash.combined.buffers()
    optimizer.zero_grad(set_to_none=False)
    assert all(in_buffer(p.grad, buffers) and not p.grad.any() for p in model.parameters())
    assert not buffers[0].any()
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none=set_to_none)
        with amp.scale_loss(loss_of(model, 1), optimizer) as scaled:
            scaled.backward()
        assert [b.data_ptr() for b in optimizer._amp_stash.combined.buffers()] == [b.data_ptr() for b in buffers]
        assert all(in_buffer(p.grad, buffers) for p in model.parameters())


def test_sharing_that_was_broken_is_found_or_repaired() -> None:
    model, optimizer = prepared("O1", check_combined_tensors=True)
    model[3].bias.grad = model[3].bias.grad.clone()
    before = values(model.parameters())
    with pytest.raises(RuntimeError, match=r"1 parameter\(s\) are not in the combined buffer any more: 3.bias"):
        optimizer.step()
    assert_same(before, model.parameters())
    amp.shutdown()
    model, optimizer = prepared("O1")
    model[3].bias.grad = model[3].bias.grad.clone()
    optimizer.step()
    train(model, optimizer, [1])
    assert in_buffer(model[3].bias.grad, optimizer._amp_stash.combined.buffers())


def test_parameters_that_move() -> None:
    model, optimizer = prepared("O1")
    model[0].weight.data = model[0].weight.data.clone()
    train(model, optimizer, 2)
    assert in_buffer(model[0].weight.grad, optimizer._amp_stash.combined.buffers())


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model, optimizer = quiet(model, torch.optim.SparseAdam(model.parameters()), combine_grad=True)
    with (
        pytest.raises(RuntimeError, match="sparse=True"),
        amp.scale_loss(model(torch.tensor([1])).sum(), optimizer) as scaled,
    ):
        scaled.backward()
