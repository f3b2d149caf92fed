"""BERT on split layers, as a whole or as a pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops._host import HOST
from .. import parallel_state
from .._marks import MarkedModule
from ..enums import AttnMaskType
from ..tensor_parallel import vocab_parallel_cross_entropy
from ..tensor_parallel.layers import set_tensor_model_parallel_attributes
from ..utils import divide
from . import global_vars
from .standalone_transformer_lm import (
    LanguageModelStage,
    TransformerConfig,
    get_linear_layer,
    init_method_normal,
    parallel_lm_logits,
)


def bert_extended_attention_mask(attention_mask: Tensor) -> Tensor:
    """Map a mask [b, s], zero for padding, to [b, 1, s, s], True where the query or the key is padding."""
    is_word = attention_mask.bool()
    return (is_word[:, None, :, None] & is_word[:, None, None, :]).logical_not()


class BertLMHead(MarkedModule):
    """The language-model head: a linear layer, GELU and a norm, then logits of all words with a bias."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        words = divide(config.vocab_size, ranks, "vocab_size over the tensor-parallel ranks")
        self.bias = nn.Parameter(torch.zeros(words, dtype=config.params_dtype, device=HOST))
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)
        init_method = init_method_normal(config.init_method_std, config.generator(config.num_layers + 1))
        self.dense = get_linear_layer(config.hidden_size, config.hidden_size, init_method).to(config.params_dtype)
        for parameter in self.dense.parameters():
            parameter.sequence_parallel_enabled = config.splits_sequence  # type: ignore[attr-defined]
        self.layernorm = config.norm()

    def forward(self, x: Tensor, weight: Tensor, parallel_output: bool) -> Tensor:
        """Map [s, b, h] to logits [s, b, words] of the embedding `weight`.

        With `parallel_output` they are this rank's words only.
        """
        x = self.layernorm(F.gelu(self.dense(x), approximate="tanh"))
        return parallel_lm_logits(x, weight, parallel_output, self.bias, config=self.config)


class BertModel(LanguageModelStage):
    """BERT: maps words to logits or losses and, with `add_binary_head`, each sequence to two logits.

    Takes the arguments of `LanguageModelStage` from `parallel_output` on.
    """

    attn_mask_type = AttnMaskType.padding

    def __init__(self, num_tokentypes: int = 2, add_binary_head: bool = True, *args: bool, **options: Any) -> None:
        super().__init__(num_tokentypes, *args, add_pooler=add_binary_head, **options)
        config = self.config
        self.lm_head: BertLMHead | None = None
        self.binary_head: nn.Linear | None = None
        if self.post_process:
            self.lm_head = BertLMHead(config)
            if add_binary_head:
                init_method = init_method_normal(config.init_method_std, config.generator(config.num_layers + 2))
                self.binary_head = get_linear_layer(config.hidden_size, 2, init_method).to(config.params_dtype)

    def forward(
        self,
        bert_model_input: Tensor,
        attention_mask: Tensor,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Run words [b, s] with a mask that is zero for padding through the stage.

        Returns the hidden state for the next stage. The last stage returns a pair: logits [b, s, words], or losses [b,
        s] if `lm_labels` is given, and the binary head's logits [b, 2] or None.
        """
        if attention_mask.dim() != 2 or (self.pre_process and attention_mask.shape != bert_model_input.shape):
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, expected the words' [batch, words], zero for "
                "padding"
            )
        with self._offloading():
            mask = bert_extended_attention_mask(attention_mask)
            x = self.language_model(bert_model_input, None, mask, tokentype_ids)
            if self.lm_head is None:
                return x
            weight = self.language_model.embedding.word_embeddings.weight
            logits = self.lm_head(x, weight, self.parallel_output or lm_labels is not None)
            binary = None
            if self.binary_head is not None and self.language_model.pooler is not None:
                binary = self.binary_head(self.language_model.pooler(x))
            if lm_labels is None:
                return logits.transpose(0, 1).contiguous(), binary
            losses = vocab_parallel_cross_entropy(logits, lm_labels.transpose(0, 1).contiguous())
            return losses.transpose(0, 1).contiguous(), binary


def bert_model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    cpu_offload: bool = False,
    *,
    add_binary_head: bool | None = None,
    **stage: Any,
) -> BertModel:
    """Return a stage of BERT, as `build_model` calls it; `add_binary_head` defaults to Megatron's command line."""
    binary = global_vars.get_args().bert_binary_head if add_binary_head is None else add_binary_head
    return BertModel(2 if binary else 0, binary, True, pre_process, post_process, cpu_offload, **stage)
