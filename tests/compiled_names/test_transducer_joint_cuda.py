"""The compiled module transducer_joint_cuda, called as upstream's Python code calls it."""

import pytest
import torch

import transducer_joint_cuda
from apex.ops import _library
from apex.ops.transducer import joint_arguments, reference
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_forward_and_backward(relu: bool, packed: bool, route: Route) -> None:
    f = torch.randn(2, 5, 16, device=route.device).half()
    g = torch.randn(2, 3, 16, device=route.device).half()
    f_len = torch.tensor([5, 2], dtype=torch.int32, device=route.device)
    g_len = torch.tensor([2, 3], dtype=torch.int32, device=route.device)
    offset = torch.cumsum(f_len * g_len, 0) if packed else torch.empty(0)
    with _library.implementation(route.implementation):
        found = transducer_joint_cuda.forward(f, g, f_len, g_len, offset, 16, 1, packed, relu, False, 0.0, 4)
        dh = torch.randn_like(found[0])
        inputs = [dh, *found[1:]]
        gradients = transducer_joint_cuda.backward(inputs, f_len, g_len, offset, 5, 3, packed, 1.0)
    exact = f.double().cpu(), g.double().cpu(), f_len.cpu(), g_len.cpu(), offset.cpu() if packed else None
    arguments = joint_arguments(*exact, relu, 0.0, 16, True)
    h, mask = reference.joint(*arguments)
    assert len(found) == 1 + relu
    assert_close(found[0], h)
    if relu:
        assert torch.equal(found[1].cpu(), mask)
    expected = reference.joint_backward(dh.double().cpu(), mask, *exact[2:], *arguments[6:], (True, True))
    for actual, wanted in zip(gradients, expected, strict=True):
        assert actual.dtype == torch.float16
        assert_close(actual, wanted, reduction=5)


def test_dropout_has_a_mask_and_a_scale() -> None:
    f, g = torch.randn(1, 20, 8), torch.randn(1, 10, 8)
    lengths = torch.tensor([20]), torch.tensor([10])
    h, mask = transducer_joint_cuda.forward(f, g, *lengths, torch.empty(0), 0, 1, False, False, True, 0.5, 4)
    torch.testing.assert_close(h, (f[:, :, None] + g[:, None]) * mask * 2)
    assert 0.4 < mask.float().mean() < 0.6
    df, dg = transducer_joint_cuda.backward([h, mask], *lengths, torch.empty(0), 20, 10, False, 2.0)
    torch.testing.assert_close(df, (h * mask * 2).sum(2))
    torch.testing.assert_close(dg, (h * mask * 2).sum(1))


def test_bad_arguments_are_refused() -> None:
    f, lengths = torch.randn(1, 2, 8), torch.tensor([2])
    with pytest.raises(ValueError, match="opt=3"):
        transducer_joint_cuda.forward(f, f, lengths, lengths, torch.empty(0), 0, 3, False, False, False, 0.0, 4)
    with pytest.raises(ValueError, match="got shapes"):
        transducer_joint_cuda.forward(f, f[:, 0], lengths, lengths, torch.empty(0), 0, 1, False, False, False, 0.0, 4)
