"""apex.contrib.group_norm, and the compiled names group_norm_cuda and group_norm_v2_cuda."""

import pytest
import torch
from torch.nn import functional

from apex.contrib.group_norm import GroupNorm
from apex.contrib.group_norm.group_norm import torch_group_norm
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("act", [None, "", "silu", "SiLU", "swish"])
def test_module(route: Route, act: str | None) -> None:
    module = GroupNorm(4, 12, act=act, device=route.device)
    x = torch.randn(2, 12, 3, 5, device=route.device).to(memory_format=torch.channels_last)
    with _library.implementation(route.implementation):
        actual = module(x)
    expected = functional.group_norm(x.double(), 4)
    assert_close(actual, functional.silu(expected) if act else expected)


def test_parameters_equal_torchs() -> None:
    ours, torchs = GroupNorm(2, 6, act="silu"), torch.nn.GroupNorm(2, 6)
    torchs.weight.data.uniform_()
    ours.load_state_dict(torchs.state_dict())
    assert torch.equal(ours.weight, torchs.weight)
    assert torch.equal(ours.bias, torchs.bias)
    assert repr(ours) == "GroupNorm(2, 6, eps=1e-05, affine=True, act=silu)"


def test_without_parameters() -> None:
    module = GroupNorm(2, 6, affine=False)
    x = torch.randn(2, 6, 4)
    assert not list(module.parameters())
    assert_close(module(x), functional.group_norm(x.double(), 2))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_parameters_of_another_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x = torch.randn(2, 6, 4, 4).to(dtypes[0]) * 100
    module = GroupNorm(3, 6, dtype=dtypes[1], act="silu")
    expected = functional.silu(functional.group_norm(x.double(), 3))
    for actual in (module(x), torch_group_norm(x, 3, module.weight, module.bias, 1e-5, "silu")):
        assert actual.dtype == dtypes[0]
        assert_close(actual, expected)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_channels=6 must be divisible by num_groups=4"):
        GroupNorm(4, 6)
    with pytest.raises(ValueError, match="act='relu'"):
        GroupNorm(2, 6, act="relu")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("version", [1, 2])
def test_compiled_names(route: Route, version: int) -> None:
    x, dy = (torch.randn(2, 12, 3, 5, device=route.device).to(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = (torch.rand(12, device=route.device) for _ in range(2))
    with _library.implementation(route.implementation):
        if version == 1:
            import group_norm_cuda

            y, sums = group_norm_cuda.forward(x, 4, weight, bias, 1e-5, 2, True)
            assert sums.shape == (2 * 2 * 4,)
            gradients = group_norm_cuda.backward(dy, sums, x, 4, weight, bias, 1e-5, 2, True)
        else:
            import group_norm_v2_cuda

            mean_var = torch.empty(2, 4, 2, device=route.device)
            y = group_norm_v2_cuda.gn(x, weight, bias, 1e-5, True, 4, mean_var, 0)
            grouped = x.double().reshape(2, 4, -1)
            assert_close(mean_var[..., 0], grouped.mean(-1))
            assert_close(mean_var[..., 1], grouped.var(-1, correction=0))
            gradients = group_norm_v2_cuda.gn_bwd(dy, x, weight, bias, mean_var, 1e-5, True, 4, 0)
    leaves = [each.double().requires_grad_() for each in (x, weight, bias)]
    expected = functional.silu(functional.group_norm(leaves[0], 4, *leaves[1:]))
    assert_close(y, expected)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected, leaves, dy.double()), strict=True):
        assert_close(actual, wanted, reduction=30)


def test_compiled_name_refuses_a_wrong_buffer() -> None:
    import group_norm_v2_cuda

    x = torch.ones(2, 4, 2, 2)
    with pytest.raises(ValueError, match="mean_var_out has shape"):
        group_norm_v2_cuda.gn(x, torch.ones(4), torch.ones(4), 1e-5, False, 2, torch.empty(3))
