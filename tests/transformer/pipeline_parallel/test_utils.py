"""Pipeline helpers that need no other process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from apex.contrib.layer_norm import FastLayerNorm
from apex.normalization import FusedLayerNorm, MixedFusedLayerNorm
from apex.transformer import layers
from apex.transformer.enums import ModelType
from apex.transformer.microbatches import ConstantNumMicroBatches
from apex.transformer.pipeline_parallel import get_forward_backward_func, p2p_communication, schedules, utils
from apex.transformer.pipeline_parallel._split_backward import backward_input
from apex.transformer.pipeline_parallel._steps import _loss_of
from apex.transformer.pipeline_parallel._timers import _Timers
from apex.transformer.pipeline_parallel.schedules import common


@pytest.fixture(autouse=True)
def _no_calculator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    monkeypatch.setattr(utils, "_timers", None)


def test_microbatches() -> None:
    with pytest.raises(AssertionError, match="setup_microbatch_calculator first"):
        utils.get_num_microbatches()
    utils.setup_microbatch_calculator(1, [4, 4, 20], 12, 2, 2)
    assert (utils.get_num_microbatches(), utils.get_micro_batch_size()) == (1, 2)
    utils.update_num_microbatches(30)
    assert (utils.get_num_microbatches(), utils.get_current_global_batch_size()) == (3, 12)
    with pytest.raises(AssertionError, match="already initialized"):
        utils.setup_microbatch_calculator(1, None, 8, 2, 1)
    batch = [torch.arange(6), torch.arange(6) * 10]
    assert [part.tolist() for part in utils.get_kth_microbatch(batch, 1)] == [[2, 3], [20, 30]]
    assert utils.get_kth_microbatch(None, 3) is None
    assert utils.get_kth_microbatch(batch[0], 1) is batch[0]
    with pytest.raises(AssertionError, match="microbatch 3 of 2 samples needs a batch of 8, got 6"):
        utils.get_kth_microbatch(batch, 3)
    parts = utils._split_batch_into_microbatch(batch, _micro_batch_size=4, _global_batch_size=6)
    assert [[tensor.tolist() for tensor in part] for part in parts] == [
        [[0, 1, 2, 3], [0, 10, 20, 30]],
        [[4, 5], [40, 50]],
    ]


def test_clients_read_the_calculator_by_name() -> None:
    """NeMo imports the name before and after the calculator is made, and looks at its attributes."""
    from apex.transformer.pipeline_parallel.utils import _GLOBAL_NUM_MICROBATCHES_CALCULATOR as before

    utils.setup_microbatch_calculator(1, None, 8, 2, 1)
    from apex.transformer.pipeline_parallel.utils import _GLOBAL_NUM_MICROBATCHES_CALCULATOR as after

    assert before is None
    assert isinstance(after, ConstantNumMicroBatches)
    assert (after.current_global_batch_size, after.micro_batch_size, after.num_micro_batches) == (8, 2, 4)
    utils._reconfigure_microbatch_calculator(1, None, 6, 1, 1)
    assert utils._GLOBAL_NUM_MICROBATCHES_CALCULATOR.num_micro_batches == utils.get_num_microbatches() == 6


def test_choosing_a_schedule() -> None:
    utils._reconfigure_microbatch_calculator(1, None, 6, 1, 1)
    assert get_forward_backward_func(None, 1) is schedules.forward_backward_no_pipelining
    assert get_forward_backward_func(None, 4) is schedules.forward_backward_pipelining_without_interleaving
    interleaved = get_forward_backward_func(2, 3)
    assert interleaved.__name__ == "_forward_backward_pipelining_with_interleaving"
    with pytest.raises(RuntimeError, match=r"microbatches \(6\) is not divisible by pipeline-parallel size \(4\)"):
        get_forward_backward_func(2, 4)


class Stage(nn.Linear):
    """A whole model of one layer."""

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        assert tensors == [None]


def test_steps_refuse_what_would_be_ignored() -> None:
    batch, model = [torch.ones(4, 3)], Stage(3, 1)

    def forward_step(batch: Any, model: nn.Module, results: Any = None) -> Any:
        return model(batch[0]), lambda output: results or (output.sum(), output.detach())

    def step(model: Any = model, **options: Any) -> Any:
        return schedules.forward_backward_no_pipelining(forward_step, batch, model, forward_only=False, **options)

    utils._reconfigure_microbatch_calculator(1, None, 4, 2, 1)
    with pytest.warns(
        UserWarning, match=r"ignoring unknown keyword arguments grad_scalar; a step takes .*, grad_scaler"
    ):
        assert len(step(grad_scalar=None)) == 2
    model.weight.grad = None
    with pytest.raises(TypeError, match=r"set_input_tensor.*Linear has none"):
        step(nn.Linear(3, 1))
    assert model.weight.grad is None
    assert len(step([model], async_comm=True)) == 2
    model.weight.grad = None
    partial = {"num_micro_batches_with_partial_activation_checkpoints": 1, "tensor_shape": (2, 1)}
    with pytest.raises(ValueError, match="does not go with zero-bubble schedules"):
        schedules.forward_backward_zero_bubble(forward_step, batch, model, forward_only=False, **partial)
    assert model.weight.grad is None
    utils._reconfigure_microbatch_calculator(1, [2, 2, 8], 8, 4, 1)  # no microbatch in a batch of two samples
    with pytest.raises(ValueError, match="the number of microbatches is 0"):
        step()


@pytest.mark.parametrize("results", [torch.ones(()), (torch.ones(()),), {"loss": 1.0}], ids=["loss", "one", "dict"])
def test_results_of_loss_functions_are_checked(results: Any) -> None:
    with pytest.raises(TypeError, match=r"must return \(mean loss, value to report\)"):
        _loss_of(results)


def test_masks_and_positions() -> None:
    data = torch.tensor([[5, 0, 6, 7, 0, 8], [1, 2, 3, 4, 5, 6]])
    hidden, loss_mask, positions = utils.get_ltor_masks_and_position_ids(data, 0, True, True, True)
    assert hidden.shape == (2, 1, 6, 6)
    assert hidden.dtype == torch.bool
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert loss_mask.tolist() == [[1, 0, 1, 1, 0, 1], [1] * 6]
    visible = [[place for place in range(6) if not hidden[0, 0, row, place]] for row in range(6)]
    assert visible == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [5]]
    causal, loss_mask, positions = utils.get_ltor_masks_and_position_ids(data, 0, False, False, False)
    assert torch.equal(causal[0, 0], ~torch.ones(6, 6).tril().bool())
    assert (causal.shape[0], loss_mask.min().item(), positions[0].tolist()) == (1, 1.0, list(range(6)))


def test_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert utils.listify_model(model) == [model]
    assert utils.unwrap_model([model]) == [model]
    assert utils.unwrap_model(nn.DataParallel(model), nn.DataParallel) is model
    assert utils.get_model_type(model) == ModelType.encoder_or_decoder
    decaying, others = common._get_params_for_weight_decay_optimization(model)
    assert decaying["params"] == [model[0].weight]
    assert others["weight_decay"] == 0.0
    assert [id(param) for param in others["params"]] == [id(p) for p in (model[0].bias, *model[1].parameters())]
    assert utils.param_is_not_shared(model[0].weight)
    model[0].weight.shared = True
    assert not utils.param_is_not_shared(model[0].weight)


def test_groups_of_weight_decay_have_each_parameter_once() -> None:
    embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4)
    head.weight = embedding.weight
    norms = (FusedLayerNorm(2), MixedFusedLayerNorm(2), layers.MixedFusedLayerNorm(2), FastLayerNorm(2))
    model = nn.Sequential(embedding, *norms, head)
    decaying, others = common._get_params_for_weight_decay_optimization([model])
    assert decaying["params"] == [embedding.weight]
    expected = [param for norm in norms for param in norm.parameters()] + [head.bias]
    assert list(map(id, others["params"])) == list(map(id, expected))
    decaying, others = common._get_params_for_weight_decay_optimization(model, no_weight_decay_modules=())
    assert (len(decaying["params"]), len(others["params"])) == (5, 5)


def test_timers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="not initialized"):
        utils.get_timers()
    utils._set_timers()
    timers = utils.get_timers()
    assert isinstance(timers, _Timers)
    timer = timers("forward")
    timer.start()
    with pytest.raises(AssertionError, match="'forward' has already been started"):
        timer.start()
    assert timer.elapsed() >= 0.0
    assert timer.started_
    timer.stop()
    with pytest.raises(AssertionError, match="is not started"):
        timer.stop()
    timer.elapsed_ = 0.5
    written = []

    class Writer:
        def add_scalar(self, *values: object) -> None:
            written.append(values)

    timers.write(["forward"], Writer(), 3, normalizer=2.0)
    timers.log(["forward"])
    assert written == [("forward-time", 0.25, 3)]
    assert "time (ms) | forward: 500.00" in capsys.readouterr().out
    assert timer.elapsed_ == 0.0


def test_freed_outputs_and_their_backward_pass() -> None:
    for shape in ((3, 4), ()):
        x = torch.ones(3, 4, requires_grad=True)
        output = (x * 2.0).sin() if shape else (x * 2.0).sum()
        kept = torch.full_like(output, 0.5)
        common.free_output_tensor(output)
        assert output.shape == shape
        common.free_output_tensor([output], True)
        assert (output.shape, output.dtype) == ((1,), x.dtype)
        common.custom_backward(output, kept)
        expected = torch.cos(x * 2.0) if shape else torch.ones_like(x)
        assert torch.equal(x.grad, expected.detach())
    view = (x * 2.0).view(4, 3)
    common.free_output_tensor(view, True)
    assert view.shape == (4, 3)
    with pytest.raises(AssertionError, match="pseudo-'freed'"):
        common.custom_backward(view, view.detach())


def test_backward_pass_in_two_parts() -> None:
    """The input gradient comes first, without parameter gradients; both equal those of a single pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3), nn.GELU())
    x, gradient = torch.randn(5, 4), torch.randn(5, 3)
    whole = x.clone().requires_grad_()
    for _ in range(2):
        model(whole).backward(gradient)
    expected = [param.grad for param in model.parameters()]
    model.zero_grad()
    called = []
    handles = [param.register_post_accumulate_grad_hook(lambda _: called.append(1)) for param in model.parameters()]
    parted = x.clone().requires_grad_()
    for _ in range(2):
        found, weight_pass = backward_input(model(parted), gradient, [parted])
        parted.grad = found[0] if parted.grad is None else parted.grad + found[0]
        before = len(called)
        weight_pass()
        assert len(called) == before + len(handles)
    assert torch.equal(parted.grad, whole.grad)
    for param, one in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, one)


def test_exchanges_refuse_options_that_they_do_not_have() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        p2p_communication.recv_forward((2, 3), nonsense=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="overlap_p2p_comm"):  # nobody could wait for it
        p2p_communication.recv_backward((2, 3), overlap_p2p_comm=True)
    with pytest.raises(TypeError, match="nonsense"):
        p2p_communication.send_forward_recv_forward(None, True, (2, 3), nonsense=True)  # type: ignore[call-arg]
