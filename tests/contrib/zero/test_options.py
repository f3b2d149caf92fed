"""DistributedFusedAdam in a world of one without torch.distributed: options, layouts of memory, and bad input."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import apex
from apex.contrib.optimizers import DistributedFusedAdam
from apex.contrib.optimizers._zero.gradients import GradientSync
from apex.contrib.optimizers.distributed_fused_adam import _multi_tensor_copy
from apex.ops import implementation
from apex.ops.multi_tensor.triton_lists import TritonLists
from apex.optimizers import FusedAdam


def test_it_is_reachable() -> None:
    assert apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam is DistributedFusedAdam
    with pytest.raises(AttributeError, match="no_such_optimizer"):
        _ = apex.contrib.optimizers.no_such_optimizer


@pytest.mark.parametrize("name", ["DistributedFusedAdam", "DistributedFusedLAMB", "DistributedFusedMuon"])
def test_hooks_of_state_dicts_are_called(name: str) -> None:
    optimizer = getattr(apex.contrib.optimizers, name)(nn.Linear(3, 3).parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {"archive": saved})
    optimizer.register_load_state_dict_pre_hook(lambda _, found: found["archive"])
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before saving", "after loading"]


def test_names_that_subclasses_use() -> None:
    """NeMo's subclass names the class in annotations and makes fragments by their names."""
    assert DistributedFusedAdam.ParameterBucket().params_shard is None
    ranges = dict.fromkeys(("param_range", "bucket_range"), (3, 3))
    nothing = dict.fromkeys(("shard_range", "shard_bucket_range", "shard_param_range"))
    fragment = DistributedFusedAdam.ParameterFragment(
        param_group_id=0, param_id=1, bucket_id=2, in_local_shard=False, **ranges, **nothing
    )
    net = nn.Linear(2, 2)
    optimizer = DistributedFusedAdam(net.parameters())
    assert optimizer.parameter(fragment) is net.bias
    with pytest.raises(ValueError, match="buffers_in has 1 tensors and buffers_out 0"):
        _multi_tensor_copy([torch.zeros(2)], [])
    with pytest.raises(ValueError, match=r"norm_type=3\.0 is not supported; 2 is"):
        optimizer._local_grad_norm(norm_type=3.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 is negative"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0"),
        ({"dtype": torch.float64}, "dtype=torch.float64 is not supported"),
        ({"grad_sync_dtype": torch.int8}, "grad_sync_dtype=torch.int8"),
        ({"param_sync_dtype": torch.bool}, "param_sync_dtype=torch.bool is not supported; .* and integers of 8 to 64"),
        ({"store_param_remainders": True}, "takes the place of store_params"),
        ({"store_param_remainders": True, "store_params": False}, "param_sync_dtype bfloat16, not"),
        ({"with_scaled_states": True}, "needs store_params=True and dtype float16 or bfloat16"),
        ({"capturable": True, "with_scaled_states": True, "dtype": torch.float16}, "capturable works with neither"),
        ({"state_format": "int4"}, "state_format='int4' is none of float32, bfloat16, int8, float8"),
        ({"state_format": "int8", "amsgrad": True}, "amsgrad=True needs state_format='float32'"),
        (
            {"state_format": "int8", "dtype": torch.bfloat16},
            "stores numbers of dtype=torch.float32, not torch.bfloat16",
        ),
        ({"nccl_ub": True}, "contiguous_grad_buffer=True"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"pipeline_size": 0}, "pipeline_size=0"),
        ({"device": "meta"}, "device=meta is not where the parameters are"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedFusedAdam(nn.Linear(2, 2).parameters(), **options)


def test_bad_calls() -> None:
    net = nn.Linear(2, 2)
    optimizer = DistributedFusedAdam(net.parameters(), contiguous_param_buffer=True, param_sync_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"contiguous_param_buffer needs param_sync_dtype=torch\.float32"):
        optimizer.init_params()
    optimizer = DistributedFusedAdam(net.parameters())
    with pytest.raises(ValueError, match="in no parameter group"):
        optimizer.init_params([torch.zeros(2)])
    with pytest.raises(ValueError, match=r"dtype=torch\.int8 is not supported"):
        optimizer.init_params(net.weight, dtype=torch.int8)
    with pytest.raises(ValueError, match="max_norm=0"):
        optimizer.clip_grad_norm(0)
    with pytest.raises(ValueError, match=r"norm_type=1\.0"):
        optimizer.grad_norm(norm_type=1)
    with pytest.raises(ValueError, match="not parameters of this optimizer"):
        optimizer.grad_norm([torch.zeros(2)])
    with pytest.raises(RuntimeError, match="contiguous_grad_buffer=True only"):
        optimizer.grad_buffer_view(net.weight)
    with pytest.raises(ValueError, match="needs inv_scale, or grad_scaler"):
        optimizer.unscale_grads()
    with pytest.raises(TypeError, match="a ParameterFragment, or two numbers"):
        optimizer.parameter("weight")
    net.weight.grad = torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError, match=r"shape \(2, 2\) is sparse"):
        optimizer.step()


def test_gradients_live_until_the_update_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are given addresses: copies of gradients, made where these have several dtypes, must not be freed."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = DistributedFusedAdam([{"params": [param]} for param in params])
    copies: list[weakref.ref[torch.Tensor]] = []
    of_units, apply = GradientSync.of_units, TritonLists.apply

    def copied(*args: Any) -> list[torch.Tensor]:
        found = [gradient.clone() for gradient in of_units(*args)]
        copies.extend(map(weakref.ref, found))
        return found

    def checked(*args: Any, **options: Any) -> Any:
        assert len(copies) == 2
        assert all(copy() is not None for copy in copies)
        return apply(*args, **options)

    monkeypatch.setattr(GradientSync, "of_units", copied)
    monkeypatch.setattr(TritonLists, "apply", checked)
    for param in params:
        param.grad = torch.ones(4)
    with implementation("triton"):
        optimizer.step()
    assert all(copy() is None for copy in copies)


@pytest.mark.parametrize("options", [{}, {"overlap_grad_sync": False}], ids=str)
def test_gradients_of_the_user_are_only_read(options: dict[str, Any]) -> None:
    """Accumulation adds to a sum of the optimizer's own, after `zero_grad` and after a step as well."""
    param = nn.Parameter(torch.zeros(4))
    optimizer = DistributedFusedAdam([param], lr=1.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0, **options)
    for end in (optimizer.zero_grad, optimizer.step, optimizer.zero_grad, lambda: None):
        given = [torch.full((4,), number) for number in (1.0, 2.0, 4.0)]
        for gradient in given:
            param.grad = gradient
            optimizer.grad_norm()  # takes the gradient
            assert param.grad is None
        assert [float(gradient[0]) for gradient in given] == [1.0, 2.0, 4.0]
        end()


def test_unscaling_by_hand() -> None:
    net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    optimizer, plain = DistributedFusedAdam(net.parameters(), eps=0.1), FusedAdam(twin.parameters(), eps=0.1)
    (net(torch.ones(1, 3)).sum() * 8).backward()
    flags = optimizer.unscale_grads(torch.tensor(0.125))
    assert [flag.item() for flag in flags.values()] == [0.0]
    twin(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    plain.step()
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


@pytest.mark.parametrize("options", [{}, {"contiguous_param_buffer": True, "contiguous_grad_buffer": True}], ids=str)
def test_strided_parameters(options: dict[str, Any]) -> None:
    """Channels last and transposed, with gradients that lie otherwise; one without elements; a closure."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(5, 7).t())
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.turned @ self.conv(x).mean((2, 3)).t()).square().mean() + self.empty.sum()

    net, twin = Net(), Net()
    optimizer = DistributedFusedAdam(net.parameters(), lr=0.01, **options)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3, 6, 6) * optimizer.state["step"])
        loss.backward()
        return loss

    for step in range(3):
        plain.zero_grad()
        loss = twin(torch.ones(2, 3, 6, 6) * step)
        loss.backward()
        plain.step()
        torch.testing.assert_close(optimizer.step(closure), loss)
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other)
        assert param.stride() == other.stride()
    state = optimizer.state_dict()["state"]
    for index, other in enumerate(twin.parameters()):
        torch.testing.assert_close(state[index]["exp_avg_sq"], plain.state[other]["exp_avg_sq"])
    loaded = DistributedFusedAdam(Net().parameters(), **options)
    loaded.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, loaded.parameters(), net.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.02},
        {"weight_decay": 0.3},
        {"betas": (0.5, 0.999)},
        {"betas": (0.9, 0.7)},
        {"eps": 0.1},
        {"amsgrad": True},
        {"adam_w_mode": False},
        {"bias_correction": False},
    ],
    ids=str,
)
def test_as_fused_adam(options: dict[str, Any]) -> None:
    """And not as without the option: gradients become smaller, which AMSGrad remembers."""
    found = []
    for kind, given in ((DistributedFusedAdam, options), (FusedAdam, options), (FusedAdam, {})):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = kind(net.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **given})
        for step in range(4):
            optimizer.zero_grad()
            net(torch.full((2, 4), 10.0**-step)).square().sum().backward()
            optimizer.step()
        found.append(list(net.parameters()))
    # On a CPU FusedAdam is PyTorch's, which rounds the decay and the rest of an update one after the other.
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found[0][0], found[2][0], rtol=1e-5)


def test_small_updates_are_not_lost() -> None:
    """Of bfloat16 parameters, where updates are far below the last bit: kept in the state, lost without."""
    options = {"param_sync_dtype": torch.bfloat16, "lr": 1e-4}
    moved = {}
    for name, more in {
        "stored": {},
        "remainders": {"store_params": False, "store_param_remainders": True},
        "lost": {"store_params": False},
    }.items():
        param = nn.Parameter(torch.full((8,), 1.0, dtype=torch.bfloat16))
        optimizer = DistributedFusedAdam([param], **options, **more)
        for _ in range(60):
            optimizer.zero_grad()
            param.float().sum().backward()
            optimizer.step()
        moved[name] = param.detach().float()
    expected = torch.full((8,), 1 - 60 * 1e-4).bfloat16().float()
    assert torch.equal(moved["stored"], expected)
    assert torch.equal(moved["remainders"], expected)
    assert torch.equal(moved["lost"], torch.ones(8))


@pytest.mark.parametrize(("bucket_cap_mb", "share"), [(0.125, None), (0.5, None), (0.75, "66.7%"), (100.0, "0.5%")])
def test_buckets_that_few_gradients_fill_are_warned_of(bucket_cap_mb: float, share: str | None) -> None:
    params = [nn.Parameter(torch.zeros(1 << 16)) for _ in range(2)]  # half a megabyte
    optimizer = DistributedFusedAdam(params, bucket_cap_mb=bucket_cap_mb)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.init_params()
        optimizer.init_params()
    message = f"Only {share} of buckets are used. Consider decreasing the bucket_cap_mb argument."
    assert [str(each.message) for each in caught] == ([] if share is None else [message])


def test_one_bucket_for_all_is_full() -> None:
    optimizer = DistributedFusedAdam([nn.Parameter(torch.zeros(64))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.init_params_bucket(optimizer.param_groups[0]["params"])


@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, False), (torch.bfloat16, True)])
def test_fused_adam_goes_on_from_it(dtype: torch.dtype, masters: bool) -> None:
    """With the step count, which bias corrections depend on, and the same masters."""
    params = [nn.Parameter(torch.randn(9, 5).to(dtype)), nn.Parameter(torch.randn(7).to(dtype))]
    optimizer = DistributedFusedAdam(params, lr=0.1, dtype=torch.float32)

    def step(each: torch.optim.Optimizer, params: list[nn.Parameter], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        each.zero_grad()
        sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()
        each.step()

    for seed in range(3):
        step(optimizer, params, seed)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    plain = FusedAdam(copies, lr=0.5, master_weights=masters)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["step"] == 3
    assert plain.param_groups[0]["lr"] == 0.1
    for seed in range(3, 6):
        step(optimizer, params, seed)
        step(plain, copies, seed)
    for param, found in zip(params, copies, strict=True):
        assert torch.equal(found, param)
    with pytest.raises(ValueError, match=r"format 1 of .*state_dict_format=2"):
        plain.load_state_dict(optimizer.state_dict(state_dict_format=1))
