"""`apex.fuse` of norms, convolutional networks and losses, and its report."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import apex
from apex import amp
from apex._fuse import Report, ReportRow, vision
from apex._fuse.rule import FusedModule, compare, random_input


class RMSNorm(nn.Module):
    """An RMS norm as models write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class TimesRMSNorm(RMSNorm):
    """An RMS norm with a factor that no rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class PlusOne(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class GatedMLP(nn.Module):
    """A gated MLP like the ones in transformers."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GatedT5(nn.Module):
    """As T5 has it: the last layer may keep float32 where the others are in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0, self.wi_1, self.wo = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout, self.act = nn.Dropout(0.0), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.act(self.wi_0(x)) * self.wi_1(x))
        if isinstance(self.wo.weight, torch.Tensor) and self.wo.weight.dtype not in (x.dtype, torch.int8):
            x = x.to(self.wo.weight.dtype)
        return self.wo(x)


class Bottleneck(nn.Module):
    """The shape of torchvision's."""

    def __init__(self, channels: int, downsample: bool, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 4, 1, bias=False), norm(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(4)
        self.conv3, self.bn3 = nn.Conv2d(4, channels, 1, bias=False), norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(channels, channels, 1), norm(channels)) if downsample else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class PreActivation(Bottleneck):
    """A block with a Bottleneck's names in another order."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        out = self.conv2(self.relu(self.bn1(out)))
        out = self.bn3(self.conv3(self.relu(self.bn2(out))))
        return out + (self.downsample(x) if self.downsample is not None else x)


class TimmBlock(nn.Module):
    """The shape of timm's basic block."""

    def __init__(self, channels: int, se: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.drop_block, self.aa, self.act1, self.act2 = nn.Identity(), nn.Identity(), nn.ReLU(), nn.ReLU()
        self.se, self.drop_path, self.downsample = se, None, None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))
        x = self.bn2(self.conv2(x))
        if self.se is not None:
            x = self.se(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act2(x)


class BatchNormAct2d(nn.BatchNorm2d):
    """The shape of timm's batch norm of EfficientNet blocks."""

    def __init__(
        self, channels: int, act: nn.Module, drop: nn.Module | None = None, factor: float | None = 0.1
    ) -> None:
        super().__init__(channels, momentum=factor)
        self.drop, self.act = nn.Identity() if drop is None else drop, act

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        tracks = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if tracks else (None, None)
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, uses_batch, factor, self.eps)
        return self.act(self.drop(x))


class EvaluatingNorm(BatchNormAct2d):
    """A norm that never uses the statistics of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return self.act(self.drop(x))


def stem() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten())


CASES: dict[str, tuple[Any, tuple[int, ...], set[str]]] = {
    "layer norm": (lambda: nn.LayerNorm((3, 8)), (5, 3, 8), {"layer norm"}),
    "layer norm without bias": (lambda: nn.LayerNorm(8, bias=False), (5, 8), {"layer norm"}),
    "RMS norm": (lambda: nn.RMSNorm(8), (5, 8), {"RMS norm"}),
    "written RMS norm": (lambda: RMSNorm(8), (5, 8), {"RMS norm of weight"}),
    "group norm": (lambda: nn.GroupNorm(2, 8), (5, 8, 3), {"group norm"}),
    "layer norm without weights": (lambda: nn.LayerNorm(8, elementwise_affine=False), (5, 8), {"layer norm"}),
    "RMS norm without weight": (lambda: nn.RMSNorm(8, elementwise_affine=False), (5, 8), {"RMS norm"}),
    "group norm without weights": (lambda: nn.GroupNorm(2, 8, affine=False), (5, 8, 3), {"group norm"}),
    "batch norm without weights": (
        lambda: nn.Sequential(nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.ReLU()),
        (5, 8),
        {"norm + activation in a row"},
    ),
    "gated MLP": (lambda: GatedMLP(nn.SiLU()), (5, 8), {"gated MLP"}),
    "in a row": (stem, (2, 3, 6, 6), {"norm + activation in a row", "group norm"}),
    "first layers": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.MaxPool2d(3, 2, 1)),
        (2, 3, 9, 9),
        {"convolution of few channels", "max pooling"},
    ),
    "bottleneck": (lambda: Bottleneck(8, False), (2, 8, 5, 5), {"residual block: batch norm + add + ReLU"}),
    "with downsample": (lambda: Bottleneck(8, True), (2, 8, 5, 5), {"residual block: batch norm + add + ReLU"}),
    "EfficientNet in a row": (
        lambda: nn.Sequential(nn.BatchNorm2d(8), nn.SiLU(inplace=True)),
        (2, 8, 5, 5),
        {"norm + activation in a row"},
    ),
    "timm, SiLU": (lambda: BatchNormAct2d(8, nn.SiLU(inplace=True)), (2, 8, 5, 5), {"batch norm + activation"}),
    "timm, ReLU": (lambda: BatchNormAct2d(8, nn.ReLU(), factor=None), (2, 8, 5, 5), {"batch norm + activation"}),
    "timm": (lambda: TimmBlock(8), (2, 8, 5, 5), {"residual block: batch norm + add + ReLU"}),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers(case: str, training: bool) -> None:
    make, shape, rules = CASES[case]
    torch.manual_seed(0)
    model = make().train(training)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor.uniform_(0.5, 1.5)
    plain, x = copy.deepcopy(model), torch.randn(shape)
    report = apex.fuse(model, check=x, verbose=False)
    assert {row.rule for row in report if not row.reason} == rules, str(report)
    assert all(
        map(torch.equal, model.state_dict().values(), plain.state_dict().values())
    )  # checks change no statistics
    results = []
    for each in (model, plain):
        leaf = x.clone().requires_grad_()
        output = each(leaf)
        results.append([output, *torch.autograd.grad(output.square().sum(), [leaf, *each.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())  # running statistics as well
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    apex.unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rms_norms_without_eps_use_pytorchs_default(dtype: torch.dtype) -> None:
    """The default eps for half precision is float32's, up to PyTorch 2.6 the dtype's own."""
    norm = nn.RMSNorm(8, dtype=dtype)
    plain, x = copy.deepcopy(norm), torch.full((2, 8), 1e-3, dtype=dtype)
    apex.fuse(norm, verbose=False)
    torch.testing.assert_close(norm(x), plain(x))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str) -> None:
    loss = nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1, ignore_index=3)
    plain = copy.deepcopy(loss)
    apex.fuse(loss, verbose=False)
    target = torch.tensor([0, 3, 4, 1])
    for logits, labels in ((torch.randn(4, 5), target), (torch.randn(2, 5, 2), target.view(2, 2))):
        results = []
        for each in (loss, plain):
            leaf = logits.clone().requires_grad_()
            value = each(leaf, labels)
            results.append((value, *torch.autograd.grad(value.sum(), leaf)))
        torch.testing.assert_close(*results)
    assert loss(torch.randn(4, 5).bfloat16(), target).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "classes have weights"),
        (nn.MultiheadAttention(8, 2, kdim=4), "another size than queries"),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), "a key and a value of its own"),
        (PlusOne(8), "its class has a forward of its own"),
        (weight_norm(nn.LayerNorm(8), dim=None), "its parameters are parametrized"),
        (TimesRMSNorm(8), "computes something else"),
        (Bottleneck(8, False, nn.SyncBatchNorm), "SyncBatchNorm"),
        (TimmBlock(8, nn.Sigmoid()), "it has se"),
        (PreActivation(8, False), "computes something else"),
        (EvaluatingNorm(8, nn.SiLU()), "computes something else"),
        (BatchNormAct2d(8, nn.SiLU(), nn.Dropout(0.1)), "it has dropout"),
        (BatchNormAct2d(8, nn.Hardswish()), "its activation is Hardswish"),
        (RMSNorm(8).to("meta"), "on no device"),
        (nn.MaxPool2d((3, 2)), "not square"),
        (nn.MaxPool2d(3, ceil_mode=True), "ceil_mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons_against_fusing(model: nn.Module, reason: str) -> None:
    kind = type(model)
    (row,) = (row for row in apex.fuse(model, verbose=False) if not row.name)
    assert reason in row.reason
    assert type(model) is kind


def test_a_replacement_that_fails_the_check_is_undone_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
    apex.fuse(model, verbose=False)
    monkeypatch.setattr(type(model[0]), "forward", lambda self, x: x * 1.001)
    apex.unfuse(model)
    report = apex.fuse(model, check=(torch.randn(4, 8),), verbose=False)
    assert [bool(row.reason) for row in report] == [True, False]
    assert "times the tolerance" in report[0].reason
    assert type(model[0]) is nn.LayerNorm
    assert "LayerNorm  no   undone: " in str(report)


def test_compare_reports_differences() -> None:
    norm = nn.LayerNorm(8)
    apex.fuse(norm, verbose=False)
    x = torch.randn(4, 8)
    assert compare(norm, (x,), {})[0] <= 1
    type(norm).fused_from = nn.RMSNorm
    try:
        assert compare(norm, (x,), {})[0] > 1
    finally:
        type(norm).fused_from = nn.LayerNorm


def test_nan_is_the_largest_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons with NaN are false: a check that asks whether an error is too large would let it pass."""
    norm = nn.LayerNorm(8)
    apex.fuse(norm, verbose=False)
    monkeypatch.setattr(type(norm), "forward", lambda self, x: nn.LayerNorm.forward(self, x) * torch.nan)
    assert compare(norm, (torch.randn(4, 8),), {})[0] == torch.inf


def test_random_numbers_of_the_training_stay_the_same() -> None:
    """Trials of modules draw their numbers from a separate generator."""
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    norm = RMSNorm(8)
    weights = norm.weight.detach().clone()
    torch.manual_seed(5)
    (row,) = apex.fuse(norm, verbose=False)
    assert not row.reason
    assert torch.equal(torch.randn(3), expected)
    assert torch.equal(random_input(norm, 2, 8), random_input(norm, 2, 8))
    assert torch.equal(norm.weight, weights)


def test_alike_modules_share_a_line_of_the_table() -> None:
    names = {"block_0.norm_1": "block_*.norm_1", "norm_2": "norm_2", "layers.3": "layers.*"}
    for name, pattern in names.items():
        assert f"\n{pattern} " in str(Report([ReportRow(name, "LayerNorm", "layer norm", "")]))
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3)))
    text = str(apex.fuse(model, verbose=False, choose=lambda name, module: name != "1.0"))
    assert text.splitlines() == [
        "module  class               fused",
        "*.*     LayerNorm x 2  yes  layer norm",
        "*.*     LayerNorm      no   left out by choose",
    ]
    assert str(apex.fuse(nn.Linear(2, 2), verbose=False)) == (
        "nothing here has a fused counterpart that is not in its place already"
    )


def test_the_forward_of_the_class_as_an_attribute_is_no_obstacle() -> None:
    """Transformers 4.57 leaves it there when it has recorded hidden states."""
    model, x = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(2, 8)
    expected = model(x)
    model[0].forward = model[0].forward
    apex.fuse(model, verbose=False)
    assert isinstance(model[0], FusedModule)
    torch.testing.assert_close(model(x), expected)
    model[0].forward = model[0].forward
    torch.testing.assert_close(model(x), expected)
    apex.unfuse(model)
    assert "forward" not in vars(model[0])
    assert torch.equal(model(x), expected)
    model[0].forward = lambda x: x
    (row,) = apex.fuse(model, verbose=False)
    assert "its forward was replaced in this instance" in row.reason


def test_a_second_time_changes_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    apex.fuse(model, verbose=False)
    kind = type(model[0])
    assert apex.fuse(model, verbose=False) == []
    assert type(model[0]) is kind
    assert isinstance(model[0], nn.LayerNorm)


@pytest.mark.parametrize(
    "call",
    [
        lambda: apex.fuse("model"),
        lambda: apex.unfuse(3),
        lambda: apex.fuse(nn.LayerNorm(2), check=3),
        lambda: apex.fuse(nn.LayerNorm(2), choose="1"),
    ],
)
def test_wrong_arguments(call: Any) -> None:
    with pytest.raises(TypeError, match="must be a"):
        call()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("fuse_first", [True, False])
def test_amp_before_and_after(level: str, fuse_first: bool) -> None:
    losses = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 2)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if fused and fuse_first:
            apex.fuse(model, verbose=False)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
        if fused and not fuse_first:
            apex.fuse(model, verbose=False)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3, 6, 6) + torch.arange(2.0)[:, None, None, None]).float().square().sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        losses.append(loss.item())
        amp.shutdown()
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0] != 0


def test_a_call_that_fails_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.RMSNorm(8))
    with pytest.raises(RuntimeError):
        apex.fuse(model, check=torch.randn(2, 5))
    with pytest.raises(TypeError, match="check must be"):
        apex.fuse(model, check="input")
    with pytest.raises(ZeroDivisionError):
        apex.fuse(model, choose=lambda name, module: bool(1 / (name != "2")))
    with pytest.raises(TypeError, match=r"choose must be a function .* got '1'"):
        apex.fuse(model, choose="1")  # type: ignore[arg-type]
    assert type(model[1]) is nn.LayerNorm


def test_a_check_sees_a_norm_together_with_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "group_norm_forward", lambda norm, input, activation: input)
    report = apex.fuse(nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), check=torch.randn(2, 8, 4), verbose=False)
    assert [bool(row.reason) for row in report] == [True, False]


def test_torch_compile() -> None:
    model = nn.Sequential(Bottleneck(8, True), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.LayerNorm(128))
    plain, x = copy.deepcopy(model), torch.randn(2, 8, 4, 4)
    apex.fuse(model, verbose=False)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), plain(x))


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.functional.silu])
def test_a_gated_unit_notices_a_changed_activation(activation: Any) -> None:
    model, calls, x = GatedMLP(activation), [], torch.randn(2, 8)
    assert [row.reason for row in apex.fuse(model, verbose=False)] == [""]
    plain = copy.deepcopy(model)
    apex.unfuse(plain)
    if isinstance(activation, nn.Module):
        model.act_fn.register_forward_hook(lambda *args: calls.append(1))
        torch.testing.assert_close(model(x), plain(x))
        assert calls == [1]
    model.act_fn = plain.act_fn = nn.Tanh() if calls else torch.tanh
    torch.testing.assert_close(model(x), plain(x))


def test_modules_that_share_weights_hooks_or_parents() -> None:
    """Check tied weights, a module at two places, hooks and frozen weights."""
    shared = nn.LayerNorm(8)
    model = nn.Sequential(shared, nn.Linear(8, 8), nn.LayerNorm(8), shared, nn.RMSNorm(8))
    model[2].weight = shared.weight
    model[4].requires_grad_(False)
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    model[2].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    plain, x = copy.deepcopy(model), torch.randn(3, 8)
    assert len(apex.fuse(model, verbose=False)) == 3
    assert model[2].weight is shared.weight
    for each in (model, plain):
        each(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.testing.assert_close(seen[:2], seen[2:])


def test_a_saved_model_and_an_average_of_it(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8)), torch.randn(2, 8)
    apex.fuse(model, verbose=False)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    for each in (loaded, average, torch.jit.trace(model, x), torch.export.export(model, (x,)).module()):
        torch.testing.assert_close(each(x), model(x))
    apex.unfuse(loaded)
    assert [type(module) for module in loaded] == [nn.Linear, nn.LayerNorm, nn.RMSNorm]


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("norm", ["bn1", "bn2"])
def test_blocks_whose_norms_have_hooks_call_them(norm: str, kind: str) -> None:
    model, calls = Bottleneck(8, False), []
    model.relu.inplace = False  # PyTorch refuses to change the output of a module with backward hooks
    assert not any(row.reason for row in apex.fuse(model, verbose=False))
    getattr(model.get_submodule(norm), f"register_{kind}_hook")(lambda *args: calls.append(1))
    model(torch.randn(2, 8, 4, 4)).sum().backward()
    assert calls == [1]


def test_data_parallel_before_and_after_and_sharding(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    apex.fuse(model, verbose=False)
    plain(x).sum().backward()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for wrap in (nn.parallel.DistributedDataParallel, apex.parallel.DistributedDataParallel):
            after = wrap(copy.deepcopy(plain))
            assert [row.reason for row in apex.fuse(after, verbose=False)] == [""]
            for wrapped in (wrap(copy.deepcopy(model)), after):
                wrapped.zero_grad()
                wrapped(x).sum().backward()
                torch.testing.assert_close(*[[p.grad for p in m.parameters()] for m in (wrapped, plain)])
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model[1], mesh=mesh)
        if torch.torch_version.TorchVersion(torch.__version__) >= (2, 10):  # 2.6 has no fully_shard for CPUs
            torch.testing.assert_close(model(x), plain(x))
        with pytest.raises(RuntimeError, match="undo that first"):
            apex.unfuse(model)
        gated = GatedMLP(nn.SiLU())
        fully_shard(gated, mesh=mesh)
        assert "fuse before fully_shard" in apex.fuse(gated, verbose=False)[0].reason
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_the_dtypes_of_autocast_stay_on_a_gpu() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.RMSNorm(64), nn.GroupNorm(2, 64)).cuda()
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    with torch.autocast("cuda", torch.bfloat16):
        for one, other in zip(model, plain, strict=True):
            assert one(x).dtype == other(x).dtype
            torch.testing.assert_close(one(x), other(x), rtol=1e-2, atol=1e-2)
    small = torch.full_like(x, 1e-3)  # where eps decides
    torch.testing.assert_close(model[1].bfloat16()(small), plain[1].bfloat16()(small), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("last", [torch.float32, torch.bfloat16])
def test_a_gated_unit_whose_last_layer_keeps_another_dtype(last: torch.dtype) -> None:
    torch.manual_seed(0)
    model = GatedT5().bfloat16()
    model.wo.to(last)
    plain, x = copy.deepcopy(model), torch.randn(5, 8).bfloat16()
    (row,) = apex.fuse(model, verbose=False)
    assert type(model) is not GatedT5, row
    assert model(x).dtype == last
    torch.testing.assert_close(model(x), plain(x), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_one_value_per_channel_is_refused_in_training(activation: Any) -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), activation())
    apex.fuse(model)
    with pytest.raises(ValueError, match="more than one value per channel"):
        model(torch.randn(1, 8, 1, 1))
    assert not model[0].running_mean.any()
    assert model.eval()(torch.randn(1, 8, 1, 1)).shape == (1, 8, 1, 1)
