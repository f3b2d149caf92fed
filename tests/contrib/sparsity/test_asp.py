"""ASP: the choice of parameters, and zeros that stay zero through training, checkpoints and mixed precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from apex.booster import Booster
from apex.booster.mixed_precision import BF16MixedPrecision
from apex.contrib.sparsity import ASP, WandaMask, _parameters, create_mask
from apex.contrib.sparsity._parameters import copies_of, optimizer_chain, tied_tensors
from apex.contrib.sparsity.asp import eligible_modules
from apex.fp16_utils import FP16_Optimizer
from apex.graphs import CapturedStep
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel import LARC
from tests.graphs.recorder import CpuGraphs


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ASP.reset()
    yield
    ASP.reset()
    amp.shutdown()


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    return nn.Sequential(*layers).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int = 3, scaled: bool = False) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator)
        loss = (model(x.to(next(model.parameters()).dtype) if not scaled else x).float() - x.roll(1)).square().mean()
        if scaled:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_sparse(model: nn.Module) -> None:
    for index in (0, 3, 5):
        weight, mask = model[index].weight, model[index].get_buffer("__weight_mma_mask")
        assert mask.dtype == torch.bool
        assert (weight.detach()[~mask] == 0).all()
        assert (weight.detach()[mask] != 0).float().mean() > 0.9
        assert (mask.view(-1, 4).sum(1) == 2).all()


def quiet(model: nn.Module, **options: Any) -> None:
    ASP.init_model_for_pruning(model, **{"verbosity": 0, **options})


def test_dense_sparse_recomputed_restored() -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    assert not ASP.already_init_asp_model()
    assert not ASP.is_sparsity_enabled()
    quiet(model, allow_recompute_mask=True)
    assert ASP.already_init_asp_model()
    ASP.init_optimizer_for_pruning(optimizer)
    assert not ASP.is_sparsity_enabled()
    dense = [model[index].weight.detach().clone() for index in (0, 3, 5)]
    ASP.set_permutation_saving_params(allow_permutation=False)
    ASP.compute_sparse_masks()
    assert ASP.is_sparsity_enabled()
    for index, before in zip((0, 3, 5), dense, strict=True):
        assert torch.equal(model[index].weight, before * create_mask(before))
    ASP.restore_pruned_weights()
    assert not ASP.is_sparsity_enabled()
    assert all(torch.equal(model[index].weight, before) for index, before in zip((0, 3, 5), dense, strict=True))
    ASP.compute_sparse_masks()
    train(model, optimizer)
    assert_sparse(model)
    ASP.set_permutation_saving_params()
    ASP.compute_sparse_masks()  # again, from dense values that are permuted first
    assert_sparse(model)
    assert float(model[0].get_buffer("__weight_mma_pruned_p").abs().max()) > 0
    train(model, optimizer)
    assert_sparse(model)


@pytest.mark.parametrize(
    "names", [{"disallowed_layer_names": ["module.3"]}, {"allowed_layer_names": ["0", "module.3"]}]
)
def test_names_of_no_layer_warn(names: dict) -> None:
    """A wrapper changes names; the layer that should stay dense was pruned, or the other way round."""
    with pytest.warns(UserWarning, match=r"is called module\.3"):
        quiet(make(), **names)


def test_masks_cannot_be_recomputed_without_values() -> None:
    model = make()
    quiet(model)
    ASP.compute_sparse_masks()
    for again in (ASP.compute_sparse_masks, ASP.restore_pruned_weights):
        with pytest.raises(AssertionError, match="allow_recompute_mask=True"):
            again()
    assert_sparse(model)


def test_checkpoints_go_on_elsewhere(tmp_path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ASP.prune_trained_model(model, optimizer)
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    keys = [key for key in model.state_dict() if "mma" in key]
    assert keys == ["0.__weight_mma_mask", "3.__weight_mma_mask", "5.__weight_mma_mask"]
    ASP.reset()
    assert not [key for key in model.state_dict() if "mma" in key]
    other = make().double()
    other = other.float()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
    quiet(other)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    ASP.init_optimizer_for_pruning(optimizer)
    assert ASP.is_sparsity_enabled()
    other.to(torch.float64).to(torch.float32)  # moves and casts replace buffers and values
    train(other, optimizer)
    assert_sparse(other)


def test_state_is_masked_and_permuted_with_the_weights() -> None:
    """Training continues as the unpermuted model would: moments follow their channels."""
    torch.manual_seed(0)
    model = make(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    ones = lambda param: torch.ones_like(param)  # noqa: E731  permutes, prunes nothing
    quiet(model, mask_calculator=ones)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.add_copy(average)
    before = model[3].weight.detach().clone()
    ASP.compute_sparse_masks()
    assert not torch.equal(model[3].weight, before)
    train(model, optimizer)
    train(twin, its_optimizer)
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(model(x), twin(x), rtol=1e-9, atol=1e-9)
    order = [int(torch.cdist(average.module[3].weight, row[None]).argmin()) for row in before.detach()]
    assert order != list(range(32))  # the copy was permuted
    ASP.reset()
    ASP.prune_trained_model(model, optimizer)
    train(model, optimizer)
    mask = model[3].get_buffer("__weight_mma_mask")
    assert all((optimizer.state[model[3].weight][key][~mask] == 0).all() for key in ("exp_avg", "exp_avg_sq"))


def test_several_optimizers_and_wrappers() -> None:
    model = make()
    first = FusedAdam(model[:3].parameters(), lr=0.01)
    second = LARC(FusedSGD(model[3:].parameters(), lr=0.01, momentum=0.9))
    quiet(model)
    for optimizer in (first, second):
        ASP.init_optimizer_for_pruning(optimizer)
    with pytest.raises(AssertionError, match="already"):
        ASP.init_optimizer_for_pruning(first)
    ASP.compute_sparse_masks()

    class Both:
        @staticmethod
        def step() -> None:
            first.step()
            second.step()

        @staticmethod
        def zero_grad() -> None:
            model.zero_grad()

    train(model, Both)
    assert_sparse(model)


def test_one_call_masks_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    apply = _parameters.apply_masks
    monkeypatch.setattr(_parameters, "apply_masks", lambda *lists: calls.append(len(lists[0])) or apply(*lists))
    model = make()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    ASP.prune_trained_model(model, optimizer)
    calls.clear()
    train(model, optimizer, steps=1)
    assert calls == [3, 9]  # gradients before the step; weights and two moments of three layers after it


@pytest.mark.parametrize("masters", ["amp O2", "amp O5", "fp16_utils", "master_weights", "booster"])
def test_half_precision_and_its_masters(masters: str) -> None:
    model = make()
    if masters == "master_weights":
        model = model.bfloat16()
        optimizer: Any = FusedAdam(model.parameters(), lr=0.01, master_weights=True)
    elif masters == "fp16_utils":
        model = model.bfloat16()
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), static_loss_scale=8.0)
    elif masters == "booster":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        _, optimizer, *_ = Booster("cpu", BF16MixedPrecision("O5")).boost(model, optimizer)
    else:
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(model, optimizer, opt_level=masters[4:], verbosity=0)
    quiet(model, allow_recompute_mask=True)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    if masters in ("fp16_utils", "booster"):
        for _ in range(3):
            x = torch.randn(8, 16).bfloat16()
            for layer in model:
                x = layer(x.to(next((param.dtype for param in layer.parameters()), x.dtype)))
            optimizer.backward(x.float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    else:
        train(model, optimizer, scaled=masters.startswith("amp"))
    assert_sparse(model)
    states = [optimizer_chain(optimizer)[-1].state]
    values, state, _ = tied_tensors(model[3].weight, copies_of(model, [optimizer], ()), states)
    mask = model[3].get_buffer("__weight_mma_mask")
    assert len(values) == 2
    assert all((value[~mask] == 0).all() for value in (*values, *state))
    ASP.restore_pruned_weights()
    for value in values[1:]:
        torch.testing.assert_close(value.to(model[3].weight.dtype), model[3].weight.detach())


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_autocast(level: str) -> None:
    model = make()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    ASP.prune_trained_model(model, optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, scaled=True)
    assert_sparse(model)


def test_captured_steps() -> None:
    model = make()
    optimizer = FusedAdam(model.parameters(), lr=0.01, capturable=True)
    ASP.prune_trained_model(model, optimizer)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    captured = CapturedStep(step, backend=CpuGraphs())
    losses = [float(captured(torch.randn(8, 16))) for _ in range(6)]
    assert captured.graphs == 1
    assert all(map(math.isfinite, losses))
    assert_sparse(model)


def test_every_skipped_layer_has_a_reason(capsys: pytest.CaptureFixture) -> None:
    class Special(nn.Linear):
        pass

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(8, 16))

    model = nn.ModuleDict(
        {
            "special": Special(16, 8),
            "narrow": nn.Linear(10, 8),
            "frozen": nn.Linear(16, 8).requires_grad_(False),
            "rounded": nn.Linear(10, 8).bfloat16(),
            "unwanted": nn.Linear(16, 8),
            "strange": Strange(),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)),
            "tied": nn.Linear(16, 8),
        }
    )
    model["tied"].weight = model["special"].weight
    ASP.init_model_for_pruning(model, disallowed_layer_names=["unwanted"], custom_layer_dict={Strange: ["kernel"]})
    reasons = ASP.skipped_layers()
    assert list(reasons) == [
        "narrow.weight",
        "frozen.weight",
        "rounded.weight",
        "unwanted",
        "normed.weight",
        "tied.weight",
    ]
    assert "[8, 10] is not a multiple of 8 by a multiple of 16" in reasons["rounded.weight"]
    assert "the same parameter as special.weight" in reasons["tied.weight"]
    printed = capsys.readouterr().out
    assert "will prune special.weight" in printed
    assert "will prune strange.kernel" in printed
    assert "will not prune frozen.weight: it is frozen" in printed
    assert set(model["special"]._buffers) == {"__weight_mma_mask"}


def test_attention() -> None:
    for sizes in ({}, {"kdim": 16, "vdim": 48}):
        model = nn.Sequential(nn.MultiheadAttention(32, 4, **sizes))
        quiet(model)
        ASP.compute_sparse_masks()
        names = ["in_proj_weight"] if not sizes else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        keys = {f"0.__{name}_mma_mask" for name in names} | {"0.out_proj.__weight_mma_mask"}
        assert {key for key in model.state_dict() if "mma" in key} == keys
        assert ASP.is_sparsity_enabled()
        ASP.reset()


def test_compiled_models_and_their_copies_are_permuted() -> None:
    inner = make(torch.float64)
    model = torch.compile(inner, backend="eager")
    x = torch.randn(4, 16, dtype=torch.float64)
    average = torch.optim.swa_utils.AveragedModel(model)
    model.eval()
    average.eval()
    expected, before = model(x), inner[3].weight.detach().clone()
    quiet(model, mask_calculator=lambda param: torch.ones_like(param))
    ASP.add_copy(average)
    ASP.compute_sparse_masks()
    assert not torch.equal(inner[3].weight, before)
    for each in (model, average):
        torch.testing.assert_close(each(x), expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(average.module._orig_mod[3].weight, inner[3].weight)


def test_models_without_values() -> None:
    model = nn.Sequential(nn.Linear(16, 32, device="meta"), nn.Linear(32, 16, device="meta"))
    quiet(model)
    with pytest.raises(RuntimeError, match="meta device have no values"):
        ASP.compute_sparse_masks()


def test_names_and_types() -> None:
    model = make()
    assert [name for name, _ in eligible_modules(model, [nn.Linear], None, ["3"])] == ["0", "5"]
    assert [name for name, _ in eligible_modules(model, [nn.Linear, nn.ReLU], ["2", "3"], [])] == ["2", "3"]


def test_errors() -> None:
    with pytest.raises(AssertionError, match="init_model_for_pruning first"):
        ASP.compute_sparse_masks()
    with pytest.raises(AssertionError, match="init_model_for_pruning first"):
        ASP.init_optimizer_for_pruning(torch.optim.SGD(make().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"no parameter of the model can be pruned\n  0.weight: its shape \[8, 10\]"):
        quiet(nn.Sequential(nn.Linear(10, 8)))
    with pytest.raises(ValueError, match="it has no layer of these types"):
        quiet(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="pattern 'm4' is not known"):
        quiet(make(), mask_calculator="m4")
    for helper in ("fill", "mn_1d_best", "as_matrix", "WandaMask", "torch"):
        with pytest.raises(ValueError, match=f"pattern '{helper}' is not known"):
            quiet(make(), mask_calculator=helper)
    with pytest.raises(ValueError, match="whitelist has ReLU"):
        quiet(make(), whitelist=[nn.ReLU])
    model = make()
    assert not ASP.already_init_asp_model()
    quiet(model, mask_calculator=lambda param: param[:1])
    with pytest.raises(AssertionError, match=r"initialized already; ASP.reset"):
        quiet(model)
    with pytest.raises(TypeError, match="got int"):
        ASP.init_optimizer_for_pruning(3)
    with pytest.raises(ValueError, match=r"none of the parameters of the optimizer \(SGD\) belongs to the model"):
        ASP.init_optimizer_for_pruning(torch.optim.SGD(make().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"mask_calculator gave \[1, 16\] for 0.weight of shape \[32, 16\]"):
        ASP.compute_sparse_masks()


def test_bad_arguments_change_nothing() -> None:
    """Whatever is refused leaves weights, buffers and hooks as they were, and ASP without a model."""
    model, other = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def fails_later(param: Tensor) -> Any:
        return torch.ones_like(param) if param.shape[0] == 32 else None

    def prune(**options: Any) -> None:
        quiet(model, **options)
        ASP.compute_sparse_masks()

    calls: list[tuple[type[Exception], str, Callable[[], None]]] = [
        (TypeError, "optimizer must be", lambda: ASP.prune_trained_model(model, object())),
        (ValueError, "none of the parameters", lambda: ASP.prune_trained_model(model, FusedSGD(other.parameters(), 1))),
        (TypeError, "model must be a torch.nn.Module", lambda: ASP.prune_trained_model("text", optimizer)),
        (TypeError, "verbosity must be an integer", lambda: ASP.init_model_for_pruning(model, verbosity="text")),
        (TypeError, "mask_calculator must be a string or", lambda: quiet(model, mask_calculator=3)),
        (TypeError, "whitelist must be a list of", lambda: quiet(model, whitelist=["Linear"])),
        (TypeError, "disallowed_layer_names must be", lambda: quiet(model, disallowed_layer_names="3")),
        (TypeError, "custom_layer_dict must have", lambda: quiet(model, custom_layer_dict={nn.Linear: "weight"})),
        (ValueError, "mask_calculator gave NoneType for 5.weight", lambda: prune(mask_calculator=fails_later)),
    ]
    for error, words, call in calls:
        with pytest.raises(error, match=words):
            call()
        for key, value in before.items():
            assert torch.equal(model.state_dict()[key], value), words
        assert not optimizer._optimizer_step_pre_hooks
        if ASP.already_init_asp_model():  # by `prune`, whose masks keep everything
            assert not ASP.is_sparsity_enabled()
            ASP.reset()
        assert model.state_dict().keys() == before.keys(), words
    quiet(model)
    for error, words, call in [
        (TypeError, "example_inputs must be a tensor", lambda: ASP.compute_sparse_masks("text")),
        (ValueError, r"model must have a 0.weight of shape \[32, 16\], it has none", lambda: ASP.add_copy(nn.ReLU())),
        (TypeError, "permutation_output_dir must be", lambda: ASP.set_permutation_saving_params(True, True, 3)),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert not ASP.is_sparsity_enabled()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_a_model_that_cannot_be_pruned_keeps_no_masks() -> None:
    model = make().to("meta")
    keys = model.state_dict().keys()
    with pytest.raises(AssertionError, match="meta device"):
        ASP.prune_trained_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.state_dict().keys() == keys
    assert not ASP.already_init_asp_model()


def test_masks_that_do_not_agree() -> None:
    model = make()
    quiet(model)
    model[0].get_buffer("__weight_mma_mask")[:] = False
    with pytest.raises(AssertionError, match=r"\{'0.weight': 0.0, '3.weight': 1.0, '5.weight': 1.0\}"):
        ASP.is_sparsity_enabled()


def test_wanda_weighs_inputs_and_is_permuted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 1, groups=2), nn.Flatten(), nn.Linear(32, 16))
    x = torch.randn(6, 16, 1, 1)
    x[:, ::4] *= 100
    with WandaMask(model) as calculator:
        model(x[:3])
        model(x[3:])
    weight = model[0].weight.detach()
    expected = create_mask(weight * x.square().sum((0, 2, 3)).sqrt()[None, :, None, None])
    assert torch.equal(calculator(model[0].weight), expected)
    assert not torch.equal(expected, create_mask(weight))
    norms = calculator.tied_tensors(model[1].weight)[0].sqrt()
    inside = model[0](x).square().sum((0, 2, 3)).sqrt()
    torch.testing.assert_close(norms[:16, :, 0, 0], inside[None, :16].expand(16, -1))
    torch.testing.assert_close(norms[16:, :, 0, 0], inside[None, 16:].expand(16, -1))
    ones = lambda param: torch.ones_like(param)  # noqa: E731  permutes, prunes nothing
    ones.tied_tensors = calculator.tied_tensors
    quiet(model, mask_calculator=ones)
    before = model[1].weight.detach().clone()
    ASP.compute_sparse_masks()
    assert not torch.equal(model[1].weight, before)
    with WandaMask(model) as fresh:
        model(x)
    for layer in (model[0], model[1], model[3]):
        torch.testing.assert_close(*(each.tied_tensors(layer.weight)[0] for each in (calculator, fresh)))


def test_wanda_sees_inputs_by_name() -> None:
    model, x = nn.Linear(16, 32), torch.rand(3, 16)
    with WandaMask(model) as by_name:
        model(input=x)
    with WandaMask(model) as by_place:
        model(x)
    assert torch.equal(by_name.tied_tensors(model.weight)[0], by_place.tied_tensors(model.weight)[0])


def test_conversion_needs_a_gpu() -> None:
    model = make()
    with pytest.raises(RuntimeError, match="move the model to a GPU first"):
        ASP.to_semi_structured(model, torch.ones(2, 16))


@pytest.mark.gpu
def test_conversion_keeps_outputs_and_reports(capsys: pytest.CaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 10)).cuda().bfloat16()
    quiet(model)
    ASP.compute_sparse_masks()
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        rows = ASP.to_semi_structured(model, x)
        torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)
    assert [row.name for row in rows] == ["0", "2", "3"]
    assert rows[2].outcome.startswith("its sides are not multiples of 8")
    assert all(row.outcome == "converted" or row.outcome.startswith(("stays", "PyTorch cannot")) for row in rows[:2])
    assert "dense us" in capsys.readouterr().out
