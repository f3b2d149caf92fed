"""Mixed precision on several GPUs, or in several CPU processes. The lines that make it parallel are marked."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist  # parallel: 1
from torch import nn

from apex import amp
from apex.checkpoint import Series
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel, ReplicaCheck

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--opt-level", default="O2", choices=("O0", "O1", "O2", "O3", "O4", "O5"))
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=64, help="rows of each process and backward pass")
parser.add_argument("--accumulate", type=int, default=2, help="backward passes before a step")
parser.add_argument("--checkpoints", default="checkpoints", help="folder to save to, and to go on from")
parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
args = parser.parse_args()

dist.init_process_group("nccl" if args.device == "cuda" else "gloo")  # parallel: 2
rank, device = dist.get_rank(), torch.device("cpu")
if args.device == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

# Parameters need no common seed: wrapping gives all processes those of rank 0.
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)).to(device)
optimizer = FusedAdam(model.parameters(), lr=3e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
model = DistributedDataParallel(model)  # parallel: 3, after amp.initialize

check = ReplicaCheck(model, optimizer, every=100)  # optional: raises if processes do not have the same numbers

# A run that was stopped goes on where its newest checkpoint is, to the bit.
checkpoints, done = Series(args.checkpoints, keep=2), 0
state = checkpoints.load(map_location=device)
if state is not None:
    done = state["step"]
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    if rank == 0:
        print(f"resumed after step {done}")

for step in range(done + 1, args.steps + 1):
    torch.manual_seed(1000 * step + rank)  # data must differ between processes
    optimizer.zero_grad()
    total = torch.zeros((), device=device)
    for part in range(args.accumulate):
        inputs = torch.rand(args.batch, 8, device=device) * 2 - 1
        targets = inputs.sum(1, keepdim=True).sin()
        last = part == args.accumulate - 1
        # All passes but the last keep their gradients to themselves, and scaled.
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(inputs), targets) / args.accumulate
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
        total += loss.detach()
    optimizer.step()
    check()
    if step in (1, args.steps) or step % 100 == 0:
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / dist.get_world_size():.4f}")
    if step == args.steps or step % args.save_every == 0:  # in all processes; rank 0 writes, the others go on
        everything = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        checkpoints.save({"step": step, **everything}, step, wait=step == args.steps)

# Each process has taken the same steps.
mine = torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])
first = mine.clone()
dist.broadcast(first, 0)
difference = (mine - first).abs().max()
dist.all_reduce(difference, dist.ReduceOp.MAX)
if rank == 0:
    print(f"largest difference between {dist.get_world_size()} processes: {difference.item()}")
dist.destroy_process_group()
