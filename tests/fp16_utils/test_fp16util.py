"""Models in half precision, and their float32 masters."""

import pytest
import torch
from torch import Tensor, nn

from apex.fp16_utils import (
    BN_convert_float,
    FP16Model,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    tofp16,
)
from apex.fp16_utils.fp16util import backwards_debug_hook
from apex.ops import implementation
from apex.RNN import LSTM
from tests.support.harness import Route, routes


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(36, 2)
    )


@pytest.mark.parametrize("wrap", [network_to_half, FP16Model])
def test_batch_norms_with_parameters_stay_in_float32(wrap: type) -> None:
    model = network()
    half = wrap(model)
    kept = [tensor.dtype for tensor in (*model[1].parameters(), model[1].running_mean)]
    assert kept == [torch.float32] * 3
    assert {p.dtype for p in (*model[0].parameters(), *model[4].parameters())} == {torch.float16}
    assert model[2].running_mean.dtype == torch.float16
    assert model[1].num_batches_tracked.dtype == torch.int64
    output = half(torch.randn(2, 3, 5, 5))
    assert output.dtype == torch.float16
    output.float().sum().backward()
    assert all(param.grad.dtype == param.dtype for param in model.parameters())


def test_network_to_half_is_a_sequential_behind_a_cast() -> None:
    model = network()
    half = network_to_half(model)
    assert isinstance(half[0], tofp16)
    assert half[1] is model
    assert BN_convert_float(model) is model


def test_convert_network_casts_gradients_and_recurrent_networks() -> None:
    model = nn.ModuleList([nn.LSTM(2, 2), LSTM(2, 2, 1), nn.BatchNorm1d(2)])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert convert_network(model, torch.bfloat16) is model
    assert (
        {p.dtype for p in model[:2].parameters()} == {p.grad.dtype for p in model[:2].parameters()} == {torch.bfloat16}
    )
    assert {p.dtype for p in model[2].parameters()} == {torch.float32}
    assert model[1](torch.ones(1, 1, 2, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_convert_module_leaves_children_alone() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.register_buffer("buffer", torch.ones(1))
    model.register_buffer("index", torch.ones(1, dtype=torch.int64))
    convert_module(model, torch.float16)
    assert (model.buffer.dtype, model.index.dtype, model[0].weight.dtype) == (torch.float16, torch.int64, torch.float32)


def test_fp16model_leaves_indices_alone() -> None:
    model = FP16Model(nn.Embedding(5000, 2))
    assert torch.equal(model(torch.tensor([4999])), model.network.weight[4999:])


def parameters(device: str) -> nn.ParameterList:
    """Return parameters of odd sizes, layouts and dtypes, one frozen and one without a gradient."""
    params = nn.ParameterList(
        [
            nn.Parameter(torch.randn(3, 5).half()),
            nn.Parameter(torch.randn(2, 3, 2, 2).half().contiguous(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(7).bfloat16()),
            nn.Parameter(torch.randn(9)),
            nn.Parameter(torch.randn(4).half()),
            nn.Parameter(torch.randn(2).half(), requires_grad=False),
        ]
    ).to(device)
    for param in params[:4]:
        param.grad = torch.randn_like(param)
    return params


def unflat(masters: list[Tensor], params: list[Tensor], flat: bool) -> list[Tensor]:
    if not flat:
        return masters
    assert len(masters) == 1
    return [part.view(p.shape) for part, p in zip(masters[0].split([p.numel() for p in params]), params, strict=True)]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("flat", [False, True])
def test_master_weights_round_trip(flat: bool, route: Route) -> None:
    with implementation(route.implementation):
        model = parameters(route.device)
        params, masters = prep_param_lists(model, flat_master=flat)
        assert len(params) == 5
        assert all(master.requires_grad and master.is_leaf and master.dtype == torch.float32 for master in masters)
        for param, part in zip(params, unflat(masters, params, flat), strict=True):
            assert torch.equal(param.float(), part)
            assert param.data_ptr() != part.data_ptr()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        grads = [master.grad for master in masters]
        for param, part in zip(params[:4], unflat(grads, params, flat)[:4], strict=True):
            assert torch.equal(param.grad.float(), part)
        assert (grads[0][-4:].abs().max() == 0) if flat else grads[4] is None
        optimizer = torch.optim.SGD(masters, lr=0.5)
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)
        for param, part in zip(params, unflat(masters, params, flat), strict=True):
            # Triton's interpreter does not round ties to even when it casts to bfloat16.
            rtol = 2.0**-7 if route.implementation == "triton" and param.dtype == torch.bfloat16 else 0
            torch.testing.assert_close(param, part.to(param.dtype), rtol=rtol, atol=0)
        # Once more, into existing gradients, and with one gradient removed.
        params[0].grad = None
        model_grads_to_master_grads(params, masters, flat_master=flat)
        assert (masters[0].grad[:15].abs().max() == 0) if flat else masters[0].grad is None


def test_a_flat_master_of_parameters_that_all_have_gradients() -> None:
    model = nn.Linear(2, 2)
    params, masters = prep_param_lists(model, flat_master=True)
    model(torch.ones(3, 2)).sum().backward()
    model_grads_to_master_grads(params, masters, flat_master=True)
    assert torch.equal(masters[0].grad, torch.tensor([3.0] * 6))


def test_flat_errors() -> None:
    with pytest.raises(ValueError, match="here they are none"):
        prep_param_lists(nn.Module(), flat_master=True)
    assert prep_param_lists(nn.Module()) == ([], [])
    params, masters = prep_param_lists(nn.Linear(2, 2), flat_master=True)
    with pytest.raises(ValueError, match="6 elements"):
        master_params_to_model_params(params[:1], masters, flat_master=True)
    master_params_to_model_params([], [])


def test_small_helpers() -> None:
    assert clip_grad_norm is nn.utils.clip_grad_norm_
    with pytest.raises(RuntimeError, match="master parameter"):
        backwards_debug_hook(torch.ones(1))
