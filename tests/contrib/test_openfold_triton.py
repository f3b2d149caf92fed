"""apex.contrib.openfold_triton as OpenFold uses it: attention, layer norm, and the tuning functions."""

import pytest
import torch

import apex.contrib.openfold_triton as openfold
from apex.contrib.openfold_triton import AttnBiasJIT, AttnNoBiasJIT, AttnTri, CanSchTriMHA, mha
from apex.contrib.openfold_triton.layer_norm import LayerNormSmallShapeOptImpl
from apex.ops import _library, norm
from apex.ops.attention import reference
from tests.ops.attention.cases import BIASED_CASES, assert_close
from tests.support.harness import Route, routes
from tests.support.harness import assert_close as assert_close_by_table


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("function", [AttnTri, mha.FusedAttenionCoreFunc.apply], ids=["AttnTri", "Function"])
def test_attention(route: Route, function) -> None:
    inputs, mask, dout = BIASED_CASES[2].tensors(route.device)
    leaves = [t.requires_grad_() for t in inputs]
    with _library.implementation(route.implementation):
        output = function(*leaves[:3], mask, leaves[3], 1e9, torch.is_grad_enabled())
        gradients = torch.autograd.grad(output, leaves, dout)
    wide = [t.detach().double().cpu().requires_grad_() for t in leaves]
    expected = reference.attention(*wide[:3], mask.double().cpu(), wide[3])
    assert_close(output, expected)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected, wide, dout.double().cpu()), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_variants(route: Route) -> None:
    (query, key, value, bias), mask, _ = BIASED_CASES[2].tensors(route.device)
    with _library.implementation(route.implementation):
        assert_close(
            AttnBiasJIT(query, key, value, mask, bias, 1e9), reference.attention(query, key, value, mask, bias)
        )
        assert_close(AttnNoBiasJIT(query, key, value, mask, 1e9), reference.attention(query, key, value, mask))
        weak = reference.attention(query, key, value, mask, bias, inf=2.0)
        assert_close(AttnTri(query, key, value, mask, bias, 2.0, False), weak)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_a_function_for_inference_has_no_gradient(route: Route) -> None:
    (query, key, value, bias), mask, dout = BIASED_CASES[2].tensors(route.device)
    query.requires_grad_()
    with _library.implementation(route.implementation):
        output = mha.FusedAttenionCoreFunc.apply(query, key, value, mask, bias, 1e9, False)
        assert_close(output, reference.attention(query, key, value, mask, bias))
        with pytest.raises(RuntimeError, match="is_training=False"):
            torch.autograd.grad(output, query, dout)


def test_the_switch() -> None:
    assert not mha.is_enabled()
    try:
        mha.enable()
        assert mha.is_enabled()
    finally:
        mha.disable()
    assert not mha.is_enabled()


def test_every_shape_can_be_scheduled() -> None:
    assert CanSchTriMHA([1, 256, 4, 256, 32], True, inf=1e9, training=True)
    assert CanSchTriMHA([1, 538, 4, 538, 16], False, inf=1e5, training=False)
    assert not CanSchTriMHA([16, 8])
    for shape in ([256, 4, 256, 16], [32, 8, 128, 32], [1, 1, 1, 1]):
        for forward in (True, False):
            assert all(number > 0 for number in mha.schedule_triton_mha(shape, fwd=forward))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("strided", [False, True])
def test_layer_norm(route: Route, strided: bool) -> None:
    x = torch.randn(2, 3, 4, 8, device=route.device)
    x = x.transpose(1, 2) if strided else x
    weight, bias = (torch.rand(8, device=route.device, requires_grad=True) for _ in range(2))
    leaf, dy = x.detach().requires_grad_(), torch.randn_like(x)
    with _library.implementation(route.implementation):
        output = LayerNormSmallShapeOptImpl.apply(leaf, (8,), weight, bias, 1e-5)
        gradients = torch.autograd.grad(output, (leaf, weight, bias), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.layer_norm(wide[0], (8,), *wide[1:], 1e-5)
    assert_close_by_table(output, expected)
    wanted = torch.autograd.grad(expected, wide, dy.double())
    for actual, exact, terms in zip(gradients, wanted, (1, 24, 24), strict=True):
        assert_close_by_table(actual, exact, reduction=terms)


def test_layer_norm_goes_to_the_norms() -> None:
    weight, bias = torch.rand(2, 3, 8)
    x = torch.randn(5, 3, 8)
    output = openfold.LayerNormSmallShapeOptImpl.apply(x, (3, 8), weight, bias)
    assert_close_by_table(output, norm.layer_norm(x.double(), (3, 8), weight.double(), bias.double()))


def test_tuning_functions_do_nothing() -> None:
    """Clients load tuned launches before training and send them to the other ranks."""
    from apex.contrib.openfold_triton._layer_norm_config_ampere import _auto_tuned_config_ampere
    from apex.contrib.openfold_triton._layer_norm_config_hopper import _auto_tuned_config_hopper

    for config in (_auto_tuned_config_ampere, _auto_tuned_config_hopper):
        for size in (0, 1, 2, 4, 8):
            for name, cache in config[size].items():
                openfold._tuneable_triton_kernels[name].cache = cache
    openfold.sync_triton_auto_tune_cache_across_gpus()
    openfold.sync_triton_auto_tune_cache_across_gpus(strict=False, verbose=True)
