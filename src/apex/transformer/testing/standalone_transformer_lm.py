"""A transformer language model on split layers, shared by `standalone_gpt` and `standalone_bert`.

Shapes: s sequence (this rank's part of it, between split layers with sequence parallelism), b batch, h hidden size, n
heads of this rank, d channels of a head. Activations are [s, b, h].

Weights are drawn on the host from one seed per layer, as a whole, and each rank keeps its part. Any division of the
model over processes therefore starts with the same weights. Parameters also have the same names in any division: layers
are named by their number in the whole model, and the embedding has the same name in the first stage and in the last,
whose logits use it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...fused_bias_swiglu import fused_bias_swiglu
from ...fused_dense import fused_dense_gelu_dense_function
from ...ops._checks import at_hand
from ...ops._host import HOST
from .. import parallel_state, tensor_parallel
from ..context_parallel._parts import size_and_rank
from ..context_parallel._positions import positions_of
from ..enums import AttnMaskType
from ..moe import MoELayer
from ..packed_seq_params import PackedSeqParams
from ..tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from ._attention import CoreAttention, ParallelAttention
from ._config import TransformerConfig, config_from_args, stage_layers
from ._layers import Init, dropout, get_linear_layer, init_method_normal, scaled_init_method_normal

__all__ = [
    "CoreAttention",
    "Embedding",
    "LanguageModelStage",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelTransformer",
    "ParallelTransformerLayer",
    "Pooler",
    "TransformerConfig",
    "TransformerLanguageModel",
    "config_from_args",
    "get_linear_layer",
    "init_method_normal",
    "parallel_lm_logits",
    "scaled_init_method_normal",
    "stage_layers",
]


class ParallelMLP(nn.Module):
    """An MLP from h to `ffn_hidden_size` and back, with GELU or SwiGLU between."""

    def __init__(self, config: TransformerConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        # One op for both layers, which saves one of the two wide activations. Its backward pass cannot be split, as
        # zero-bubble pipelines need, and does not add to main_grad.
        split = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        self.fused = split == (1, 1) and not self.gated and not config.gradient_accumulation_fusion
        width = config.ffn_hidden_size or 4 * config.hidden_size
        self.dense_h_to_4h = tensor_parallel.ColumnParallelLinear(
            config.hidden_size,
            2 * width if self.gated else width,
            init_method=init_method_normal(config.init_method_std, generator),
            skip_bias_add=self.gated,
            stride=2 if self.gated else 1,  # each rank holds the values that belong to its gates
            **config.column(),
        )
        self.dense_4h_to_h = tensor_parallel.RowParallelLinear(
            width,
            config.hidden_size,
            input_is_parallel=True,
            init_method=scaled_init_method_normal(config.init_method_std, config.num_layers, generator),
            **config.row(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, h] to the same shape."""
        up, down = self.dense_h_to_4h, self.dense_4h_to_h
        # Not if the layers' product was replaced, as by `fp8.convert`.
        if self.fused and up._linear is down._linear is linear_with_grad_accumulation_and_async_allreduce:
            return fused_dense_gelu_dense_function(x, up.weight, up.bias, down.weight, down.bias)
        hidden, bias = up(x)
        hidden = fused_bias_swiglu(hidden, bias) if self.gated else F.gelu(hidden, approximate="tanh")
        return down(hidden)[0]


class ParallelTransformerLayer(nn.Module):
    """A layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType = AttnMaskType.causal
    ) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer_number
        generator = config.generator(layer_number)
        self.input_layernorm = config.norm()
        self.self_attention = ParallelAttention(config, attn_mask_type, generator)
        self.post_attention_layernorm = config.norm()
        self.mlp: nn.Module
        if config.has_experts(layer_number):
            self.mlp = MoELayer(config, layer_number=layer_number)
        else:
            self.mlp = ParallelMLP(config, generator)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map [s, b, h] to the same shape."""
        mixed = self.self_attention(self.input_layernorm(x), attention_mask, rotary, packed_seq_params)
        x = x + self._dropout(mixed)
        output = self.mlp(self.post_attention_layernorm(x))
        return x + self._dropout(output[0] if isinstance(output, tuple) else output)

    def _dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.config.hidden_dropout, self.training, own=self.config.splits_sequence)


class ParallelTransformer(nn.Module):
    """Consecutive layers of a model, followed by the final norm if `post_process`."""

    def __init__(
        self,
        config: TransformerConfig,
        layers: range,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        post_process: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleDict(
            {str(number): ParallelTransformerLayer(config, number, attn_mask_type) for number in layers}
        )
        self.final_layernorm = config.norm() if post_process else None

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        checkpoint_activations_micro_batch: bool | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map [s, b, h] to the same shape.

        A pipeline schedule passes `checkpoint_activations_micro_batch`: True recomputes all layers in the backward pass
        of this microbatch, False none. If it is None, the configuration decides.
        """
        rotary = self._rotary(x, packed_seq_params)
        layers = list(self.layers.values())
        for first, last, recompute in self._recompute_groups(len(layers), checkpoint_activations_micro_batch):

            def run(x: Tensor, group: list[nn.Module] = layers[first:last]) -> Tensor:
                for layer in group:
                    x = layer(x, attention_mask, rotary, packed_seq_params)
                return x

            if recompute and torch.is_grad_enabled():
                x = tensor_parallel.checkpoint(run, self.config.distribute_saved_activations, x)
            else:
                x = run(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def _recompute_groups(self, count: int, whole_microbatch: bool | None) -> list[tuple[int, int, bool]]:
        """Return (first layer, end, recompute) for each group of layers."""
        full = self.config.recompute == "full" if whole_microbatch is None else whole_microbatch
        if not full:
            return [(0, count, False)]
        group_size = self.config.recompute_num_layers
        if self.config.recompute_method == "block" and whole_microbatch is None:
            recomputed = min(group_size, count)
            return [*((index, index + 1, True) for index in range(recomputed)), (recomputed, count, False)]
        return [(first, min(first + group_size, count), True) for first in range(0, count, group_size)]

    def _rotary(self, x: Tensor, packed: PackedSeqParams | None) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines [s, 1, 1, d] of all tensor-parallel ranks' positions.

        In float32: half precision is too coarse.
        """
        if self.config.position_embedding != "rope":
            return None
        ranks = parallel_state.get_tensor_model_parallel_world_size() if self.config.splits_sequence else 1
        options: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
        half = self.config.head_size // 2
        frequencies = 10000.0 ** (-torch.arange(half, **options) / half)
        places = positions_of(ranks * x.shape[0], packed, x.device).to(torch.float32)
        angles = torch.outer(places, frequencies).repeat(1, 2)[:, None, None]
        return angles.cos(), angles.sin()


class Embedding(nn.Module):
    """Embeddings of words, learned positions and token types; a last stage has only the words, for its logits."""

    def __init__(self, config: TransformerConfig, num_tokentypes: int = 0, words_only: bool = False) -> None:
        super().__init__()
        self.config = config
        generator = config.generator(-1)
        init_method = init_method_normal(config.init_method_std, generator)
        self.word_embeddings = tensor_parallel.VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            init_method,
            params_dtype=config.params_dtype,
            use_cpu_initialization=True,
        )
        # finalize_model_grads adds the gradients of both copies; norms over all parameters count only the first copy.
        self.word_embeddings.weight.shared_embedding = True  # type: ignore[attr-defined]
        self.word_embeddings.weight.shared = words_only  # type: ignore[attr-defined]
        self.position_embeddings: nn.Embedding | None = None
        self.tokentype_embeddings: nn.Embedding | None = None
        if words_only:
            return
        if config.position_embedding == "learned":
            self.position_embeddings = self._table(config.max_position_embeddings, init_method)
        if num_tokentypes:
            self.tokentype_embeddings = self._table(num_tokentypes, init_method)

    def _table(self, rows: int, init_method: Init) -> nn.Embedding:
        table = nn.Embedding(rows, self.config.hidden_size, device=HOST, dtype=torch.float32)
        init_method(table.weight)
        return table.to(self.config.params_dtype)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        tokentype_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map words [b, s], positions and token types to [s, b, h].

        Without `position_ids`, positions count from 0 in each sequence; a context-parallel rank has two chunks of it.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [batch, words]")
        types = 0 if self.tokentype_embeddings is None else self.tokentype_embeddings.num_embeddings
        if types and tokentype_ids is None:
            raise ValueError(
                f"tokentype_ids is None, and the model has num_tokentypes={types}: give integers below {types} like "
                "the words, such as torch.zeros_like(words), or make the model with num_tokentypes=0"
            )
        if tokentype_ids is not None and not types:
            raise ValueError(
                "tokentype_ids is given, and the model has num_tokentypes=0: leave it out, or make the model with "
                "num_tokentypes=2"
            )
        if position_ids is not None and self.config.position_embedding == "rope":
            self._check_rotated(input_ids, position_ids, packed_seq_params)
        x = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            x = x + self._positions(input_ids, position_ids, packed_seq_params)
        if self.tokentype_embeddings is not None:
            x = x + self.tokentype_embeddings(tokentype_ids)
        x = x.transpose(0, 1).contiguous()
        if self.config.splits_sequence:
            x = tensor_parallel.scatter_to_sequence_parallel_region(x)
        return dropout(x, self.config.hidden_dropout, self.training, own=self.config.splits_sequence)

    def _check_rotated(self, input_ids: Tensor, position_ids: Tensor, packed: PackedSeqParams | None) -> None:
        """Raise a ValueError if `position_ids` differ from the positions of the rotations, which ignore them."""
        if not at_hand(position_ids):
            return
        places = positions_of(input_ids.shape[1], packed, position_ids.device)
        if position_ids.shape[-1:] != places.shape or not bool((position_ids == places).all()):
            raise ValueError(
                'position_ids are for position_embedding="learned": with "rope", positions count from 0 in each '
                "sequence or packed document; leave them out, or give packed_seq_params"
            )

    def _positions(self, input_ids: Tensor, position_ids: Tensor | None, packed: PackedSeqParams | None) -> Tensor:
        """Return the position embeddings, or raise a ValueError that names the positions out of range."""
        assert self.position_embeddings is not None
        limit = self.position_embeddings.num_embeddings
        length = input_ids.shape[1] * size_and_rank(None)[0]
        if packed is not None:
            length = packed.bounds()[1]
        if position_ids is not None:
            try:
                return self.position_embeddings(position_ids)
            except IndexError as error:  # on a CPU; a GPU raises no IndexError
                lowest, highest = (int(end) for end in position_ids.aminmax())
                raise ValueError(
                    f"position_ids has positions from {lowest} to {highest}; 0 to {limit - 1} are accepted, because "
                    f"max_position_embeddings={limit}"
                ) from error
        if length > limit:
            raise ValueError(
                f"a sequence of {length} words is longer than max_position_embeddings={limit}: shorten it, make the "
                'model with more positions, or use position_embedding="rope"'
            )
        return self.position_embeddings(positions_of(input_ids.shape[1], packed, input_ids.device))


class Pooler(nn.Module):
    """A linear layer and tanh at one position."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.splits_sequence = config.splits_sequence
        init_method = init_method_normal(config.init_method_std, config.generator(config.num_layers))
        self.dense = get_linear_layer(config.hidden_size, config.hidden_size, init_method).to(config.params_dtype)

    def forward(self, x: Tensor, position: int = 0) -> Tensor:
        """Map [s, b, h] to [b, h]."""
        if self.splits_sequence:  # from here on every rank computes the same
            x = tensor_parallel.gather_from_sequence_parallel_region(x, to_model_parallel=False)
        return torch.tanh(self.dense(x[position]))


class TransformerLanguageModel(nn.Module):
    """The layers of a stage, with an embedding if `pre_process` and a pooler if `add_pooler` and `post_process`."""

    def __init__(
        self,
        config: TransformerConfig,
        layers: range,
        attn_mask_type: AttnMaskType,
        num_tokentypes: int = 0,
        add_pooler: bool = False,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> None:
        super().__init__()
        if (pre_process, post_process) != (layers.start == 0, layers.stop == config.num_layers):
            raise ValueError(
                f"a stage with pre_process={pre_process} and post_process={post_process} cannot have the layers "
                f"{layers.start} to {layers.stop - 1} of {config.num_layers}: is `folded` that of its placement?"
            )
        self.pre_process = pre_process
        self.input_tensor: Tensor | None = None
        if pre_process or post_process:
            self.embedding = Embedding(config, num_tokentypes, words_only=not pre_process)
        self.encoder = ParallelTransformer(config, layers, attn_mask_type, post_process)
        self.pooler = Pooler(config) if add_pooler and post_process else None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Set the input from the previous stage: a tensor, or a list whose first element is used."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        tokentype_ids: Tensor | None = None,
        checkpoint_activations_micro_batch: bool | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map words [b, s], or the input from the previous stage, to [s, b, h]."""
        x = self.input_tensor
        if self.pre_process:
            x = self.embedding(input_ids, position_ids, tokentype_ids, packed_seq_params)
        if x is None:
            raise RuntimeError("a stage without an embedding needs set_input_tensor before it is called")
        return self.encoder(x, attention_mask, checkpoint_activations_micro_batch, packed_seq_params)


class LanguageModelStage(nn.Module):
    """Base of GPT and BERT, as whole models or as pipeline stages.

    If `config` is None, it is made from Megatron's command line. `layers` are the numbers of the layers to build, by
    default this rank's part of the pipeline. `cpu_offload` keeps tensors saved for the backward pass on the host.
    """

    attn_mask_type: AttnMaskType

    def __init__(
        self,
        num_tokentypes: int = 0,
        parallel_output: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        cpu_offload: bool = False,
        *,
        config: TransformerConfig | None = None,
        layers: range | None = None,
        folded: bool = False,
        add_pooler: bool = False,
    ) -> None:
        super().__init__()
        self.config = config_from_args() if config is None else config
        self.parallel_output, self.cpu_offload = parallel_output, cpu_offload
        self.pre_process, self.post_process = pre_process, post_process
        layers = stage_layers(self.config, folded) if layers is None else layers
        self.language_model = TransformerLanguageModel(
            self.config, layers, self.attn_mask_type, num_tokentypes, add_pooler, pre_process, post_process
        )

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Set the input from the previous stage: a tensor, or a list whose first element is used."""
        self.language_model.set_input_tensor(input_tensor)

    def _offloading(self) -> contextlib.AbstractContextManager:
        return torch.autograd.graph.save_on_cpu() if self.cpu_offload else contextlib.nullcontext()


def parallel_lm_logits(
    x: Tensor, weight: Tensor, parallel_output: bool, bias: Tensor | None = None, *, config: TransformerConfig
) -> Tensor:
    """Map [s, b, h] to logits [s, b, words] of the embedding `weight`, only this rank's words if `parallel_output`."""
    ranks, sequence = parallel_state.get_tensor_model_parallel_world_size(), config.splits_sequence
    logits = linear_with_grad_accumulation_and_async_allreduce(
        x, weight, bias, config.gradient_accumulation_fusion, ranks > 1 and not sequence, sequence
    )
    return logits if parallel_output else tensor_parallel.gather_from_tensor_model_parallel_region(logits)
