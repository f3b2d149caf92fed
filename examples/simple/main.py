"""The three lines that make a training script mixed precision, each marked with `amp`."""

import argparse

import torch
from torch import nn

from apex import amp  # amp: 1

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--opt-level", default="O1", choices=("O0", "O1", "O2", "O3", "O4", "O5"))
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.rand(256, 8, device=args.device) * 2 - 1
targets = (inputs.sum(1, keepdim=True) * 2).sin()

model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)  # amp: 2

for step in range(1, args.steps + 1):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:  # amp: 3, instead of loss.backward()
        scaled_loss.backward()
    optimizer.step()
    if step in (1, args.steps) or step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
