"""Estimates compared with real objects, and with the storages of a real step on the CPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import apex
from apex import optimizers
from apex._memory.estimate import Memory, estimate, largest_batch, measure
from apex._memory.storages import LiveStorages
from apex._memory.tasks import Shape, parse_shape, task_of
from apex._memory.training import OPT_LEVELS, Settings, trained
from apex.amp._amp_state import _amp_state
from apex.normalization import FusedLayerNorm
from apex.transformer import parallel_state
from apex.transformer.testing.standalone_gpt import GPTModel
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig

CPU = torch.device("cpu")
# FusedMuon takes matrices alone, and `Network` has other parameters.
OPTIMIZERS = sorted(set(optimizers.__all__) - {"FP16_Optimizer", "FusedMuon", "OffloadedOptimizer", "muon_groups"})
OF_STATE = ("parameters", "buffers", "gradients", "masters", "state")


class Network(nn.Module):
    """A convolution, a batch norm, dense layers with a shared weight, and their loss."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8, bias=False)
        self.third = nn.Linear(width, 8, bias=False)
        self.third.weight = self.second.weight

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.convolution(images))).mean((2, 3))
        x = functional.gelu(self.first(x))
        return functional.cross_entropy(self.second(x) + self.third(x).detach(), images[:, 0, 0, 0].long().clamp(0, 7))


NETWORK_INPUTS = [Shape((3, 8, 8), torch.float32)]


class Largest(nn.Module):
    """Returns integers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


NETWORK = task_of(Network, NETWORK_INPUTS)


def real_state(settings: Settings) -> dict[str, int]:
    """Return the bytes of real objects before the update of the second step."""
    found: dict[str, int] = {}
    torch.manual_seed(0)
    with trained(NETWORK, settings, CPU) as training:
        training.step()
        training.step(before_update=lambda: found.update(training.owners()))
    return found


def check_state(settings: Settings) -> Memory:
    found, real = estimate(NETWORK, settings), real_state(settings)
    estimated = {name: getattr(found, name) for name in OF_STATE}
    if "Npu" in settings.optimizer or settings.optimizer == "Lamb":  # one buffer has float32 parameters and masters
        for each in (estimated, real):
            each["parameters"] += each.pop("masters")
    assert estimated == {name: real[name] for name in estimated}
    return found


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_state_is_that_of_real_objects_at_every_level(level: str) -> None:
    found = check_state(Settings(level, batch=2))
    count = sum(param.numel() for param in Network().parameters())
    half = level in ("O2", "O3", "O5")
    assert found.state == 8 * count  # FusedAdam's two moments, float32
    assert (found.parameters < 3 * count) == half
    assert found.buckets < 16384  # a GPU's pointer tables, and the loss scale


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "FusedSGD,momentum=0.9", "torch.optim:AdamW"])
def test_state_is_that_of_real_objects_for_every_optimizer(optimizer: str) -> None:
    found = check_state(Settings("O2" if ":" not in optimizer else "O0", optimizer, batch=2))
    assert found.buckets >= 0  # AdamW's counts of steps are on the host


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_peak_is_that_of_a_real_step(level: str) -> None:
    """Use plain modules, which save the same tensors on host and GPU; both steps have state and growing gradients."""

    class Blocks(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(50, 32), *(nn.TransformerEncoderLayer(32, 4, 64, 0.0) for _ in range(2)))

    task, settings = task_of(Blocks, [Shape((16,), torch.int64)]), Settings(level, batch=8)
    found = estimate(task, settings)
    storages, marks = LiveStorages(lambda tensor: True), {}
    with trained(task, settings, CPU) as training:
        training.step()
        gc.collect()
        for tensor in (*training.model.parameters(), *training.optimizer._amp_stash.all_fp32_from_fp16_params):
            storages.note(tensor)
        for state in training.optimizer.state.values():
            for tensor in state.values():
                storages.note(tensor)
        before = storages.live
        with storages:
            marks = {}
            training.step(lambda: marks.update(activations=storages.live - before, peak=storages.peak))
    assert found.activations == pytest.approx(marks["activations"], rel=0.02)
    assert found.peak == pytest.approx(storages.peak, rel=0.05)


def test_fused_ops_save_the_tensors_of_their_kernels() -> None:
    rows, width = 64, 256

    def loss(model: nn.Module, batch: int, device: torch.device) -> Tensor:
        return model(torch.randn(batch, width, device=device, requires_grad=True)).sum()

    found = estimate(lambda: (FusedLayerNorm(width), loss), Settings("O0", "FusedSGD", batch=rows))
    # The input, and a mean and a deviation of each row; the reference would keep several tensors of the input's size.
    # Small ones take 512 bytes each, and so does the loss.
    assert found.activations == 4 * rows * width + 3 * 512


def test_masks_of_dropout_have_bytes() -> None:
    def loss(model: nn.Module, batch: int, device: torch.device) -> Tensor:
        return model(torch.ones(batch, 512, device=device)).sum()

    kept = [
        estimate(lambda p=p: (nn.Sequential(nn.Linear(512, 512), nn.Dropout(p)), loss), Settings(batch=64)).activations
        for p in (0.0, 0.5)
    ]
    assert kept[1] - kept[0] == 64 * 512


def test_attention_with_dropout_keeps_no_scores() -> None:
    kept = [
        estimate(
            task_of(lambda p=p: nn.TransformerEncoderLayer(32, 4, 32, p), [Shape((256, 32), torch.float32)]),
            Settings(batch=256),
        ).activations
        for p in (0.0, 0.1)
    ]
    scores = 4 * 4 * 256**3
    assert 0 < kept[1] - kept[0] < 0.1 * scores  # masks, and results of dropout, of the layer's own


def test_measuring_several_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="one process is measured"):
        measure(NETWORK, Settings(world=2), CPU)


def test_checkpointing_keeps_less() -> None:
    task = task_of(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))),
        [Shape((64,), torch.float32)],
    )
    plain, again = (estimate(task, Settings(batch=256, checkpointing=each)) for each in (False, True))
    assert again.activations < 0.6 * plain.activations
    assert again.peak < plain.peak
    assert again.fixed == plain.fixed


def test_data_parallel_buckets_and_shards() -> None:
    alone, wrapped, divided = (
        estimate(task_of(lambda: Network(512), NETWORK_INPUTS), Settings("O5", batch=2, world=world, zero=zero))
        for world, zero in ((1, False), (4, False), (4, True))
    )
    assert wrapped.buckets - alone.buckets >= 0.9 * alone.parameters  # flat buffers of gradients
    assert (wrapped.state, wrapped.masters, divided.masters) == (alone.state, alone.masters, 0)
    # Two moments and a master, a quarter of each.
    assert divided.state == pytest.approx((alone.state + alone.masters) / 4, rel=0.2)
    assert not torch.distributed.is_initialized()


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings("O5", batch=2, world=4, zero=True)
    expected = estimate(NETWORK, settings)
    monkeypatch.setattr("apex.ops._library._triton_found", ["the triton package is not installed"])
    found = estimate(NETWORK, settings)
    assert found.state == expected.state
    assert estimate(NETWORK, Settings("O5", batch=2, world=4)).buckets > 0


def test_split_layers_and_stages() -> None:
    config = TransformerConfig(2, 64, 2, vocab_size=128, max_position_embeddings=16, hidden_dropout=0.1)

    def loss(model: nn.Module, batch: int, device: torch.device) -> Tensor:
        words = torch.zeros(batch, 16, dtype=torch.int64, device=device)
        return model(words, labels=words if parallel_state.is_pipeline_last_stage() else None).float().mean()

    def make() -> Any:
        return GPTModel(post_process=parallel_state.is_pipeline_last_stage(), config=config), loss

    whole, split, staged = (
        estimate(make, Settings("O5", batch=2, world=2, tensor_parallel=tensor, pipeline_parallel=pipeline))
        for tensor, pipeline in ((1, 1), (2, 1), (1, 2))
    )
    assert 0.5 < split.parameters / whole.parameters < 0.6  # norms and positions are whole
    assert split.state == pytest.approx(2 * split.masters, rel=0.1)
    assert 0.5 < staged.parameters / whole.parameters < 0.7  # one layer of two, and the embedding
    assert split.buckets < whole.buckets  # which has the gradients' buckets of two replicas


def test_a_pipeline_keeps_the_activations_of_its_stages() -> None:
    one, two = (estimate(NETWORK, Settings(batch=8, world=stages, pipeline_parallel=stages)) for stages in (1, 2))
    assert two.activations == pytest.approx(2 * one.activations, rel=0.02)


def test_largest_batch() -> None:
    limit = estimate(NETWORK, Settings(batch=100)).total
    found = largest_batch(NETWORK, Settings(), limit)
    assert found >= 100
    totals = [estimate(NETWORK, Settings(batch=batch)).total for batch in (found, found + found // 100 + 1)]
    assert totals[0] <= limit < totals[1]
    assert largest_batch(NETWORK, Settings(), 1) == 0


def test_any_batch_fits_where_the_loss_has_its_own() -> None:
    task = task_of(
        lambda: (nn.Linear(8, 4), lambda model, _, device: model(torch.randn(2, 8, device=device)).sum()), ()
    )
    assert largest_batch(task, Settings(), 2 << 30) is None


def test_public_function_leaves_nothing_behind() -> None:
    found = apex.estimate_memory(lambda: nn.Linear(8, 4), ["8"], opt_level="O1", batch=3)
    assert (found.parameters, found.gradients, found.state) == (144, 144, 288)
    assert not _amp_state.models
    assert not torch.is_autocast_enabled("cpu")
    assert torch.zeros(3).sum().item() == 0


def chooses_rows(model: nn.Module, batch: int, device: torch.device) -> Tensor:
    output = model(torch.ones(batch, 8, device=device))
    return output[output > 0].sum()


def test_numbers_that_are_read_are_zero() -> None:
    def loss(model: nn.Module, batch: int, device: torch.device) -> Tensor:
        output = model(torch.ones(batch, 8, device=device)).sum()
        assert (output.item(), bool(output > 1)) == (0, False)
        return output

    apex.estimate_memory(lambda: (nn.Linear(8, 4), loss))


@pytest.mark.parametrize(
    ("factory", "shapes", "options", "message"),
    [
        (lambda: 3, ["8"], {}, "must return a torch.nn.Module, not int"),
        (lambda: nn.Linear(8, 4), [], {}, "--input-shape"),
        (lambda: nn.Linear(8, 4), ["9"], {}, "9"),
        (lambda: nn.Linear(8, 4), ["8y"], {}, "'8y'"),
        (lambda: nn.Linear(8, 4), ["8:float33"], {}, "float33"),
        (lambda: (nn.Linear(8, 4), chooses_rows), [], {}, "depends on values"),
        (lambda: (nn.Linear(8, 4), lambda *_: 1.0), [], {}, "one element.*float"),
        (lambda: (nn.Linear(8, 4), 3), [], {}, "must be a function, not int"),
        (lambda: nn.Sequential(nn.Linear(8, 4), Largest()), ["8"], {"batch": 2}, "no floating-point tensor"),
        (lambda: nn.Linear(8, 4), ["8"], {"opt_level": "O7"}, "'O7'"),
        (lambda: nn.Linear(8, 4), ["8"], {"optimizer": "torch.optim:Best"}, "torch.optim:Best.*not MODULE:CLASS"),
        (lambda: nn.Linear(8, 4), ["8"], {"optimizer": "no_such_module:Best"}, "not MODULE:CLASS"),
        (lambda: nn.Linear(8, 4), ["8"], {"optimizer": "Adam"}, "FusedAdam"),
        (lambda: nn.Linear(8, 4), ["8"], {"optimizer": "muon_groups"}, "'muon_groups' is not known"),
        (lambda: nn.Linear(8, 4), ["8"], {"optimizer": "FusedSGD,momentum"}, "'momentum'"),
        (lambda: nn.Linear(8, 4), ["8"], {"optimizer": "OffloadedOptimizer"}, "host memory"),
        (lambda: nn.Linear(8, 4), ["8"], {"batch": 0}, "batch must be .* got 0"),
        (lambda: nn.Linear(8, 4), ["8"], {"zero": True, "world": 2, "optimizer": "FusedSGD"}, "no ZeRO counterpart"),
        (lambda: nn.Linear(8, 4), ["8"], {"tensor_parallel": 2, "world": 3}, "no multiple"),
        (lambda: nn.Linear(8, 4), ["8"], {"checkpointing": True}, "no ModuleList or Sequential"),
    ],
)
def test_errors_name_the_argument(factory: Any, shapes: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        apex.estimate_memory(factory, shapes, **options)
    assert not _amp_state.models


def test_amp_in_use_is_refused() -> None:
    model = nn.Linear(2, 2)
    apex.amp.initialize(model, opt_level="O2", verbosity=0)
    try:
        with pytest.raises(RuntimeError, match=r"amp\.shutdown"):
            apex.estimate_memory(lambda: nn.Linear(8, 4), ["8"])
    finally:
        apex.amp.shutdown()


def test_shapes() -> None:
    assert parse_shape("3x224x224") == ((3, 224, 224), torch.float32)
    assert parse_shape("7:int64").make(2, CPU).shape == (2, 7)
    assert parse_shape("").make(5, CPU).shape == (5,)
