"""Trains a small GPT that is split over processes in any way: layers, stages of a pipeline, sequences, replicas.

    apex run --nproc-per-node 4 train.py --tensor 2 --pipeline 2 --sequence-parallel

What is left of the processes after --tensor times --pipeline times --context are replicas. Start it again, with the
same split or another one, and it goes on from its last checkpoint.
"""

import argparse
import contextlib

import text
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from apex import amp, fp8
from apex.checkpoint import Series
from apex.contrib.optimizers import DistributedFusedAdam
from apex.optimizers import FusedAdam
from apex.transformer import checkpoint, finalize_model_grads, parallel_state, tensor_parallel
from apex.transformer.amp import GradScaler
from apex.transformer.context_parallel import get_batch_on_this_cp_rank
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils
from apex.transformer.pipeline_parallel.schedules import forward_backward_zero_bubble
from apex.transformer.testing.standalone_gpt import gpt_model_provider
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig

HALF = {"O0": None, "O2": torch.float16, "O5": torch.bfloat16}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tensor", type=int, default=1, help="ranks that divide each layer")
parser.add_argument("--sequence-parallel", action="store_true", help="divide the sequence between layers as well")
parser.add_argument("--context", type=int, default=1, help="ranks that divide each sequence, attention included")
parser.add_argument("--pipeline", type=int, default=1, help="ranks that divide the sequence of layers")
parser.add_argument("--chunks", type=int, default=1, help="stages of each of these ranks")
parser.add_argument("--zero-bubble", action="store_true", help="ZB-H1, or with two chunks ZB-V, instead of 1F1B")
parser.add_argument("--zero", action="store_true", help="divide the optimizer's state among replicas")
parser.add_argument("--opt-level", choices=HALF, help="O5: bfloat16, O2: float16 with a loss scale; on a CPU O0")
parser.add_argument("--fp8", choices=("tensorwise", "blockwise"), help="float8 products; a CPU emulates them")
parser.add_argument("--recompute", choices=("selective", "full"), help="compute attention, or layers, again backward")
parser.add_argument("--experts", type=int, help="experts in place of each MLP")
parser.add_argument("--topk", type=int, default=2, help="experts of each token")
parser.add_argument("--aux-loss", type=float, default=1e-2, help="factor of the loss that balances experts")
parser.add_argument("--expert-parallel", type=int, default=1, help="ranks that divide the experts of a layer")
parser.add_argument("--expert-tensor", type=int, help="ranks that divide each expert, by default those of --tensor")
for size, default in {"layers": 4, "hidden": 64, "heads": 4, "sequence": 64}.items():
    parser.add_argument(f"--{size}", type=int, default=default)
parser.add_argument("--batch", type=int, default=16, help="rows of a step, over all replicas")
parser.add_argument("--microbatch", type=int, default=2, help="rows that pass through the model at once")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--checkpoints", default="checkpoints", help="folder to save to, and to go on from")
parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
args = parser.parse_args()
if (args.recompute and args.zero_bubble) or (args.zero and args.expert_parallel > 1):
    parser.error("--recompute does not go with --zero-bubble, and --zero does not go with --expert-parallel")
of_experts = (args.expert_parallel > 1, args.expert_tensor, args.topk != 2, args.aux_loss != 1e-2)
if (args.zero_bubble and args.pipeline == 1) or (any(of_experts) and not args.experts):
    parser.error("--zero-bubble needs --pipeline; --expert-parallel, --expert-tensor, --topk and --aux-loss --experts")
args.opt_level = args.opt_level or ("O5" if args.device == "cuda" else "O0")  # CPUs are quickest in float32

# Processes and their groups.
dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
if args.device == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
chunks = args.chunks if args.chunks > 1 else None
dims = {"expert_model_parallel_size": args.expert_parallel, "expert_tensor_parallel_size": args.expert_tensor}
parallel_state.initialize_model_parallel(args.tensor, args.pipeline, chunks, context_parallel_size=args.context, **dims)
tensor_parallel.model_parallel_cuda_manual_seed(1)
replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
utils.setup_microbatch_calculator(dist.get_rank(), None, args.batch, args.microbatch, replicas)

# This rank's part of the model. Its weights do not depend on the split.
folded = args.zero_bubble and args.chunks == 2
config = TransformerConfig(
    num_layers=args.layers,
    hidden_size=args.hidden,
    num_attention_heads=args.heads,
    vocab_size=text.WORDS,
    max_position_embeddings=args.sequence,
    position_embedding="rope",
    activation="swiglu",
    attention="sdpa",
    sequence_parallel=args.sequence_parallel,
    recompute=args.recompute,
    num_moe_experts=args.experts,
    moe_router_topk=args.topk,
    moe_router_pre_softmax=args.topk == 1,  # the softmax over a single expert would be 1
    moe_aux_loss_coeff=args.aux_loss,
    moe_token_dispatcher_type="alltoall",
)
model = build_model(
    gpt_model_provider,
    False,  # finalize_model_grads, or the ZeRO optimizer, takes the mean over replicas
    chunks,
    ModelType.encoder_or_decoder,
    placement="v" if folded else "loop",
    config=config,
    folded=folded,
)

# The optimizer, amp, and a loss scale that all ranks agree on. amp gets the model without its head: stages then send
# half precision to each other, and the loss is computed in float32.
parameters = [parameter for chunk in model for parameter in chunk.parameters()]
if args.zero:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    optimizer = DistributedFusedAdam(parameters, lr=args.lr, process_group=group)
else:
    optimizer = FusedAdam(parameters, lr=args.lr)
inner = [chunk.language_model for chunk in model]
_, optimizer = amp.initialize(
    inner, optimizer, opt_level=args.opt_level, loss_scale=1.0, cast_model_outputs=HALF[args.opt_level], verbosity=0
)
converted = [
    layer
    for chunk in inner
    if args.fp8
    # Layers of this size are quicker in bfloat16; here they show how it is done.
    for layer in fp8.convert(chunk, args.fp8, smallest_weight=0, emulate=args.device == "cpu")
]
scaler = GradScaler(init_scale=2.0**12, enabled=args.opt_level == "O2")


def forward_step(batch, stage):
    """One microbatch through one stage, and what its last one makes of the output."""
    (rows,) = batch
    part = get_batch_on_this_cp_rank({"words": rows[:, :-1], "labels": rows[:, 1:]})
    losses = stage(part["words"], labels=part["labels"])

    def loss_function(losses):
        loss = losses.mean()
        return loss, utils.average_losses_across_data_parallel_group([loss])

    return losses, loss_function


schedule = get_forward_backward_func(chunks, args.pipeline)
if args.zero_bubble and args.pipeline > 1:
    schedule = forward_backward_zero_bubble


def train_step(step):
    """The losses of all microbatches, where this rank has the last stage."""
    device = parameters[0].device
    count = args.batch // replicas
    rows = text.rows(step, args.batch, args.sequence)[replica * count : (replica + 1) * count].to(device)
    optimizer.zero_grad()
    # The loss scale is the scaler's; amp, whose own is 1, gives the gradients to its float32 weights. With ZeRO they
    # stay in this process until those of all stages and tensor-parallel ranks have been added up.
    unreduced = optimizer.no_sync() if args.zero else contextlib.nullcontext()
    with amp.scale_loss(torch.ones((), device=device), optimizer), unreduced:
        losses = schedule(
            forward_step,
            [rows],
            model,
            forward_only=False,
            grad_scaler=scaler if scaler.is_enabled() else None,
            tensor_shape=(args.sequence // args.context, args.microbatch, args.hidden),
            sequence_parallel_enabled=args.sequence_parallel,
        )
        finalize_model_grads(model, data_parallel=False if args.zero else None)
    scaler.step(optimizer)
    scaler.update()
    return losses


# The last stage has the losses; one of its ranks shows them.
last = parallel_state.is_pipeline_first_stage(True) if folded else parallel_state.is_pipeline_last_stage(True)
first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
shows = last and replica == 0 and first
columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]}"))
progress = Progress(*columns, TimeRemainingColumn(), console=Console(), disable=not shows)

series, done = Series(args.checkpoints, sharded=True), 0
if (path := series.latest()) is not None:
    done = checkpoint.load(path, model, optimizer, scaler=scaler)["step"]
    if shows:
        progress.console.print(f"goes on after step {done}, from {path}")

if args.fp8 and shows:
    number = sum(not layer.reason for layer in converted)
    progress.console.print(f"{number} of {len(converted)} linear layers of the last stage multiply in float8")

with progress:
    task = progress.add_task("", total=args.steps, completed=done, loss="-")
    for step in range(done + 1, args.steps + 1):
        losses = train_step(step)
        if shows:
            progress.update(task, advance=1, loss=f"{torch.stack(losses).mean().item():.4f}")
            if step in (done + 1, args.steps) or step % 20 == 0:
                progress.console.print(f"step {step}: loss {torch.stack(losses).mean().item():.6f}")
        if step == args.steps or step % args.save_every == 0:
            series.save(checkpoint.state_of(model, optimizer, scaler=scaler, step=step), step, wait=True)

parallel_state.destroy_model_parallel()
dist.destroy_process_group()
