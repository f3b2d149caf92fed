"""One valid call of every public function and module that takes tensors, arguments by name in their order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import amp_C
from apex import RNN, normalization
from apex.contrib import (
    clip_grad,
    fmha,
    llm_losses,
    multihead_attn,
)
from apex.integrations import verl
from apex.multi_tensor_apply import multi_tensor_applier
from apex.ops._examples import Example, Make, Public, by_name
from apex.transformer import functional
from apex.transformer.enums import AttnMaskType


@dataclass
class Call:
    """A function and arguments it takes. `optional` arguments may be None; `any_dtype` ones need not be floats."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    optional: frozenset[str] = frozenset()
    any_dtype: frozenset[str] = frozenset()

    def __call__(self, **replaced: Any) -> Any:
        return self.function(*{**self.arguments, **replaced}.values())

    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are tensors, and what modules keep."""
        kept = self.function.state_dict() if isinstance(self.function, torch.nn.Module) else {}
        given = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        return {**given, **{f"state {name}": value for name, value in kept.items()}}

    def __str__(self) -> str:
        return self.name


def rows(*shape: int) -> Tensor:
    return torch.randn(shape)


def numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def calls() -> list[Call]:
    """All of them, with tensors made anew."""
    table: list[Call] = []

    def add(name: str, function: Callable[..., Any], optional: str = "", any_dtype: str = "", **arguments: Any) -> None:
        table.append(Call(name, function, arguments, frozenset(optional.split()), frozenset(any_dtype.split())))

    for _, example in by_name():
        for public in example.public:
            table.append(_public_call(example, public))
    _add_layers(add)
    _add_transformers(add)
    _add_losses(add)
    _add_llm_losses(add)
    return table


def _public_call(example: Example, public: Public) -> Call:
    """Return a public function or module, with arguments of the example by the names that it has for them."""
    function = public.make(*example.small[0])
    made = example.arguments(Make(torch.float32, torch.device("cpu")), *example.small[0])
    parameters = list(signature_of(function).parameters.values())
    names = [each.name for each in parameters if each.kind != each.VAR_POSITIONAL]
    names = [*names, *public.takes[len(names) :]][: len(public.takes)]  # *args have the example's names
    given = dict(zip(names, public.arguments(made), strict=True))
    optional = {each.name for each in parameters if each.default is None or "None" in str(each.annotation)}
    named = dict(zip(names, public.takes, strict=True))
    any_dtype = {name for name, taken in named.items() if taken in example.accepts_integers}
    return Call(public.name, function, given, frozenset(optional), frozenset(any_dtype))


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or a module; of an autograd Function's `apply`, that of its `forward`."""
    if isinstance(function, torch.nn.Module):
        return inspect.signature(function.forward)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        signature = inspect.signature(owner.forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    return inspect.signature(function)


def _add_layers(add: Callable[..., None]) -> None:
    add("InstanceNorm3dNVFuser", normalization.InstanceNorm3dNVFuser(4), input=rows(2, 4, 3, 3, 3))
    for name in ("FusedScaleMaskSoftmax", "GenericFusedScaleMaskSoftmax"):
        add(name, _softmax_module(name), "mask", input=rows(2, 3, 4, 4), mask=numbers(2, 2, 1, 4, 4).bool())
    add("multi_tensor_applier", _scaled, noop_flag=torch.zeros(1, dtype=torch.int32), tensor_lists=rows(3))
    add("clip_grad_norm_", clip_grad.clip_grad_norm_, any_dtype="parameters", parameters=rows(3).requires_grad_(),
        max_norm=1.0)  # fmt: skip
    for name in ("LSTM", "GRU", "ReLU", "Tanh", "mLSTM"):
        add(f"RNN.{name}", getattr(RNN, name)(8, 4, 1), input=rows(5, 2, 8))


def _add_transformers(add: Callable[..., None]) -> None:
    edges = torch.tensor([0, 2, 5])
    states = rows(3, 2, 8)
    for impl in ("fast", "default"):
        attention = multihead_attn.SelfMultiheadAttn(8, 2, impl=impl)
        add(f"SelfMultiheadAttn {impl}", attention, query=states)
        given = {"query": states, "key": None, "value": None, "key_padding_mask": numbers(2, 2, 3).bool()}
        add(f"SelfMultiheadAttn {impl} with padding", attention, "key_padding_mask", **given)
        given = {**given, "key_padding_mask": None, "need_weights": False, "attn_mask": numbers(2, 3, 3).bool()}
        add(f"SelfMultiheadAttn {impl} with mask", attention, "attn_mask", **given)
        attention = multihead_attn.EncdecMultiheadAttn(8, 2, impl=impl)
        add(f"EncdecMultiheadAttn {impl}", attention, query=states, key=rows(4, 2, 8))
    add("fast_mask_softmax_dropout_func", multihead_attn.fast_mask_softmax_dropout_func, "pad_mask",
        is_training=True, heads=2, inputs=rows(4, 3, 3), pad_mask=numbers(2, 2, 3).to(torch.uint8),
        mask_additive=False, dropout_prob=0.0)  # fmt: skip
    config = SimpleNamespace(attention_probs_dropout_prob=0.0, num_attention_heads=2, hidden_size=16)
    add("FMHA", fmha.FMHA(config), qkv=rows(5, 48), cu_seqlens=edges.int(), max_s=3)


def _add_losses(add: Callable[..., None]) -> None:
    given = {"hidden": rows(4, 8), "weight": rows(6, 8), "labels": numbers(6, 4)}
    add("verl's linear_cross_entropy", verl.linear_cross_entropy, **given)


def _add_llm_losses(add: Callable[..., None]) -> None:
    pairs = {"chosen_logps": -rows(3).abs(), "rejected_logps": -rows(3).abs()}
    refs = {"ref_chosen_logps": rows(3), "ref_rejected_logps": rows(3)}
    add("dpo_loss", llm_losses.dpo_loss, " ".join(refs), **pairs, **refs)
    for name in ("cpo_loss", "simpo_loss", "orpo_loss"):
        add(name, getattr(llm_losses, name), **pairs)
    add("kto_loss", llm_losses.kto_loss, "ref_logps kl", logps=rows(3), preference_labels=numbers(2, 3),
        ref_logps=rows(3), kl=torch.tensor(0.1))  # fmt: skip
    add("kto_kl", llm_losses.kto_kl, policy_kl_logps=rows(3), ref_kl_logps=rows(3))
    add("sequence_log_probs", llm_losses.sequence_log_probs, log_probs=rows(2, 3), mask=numbers(2, 2, 3))
    add("wpo_weights", llm_losses.wpo_weights, log_probs=rows(2, 3), log_sum_sq_probs=rows(2, 3), mask=numbers(2, 2, 3))
    given = {"log_probs": rows(2, 3), "mask": numbers(2, 2, 3), "advantages": rows(2)}
    more = {"old_log_probs": rows(2, 3), "ref_log_probs": rows(2, 3), "vllm_is_ratio": torch.ones(2, 3)}
    add("grpo_loss", llm_losses.grpo_loss, " ".join(more), **given, **more)
    add("kl_estimate", llm_losses.kl_estimate, log_probs=rows(3), ref_log_probs=rows(3))
    add("token_weights", llm_losses.token_weights, mask=numbers(2, 2, 3))
    add("divergence", llm_losses.divergence, student=rows(2, 3), teacher=rows(2, 3))
    add("total_variation", llm_losses.total_variation, student=rows(2, 3), teacher=rows(2, 3))
    add("top_k_log_probs", llm_losses.top_k_log_probs, log_probs=rows(2, 3).log_softmax(-1), indices=numbers(3, 2, 2))
    add("distillation_loss", llm_losses.distillation_loss, "labels", student_logits=rows(2, 5),
        teacher_logits=rows(2, 5), labels=numbers(5, 2))  # fmt: skip
    head = {"lin_weight": rows(6, 8), "_input": rows(2, 3, 8), "target": numbers(6, 2, 3), "bias": rows(6)}
    for name in ("CPO", "SimPO", "ORPO"):
        add(f"FusedLinear{name}Loss", getattr(llm_losses, f"FusedLinear{name}Loss")(), "bias", **head)
    ref = {"ref_input": rows(2, 3, 8), "ref_weight": rows(6, 8), "ref_bias": rows(6)}
    add("FusedLinearDPOLoss", llm_losses.FusedLinearDPOLoss(), "bias ref_bias", **head, **ref)
    head = {"_input": rows(2, 3, 8), "lin_weight": rows(6, 8), "target": numbers(6, 2, 3), "bias": rows(6)}
    add("FusedLinearKTOLoss", llm_losses.FusedLinearKTOLoss(use_ref_model=True), "bias ref_bias kl", **head,
        preference_labels=torch.tensor([True, False]), **ref, kl=torch.tensor(0.1))  # fmt: skip
    add("FusedLinearGRPOLoss", llm_losses.FusedLinearGRPOLoss(), "bias old_per_token_logps", _input=rows(2, 3, 8),
        lin_weight=rows(6, 8), selected_token_ids=numbers(6, 2, 3), attention_mask=numbers(2, 2, 3), advantages=rows(2),
        bias=rows(6), ref_per_token_logps=rows(2, 3), old_per_token_logps=rows(2, 3))  # fmt: skip
    add("FusedLinearDistillationLoss", llm_losses.FusedLinearDistillationLoss(), "student_bias teacher_bias",
        student_input=rows(3, 8), student_weight=rows(6, 8), teacher_input=rows(3, 4), teacher_weight=rows(6, 4),
        true_labels=numbers(6, 3), student_bias=rows(6), teacher_bias=rows(6))  # fmt: skip


def _softmax_module(name: str) -> torch.nn.Module:
    """In its form of PyTorch operators for float32, in one pass for half precision."""
    kind = () if name.startswith("Generic") else (AttnMaskType.padding,)
    return getattr(functional, name)(
        False, False, *kind, True, lambda scores, mask: scores.masked_fill(mask, -1e4), True, 1.0
    )


def _scaled(noop_flag: Any, tensor_lists: Any) -> Any:
    return multi_tensor_applier(amp_C.multi_tensor_scale, noop_flag, [[tensor_lists], [torch.empty(3)]], 2.0)
