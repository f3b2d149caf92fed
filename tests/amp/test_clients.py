"""Uses of amp in published projects that its documentation does not mention."""

import inspect
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_C
import apex_C
from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedLAMB, FusedSGD
from tests.amp.common import assert_same, loss_of, overflow_at, quiet, small_model, train, values


def test_gradients_reduced_by_hand_after_accumulation() -> None:
    """Do as NVIDIA's BERT: flat raw gradients, unscaling by amp_C, and a scaler updated with the script's flag."""
    model = small_model()
    model, optimizer = quiet(model, FusedLAMB(model.parameters(), lr=0.01), opt_level="O2", loss_scale="dynamic")
    flag = torch.zeros(1, dtype=torch.int32)
    skipped = []
    for step in range(4):
        for part in range(2):
            loss = loss_of(model, 2 * step + part, float("inf") if step == 1 else 1.0)
            with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled:
                scaled.backward()
        scaler = _amp_state.loss_scalers[0]
        scale = scaler.loss_scale()
        masters = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        flat = torch.empty(sum(p.numel() for p in amp.master_params(optimizer)))
        views = apex_C.unflatten(flat, masters)
        flag.zero_()
        amp_C.multi_tensor_scale(65536, flag, [masters, views], scale / 2)
        flag.zero_()
        amp_C.multi_tensor_scale(65536, flag, [views, masters], 1.0 / scale)
        old, scaler._overflow_buf = scaler._overflow_buf, flag
        had_overflow = scaler.update_scale()
        scaler._overflow_buf = old
        skipped.append(had_overflow)
        if not had_overflow:
            optimizer.step()
        for param in model.parameters():
            param.grad = None
        for param in amp.master_params(optimizer):
            param.grad = None
    assert skipped == [False, True, False, False]
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15


def test_masters_restored_from_a_checkpoint_of_their_own() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedLAMB(model.parameters(), lr=0.01), opt_level="O2")
    train(model, optimizer, 2)
    saved = {"optimizer": optimizer.state_dict(), "master params": values(amp.master_params(optimizer))}
    losses = train(model, optimizer, [2])
    amp.shutdown()
    model = small_model(seed=3)
    model, optimizer = quiet(model, FusedLAMB(model.parameters(), lr=0.01), opt_level="O2")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved["optimizer"])
    for param, value in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        param.data.copy_(value.data)
    optimizer._master_params_to_model_params()
    assert train(model, optimizer, [2]) == pytest.approx(losses, rel=1e-3)


def test_loss_scaler_looked_up_and_changed() -> None:
    model = small_model()
    quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2", num_losses=2)
    assert _amp_state.opt_properties.options["loss_scale"] == "dynamic"
    assert _amp_state.opt_properties.options["opt_level"] == "O2"
    assert _amp_state.opt_properties.loss_scale == "dynamic"
    for scaler in _amp_state.loss_scalers:
        scaler._scale_seq_len = 100
        scaler._loss_scale = 2.0**8
    assert [each["loss_scale"] for each in amp.state_dict().values()] == [256.0, 256.0]
    _amp_state.opt_properties.options["loss_scale"] = 1.0
    assert _amp_state.opt_properties.loss_scale == 1.0


def test_tensors_that_scale_loss_yields() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O1")
    loss = loss_of(model, 0)
    with amp.scale_loss(loss, [optimizer], 0) as scaled:
        assert isinstance(scaled, Tensor)
        assert scaled.dtype == torch.float32
        assert scaled.shape == loss.shape
        scaled.backward(retain_graph=True)
    per_sample = (model(torch.randn(5, 6)).float() ** 2).mean(1)
    with amp.scale_loss(per_sample, optimizer) as scaled:
        scaled.backward(torch.ones_like(scaled))
    with amp.scale_loss(loss.half(), optimizer) as scaled:
        assert scaled.dtype == torch.float32
    with pytest.raises(RuntimeError, match="has not seen"), amp.scale_loss(loss, torch.optim.SGD(model.parameters())):
        pass


def test_arguments_of_scale_loss_come_in_upstreams_order() -> None:
    names = ["loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check"]
    assert list(inspect.signature(amp.scale_loss).parameters) == names
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2", num_losses=2)
    before = model[0].weight.detach().clone()
    with amp.scale_loss(loss_of(model, 0), optimizer, 1, model, True) as scaled:
        scaled.backward()
    assert all(master.grad is None for master in optimizer._amp_stash.all_fp32_from_fp16_params)
    with amp.scale_loss(loss_of(model, 1), optimizer, loss_id=1, model=[model]) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_weights_clamped_through_masters() -> None:
    """Do as a Wasserstein GAN: clamp masters; the model follows with the next step."""
    for kind in (torch.optim.SGD, FusedSGD):
        model = nn.Linear(6, 4)
        model, optimizer = quiet(model, kind(model.parameters(), lr=1e-4), opt_level="O2")
        for step in range(2):
            train(model, optimizer, [step])
            for param in amp.master_params(optimizer):
                param.data.clamp_(-0.01, 0.01)
        train(model, optimizer, [2])
        assert model.weight.abs().max() < 0.02
        amp.shutdown()


def test_a_model_in_channels_last() -> None:
    for kind in (torch.optim.SGD, FusedSGD):
        results = []
        for layout in (torch.contiguous_format, torch.channels_last):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
            model = model.to(memory_format=layout)
            model, optimizer = quiet(model, kind(model.parameters(), lr=0.1, momentum=0.9), opt_level="O2")
            assert model[0].weight.is_contiguous(memory_format=layout)
            for step in range(3):
                optimizer.zero_grad()
                x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(memory_format=layout)
                with amp.scale_loss(model(x).pow(2).mean(), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            results.append([value.contiguous() for value in model.state_dict().values()])
            amp.shutdown()
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-2)


def test_gradients_zeroed_through_the_model() -> None:
    """Call `model.zero_grad()` instead of the optimizer's: no old gradient stays on the masters."""
    results = []
    for through_model in (False, True):
        model = small_model()
        model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.05), opt_level="O2")
        for step in range(3):
            (model if through_model else optimizer).zero_grad()
            with amp.scale_loss(loss_of(model, step), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        results.append(values(amp.master_params(optimizer)))
        amp.shutdown()
    assert_same(*results)


def test_a_subclass_of_a_fused_optimizer_that_calls_the_kernel() -> None:
    """The subclass was written for upstream, whose FusedLAMB and FusedAdam keep the kernel in an attribute."""
    from apex.optimizers import FusedAdam

    class Own(FusedAdam):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            group = self.param_groups[0]
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for param in params:
                self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                self.state[param].setdefault("exp_avg_sq", torch.zeros_like(param))
            lists = [
                [p.grad for p in params],
                [p.data for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
            ]
            beta1, beta2 = group["betas"]
            self.multi_tensor_adam(
                65536, self._dummy_overflow_buf, lists, group["lr"], beta1, beta2, group["eps"], group["step"],
                self.adam_w_mode, 1, group["weight_decay"],
            )  # fmt: skip

    results = []
    for kind in (FusedAdam, Own):
        model = small_model()
        model, optimizer = quiet(model, kind(model.parameters(), lr=0.01), opt_level="O2")
        results.append(train(model, optimizer, 4, overflow_at(1))[2:])
        amp.shutdown()
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def test_hooks_that_a_script_replaces() -> None:
    """Scripts replace the hooks by methods with upstream's arguments: none, and after the backward pass a scaler."""
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2")
    called = []
    after = optimizer._post_amp_backward
    optimizer._prepare_amp_backward = MethodType(lambda self: called.append("before"), optimizer)
    optimizer._post_amp_backward = MethodType(lambda self, scaler: called.append(after(scaler) and "after"), optimizer)
    before = values(model.parameters())
    train(model, optimizer, 1)
    assert called == ["before", "after"]
    assert not torch.equal(before[0], model[0].weight)


def test_small_functions_that_scripts_import() -> None:
    """Scripts import them without calling them; the import must work."""
    from apex.amp.compat import filter_attrs
    from apex.amp.rnn_compat import has_old_rnns
    from apex.amp.utils import is_fp_tensor

    assert filter_attrs(torch, ["float16", "no_such_type"]) == ["float16"]
    assert has_old_rnns() is False
    assert [is_fp_tensor(x) for x in (torch.ones(1), [torch.ones(1), torch.ones(1).int()], 1.0)] == [True, False, False]


def test_masters_named_before_the_first_backward_pass() -> None:
    """Do as Varuna and an Adasum optimizer: `_amp_lazy_init`, then name masters like their parameters."""
    model = small_model()
    names = {param: name for name, param in model.named_parameters()}
    model, optimizer = quiet(model, FusedLAMB(model.parameters(), lr=0.01), opt_level="O2")
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        names[master] = names.pop(param)
    called = [names[param] for param in amp.master_params(optimizer)]
    assert called == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    "options", [{"opt_level": "O1"}, {"opt_level": "O2"}, {"opt_level": "O2", "combine_grad": True}]
)
def test_an_optimizer_for_the_centers_of_a_loss(options: dict[str, Any]) -> None:
    """Do as person re-identification: an optimizer for the model, and one for parameters of the loss."""
    model = small_model()
    centers = nn.Parameter(torch.zeros(3))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([centers], lr=0.5)]
    model, [optimizer, center_optimizer] = quiet(model, optimizers, **options)
    weights = values(model.parameters())
    output = model(torch.randn(8, 6)).float()
    loss = (output - centers[: output.shape[1]].mean()).square().mean()
    with amp.scale_loss(loss, [optimizer, center_optimizer]) as scaled:
        scaled.backward()
    gradient = centers.grad.clone()
    optimizer.step()
    center_optimizer.step()
    assert torch.equal(centers.detach(), -0.5 * gradient)
    assert any(not torch.equal(before, after) for before, after in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_first_and_its_optimizer_later(level: str) -> None:
    """Do as a sharded GPT: initialize the model alone, then the optimizer with a module without parameters."""
    model = quiet(small_model(), opt_level=level, num_losses=0)
    assert _amp_state.loss_scalers == []
    assert amp.state_dict() == {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer = quiet(nn.Identity(), optimizer, opt_level=level)
    losses = train(model, optimizer, [0] * 6)
    assert losses[-1] < losses[0]
