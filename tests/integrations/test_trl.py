"""The hooks of TRL: stand-ins for its modules, with the names and signatures of several releases.

`tests/clients/trl_client.py` trains with TRL itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.contrib import llm_losses
from apex.integrations import trl

Package = Callable[..., Any]

NAIVE = """
import torch

class _ChunkedLogProbFunction:
    @staticmethod
    def forward(ctx, {names}):
        raise AssertionError("TRL's own function was called")

    @classmethod
    def apply(cls, *given):
        return "TRL's own"
"""
NEW = (
    "hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0, outputs=()"
)
OLD = "last_hidden, weight, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0"
LIGER = """
def is_liger_kernel_available():
    return False

if is_liger_kernel_available():
    from liger_kernel.chunked_loss import LigerFusedLinear{0}Loss

def make():
    assert is_liger_kernel_available()
    return LigerFusedLinear{0}Loss(beta=0.3)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A function that makes a package named trl of the sources of its `trainer` modules."""

    def make(**sources: str) -> Any:
        folder = tmp_path / "trl"
        (folder / "trainer").mkdir(parents=True)
        (folder / "__init__.py").write_text('__version__ = "0.0"\n')
        for name, source in {"__init__": "", **sources}.items():
            (folder / "trainer" / f"{name}.py").write_text(source)
        for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        return lambda name: importlib.import_module(f"trl.trainer.{name}")

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        del sys.modules[name]


def head() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(9, 4, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, weight, bias, torch.tensor([0, 8, 3, 3, 1, 7])


def test_the_log_prob_function_of_the_fused_head(package: Package) -> None:
    module = package(utils=NAIVE.format(names=NEW))("utils")
    original = module._ChunkedLogProbFunction
    hidden, weight, bias, targets = head()
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    with trl.enabled():
        found = module._ChunkedLogProbFunction.apply(hidden, weight, bias, targets, 0.7, 5, 30.0, 0.5, outputs)
        fewer = module._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 5, None, 1.0, ("log_probs",))
    assert module._ChunkedLogProbFunction is original
    z = 30.0 * torch.tanh(0.5 * functional.linear(hidden, weight, bias) / 30.0) / 0.7
    p = z.log_softmax(-1)
    own = p.gather(-1, targets[:, None])[:, 0]
    entropy = -(p.exp() * p).sum(-1)
    expected = (own, entropy, (2 * p).exp().sum(-1).log(), z.mean(-1), z.argmax(-1) == targets)
    for actual, value in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, value)
    gradients = torch.autograd.grad(found[0].sum() + 0.3 * found[1].sum(), (hidden, weight, bias))
    wanted = torch.autograd.grad(own.sum() + 0.3 * entropy.sum(), (hidden, weight, bias))
    torch.testing.assert_close(gradients, wanted)
    torch.testing.assert_close(
        fewer[0], functional.linear(hidden, weight).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    )
    assert fewer[1:] == (None, None, None, None)


def test_the_log_prob_function_before_1_14_has_no_bias_and_two_results(package: Package) -> None:
    module = package(utils="", grpo_trainer=NAIVE.format(names=OLD))("grpo_trainer")
    hidden, weight, _, targets = head()
    with trl.enabled():
        log_probs, entropy = module._ChunkedLogProbFunction.apply(hidden, weight, targets, 0.7, 5)
    p = (functional.linear(hidden, weight) / 0.7).log_softmax(-1)
    torch.testing.assert_close(log_probs, p.gather(-1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(p.exp() * p).sum(-1))


def test_a_weight_that_deepspeed_has_partitioned_is_left_to_trl(package: Package) -> None:
    module = package(utils=NAIVE.format(names=NEW))("utils")
    hidden, weight, bias, targets = head()
    weight.ds_id = 3  # type: ignore[attr-defined]
    with trl.enabled():
        assert module._ChunkedLogProbFunction.apply(hidden, weight, bias, targets, 1.0, 5) == "TRL's own"


def test_too_many_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="apply takes at most 9 arguments: hidden, weight, bias"):
        trl.log_prob_function().apply(*range(10))


@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO"])
def test_trainers_make_our_losses_in_place_of_ligers(package: Package, kind: str) -> None:
    name = f"{kind.lower()}_trainer"
    module = package(**{name: LIGER.format(kind)})(name)
    with trl.enabled():
        loss = module.make()
    assert type(loss) is getattr(llm_losses, f"FusedLinear{kind}Loss")
    assert loss.beta == 0.3
    assert not hasattr(module, f"LigerFusedLinear{kind}Loss")
    assert not module.is_liger_kernel_available()


def test_trainers_make_our_losses_in_place_of_trls_copies(package: Package) -> None:
    module = package(dpo_trainer="class FusedLinearDPOLoss:\n    pass\n")("dpo_trainer")
    theirs = module.FusedLinearDPOLoss
    with trl.enabled():
        assert module.FusedLinearDPOLoss is llm_losses.FusedLinearDPOLoss
    assert module.FusedLinearDPOLoss is theirs


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("count", [None, 7, torch.tensor(7)])
def test_the_chunked_cross_entropy(package: Package, shifted: bool, count: Any) -> None:
    module = package(sft_trainer="_chunked_cross_entropy_loss = None\n")("sft_trainer")
    hidden, weight, bias, labels = head()
    labels = labels.masked_fill(labels == 3, -100)
    given = {"shift_labels": labels} if shifted else {"labels": labels}
    rows, target = (hidden, labels) if shifted else (hidden[:-1], labels[1:])
    with trl.enabled():
        found = module._chunked_cross_entropy_loss(
            hidden, weight, 256, **given, num_items_in_batch=count, logit_scale=0.5, final_logit_softcapping=20.0,
            lm_head_bias=bias,
        )  # fmt: skip
    z = 20.0 * torch.tanh(0.5 * functional.linear(rows, weight, bias) / 20.0)
    total = functional.cross_entropy(z, target, reduction="sum")
    counted = target != -100
    p = z.log_softmax(-1)
    expected = (
        total / (counted.sum() if count is None else count),
        ((z.argmax(-1) == target) & counted).sum().double(),
        (-(p.exp() * p).sum(-1) * counted).sum(),
        counted.sum(),
    )
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found[0], (hidden, weight, bias))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected[0], (hidden, weight, bias)))


def test_the_chunked_cross_entropy_of_no_tokens_is_zero() -> None:
    hidden, weight, _, labels = head()
    loss, *_ = trl.chunked_cross_entropy_loss(hidden, weight, 256, shift_labels=torch.full_like(labels, -100))
    assert loss == 0.0
    with pytest.raises(ValueError, match="labels and shift_labels are both missing"):
        trl.chunked_cross_entropy_loss(hidden, weight, 256)


def test_the_sft_trainer_of_old_releases_fuses_the_head_of_its_model(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
class SFTTrainer:
    def __init__(self, model):
        self.model, self.args = model, type("Arguments", (), {"use_liger_kernel": False})()

    def compute_loss(self, model, inputs):
        return self.args.use_liger_kernel
"""
    module = package(sft_trainer=source)("sft_trainer")
    reasons = {"fused": "", "not fused": "it has hooks"}

    def fuse(model: Any, choose: Any, verbose: bool) -> list[Any]:
        assert choose("", model)
        assert not choose("layer", object())
        return [type("Row", (), {"reason": reasons[model]})()]

    monkeypatch.setattr("apex.fuse", fuse, raising=False)
    outside = module.SFTTrainer("fused")
    with trl.enabled():
        inside, other = module.SFTTrainer("fused"), module.SFTTrainer("not fused")
        assert [trainer.compute_loss(None, {}) for trainer in (inside, other, outside)] == [True, False, False]
    assert not inside.args.use_liger_kernel
    assert not inside.compute_loss(None, {})


def test_trl_without_the_hooks_is_refused(package: Package) -> None:
    package()
    with pytest.raises(RuntimeError, match=r"TRL 0\.0 has none of the names"), trl.enabled():
        pass


def test_every_position_is_computed_if_asked_for(package: Package) -> None:
    select = "def _use_triton(device):\n    return True\n"
    module = package(utils=NAIVE.format(names=NEW) + select)("utils")
    with trl.enabled():
        assert module._use_triton("cuda")
    with trl.enabled(every_position=True):
        assert not module._use_triton("cuda")
    assert module._use_triton("cuda")
    del module._use_triton
    refused = pytest.raises(RuntimeError, match=r"every_position=True needs 1\.16 or later")
    with refused, trl.enabled(every_position=True):
        pass


def test_everything_is_restored_after_an_error(package: Package) -> None:
    module = package(utils=NAIVE.format(names=NEW))("utils")
    original = module._ChunkedLogProbFunction
    with pytest.raises(ZeroDivisionError), trl.enabled():
        raise ZeroDivisionError
    assert module._ChunkedLogProbFunction is original


def test_the_installed_trl_has_hooks() -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    assert list(trl._swaps())
