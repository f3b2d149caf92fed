"""fmhalib, called as upstream's Python code and tests call it."""

import pytest
import torch

import fmhalib
from apex.ops import _library
from apex.ops.attention import op_packed, reference
from tests.ops.attention.cases import assert_close
from tests.support.harness import Route, routes


def tensors(device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    qkv = torch.randn(13, 3, 2, 16).to(device, dtype)
    bounds = torch.tensor([0, 7, 12], dtype=torch.int32, device=device)
    return qkv, bounds, torch.randn(13, 2, 16).to(device, dtype)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_forward_and_backward(route: Route, dropout_p: float) -> None:
    qkv, bounds, dout = tensors(route.device)
    generator = torch.Generator(route.device).manual_seed(4)
    with _library.implementation(route.implementation):
        output, kept = fmhalib.fwd(qkv, bounds, dropout_p, 7, True, False, True, generator)
        dqkv, same = fmhalib.bwd(dout, qkv, kept, bounds, dropout_p, 7, True)
        dqkv_nl, _, dkv = fmhalib.bwd_nl(dout, qkv, kept, bounds, dropout_p, 7, True)
    seed = op_packed.draw_seed(qkv.device, generator.manual_seed(4)).cpu() if dropout_p else None
    wide = qkv.double().cpu().requires_grad_()
    expected = reference.packed_attention(wide, bounds.cpu(), dropout_p, seed)
    assert_close(output, expected)
    assert_close(dqkv, torch.autograd.grad(expected, wide, dout.double().cpu())[0])
    assert torch.equal(dqkv, dqkv_nl)
    assert torch.equal(dkv.sum(1), dqkv[:, 1:])
    assert same is kept


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_half_precision_and_the_small_batch_form(route: Route) -> None:
    qkv, bounds, dout = tensors(route.device, torch.float16)
    with _library.implementation(route.implementation):
        output, kept = fmhalib.fwd(qkv, bounds, 0.0, 512, True, True, False, None)
        dqkv, _, _ = fmhalib.bwd_nl(dout.view(13, 2, 16), qkv, kept, bounds, 0.0, 512, False)
    wide = qkv.double().cpu().requires_grad_()
    expected = reference.packed_attention(wide, bounds.cpu())
    assert_close(output[:12], expected[:12])
    assert_close(dqkv[:12], torch.autograd.grad(expected, wide, dout.double().cpu())[0][:12])


@pytest.mark.parametrize("route", routes())
def test_inference_drops_nothing_and_keeps_nothing(route: Route) -> None:
    qkv, bounds, dout = tensors(route.device)
    with _library.implementation(route.implementation):
        output, kept = fmhalib.fwd(qkv, bounds, 0.9, 7, False, False, True, None)
        assert_close(output, reference.packed_attention(qkv.double().cpu(), bounds.cpu()))
        assert kept.numel() == 0
        with pytest.raises(ValueError, match="is_training=True"):
            fmhalib.bwd(dout, qkv, kept, bounds, 0.9, 7, True)
