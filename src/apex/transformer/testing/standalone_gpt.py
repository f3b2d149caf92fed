"""GPT on split layers, as a whole or as a pipeline stage."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...contrib.xentropy import linear_cross_entropy
from .. import parallel_state
from ..enums import AttnMaskType
from ..packed_seq_params import PackedSeqParams
from ..tensor_parallel.cross_entropy import IGNORED_TARGET, vocab_parallel_cross_entropy
from .standalone_transformer_lm import LanguageModelStage, parallel_lm_logits


class GPTModel(LanguageModelStage):
    """GPT: maps words to logits or losses; an inner pipeline stage maps [sequence, batch, hidden] to the same shape."""

    attn_mask_type = AttnMaskType.causal

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        *,
        reduction: str = "none",
        checkpoint_activations_micro_batch: bool | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map words [batch, sequence] to logits [batch, sequence, words], or to losses [batch, sequence] with `labels`.

        Without a mask attention is causal. `reduction="mean"` returns the mean loss; if one rank holds all words, the
        logits are then never materialised as a whole. With `packed_seq_params` the words [1, rows] are packed
        documents: attention stays within each, and positions begin anew. `position_ids` are for learned positions;
        rotations count from 0 in each sequence or document. Labels of -100 have no loss, and the mean leaves them out.
        """
        if reduction not in ("none", "mean"):
            raise ValueError(f'reduction must be "none" or "mean", got {reduction!r}')
        with self._offloading():
            x = self.language_model(
                input_ids,
                position_ids,
                attention_mask,
                tokentype_ids,
                checkpoint_activations_micro_batch,
                packed_seq_params,
            )
            return self._head(x, labels, reduction) if self.post_process else x

    def _head(self, x: Tensor, labels: Tensor | None, reduction: str) -> Tensor:
        weight = self.language_model.embedding.word_embeddings.weight
        holds_all_words = parallel_state.get_tensor_model_parallel_world_size() == 1
        if (
            labels is not None
            and reduction == "mean"
            and holds_all_words
            and not self.config.gradient_accumulation_fusion
        ):
            return linear_cross_entropy(x, weight, labels.transpose(0, 1).contiguous())
        logits = parallel_lm_logits(x, weight, self.parallel_output or labels is not None, config=self.config)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        losses = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
        if reduction == "mean":
            return losses.sum() / (labels != IGNORED_TARGET).sum()
        return losses.transpose(0, 1).contiguous()


def gpt_model_provider(
    pre_process: bool = True, post_process: bool = True, cpu_offload: bool = False, **stage: Any
) -> GPTModel:
    """Return a stage of GPT, as `build_model` calls it; pass `folded=True` with its `placement="v"`."""
    return GPTModel(0, True, pre_process, post_process, cpu_offload, **stage)
