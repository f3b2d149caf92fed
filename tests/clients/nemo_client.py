"""NeMo's GPT on apex's tensor parallelism, schedules, norms and optimizers, on gloo.

`MegatronGPTModel`, the LightningModule around `GPTModel`, moves batches to a GPU by name. Here its other steps are
called in its order: NeMo's initialisation, its model, apex's schedule, its all-reduce of layer norms, its optimizer.
NeMo's attention makes a tensor on `torch.cuda.current_device()`, which is the CPU here.
Importing the model imports tokenizers of several languages, which nothing here uses: a stand-in without content takes
the place of each package that is not installed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tempfile
import types
from pathlib import Path

STAND_INS = ("MeCab", "ijson", "ipadic", "jieba", "opencc", "pangu", "sacrebleu", "sacremoses", "youtokentome")
MISSING = tuple(name for name in STAND_INS if importlib.util.find_spec(name) is None)


class StandIn(types.ModuleType):
    """A module in which every name is a class without content."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each missing package and its submodules."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in MISSING else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from checks import falls, run  # noqa: E402
from nemo.collections.nlp.models.language_modeling.megatron.gpt_model import GPTModel  # noqa: E402
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel  # noqa: E402
from nemo.collections.nlp.modules.common.megatron.clip_grads import (  # noqa: E402
    clip_grad_norm_distributed_optimizer,
)
from nemo.collections.nlp.modules.common.megatron.megatron_init import initialize_model_parallel_for_nemo  # noqa: E402
from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS  # noqa: E402

import apex  # noqa: E402
from apex.transformer import parallel_state, tensor_parallel  # noqa: E402
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_no_pipelining import (  # noqa: E402
    forward_backward_no_pipelining,
)

VOCABULARY, LENGTH, SAMPLES, MICROBATCHES, STEPS = 32, 16, 4, 2, 40


class Reducer:
    """The two methods of NeMo's LightningModule that add up gradients of layer norms over tensor-parallel ranks."""

    _append_sequence_parallel_module_grads = MegatronGPTModel._append_sequence_parallel_module_grads
    allreduce_sequence_parallel_gradients = MegatronGPTModel.allreduce_sequence_parallel_gradients

    def __init__(self, model):
        self.model = model
        self.megatron_amp_o2 = False


def train(rank, folder, world, tensor, sequence, norm, name, options):
    """Train in one of `world` processes and save the losses of every step, and the norm of the first gradients."""
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")
    replicas = world // tensor
    initialize_model_parallel_for_nemo(
        world, rank, rank, tensor_model_parallel_size=tensor, pipeline_model_parallel_split_rank=0,
        micro_batch_size=SAMPLES, global_batch_size=SAMPLES * MICROBATCHES * replicas,
    )  # fmt: skip
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)  # NeMo does so if there is a GPU
    model = GPTModel(
        VOCABULARY, 64, LENGTH, num_layers=2, num_attention_heads=4, ffn_hidden_size=128, precision=32,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, apply_query_key_layer_scaling=False,
        normalization=norm, sequence_parallel=sequence, bias_activation_fusion=False, bias_dropout_add_fusion=False,
    )  # fmt: skip
    for param in model.parameters():
        if sequence and getattr(param, "sequence_parallel_enabled", False):
            param._disable_greedy_grad_copy = param._disable_overlap_grad_sync = True
    optimizer = AVAILABLE_OPTIMIZERS[name](model.parameters(), lr=2e-3, **options)
    distributed = name == "distributed_fused_adam"
    if distributed:
        for layer in reversed(model.language_model.encoder.layers):
            optimizer.init_params_bucket(layer.parameters())
        optimizer.init_params(reversed(list(model.parameters())))
        optimizer.init_param_buffer()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (SAMPLES * MICROBATCHES, LENGTH + 1), generator=generator)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(LENGTH).expand(SAMPLES, LENGTH)

    def forward_step(batch, model):
        output = model(batch[0][:, :-1].contiguous(), positions, hidden, labels=batch[0][:, 1:].contiguous())

        def loss_of(output):
            loss = output.float().mean()
            return loss, {"avg": loss.detach()}

        return output, loss_of

    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        reduced = forward_backward_no_pipelining(
            forward_step_func=forward_step, batch=[tokens], model=model, forward_only=False,
            tensor_shape=[LENGTH, SAMPLES, 64], dtype=torch.float32, sequence_parallel_enabled=sequence,
            custom_sync_context_handler=(lambda: optimizer.no_sync(greedy_grad_copy=False)) if distributed else None,
        )  # fmt: skip
        if sequence:
            Reducer(model).allreduce_sequence_parallel_gradients()
        if distributed:
            optimizer._finish_bucket_grad_sync()
            norms.append(clip_grad_norm_distributed_optimizer(optimizer, 1e6).item())
        optimizer.step()
        losses.append(torch.stack([each["avg"] for each in reduced]).mean().item())
    torch.save((losses, norms), Path(folder) / str(rank))


def losses_of(world, tensor=1, sequence=False, norm="layernorm", name="fused_adam", **options):
    """Train in `world` processes; losses and norms must be the same in all of them."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = folder, world, tensor, sequence, norm, name, options
        mp.start_processes(train, arguments, world, start_method="fork")
        found = [torch.load(Path(folder) / str(rank)) for rank in range(world)]
    for losses, norms in found[1:]:
        torch.testing.assert_close(losses, found[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norms, found[0][1], rtol=1e-5, atol=1e-5)
    return found[0][0]


def check_one_process() -> str:
    """`GPTModel` with `fused_adam` and apex's schedule, tensor parallel 1"""
    assert AVAILABLE_OPTIMIZERS["fused_adam"] is apex.optimizers.FusedAdam
    return falls(losses_of(1))


def check_sequence_parallelism() -> str:
    """the same with `layernorm1p`, tensor parallel 2 with sequence parallelism"""
    losses = losses_of(2, tensor=2, sequence=True, norm="layernorm1p")
    return falls(losses)


def check_distributed_optimizer() -> str:
    """the same with `distributed_fused_adam`, NeMo's subclass of `DistributedFusedAdam`, on 4 processes"""
    expected = losses_of(2, tensor=2, sequence=True, norm="layernorm1p")
    losses = losses_of(4, tensor=2, sequence=True, norm="layernorm1p", name="distributed_fused_adam")
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    return f"{falls(losses)}, as with `fused_adam`"


run(__name__, "nemo_toolkit")
