"""Calls of public functions and modules, by name, for `test_defaults.py`.

A case takes a device, makes what the call needs there, and returns the call, which returns all tensors that it changed
or made. What the call makes itself, it makes under the defaults that are set by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import amp_C
from apex import RNN, normalization
from apex.contrib import llm_losses
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.fmha import FMHA, FMHAFun
from apex.contrib.llm_losses.policy import LOSS_TYPES
from apex.contrib.llm_losses.preference import DPO_LOSSES, SMOOTHED
from apex.contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn, fast_mask_softmax_dropout_func
from apex.contrib.transducer import TransducerJoint
from apex.contrib.xentropy import linear_cross_entropy
from apex.multi_tensor_apply import multi_tensor_applier
from apex.ops._examples import Example, Make, Public, by_name
from apex.transformer import AttnMaskType
from apex.transformer import functional as transformer

Call = Callable[[], list[Any]]
Case = Callable[[torch.device], Call]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small random numbers on the CPU, whatever the defaults are."""
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def integers(*values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def op(function: Callable[..., Any], *arguments: Any) -> Case:
    """A function, and the gradients of its arguments: a tuple is the shape of one that wants a gradient."""
    return layer(lambda: function, *arguments)


def layer(make: Callable[[], Any], *arguments: Any) -> Case:
    """A module, and the gradients of its arguments and parameters."""

    def case(device: torch.device) -> Call:
        torch.manual_seed(1)
        module = make()
        learned = list(module.to(device).parameters()) if isinstance(module, nn.Module) else []
        given = [
            drawn(*each).to(device).requires_grad_() if isinstance(each, tuple)
            else each.to(device) if isinstance(each, Tensor)
            else each
            for each in arguments
        ]  # fmt: skip
        learned += [each for each in given if isinstance(each, Tensor) and each.requires_grad]

        def call() -> list[Any]:
            output = module(*given)
            output = output[0] if isinstance(output, tuple) else output
            if output.requires_grad:
                output.backward(output.detach().clone())
            buffers = list(module.buffers()) if isinstance(module, nn.Module) else []
            return [output, *buffers, *(each.grad for each in learned)]

        return call

    return case


def attention(kind: Callable[..., Any], *inputs: Any, **options: Any) -> Case:
    return layer(lambda: kind(8, 2, dropout=0.25, **options), *inputs)


MASK = integers([0, 0, 1], [0, 1, 1], dtype=torch.bool)
LENGTHS = integers(3, 2, dtype=torch.int32)
SOFTMAX_MASK = integers([[[0, 0, 1], [0, 1, 0], [1, 1, 1]]], [[[0, 0, 0], [1, 0, 1], [0, 1, 1]]], dtype=torch.bool)
FMHA_CONFIG = SimpleNamespace(attention_probs_dropout_prob=0.25, num_attention_heads=2, hidden_size=32)


def mask_softmax(kind: Any, *rest: Any) -> nn.Module:
    return kind(False, True, *rest, True, lambda scores, mask: scores.masked_fill(mask, -10000.0), True, 0.5)


FUNCTIONS: dict[str, Case] = {
    "InstanceNorm3dNVFuser": layer(
        lambda: normalization.InstanceNorm3dNVFuser(4, affine=True, track_running_stats=True), (2, 4, 3, 2, 2)
    ),
    "TransducerJoint with dropout": layer(
        lambda: TransducerJoint(relu=True, dropout=True, dropout_prob=0.25), (2, 3, 8), (2, 2, 8), LENGTHS, LENGTHS - 1
    ),
    "FusedScaleMaskSoftmax": layer(
        lambda: mask_softmax(transformer.FusedScaleMaskSoftmax, AttnMaskType.padding), (2, 2, 3, 3), SOFTMAX_MASK
    ),
    "GenericFusedScaleMaskSoftmax": layer(
        lambda: mask_softmax(transformer.GenericFusedScaleMaskSoftmax), (2, 2, 3, 3), SOFTMAX_MASK
    ),
    "SelfMultiheadAttn": attention(SelfMultiheadAttn, (3, 2, 8), None, None, MASK),
    "SelfMultiheadAttn with norm": attention(
        SelfMultiheadAttn, (3, 2, 8), None, None, None, False, "causal", include_norm_add=True
    ),
    "SelfMultiheadAttn by default": attention(SelfMultiheadAttn, (3, 2, 8), impl="default", bias=True),
    "EncdecMultiheadAttn": attention(EncdecMultiheadAttn, (3, 2, 8), (3, 2, 8), None, MASK),
    "fast_mask_softmax_dropout_func": op(fast_mask_softmax_dropout_func, True, 2, (4, 3, 3), MASK, False, 0.25),
    "FMHA": layer(lambda: FMHA(FMHA_CONFIG), (7, 96), integers(0, 3, 5, dtype=torch.int32), 4, True, True),
    "FMHAFun with dropout": op(FMHAFun.apply, (7, 3, 2, 16), integers(0, 3, 5, dtype=torch.int32), 0.25, 4, True, True),
    **{
        kind.__name__: layer(lambda kind=kind: kind(4, 6, 2, dropout=0.25), (3, 2, 4))
        for kind in (RNN.GRU, RNN.LSTM, RNN.ReLU, RNN.Tanh, RNN.mLSTM)
    },
}  # fmt: skip


TARGET, COUNTED = integers([1, 2, 0], [3, -100, 4]), integers([1, 1, 1], [1, 0, 0])
OF_PAIRS = {"weight": (5, 4), "input": (2, 3, 4), "target": TARGET}


def dpo(name: str) -> Case:
    smoothing = 0.1 if name in SMOOTHED else 0.0

    def call(chosen: Tensor, rejected: Tensor, first: Tensor, second: Tensor) -> Any:
        more = {"chosen_lengths": first, "rejected_lengths": second, "nll_loss": -chosen.mean()}
        return llm_losses.dpo_loss(chosen, rejected, loss_type=name, label_smoothing=smoothing, **more)

    return op(call, (3,), (3,), integers(3, 4, 2), integers(1, 4, 5))


def grpo(name: str) -> Case:
    """All numbers that settings have, none of which float16 holds."""
    given = {"sapo_temperature_pos": 1.3, "vespo_k_pos": 1.7, "vespo_lambda_neg": 2.3, "dual_clip": 3.1, "beta": 0.03}
    settings = {**given, "loss_type": name, "epsilon_low": 0.3, "max_completion_length": 7, "delta": 1.9}
    return op(lambda *tensors: llm_losses.grpo_loss(*tensors, **settings), (2, 3), COUNTED, drawn(2),
              *(drawn(2, 3, seed=seed) for seed in (3, 5)))  # fmt: skip


FUNCTIONS |= {
    **{f"dpo_loss {name}": dpo(name) for name in DPO_LOSSES},
    **{f"grpo_loss {name}": grpo(name) for name in LOSS_TYPES},
    **{
        f"{name} {number}": op(functools.partial(getattr(llm_losses, name), **options), (3,), (3,))
        for name in ("simpo_loss", "cpo_loss", "orpo_loss")
        for number, options in enumerate([{"beta": 0.3}, {"beta": 0.3, "label_smoothing": 0.1}])
        if name != "orpo_loss" or not number
    },
    "kto_loss": op(
        lambda *given: llm_losses.kto_loss(*given, desirable_weight=1.3, undesirable_weight=0.6),
        (3,), integers(1, 0, 1, dtype=torch.bool), drawn(3), drawn(1)[0],
    ),
    "kto_kl": op(llm_losses.kto_kl, (3,), drawn(3)),
    "sequence_log_probs": op(
        lambda *given: llm_losses.sequence_log_probs(*given, average=True, ld_alpha=0.3), (2, 3), COUNTED
    ),
    "wpo_weights": op(llm_losses.wpo_weights, (2, 3), drawn(2, 3), COUNTED),
    "policy_losses": op(
        lambda *given: llm_losses.policy_losses(*given, llm_losses.PolicySettings("sapo")), (2, 3), drawn(2, 1)
    ),
    "kl_estimate": op(llm_losses.kl_estimate, (2, 3), drawn(2, 3)),
    "token_weights": op(lambda mask: llm_losses.token_weights(mask, "grpo"), COUNTED),
    "divergence": op(lambda *given: llm_losses.divergence(*given, 0.3), (2, 3), drawn(2, 3)),
    "total_variation": op(llm_losses.total_variation, (2, 3), drawn(2, 3)),
    "top_k_log_probs": op(llm_losses.top_k_log_probs, (2, 5), integers([0, 2], [1, 4])),
    "distillation_loss": op(
        lambda *given: llm_losses.distillation_loss(*given, temperature=1.7), (3, 5), drawn(3, 5), integers(1, -100, 4)
    ),
    **{
        name: layer(lambda name=name: getattr(llm_losses, name)(), *OF_PAIRS.values())
        for name in ("FusedLinearCPOLoss", "FusedLinearSimPOLoss", "FusedLinearORPOLoss")
    },
    "FusedLinearDPOLoss": layer(
        lambda: llm_losses.FusedLinearDPOLoss(use_ref_model=False, ld_alpha=0.3, use_weighting=True),
        *OF_PAIRS.values(),
    ),
    "FusedLinearKTOLoss": layer(
        lambda: llm_losses.FusedLinearKTOLoss(undesirable_weight=0.6), (2, 3, 4), (5, 4), TARGET, None,
        integers(1, 0, dtype=torch.bool),
    ),
    **{
        f"FusedLinearGRPOLoss {name}": layer(
            lambda name=name: llm_losses.FusedLinearGRPOLoss(beta=0.0, loss_type=name), (2, 3, 4), (5, 4),
            TARGET.abs() % 5, COUNTED, drawn(2),
        )
        for name in ("dapo", "vespo")
    },
    "FusedLinearDistillationLoss": layer(
        llm_losses.FusedLinearDistillationLoss, (3, 4), (5, 4), drawn(3, 4), drawn(5, 4), integers(1, -100, 4)
    ),
    "linear_cross_entropy over ranks": op(
        lambda *given: linear_cross_entropy(
            *given, label_smoothing=0.3, smoothing="megatron", group=torch.distributed.group.WORLD
        ),
        (3, 4), (5, 4), integers(1, -100, 4),
    ),
}  # fmt: skip


def public_case(example: Example, public: Public) -> Case:
    """Return a public function or module with an example's arguments, and the gradients of these and of parameters."""

    def case(device: torch.device) -> Call:
        arguments = public.arguments(example.arguments(Make(torch.float32, device), *example.small[0]))
        arguments = [list(value) if isinstance(value, tuple) else value for value in arguments]  # tuples are drawn
        return layer(lambda: public.make(*example.small[0]), *arguments)(device)

    return case


FUNCTIONS |= {public.name: public_case(example, public) for _, example in by_name() for public in example.public}


def lists(count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    return [
        [(drawn(*shape, seed=seed).abs() / 8).to(device, dtype) for shape in ((3, 4), (70,), (5,))]
        for seed in range(count)
    ]


def list_call(name: str, count: int, *numbers: Any, dtype: torch.dtype = torch.float32) -> Case:
    """A function of amp_C; tensors among `numbers` go to the device."""

    def case(device: torch.device) -> Call:
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        tensors = lists(count, device, dtype)
        given = [each.to(device, copy=True) if isinstance(each, Tensor) else each for each in numbers]

        def call() -> list[Any]:
            found = multi_tensor_applier(getattr(amp_C, name), flag, tensors, *given)
            return [found, flag, *tensors, *given]

        return call

    return case


ONE = torch.ones(1, dtype=torch.float32, device="cpu")
STEP = integers(2, dtype=torch.int32)
ADAM = (0.1, 0.9, 0.99, 1e-8, 2, 1, 1, 0.1)
CAPTURABLE = (ONE * 0.1, 0.9, 0.99, 1e-8, STEP, 1, 1, 0.1)
NORMS = drawn(3).abs()

LIST_CALLS: dict[str, Case] = {
    "multi_tensor_scale": list_call("multi_tensor_scale", 2, 0.5),
    "multi_tensor_axpby": list_call("multi_tensor_axpby", 3, 0.5, 2.0, -1),
    "multi_tensor_l2norm": list_call("multi_tensor_l2norm", 1, True),
    "multi_tensor_l2norm_mp": list_call("multi_tensor_l2norm_mp", 1, True, dtype=torch.bfloat16),
    "multi_tensor_l2norm_scale": list_call("multi_tensor_l2norm_scale", 2, 0.5, True),
    "multi_tensor_unscale_l2norm": list_call("multi_tensor_unscale_l2norm", 1, ONE * 0.5, True),
    "multi_tensor_sgd": list_call("multi_tensor_sgd", 3, 0.1, 0.9, 0.0, 0.1, False, True, False, 0.5),
    "multi_tensor_adam": list_call("multi_tensor_adam", 4, *ADAM),
    "multi_tensor_adam_capturable": list_call("multi_tensor_adam_capturable", 4, *CAPTURABLE, ONE * 0.5),
    "multi_tensor_adam_capturable_master": list_call(
        "multi_tensor_adam_capturable_master", 5, *CAPTURABLE, ONE * 0.5
    ),
    "multi_tensor_adagrad": list_call("multi_tensor_adagrad", 3, 0.1, 1e-8, 1, 0.1),
    "multi_tensor_novograd": list_call("multi_tensor_novograd", 3, NORMS, *ADAM[:5], 1, 0.1, 1, 0, 2),
    "multi_tensor_lamb": list_call("multi_tensor_lamb", 4, *ADAM[:5], 1, 0.1, 1, 1, ONE * 9, 1.0, True),
    "multi_tensor_lamb in half precision": list_call(
        "multi_tensor_lamb", 4, *ADAM[:5], 1, 0.1, 1, 1, ONE * 9, 1.0, True, dtype=torch.bfloat16
    ),
    "multi_tensor_lamb_mp": list_call(
        "multi_tensor_lamb_mp", 4, *CAPTURABLE[:5], 1, 0.1, 1, 1, ONE * 9, ONE, True, ONE * 0, ONE * 0.5
    ),
    "multi_tensor_lamb_stage1_cuda": list_call(
        "multi_tensor_lamb_stage1_cuda", 5, NORMS, 1, 0.9, 0.99, 1e-8, ONE * 9, 1.0
    ),
    "multi_tensor_lamb_stage2_cuda": list_call("multi_tensor_lamb_stage2_cuda", 2, NORMS, NORMS, 0.1, 0.1),
    "multi_tensor_lars": list_call(
        "multi_tensor_lars", 3, NORMS, NORMS, 0.1, 0.02, 1e-8, 0.1, 0.9, 0.0, False, False, False, 1.0, False
    ),
}  # fmt: skip


def scale_of_hysteresis(device: torch.device) -> Call:
    scale, found = ONE.to(device, copy=True), ONE.to(device)
    trackers = [integers(1, dtype=torch.int32).to(device) for _ in range(2)]

    def call() -> list[Any]:
        return [amp_C.update_scale_hysteresis(scale, *trackers, found, 2.0, 0.5, 2, 1), scale, *trackers]

    return call


def clipped(norm_type: float, dtype: torch.dtype) -> Case:
    def case(device: torch.device) -> Call:
        params, gradients = lists(2, device, dtype)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        return lambda: [clip_grad_norm_(params, 0.1, norm_type), *gradients]

    return case


LIST_CALLS |= {
    "update_scale_hysteresis": scale_of_hysteresis,
    **{
        f"clip_grad_norm_ {norm_type} {dtype}": clipped(norm_type, dtype)
        for norm_type in (2.0, float("inf"))
        for dtype in (torch.float32, torch.float16)
    },
}
