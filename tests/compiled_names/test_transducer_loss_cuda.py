"""The compiled module transducer_loss_cuda, of log-probabilities, called as upstream's Python code calls it."""

import pytest
import torch

import transducer_loss_cuda
from apex.ops import _library
from tests.ops.transducer import formulas
from tests.support.harness import NO_GATHER, Route, assert_close, routes

BLANK = 2


@pytest.mark.parametrize("route", routes(lacks=NO_GATHER))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_forward_and_backward(fused: bool, packed: bool, route: Route) -> None:
    logits = torch.randn(2, 3, 3, 6, dtype=torch.float64, requires_grad=True)
    label = torch.tensor([[0, 5], [3, 1]], dtype=torch.int32)
    f_len, y_len = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    grad = torch.tensor([1.5, 0.5])
    log_probabilities = logits.log_softmax(-1)
    wanted = formulas.losses(logits, label, f_len, y_len, BLANK)
    # The definition takes the softmax of what it is given: of log-probabilities, that is themselves again.
    leaf = log_probabilities.detach().requires_grad_()
    (through,) = torch.autograd.grad(formulas.losses(leaf, label, f_len, y_len, BLANK), leaf, grad.double())
    x, through = log_probabilities.detach(), through
    if packed:
        x, through = (formulas.pack(t, f_len, y_len + 1) for t in (x, through))
    offset = torch.cumsum(f_len * (y_len + 1), 0) if packed else torch.empty(0)
    x, label, f_len, y_len, offset = (t.to(route.device) for t in (x.float(), label, f_len, y_len, offset))
    with _library.implementation(route.implementation):
        alpha, beta, losses = transducer_loss_cuda.forward(x, label, f_len, y_len, offset, 3, BLANK, 1, packed)
        dx = transducer_loss_cuda.backward(
            x, grad.to(route.device), alpha, beta, f_len, y_len, label, offset, 3, BLANK, 1, fused, packed
        )
    assert alpha.shape == beta.shape == (2, 3, 3)
    assert_close(losses, wanted.detach(), reduction=50)
    assert_close(-beta[:, 0, 0], wanted.detach(), reduction=50)
    if not fused:  # what the softmax's own backward makes of it
        dx = dx - x.exp() * dx.sum(-1, keepdim=True)
    assert_close(dx, through, reduction=50)


def test_bad_arguments_are_refused() -> None:
    x, label, lengths = torch.randn(1, 2, 2, 4), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])
    with pytest.raises(ValueError, match="opt=2"):
        transducer_loss_cuda.forward(x, label, lengths, lengths, torch.empty(0), 2, 0, 2, False)
    with pytest.raises(ValueError, match="blank_idx=4"):
        transducer_loss_cuda.forward(x, label, lengths, lengths, torch.empty(0), 2, 4, 1, False)
