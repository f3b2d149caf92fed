"""Linear layers in float8 with a scale for each block: numbers, gradients, the choice of layers, training."""

from __future__ import annotations

import io
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp, fp8, graphs
from apex.fp8.gather import ShardedWeight
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.ops import float8
from apex.ops.float8 import reference
from apex.optimizers import FusedAdam

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=[GPU, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")])]
NUMBER = torch.float8_e4m3fn


def network(device: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).to(device, dtype)


def rounded(matrix: torch.Tensor, square: bool, power_of_2: bool) -> torch.Tensor:
    """Return the nearest numbers with a scale per block, in float64."""
    copy, _, inverse, _ = reference.cast_blocks(matrix.contiguous(), square, power_of_2, NUMBER)
    return reference.widened_blocks(copy, inverse, torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_products_are_of_rounded_matrices(power_of_2, device):
    """The weight's gradient multiplies copies that are cast along the other dimension, from the same numbers."""
    torch.manual_seed(1)
    input = torch.randn(2, 128, 384, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128, 384, device=device, requires_grad=True)
    bias = torch.randn(128, device=device, requires_grad=True)
    dy = torch.randn(2, 128, 128, device=device, dtype=torch.bfloat16)
    output = fp8.linear(input, weight, bias, "blockwise", power_of_2=power_of_2)
    output.backward(dy)
    x, w, g = input.detach().view(256, 384), weight.detach(), dy.view(256, 128)
    expected = rounded(x, False, power_of_2) @ rounded(w, True, power_of_2).t() + bias.detach().double()
    dinput = rounded(g, False, power_of_2) @ rounded(w.t(), True, power_of_2).t()
    dweight = rounded(g.t(), False, power_of_2) @ rounded(x.t(), False, power_of_2).t()
    for found, exact in (
        (output.view(256, 128), expected),
        (input.grad.view(256, 384), dinput),
        (weight.grad, dweight),
    ):
        torch.testing.assert_close(found.detach().double(), exact, rtol=2**-7, atol=2**-8 * float(exact.abs().max()))
    assert (output.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_errors_of_a_layer(device):
    """Gaussian numbers: at most 3.8% of the norm. With outliers in one block: at most half of tensorwise's error.

    The rounding error of e4m3 is uniform within 2**-4 of a number at most, so that a product's is near 2**-4 / sqrt(3).
    The outliers are four of 1024 input channels, which the weight ignores: they cost one block of eight its bits.
    """
    errors = {}
    for outliers in (1.0, 1e5):
        torch.manual_seed(1)
        input = torch.randn(256, 1024, device=device, dtype=torch.bfloat16)
        weight = (torch.randn(256, 1024, device=device) / 32).bfloat16()
        if outliers > 1:
            input[:, :4] *= outliers
            weight[:, :4] = 0
        dy = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
        x, w, g = (tensor.double() for tensor in (input, weight, dy))
        exact = (x @ w.t(), g @ w, g.t() @ x)
        for scaling in ("tensorwise", "blockwise"):
            leaves = input.clone().requires_grad_(), weight.clone().requires_grad_()
            output = fp8.linear(*leaves, scaling=scaling)
            found = output.detach(), *torch.autograd.grad(output, leaves, dy)
            pairs = zip(found, exact, strict=True)
            errors[scaling, outliers] = [float((f.double() - e).norm() / e.norm()) for f, e in pairs]
    assert max(errors["blockwise", 1.0]) < 0.038, errors
    assert errors["blockwise", 1e5][0] < 0.5 * errors["tensorwise", 1e5][0], errors


def mx_numbers(matrix: torch.Tensor) -> torch.Tensor:
    """Return the nearest MXFP8 numbers of each 32 numbers of a row, in float64."""
    blocks = matrix.double().view(matrix.shape[0], -1, 32)
    largest = blocks.abs().amax(2, keepdim=True)
    scale = torch.exp2((largest / 448).log2().ceil())
    return ((blocks / scale).float().to(NUMBER).double() * scale).view(matrix.shape)


@pytest.mark.parametrize("device", DEVICES)
def test_mxfp8_is_emulated(device):
    torch.manual_seed(1)
    input = torch.randn(64, 96, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32, 96, device=device, requires_grad=True)
    dy = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        input[:, 5] *= 1e4
        input[3, 32:64] = 1e-6
    layer = nn.Sequential(nn.Linear(96, 32, bias=False, device=device))
    layer[0].weight = nn.Parameter(weight.detach())
    assert not fp8.convert(layer, "mxfp8", smallest_weight=0, emulate=True)[0].reason
    output = layer(input)
    output.backward(dy)
    x, w, g = input.detach(), weight.detach(), dy
    exact = (
        mx_numbers(x) @ mx_numbers(w).t(),
        mx_numbers(g) @ mx_numbers(w.t().contiguous()).t(),
        mx_numbers(g.t().contiguous()) @ mx_numbers(x.t().contiguous()).t(),
    )
    for found, expected in zip((output.detach(), input.grad, layer[0].weight.grad), exact, strict=True):
        bound = 2**-8 * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=bound * 2**-8)


@pytest.mark.parametrize("shape", [(64, 128), (0, 128), (3, 5, 128)])
def test_other_numbers_of_rows_are_multiplied_as_usual(shape, caplog, monkeypatch):
    monkeypatch.setattr(sys.modules["apex.fp8.linear"], "_reported", set())
    input, weight = torch.randn(shape), torch.randn(256, 128)
    for _ in range(2):
        assert torch.equal(fp8.linear(input, weight, scaling="blockwise"), F.linear(input, weight))
    rows = input.numel() // 128
    reason = (
        f"128 inputs and 256 outputs multiplied {rows} rows without float8, because 'blockwise' needs a multiple of 128"
    )
    assert [reason in message for message in caplog.messages] == [True] * bool(rows)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"])
def test_the_format_of_gradients(scaling):
    """Gradients of weights in e5m2 have twice the error of those in e4m3; outputs have the same bits."""
    torch.manual_seed(1)
    x, weight, dy = torch.randn(128, 128), torch.randn(128, 128), torch.randn(128, 128)
    exact, errors, outputs = dy.double() @ weight.double(), {}, []
    for gradients in (None, "e4m3", "e5m2"):
        layer = fp8.Float8Linear(128, 128, False, scaling=scaling, gradients=gradients)
        with torch.no_grad():
            layer.weight.copy_(weight)
        input = x.clone().requires_grad_()
        outputs.append(layer(input))
        outputs[-1].backward(dy)
        errors[gradients] = float((input.grad - exact).norm() / exact.norm())
    assert torch.equal(outputs[0], outputs[2])
    assert errors["e5m2"] > 1.3 * errors["e4m3"]
    assert errors[None] == errors["e5m2" if scaling in ("tensorwise", "delayed") else "e4m3"]


def test_formats_of_gradients_are_kept_and_refused():
    model = network("cpu")
    fp8.convert(model, "blockwise", gradients="e5m2", smallest_weight=0, emulate=True)
    assert model[0].gradients == "e5m2"
    fp8.revert(model)
    assert "gradients" not in vars(model[0])
    with pytest.raises(ValueError, match=r"gradients='e3m4' is not known; use one of e4m3, e5m2, or None"):
        fp8.convert(model, "blockwise", gradients="e3m4", emulate=True)
    with pytest.raises(ValueError, match=r"no effect on torchao's layers"):
        fp8.convert(model, gradients="e4m3", float8_all_gather=True, emulate=True)
    assert type(model[0]) is nn.Linear


def test_gradients_that_nobody_wants():
    input, weight = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128)
    fp8.linear(input, weight, scaling="blockwise").sum().backward()
    assert input.grad is not None
    input, weight = torch.randn(128, 128), torch.randn(128, 128, requires_grad=True)
    fp8.linear(input, weight, scaling="blockwise").sum().backward()
    assert weight.grad is not None
    (gradient,) = torch.autograd.grad(
        fp8.linear(input, weight, scaling="blockwise").square().sum(), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_layers_of_other_sizes_stay_as_they_are():
    model = nn.Sequential(
        nn.Linear(128, 256), nn.Linear(256, 144), FusedDense(128, 128), FusedDenseGeluDense(128, 64, 128)
    )
    report = fp8.convert(model, "blockwise", smallest_weight=0, power_of_2=True, emulate=True)
    reason = "a size is no multiple of 128"
    assert [row.reason for row in report] == ["", reason, "", reason, reason]
    assert "scaling=blockwise" in repr(model[0])
    assert model[0].power_of_2
    fp8.revert(model)
    assert "power_of_2" not in vars(model[0])
    assert type(model[0]) is nn.Linear


def test_weights_for_float8_gathers_compute_as_usual_and_are_put_back():
    model, plain = network("cpu"), network("cpu")
    fp8.convert(plain, "blockwise", smallest_weight=0, emulate=True)
    report = fp8.convert(model, "blockwise", smallest_weight=0, float8_all_gather=True, emulate=True)
    assert not any(row.reason for row in report)
    assert type(model[0].weight).__name__ == "ShardedWeight"
    x = torch.randn(128, 128)
    for each in (model, plain):
        each(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    plain.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    model.load_state_dict(loaded)
    whole = pickle.loads(pickle.dumps(model))
    assert type(whole[0].weight).__name__ == "ShardedWeight"
    assert torch.equal(whole(x), model(x))
    fp8.revert(model)
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, plain[0].weight)


@pytest.mark.parametrize("gathers", [False, True])
def test_float8_gathers_leave_tied_weights_tied(gathers):
    model = nn.ModuleDict({"words": nn.Embedding(256, 128), "inner": nn.Linear(128, 128), "head": nn.Linear(128, 256)})
    model["head"].weight, model["again"] = model["words"].weight, model["inner"]
    report = fp8.convert(model, "blockwise", smallest_weight=0, float8_all_gather=gathers, emulate=True)
    reason = "float8_all_gather would untie its weight, which another layer shares" if gathers else ""
    assert [(row.name, row.reason) for row in report] == [("inner", ""), ("head", reason)]
    assert model["head"].weight is model["words"].weight
    assert model["again"] is model["inner"]


def test_one_rank_of_fsdp_hands_over_one_tensor():
    """From 2.11 on, PyTorch copies only the first tensor if there is one rank."""
    shard = torch.randn(256, 128)
    rules = types.SimpleNamespace(param_dtype=torch.bfloat16)
    weight, mesh = ShardedWeight(shard, False), types.SimpleNamespace(size=lambda: 1)
    outputs, is_float8 = weight.fsdp_pre_all_gather(mesh, shard.shape, shard.stride(), nn.Module(), rules)
    assert not is_float8
    whole, kept = weight.fsdp_post_all_gather(outputs, is_float8, torch.bfloat16)
    assert torch.equal(whole, shard.bfloat16())
    assert kept == outputs
    assert len(outputs) == 1


@GPU
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")
def test_one_rank_of_fsdp_gathers_nothing_and_trains_alike(tmp_path):
    from torch.distributed.fsdp import fully_shard

    if reason := float8.obstacle(torch.device("cuda")):
        pytest.skip(reason)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        losses = []
        for gathered in (False, True):
            model = network("cuda")
            fp8.convert(model, "blockwise", float8_all_gather=gathered, smallest_weight=0)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            x = torch.randn(128, 128, generator=torch.Generator().manual_seed(5)).cuda()
            for _ in range(20):
                loss = F.mse_loss(model(x), x.tanh())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(float(loss))
        assert losses[1] == pytest.approx(losses[0], abs=0.02)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("scaling", ["blockwise", "mxfp8", "tensorwise"])
def test_training_continues_from_a_checkpoint(scaling):
    """A gated perceptron with two sizes that fit no block, accumulated gradients and recomputed activations."""

    class Perceptron(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(128, hidden), nn.Linear(128, hidden), nn.Linear(hidden, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    def start() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(Perceptron(90), Perceptron(256))
        report = fp8.convert(model, scaling, smallest_weight=0, emulate=True)
        assert [bool(row.reason) for row in report] == [True] * 3 + [False] * 3
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            for seed in (1, 2):
                x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(seed))
                hidden = checkpoint(model[1], model[0](x), use_reentrant=False)
                (hidden - x.tanh()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = start()
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, 2)
    file.seek(0)
    again, other = start()
    states = torch.load(file, weights_only=True)
    again.load_state_dict(states[0])
    other.load_state_dict(states[1])
    train(again, other, 2)
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_compiled_equals_eager():
    results = []
    for compiled in (False, True):
        model = network("cpu")
        fp8.convert(model, "blockwise", smallest_weight=0, emulate=True)
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        x = torch.randn(128, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
        call(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-5 * float(eager.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_trains_under_amp(level, device):
    losses = []
    for scaling in (None, "blockwise"):
        model = network(device)
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
        if scaling:
            fp8.convert(model, scaling, smallest_weight=0, emulate=True)
        x = torch.randn(128, 128, generator=torch.Generator().manual_seed(5)).to(device)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).float(), x.tanh())
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            return loss.detach()

        captured = graphs.capture(step)
        for _ in range(12):
            loss = captured(x)
        losses.append(float(loss))
    amp.shutdown()
    assert losses[0] < 0.2
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


@GPU
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")
def test_compiled_by_inductor():
    """Compare products on the GPU, compiled by Inductor, with eager mode: bit for bit, if Inductor rounds as that."""
    if reason := float8.obstacle(torch.device("cuda")):
        pytest.skip(reason)
    from torch._inductor import config

    results = []
    for compiled in (False, True):
        model = network("cuda", torch.bfloat16)
        fp8.convert(model, "blockwise", smallest_weight=0)
        call = torch.compile(model, fullgraph=True) if compiled else model
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(3)).to("cuda", torch.bfloat16)
        with config.patch(emulate_precision_casts=True):
            y = call(x)
            y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(traced, eager)
