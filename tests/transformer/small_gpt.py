"""A language model of small layers that can be split in every way, and a run that trains and saves it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by the process that divides: optimizers import it, which takes seconds in each of four
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from apex import amp
from apex.checkpoint import wait
from apex.checkpoint._split import Split
from apex.fused_bias_swiglu import fused_bias_swiglu
from apex.optimizers import FusedAdam
from apex.transformer import checkpoint, finalize_model_grads, parallel_state
from apex.transformer import tensor_parallel as tp
from apex.transformer._groups.device import parameter_device
from apex.transformer.amp import GradScaler
from apex.transformer.enums import ModelType
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func
from apex.transformer.pipeline_parallel.schedules.common import _get_params_for_weight_decay_optimization
from apex.transformer.pipeline_parallel.utils import _reconfigure_microbatch_calculator
from tests.support.first_rank import from_first_rank

WORDS, HIDDEN, LENGTH, SAMPLES, MICROBATCHES = 10, 8, 3, 2, 4
# The terms of all sums behind a loss of four layers: a norm and four products per layer, the last norm, the logits, the
# cross-entropy and the mean over all words.
TERMS = 4 * 5 * HIDDEN + 2 * HIDDEN + WORDS + MICROBATCHES * SAMPLES * LENGTH
# Adam divides by the size of a gradient: with a larger eps what rounding does to small gradients is not amplified.
SMOOTH = {"eps": 1e-3}
MADE = {"use_cpu_initialization": True}


class Layer(nn.Module):
    """Three packed projections and a gated unit, whose weights have strides 3 and 2."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        torch.manual_seed(number)
        self.norm = FusedLayerNorm(HIDDEN)
        self.packed = tp.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, False, False, stride=3, **MADE)
        self.mix = tp.RowParallelLinear(HIDDEN, HIDDEN, bias=False, input_is_parallel=True, **MADE)
        self.up = tp.ColumnParallelLinear(HIDDEN, 16, gather_output=False, stride=2, skip_bias_add=True, **MADE)
        self.down = tp.RowParallelLinear(8, HIDDEN, input_is_parallel=True, **MADE)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.packed(self.norm(x))[0].chunk(3, -1)
        with tp.get_cuda_rng_tracker().fork():
            mixed = nn.functional.dropout(query * key.tanh() + value, 0.2, self.training)
        x = x + nn.functional.dropout(self.mix(mixed)[0], 0.2, self.training)
        return x + self.down(fused_bias_swiglu(*self.up(x)))[0]


class Stage(nn.Module):
    """A stage of layers; the first has embeddings, the last a copy of the word embeddings for the logits."""

    def __init__(self, layers: int, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        rank = parallel_state.get_pipeline_model_parallel_rank()
        count = layers // ranks // chunks
        stage = (parallel_state.get_virtual_pipeline_model_parallel_rank() or 0) * ranks + rank
        self.layers = nn.ModuleList(Layer(stage * count + index + 1) for index in range(count))
        self.first, self.last = pre_process, post_process
        multiple = 2 * parallel_state.get_tensor_model_parallel_world_size()
        padded = -(-WORDS // multiple) * multiple
        torch.manual_seed(0)  # the same for both copies of the embedding
        if pre_process:
            self.embedding = tp.VocabParallelEmbedding(padded, HIDDEN, **MADE)
            self.positions = nn.Parameter(torch.zeros(LENGTH, 1, HIDDEN))
        if post_process:
            self.last_norm = FusedLayerNorm(HIDDEN)
            self.head = self.embedding if pre_process else tp.VocabParallelEmbedding(padded, HIDDEN, **MADE)
        self.register_buffer("steps", torch.zeros(2))
        for module in (getattr(self, "embedding", None), getattr(self, "head", None)):
            if module is not None:
                module.weight.shared_embedding = True
                module.weight.vocab_size = WORDS
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.received = tensors[0]

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.positions if self.first else self.received
        for layer in self.layers:
            x = layer(x)
        if not self.last:
            return x
        x = tp.copy_to_tensor_model_parallel_region(self.last_norm(x))
        logits = nn.functional.linear(x, self.head.weight)
        word = self.head.vocab_start_index + torch.arange(logits.shape[-1], device=logits.device)
        return logits.masked_fill(word >= WORDS, -1e4)


def step_function(batch: list[Tensor], model: nn.Module) -> Any:
    words = batch[0].transpose(0, 1).contiguous()

    def loss(logits: Tensor) -> tuple[Tensor, Tensor]:
        value = tp.vocab_parallel_cross_entropy(logits, words).mean()
        return value, value.detach()

    return model(words), loss


@contextlib.contextmanager
def split(tensor: int = 1, pipeline: int = 1, chunks: int | None = None, context: int = 1) -> Iterator[None]:
    parallel_state.initialize_model_parallel(tensor, pipeline, chunks, context_parallel_size=context)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


class Run:
    """A model and everything that is saved with it, on the existing groups."""

    def __init__(
        self, layers: int, optimizer: Any = FusedAdam, training: bool = False, amp_level: str = "", **options: Any
    ) -> None:
        self.chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        tp.model_parallel_cuda_manual_seed(5)
        self.model = build_model(Stage, False, self.chunks, ModelType.encoder_or_decoder, layers)
        for part in self.model:
            part.train(training)
            part.to(torch.bfloat16 if options.get("master_weights") else torch.float32)
        groups = _get_params_for_weight_decay_optimization(self.model)
        self.optimizer = optimizer(groups, lr=0.01, weight_decay=0.1, **options)
        self.amp_level = amp_level
        if amp_level:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level=amp_level, verbosity=0)
        self.scaler = GradScaler(init_scale=4.0, growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.step = 0

    def train(self) -> Tensor:
        """Run one step and return the mean loss in the last stage, zero in others."""
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        _reconfigure_microbatch_calculator(1, None, MICROBATCHES * SAMPLES, SAMPLES, 1)
        numbers = torch.Generator().manual_seed(self.step)
        batch = [torch.randint(0, WORDS, (MICROBATCHES * SAMPLES, LENGTH), generator=numbers).to(parameter_device())]
        self.optimizer.zero_grad()
        forward_backward = get_forward_backward_func(self.chunks, ranks)
        model = self.model if self.chunks else self.model[0]
        losses = forward_backward(step_function, batch, model, forward_only=False, grad_scaler=self.scaler)
        finalize_model_grads(self.model)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.step += 1
        return torch.stack(losses).mean() if losses else torch.zeros((), device=batch[0].device)

    def train_each(self) -> None:
        """Run a step in which each element's gradient depends only on that element, so its bits depend on no layout."""
        parameters = [param for part in self.model for param in part.parameters()]
        loss = sum((param * (0.25 * param + 0.01)).sum() for param in parameters)
        with amp.scale_loss(loss, self.optimizer) if self.amp_level else contextlib.nullcontext(loss) as scaled:
            scaled.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def others(self) -> dict[str, Any]:
        return {"scaler": amp if self.amp_level else self.scaler, "scheduler": self.scheduler}

    def save(self, path: Path, use_async: bool = False) -> None:
        options: Any = {"use_async": use_async}
        checkpoint.save(path, self.model, self.optimizer, **options, data={"position": self.step}, **self.others())

    def load(self, path: Path) -> None:
        found = checkpoint.load(path, self.model, self.optimizer, **self.others())
        self.step = found.pop("data")["position"]
        assert not found


def whole(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, as PyTorch's reader finds them; called in all processes.

    The first process reads, since four would take 0.4 s each.
    """

    def read() -> dict[str, Tensor]:
        reader = FileSystemReader(path)
        saved = reader.read_metadata().state_dict_metadata.items()
        found = {
            key: torch.zeros(each.size, dtype=each.properties.dtype) for key, each in saved if hasattr(each, "size")
        }
        _load_state_dict(found, reader, no_dist=True)
        return found

    wait()
    return from_first_rank(read)


def parts(run: Run) -> Iterator[tuple[str, Tensor, tuple[slice, ...]]]:
    """Return names, tensors and locations of everything that this rank would save, without padding."""
    for key, value in checkpoint.state_of(run.model, run.optimizer).items():
        if isinstance(value, Split) and not key.endswith("|padding"):
            for offsets, view in value.boxes:
                place = tuple(slice(at, at + size) for at, size in zip(offsets, view.shape, strict=True))
                yield key, view, place
