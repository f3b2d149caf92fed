"""SyncBatchNorm in two processes, and tests that need only one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import apex.parallel
from apex.ops import _library
from apex.ops.batch_norm import BatchNormSpec, Channels, batch_norm_with_statistics
from apex.parallel import SyncBatchNorm, convert_syncbn_model, optimized_sync_batchnorm, sync_batchnorm
from apex.parallel._statistics import GroupExchange
from apex.parallel.optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from tests.parallel import sync_batchnorm_checks
from tests.parallel.processes import run_checks
from tests.support.harness import Route, assert_close, routes


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(sync_batchnorm_checks.__name__, Path(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("name", sync_batchnorm_checks.CHECKS)
def test_two_processes(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5), (2, 4, 3, 5), (2, 4, 2, 3, 2)])
def test_without_processes_it_is_a_batch_norm(shape: tuple[int, ...], momentum: float | None) -> None:
    norm, same = (kind(4, momentum=momentum).double() for kind in (SyncBatchNorm, sync_batchnorm.SyncBatchNorm))
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    expected = kinds[len(shape)](4, momentum=momentum).double()
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64)
        output = norm(x)
        torch.testing.assert_close(output, expected(x))
        assert torch.equal(same(x), output)
    for name, tensor in norm.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    torch.testing.assert_close(norm.eval()(x), expected.eval()(x))
    last = SyncBatchNorm(4, momentum=momentum, channel_last=True).double()
    last.load_state_dict(norm.state_dict())
    moved = x if x.dim() == 2 else x.movedim(1, -1)
    back = last.eval()(moved)
    torch.testing.assert_close(back if x.dim() == 2 else back.movedim(-1, 1), expected(x))


def test_the_function_without_processes() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    z = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mean, variance = torch.zeros(4).double(), torch.ones(4).double()
    for by_batch in (True, False):

        def called(*tensors: torch.Tensor, by_batch: bool = by_batch) -> torch.Tensor:
            return SyncBatchnormFunction.apply(
                *tensors, mean.clone(), variance.clone(), 1e-5, by_batch, 0.1, None, False, True
            )

        assert torch.autograd.gradcheck(called, (x, z, weight, bias))
    expected = nn.functional.batch_norm(x, mean.clone(), variance.clone(), weight, bias, False, 0.1, 1e-5)
    torch.testing.assert_close(called(x, z, weight, bias), (expected + z).relu())


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """Make a process group of this process only."""
    backend = "nccl" if request.getfixturevalue("route").device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("layout", ["first", "last", "torch_last", "strided"])
@pytest.mark.parametrize("addend", [False, True])
def test_the_function_in_a_group_of_one(route: Route, alone: dist.ProcessGroup, layout: str, addend: bool) -> None:
    x, z, dy = (torch.randn(4, 6, 5, 3, device=route.device) for _ in range(3))
    weight, bias = (torch.rand(6, device=route.device) + 0.5 for _ in range(2))
    wide = [each.cpu().double().requires_grad_() for each in (x, z, weight, bias)]
    running = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    expected = nn.functional.batch_norm(wide[0], *running, *wide[2:], training=True)
    expected = (expected + wide[1] if addend else expected).relu()
    dy = dy * (expected.detach().abs() > 1e-4).to(dy)
    right = torch.autograd.grad(expected, wide if addend else [wide[0], *wide[2:]], dy.cpu().double())

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        if layout == "last":
            return tensor.movedim(1, -1).contiguous()
        if layout == "strided":
            return tensor.repeat_interleave(2, 3)[..., ::2]
        return tensor.to(memory_format=torch.channels_last) if layout == "torch_last" else tensor

    images = [laid_out(each).requires_grad_() for each in ((x, z) if addend else (x,))]
    mean, variance = torch.zeros(6, device=route.device), torch.ones(6, device=route.device)
    leaves = [*images, weight.requires_grad_(), bias.requires_grad_()]
    with _library.implementation(route.implementation):
        output = SyncBatchnormFunction.apply(
            images[0],
            images[1] if addend else None,
            weight,
            bias,
            mean,
            variance,
            1e-5,
            True,
            0.1,
            alone,
            layout == "last",
            True,
        )
        found = torch.autograd.grad(output, leaves, laid_out(dy))
    back = lambda tensor: tensor.movedim(-1, 1) if layout == "last" and tensor.dim() == 4 else tensor  # noqa: E731
    assert_close(back(output), expected)
    assert_close(mean, running[0], reduction=60)
    assert_close(variance, running[1], reduction=60)
    for actual, wanted in zip(found, right, strict=True):
        assert_close(back(actual), wanted, reduction=60)


def test_converted_models_keep_their_tensors() -> None:
    shared = nn.BatchNorm2d(4)
    other = nn.BatchNorm2d(4, eps=0.1, momentum=None)
    other.weight = shared.weight
    other.bias.requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), shared, nn.Sequential(shared, other), nn.InstanceNorm2d(4))
    model[2].eval()
    before = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    converted = convert_syncbn_model(model)
    assert converted is model
    after = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert type(model[1]) is SyncBatchNorm
    assert model[1] is model[2][0]
    assert type(model[3]) is nn.InstanceNorm2d
    assert (model[2][1].eps, model[2][1].momentum) == (0.1, None)
    assert [module.training for module in model[2]] == [False, False]
    assert not model[2][1].bias.requires_grad


def test_converting_takes_arguments_to_all_norms() -> None:
    group = object()
    model = nn.ModuleDict({"one": nn.BatchNorm1d(2, affine=False), "two": SyncBatchNorm(3, fuse_relu=True)})
    convert_syncbn_model(model, process_group=group, channel_last=True)
    for norm in model.values():
        assert norm.process_group is group
        assert norm.channel_last
    assert model["one"].weight is None
    assert model["two"].fuse_relu
    single = convert_syncbn_model(nn.BatchNorm3d(2, track_running_stats=False))
    assert type(single) is SyncBatchNorm
    assert single.running_mean is None
    with pytest.raises(ValueError, match="does not know its channels yet"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm2d()))
    part = nn.Sequential(nn.BatchNorm1d(2), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="1: LazyBatchNorm1d"):
        convert_syncbn_model(part)
    assert type(part[0]) is nn.BatchNorm1d
    with pytest.raises(TypeError, match="module must be a"):
        convert_syncbn_model([nn.BatchNorm1d(2)])


def test_state_dicts_equal_pytorchs() -> None:
    norm = SyncBatchNorm(3)
    nn.BatchNorm2d(3).load_state_dict(norm.state_dict())
    norm.load_state_dict(nn.BatchNorm2d(3).state_dict())
    assert "fuse_relu=True" in repr(SyncBatchNorm(3, fuse_relu=True, channel_last=True))


@pytest.mark.parametrize(
    ("shape", "z", "error", "words"),
    [
        ((2, 5, 3), None, ValueError, "3 channels|3 of|has shape"),
        ((3,), None, ValueError, "at least two dimensions"),
        ((1, 3), None, ValueError, "more than one value per channel"),
        ((2, 3, 4), (2, 3, 5), ValueError, "z has shape"),
    ],
)
def test_wrong_inputs(shape: tuple[int, ...], z: tuple[int, ...] | None, error: type, words: str) -> None:
    norm = SyncBatchNorm(3)
    with pytest.raises(error, match=words):
        norm(torch.zeros(shape), None if z is None else torch.zeros(z))
    with pytest.raises(ValueError, match="expected 3 channels in dimension 1"):
        SyncBatchNorm(3, affine=False, track_running_stats=False)(torch.zeros(2, 4))
    assert norm.num_batches_tracked == 0


def test_import_paths() -> None:
    assert apex.parallel.SyncBatchNorm is optimized_sync_batchnorm.SyncBatchNorm
    assert issubclass(sync_batchnorm.SyncBatchNorm, SyncBatchNorm)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("relu", [False, True])
def test_modules_where_processes_exchange(
    route: Route, alone: dist.ProcessGroup, relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the kernel path of several processes for tensors of many kinds, twice."""
    monkeypatch.setattr(optimized_sync_batchnorm, "process_count", lambda group: 2)
    with _library.implementation(route.implementation):
        for dtype, momentum, affine, turn in itertools.product(
            (torch.float32, torch.bfloat16), (0.3, None), (True, False), range(2)
        ):
            norm = SyncBatchNorm(4, momentum=momentum, affine=affine, fuse_relu=relu, process_group=alone)
            own = nn.BatchNorm2d(4, momentum=momentum, affine=affine).double()
            for _ in range(2):
                given = torch.randn(3, 4, 2, 3).add(turn).to(route.device, dtype)
                x = given.cpu().double().requires_grad_()
                given.requires_grad_(turn == 0)  # without, nothing but its own sums is a process's business
                expected = own(x)
                expected = expected.relu() if relu else expected
                output = norm.to(route.device)(given)
                assert_close(output, expected, reduction=18)
                dy = torch.ones_like(expected) * (expected.detach() > 0.05)
                expected.backward(dy)
                if output.requires_grad:
                    output.backward(dy.to(output))
                if turn == 0:
                    assert_close(given.grad, x.grad, reduction=18)
            assert_close(norm.running_var, own.running_var, reduction=18)
            if affine:
                assert_close(norm.weight.grad, own.weight.grad, reduction=36)
        bare = SyncBatchNorm(4, affine=False, track_running_stats=False, process_group=alone)
        with pytest.raises(ValueError, match="expected 4 channels in dimension 1"):
            bare(torch.ones(2, 3, 2, device=route.device))
        norm = SyncBatchNorm(4, process_group=alone).to(route.device)
        with pytest.raises(ValueError, match="expected 4 channels in dimension 1"):
            norm(torch.ones(2, 3, 2, device=route.device))
        with pytest.raises(ValueError, match="z has shape"):
            norm(torch.ones(2, 4, 2, device=route.device), torch.ones(2, 4, 3, device=route.device))
        assert norm.num_batches_tracked == 0
        assert not norm.running_mean.any()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("averaged", [False, True])
def test_hooks_may_give_saved_tensors_another_layout(
    route: Route, alone: dist.ProcessGroup, averaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.autograd.graph.save_on_cpu(pin_memory=True)` does this."""
    monkeypatch.setattr(optimized_sync_batchnorm, "process_count", lambda group: 2)
    norm = SyncBatchNorm(4, fuse_relu=True, process_group=alone).to(route.device)

    def apply(x, z):
        if not averaged:
            return norm(x, z)
        channels = Channels(None, None, norm.weight, norm.bias)
        rest = (channels, BatchNormSpec(relu=True), GroupExchange(alone, 1))
        return batch_norm_with_statistics(x, z, *rest)[0]

    x, z = (torch.randn(3, 4, 2, 5, device=route.device).to(memory_format=torch.channels_last) for _ in range(2))
    leaves = (x.requires_grad_(), z.requires_grad_(), norm.weight, norm.bias)
    dy = torch.randn(3, 4, 2, 5, device=route.device)
    with _library.implementation(route.implementation):
        expected = torch.autograd.grad(apply(x, z), leaves, dy)
        hooks = (lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            output = apply(x, z)
        for gradient, other in zip(torch.autograd.grad(output, leaves, dy), expected, strict=True):
            assert_close(gradient, other.double(), reduction=30)


@pytest.mark.parametrize("route", routes())
def test_compiled_without_graph_breaks(route: Route, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized_sync_batchnorm, "process_count", lambda group: 2)
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    x, z = (torch.randn(3, 4, 2, 5, device=route.device, requires_grad=True) for _ in range(2))
    results = []
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        for compiled in (True, False):
            norm = SyncBatchNorm(4, fuse_relu=True, process_group=alone).to(route.device)
            called = torch.compile(norm, fullgraph=True, backend=backend) if compiled else norm
            output = called(x, z)
            gradients = torch.autograd.grad(output.pow(3).sum(), (x, z, norm.weight, norm.bias))
            results.append((output, norm.running_mean, norm.running_var, *gradients))
    for actual, wanted in zip(*results, strict=True):
        assert_close(actual, wanted.double(), reduction=30)
