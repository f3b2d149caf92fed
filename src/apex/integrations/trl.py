"""This library's losses in the trainers of TRL, by the names that TRL looks up.

Before 1.14, DPO, KTO and GRPO trainers make an object of Liger's class for the loss (`LigerFusedLinearDPOLoss`, ...),
or of TRL's copy of it; the SFT trainer uses the head and the loss of the model, since 1.4 the function
`_chunked_cross_entropy_loss`. From 1.14 on DPO, KTO and GRPO, and from 1.15 on SFT and RLOO as well, call the class
`_ChunkedLogProbFunction`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..contrib import llm_losses
from ..contrib.xentropy import linear_cross_entropy, linear_log_probs

__all__ = ["enabled"]

# No label has this value: TRL leaves ignored tokens out, or masks their results.
_NEVER = -(1 << 31)
_OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_KINDS = ("sft", "dpo", "kto", "grpo", "rloo")
# The arguments of `_ChunkedLogProbFunction.apply` in TRL 1.15 and later.
_ARGUMENTS = (
    *("hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)


@contextlib.contextmanager
def enabled(*, every_position: bool = False) -> Iterator[None]:
    """Use this library's losses in TRL's trainers that are made and run within the context.

    Trainers of TRL before 1.14 use fused losses if asked to: `use_liger_loss=True`, later `use_liger_kernel=True`.
    The losses are equal to TRL's own. Nothing of TRL stays changed after the context.

    On GPUs the fused head of TRL selects the tokens that count, which waits for the GPU. `every_position=True`, from
    TRL 1.16 on, computes the log-probabilities of all tokens instead: the head waits for nothing, as CUDA graphs need.
    """
    swaps, version = list(_swaps()), getattr(importlib.import_module("trl"), "__version__", "")
    if not swaps:
        raise RuntimeError(f"TRL {version} has none of the names that apex.integrations.trl replaces")
    if every_position:
        utilities = importlib.import_module("trl.trainer.utils")
        if not hasattr(utilities, "_use_triton"):
            raise RuntimeError(f"TRL {version} always selects tokens; every_position=True needs 1.16 or later")
        swaps.append((utilities, "_use_triton", lambda device: False))
    with contextlib.ExitStack() as stack:
        for owner, name, value in swaps:
            stack.enter_context(_swapped(owner, name, value))
        yield


@contextlib.contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, which need not exist, for the duration of the context."""
    namespace = vars(owner)
    existed, before = name in namespace, namespace.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if existed:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _swaps() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and replacement of each hook that the installed TRL has."""
    importlib.import_module("trl")
    modules = {name: _module(f"trl.trainer.{name}") for name in ("utils", *(f"{kind}_trainer" for kind in _KINDS))}
    for module in filter(None, modules.values()):
        if hasattr(module, "_ChunkedLogProbFunction"):
            yield module, "_ChunkedLogProbFunction", log_prob_function(module._ChunkedLogProbFunction)
        if hasattr(module, "_chunked_cross_entropy_loss"):
            yield module, "_chunked_cross_entropy_loss", chunked_cross_entropy_loss
    for kind in ("dpo", "kto", "grpo"):
        trainer, name = modules[f"{kind}_trainer"], f"FusedLinear{kind.upper()}Loss"
        if trainer is None:
            continue
        if hasattr(trainer, name):  # TRL's copy
            yield trainer, name, getattr(llm_losses, name)
        elif f"Liger{name}" in inspect.getsource(trainer):
            yield trainer, f"Liger{name}", getattr(llm_losses, name)
            yield trainer, "is_liger_kernel_available", lambda *_, **__: True  # Liger's loss is not used
    sft = modules["sft_trainer"]
    if sft is not None and not hasattr(sft, "_chunked_cross_entropy_loss") and not hasattr(sft, "add_fused_lm_head"):
        yield sft.SFTTrainer, "__init__", _fusing_the_head(sft.SFTTrainer.__init__)
        yield sft.SFTTrainer, "compute_loss", _without_logits(sft.SFTTrainer.compute_loss)


def _module(name: str) -> ModuleType | None:
    """Return a module of TRL, or None if this release does not have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def log_prob_function(original: Any = None) -> Any:
    """Return a class with the method `apply` of TRL's `_ChunkedLogProbFunction`, computed by `linear_log_probs`.

    `original` is TRL's class, which gives the arguments and the number of results; None stands for TRL 1.15. A weight
    that DeepSpeed has partitioned is left to TRL's class, which gathers it again in the backward pass.
    """
    names = _ARGUMENTS if original is None else tuple(inspect.signature(original.forward).parameters)[1:]

    class ChunkedLogProbs:
        """Log-probabilities of the targets, and entropies, of a linear head."""

        @staticmethod
        def apply(*values: Any) -> tuple[Tensor | None, ...]:
            if original is not None and any(hasattr(value, "ds_id") for value in values):
                return original.apply(*values)
            if len(values) > len(names):
                raise TypeError(f"apply takes at most {len(names)} arguments: {', '.join(names)}")
            arguments = dict(zip(names, values, strict=False))
            takes_outputs = "outputs" in names
            outputs = arguments.get("outputs", _OPTIONAL) if takes_outputs else ("entropy",)
            rows = linear_log_probs(
                values[0],
                arguments["weight"],
                arguments["targets"],
                arguments.get("bias"),
                ignore_index=_NEVER,
                temperature=arguments["temperature"],
                softcap=arguments.get("final_logit_softcapping"),
                logit_scale=arguments.get("logit_scale", 1.0),
                outputs=("log_probs", *(name for name in outputs if name in _OPTIONAL)),
            )
            is_top1 = None if rows.is_top1 is None else rows.is_top1.bool()
            results = (rows.log_probs, rows.entropy, rows.log_sum_sq_probs, rows.mean_logits, is_top1)
            return results if takes_outputs else results[:2]

    return ChunkedLogProbs


def chunked_cross_entropy_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    chunk_size: int,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    lm_head_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the next-token loss, the number of correct tokens, the sum of entropies and the number of counted tokens.

    The arguments are as in TRL's function; `chunk_size` has no effect. If no token counts, the loss is zero.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("labels and shift_labels are both missing")
        hidden_states, shift_labels = hidden_states[..., :-1, :], labels[..., 1:]
    loss, rows = linear_cross_entropy(
        hidden_states,
        lm_head_weight,
        shift_labels,
        lm_head_bias,
        reduction="sum",
        logit_scale=logit_scale,
        softcap=final_logit_softcapping,
        outputs=("entropy", "is_top1"),
    )
    valid = (shift_labels != -100).sum()
    count = valid.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    count = count.to(loss.device) if isinstance(count, Tensor) else count
    return loss / count, rows.is_top1.sum(), rows.entropy.sum(), valid


def _fusing_the_head(original: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of an SFT trainer that replaces the head and the loss of its model."""

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        from .. import fuse

        original(self, *args, **kwargs)
        report = fuse(self.model, choose=lambda name, module: module is self.model, verbose=False)
        self.head_is_fused = any(not row.reason for row in report)

    return construct


def _without_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `compute_loss` of an SFT trainer that makes no metrics of logits, as TRL does for Liger's head."""

    @functools.wraps(original)
    def compute_loss(self: Any, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "head_is_fused", False):  # made outside of the context, or a head that cannot be fused
            return original(self, model, inputs, *args, **kwargs)
        with _swapped(self.args, "use_liger_kernel", True):
            return original(self, model, inputs, *args, **kwargs)

    return compute_loss
