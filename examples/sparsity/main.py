"""Trains a classifier, prunes 2 of 4 weights and trains on, with and without a permutation of its channels."""

import argparse
import copy

import torch
from torch import nn

from apex.contrib.sparsity import ASP
from apex.optimizers import FusedAdam

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=600, help="of training before and again after pruning")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

# Points in 16 dimensions, to be told apart by a network that nobody knows.
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)).to(args.device)
inputs = torch.randn(4096, 16, device=args.device)
with torch.no_grad():
    labels = teacher(inputs).argmax(1)
training, test = slice(0, 3072), slice(3072, None)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        batch = torch.randint(3072, (256,), generator=generator).to(args.device)
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    return float((model(inputs[test]).argmax(1) == labels[test]).float().mean())


model = nn.Sequential(
    nn.Linear(16, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, 8)
).to(args.device)
train(model, FusedAdam(model.parameters(), lr=2e-3))
print(f"dense: accuracy {accuracy(model):.4f}")

for permutes in (False, True):
    pruned = copy.deepcopy(model)
    optimizer = FusedAdam(pruned.parameters(), lr=1e-3)
    ASP.init_model_for_pruning(pruned, verbosity=0, allow_permutation=permutes)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    before = accuracy(pruned)
    train(pruned, optimizer)
    zeros = sum(int((param == 0).sum()) for param in pruned.parameters() if param.dim() == 2)
    share = zeros / sum(param.numel() for param in pruned.parameters() if param.dim() == 2)
    how = "with" if permutes else "without"
    print(f"pruned {how} permutation: accuracy {before:.4f}, retrained {accuracy(pruned):.4f}, {share:.1%} zeros")
    ASP.reset()
