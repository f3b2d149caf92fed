"""A run that goes on after a crash, in as many processes or in fewer: ZeRO, saves beside the training, restarts."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from apex.checkpoint import Series, wait
from apex.contrib.optimizers import DistributedFusedAdam
from apex.parallel import ElasticLoader
from apex.transformer import checkpoint

PARTS = 2  # A global batch is always computed in this many parts, by one process or by two.

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=32, help="rows of all processes together")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--checkpoints", default="checkpoints", help="folder to save to, and to go on from")
parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--wait", action="store_true", help="write checkpoints in the step, not beside the training")
parser.add_argument("--kill-at", type=int, help="a step in which the last process kills itself, once")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
args = parser.parse_args()

dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device(args.device)
if args.device == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

torch.manual_seed(0)
inputs = torch.rand(1000, 8) * 2 - 1
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
loader = ElasticLoader(data, args.batch, shuffle=True)
model = nn.Sequential(nn.Linear(8, 101), nn.Tanh(), nn.Dropout(args.dropout), nn.Linear(101, 1)).to(device)
optimizer = DistributedFusedAdam(model.parameters(), lr=3e-3, bucket_cap_mb=0.01)
torch.manual_seed(1 + rank)  # each process drops other activations

# The first attempt finds no checkpoint. Later ones get model, optimizer, position in the data and random numbers.
series = Series(args.checkpoints, keep=2, sharded=True)
step, _ = checkpoint.resume_latest(series, model, optimizer, loader=loader)
if step and rank == 0:
    print(f"resumed after step {step} in {ranks} processes", flush=True)

is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
while step < args.steps:
    for inputs, targets in loader:
        step += 1
        if step == args.kill_at and rank == ranks - 1 and is_first_attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        parts = zip(*(tensor.to(device).chunk(PARTS // ranks) for tensor in (inputs, targets)), strict=True)
        for rows, values in parts:
            loss = nn.functional.mse_loss(model(rows), values) / PARTS
            (loss * ranks).backward()  # the optimizer divides by the number of processes
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item():.9g}", flush=True)  # nine digits tell all float32 numbers apart
        if step % args.save_every == 0 or step == args.steps:  # in all processes
            series.save(checkpoint.state_of(model, optimizer, loader=loader), step, use_async=not args.wait)
        if step == args.steps:
            break
wait()  # for the last checkpoint
dist.destroy_process_group()
