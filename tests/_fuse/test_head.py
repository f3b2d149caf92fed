"""Heads of language models that do more with their logits than passing them to a loss.

The models are stand-ins with the structure of those in transformers, which these tests do not need.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, functional

import apex

from .test_recognition import ForCausalLMLoss


class Tiny(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=13, final_logit_softcapping=2.0, logits_scaling=3.0)
        self.logit_scale, self.vocab_size, self.loss_function = 0.7, 13, ForCausalLMLoss
        self.model, self.lm_head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=bias)


class CohereForCausalLM(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        logits = logits * self.logit_scale
        return {"loss": self.loss_function(logits, labels, self.vocab_size), "logits": logits}


class GraniteForCausalLM(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        logits = logits / self.config.logits_scaling
        return {"loss": self.loss_function(logits=logits, labels=labels, vocab_size=13), "logits": logits}


class Gemma2ForCausalLM(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        if self.config.final_logit_softcapping is not None:
            logits = logits / self.config.final_logit_softcapping
            logits = torch.tanh(logits)
            logits = logits * self.config.final_logit_softcapping
        return {"loss": self.loss_function(logits, labels, self.vocab_size), "logits": logits}


class ScaledGemma2ForCausalLM(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids)) * self.logit_scale
        logits = torch.tanh(logits / self.config.final_logit_softcapping) * self.config.final_logit_softcapping
        return {"loss": self.loss_function(logits, labels, self.vocab_size), "logits": logits}


class T5ForConditionalGeneration(Tiny):
    """The loss is made in the forward, and its labels are not shifted."""

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        loss = CrossEntropyLoss(ignore_index=-100)(logits.view(-1, logits.size(-1)), labels.to(logits.device).view(-1))
        return {"loss": loss, "logits": logits}


class BartForConditionalGeneration(Tiny):
    """A buffer is added to the logits."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__(bias)
        self.register_buffer("final_logits_bias", torch.randn(1, 13))

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        logits = logits + self.final_logits_bias.to(logits.device)
        return {"loss": CrossEntropyLoss()(logits.view(-1, 13), labels.view(-1)), "logits": logits}


class OldForCausalLM(Tiny):
    """The logits are shifted in the forward."""

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        loss = CrossEntropyLoss()(logits[..., :-1, :].contiguous().view(-1, 13), labels[..., 1:].contiguous().view(-1))
        return {"loss": loss, "logits": logits}


class WhisperForConditionalGeneration(Tiny):
    """The head has another name."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__(bias)
        self.proj_out = self._modules.pop("lm_head")

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.proj_out(self.model(input_ids))
        return {"loss": CrossEntropyLoss()(logits.view(-1, 13), labels.reshape(-1)), "logits": logits}


class LMHead(nn.Module):
    """A head that is a module of its own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.out_proj = layer

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.out_proj(hidden_states)


def ForMaskedLMLoss(logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int = -100, **kwargs: Any) -> Tensor:
    return functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), ignore_index=ignore_index)


class T5GemmaForConditionalGeneration(Tiny):
    """The linear layer is inside of the head, and labels are not shifted."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__(bias)
        self.lm_head = LMHead(self._modules.pop("lm_head"))
        self.loss_function = ForMaskedLMLoss

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        return {"loss": self.loss_function(logits, labels, self.vocab_size), "logits": logits}


class AudioForConditionalGeneration(Tiny):
    """Tokens that a mask leaves out have no loss, which is called by its name in torch.nn."""

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        mask = input_ids[..., 1:] < 5
        shifted, targets = logits[..., :-1, :][mask].contiguous(), labels[..., 1:][mask].contiguous()
        return {"loss": nn.CrossEntropyLoss()(shifted.view(-1, shifted.size(-1)), targets.view(-1)), "logits": logits}


class Llama4ForCausalLM(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size)
        return logits, loss


class Llama4ForConditionalGeneration(nn.Module):
    """The head is in the language model, the loss outside of it."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.language_model, self.vocab_size, self.loss_function = Llama4ForCausalLM(bias), 13, ForCausalLMLoss

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.language_model(input_ids)[0]
        return {"loss": self.loss_function(logits, labels, self.vocab_size), "logits": logits}


class OddForCausalLM(Tiny):
    """Operators have no name by which they could be refused beforehand."""

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))
        logits = logits + 1 if self.logit_scale else -logits
        return {"loss": self.loss_function(logits * logits, labels, self.vocab_size), "logits": logits}


class ScaledBartForConditionalGeneration(BartForConditionalGeneration):
    """A factor behind the sum is not recorded."""

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = (self.lm_head(self.model(input_ids)) + self.final_logits_bias) * self.logit_scale
        return {"loss": CrossEntropyLoss()(logits.view(-1, 13), labels.view(-1)), "logits": logits}


class TanhForCausalLM(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = torch.tanh(self.lm_head(self.model(input_ids)))
        return {"loss": self.loss_function(logits, labels, self.vocab_size), "logits": logits}


class HalfForCausalLM(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids))[..., :7]
        return {"loss": self.loss_function(logits, labels, 7), "logits": logits}


KINDS = [CohereForCausalLM, GraniteForCausalLM, Gemma2ForCausalLM, ScaledGemma2ForCausalLM]
KINDS += [T5ForConditionalGeneration, BartForConditionalGeneration, OldForCausalLM, WhisperForConditionalGeneration]
KINDS += [T5GemmaForConditionalGeneration, Llama4ForConditionalGeneration]


def results(model: Any) -> tuple[Any, list[Tensor]]:
    ids = torch.tensor([[1, 2, 3, 4], [2, 3, 4, 5]])
    outputs = model(ids, labels=torch.tensor([[-100, 2, 3, -100], [1, 1, 5, 6]]))
    return outputs, [outputs["loss"], *torch.autograd.grad(outputs["loss"], [*model.parameters()])]


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [*((kind, compiled) for kind in KINDS for compiled in (False, True)), (AudioForConditionalGeneration, False)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_same_loss_without_logits(kind: Any, bias: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    model = kind(bias).double()
    plain = copy.deepcopy(model)
    row, *_ = apex.fuse(model, verbose=False)
    assert (row.rule, row.reason) == ("linear layer + cross-entropy", "")
    torch._dynamo.reset()  # it counts how often the one fused forward is compiled for all classes
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    outputs, found = results(call)
    assert "logits" not in outputs
    torch.testing.assert_close(found, results(plain)[1])
    assert results(model.eval())[0]["logits"].shape == (2, 4, 13)


@pytest.mark.parametrize("kind", [Llama4ForConditionalGeneration, T5GemmaForConditionalGeneration])
def test_hooks_around_a_head_are_called(kind: Any) -> None:
    """Of the language model inside, and of a head around its linear layer; later exchanges of the loss too."""
    model = kind().double()
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    calls = []
    inner = getattr(model, "language_model", None) or model.lm_head
    handle = inner.register_forward_hook(lambda *_: calls.append(1))
    outputs, found = results(model)
    assert outputs["logits"] is not None
    assert calls == [1]
    torch.testing.assert_close(found, results(plain)[1])
    handle.remove()
    model.loss_function = lambda logits, labels, vocab_size: logits.square().sum()
    outputs, found = results(model)
    torch.testing.assert_close(found[0], outputs["logits"].square().sum())


@pytest.mark.parametrize("kind", [OddForCausalLM, TanhForCausalLM, HalfForCausalLM, ScaledBartForConditionalGeneration])
def test_what_is_not_recorded_gets_its_logits(kind: Any) -> None:
    model = kind().double()
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    for _ in range(2):
        (outputs, found), (_, wanted) = results(model), results(plain)
        assert outputs["logits"] is not None
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", [GraniteForCausalLM, T5ForConditionalGeneration])
def test_labels_of_another_shape_are_named(kind: Any) -> None:
    model = kind()
    apex.fuse(model, verbose=False)
    with pytest.raises(ValueError, match=r"labels of the shape .* do not fit logits for \(2, 4\) tokens"):
        model(torch.ones(2, 4, dtype=torch.int64), labels=torch.ones(2, 3, dtype=torch.int64))
