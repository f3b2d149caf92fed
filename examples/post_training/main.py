"""Trains a tiny GPT in the three stages of a language model: SFT, then DPO, then GRPO.

    python main.py

The task is to sort digits: the prompt "40721>" has the answer "01247.". A rule gives each answer its reward, the share
of tokens that are right. SFT learns from demonstrations, a part of which are wrong; DPO from pairs of the model's own
answers, of which the rule prefers one; GRPO from the rewards of groups of answers. The reward is printed, and drawn to
a file if matplotlib is installed. No stage ever holds all logits.
"""

import argparse
import copy

import task
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn import functional

from apex.contrib.llm_losses import FusedLinearDPOLoss, FusedLinearGRPOLoss
from apex.contrib.xentropy import linear_cross_entropy, linear_log_probs
from apex.normalization import FusedRMSNorm
from apex.optimizers import FusedAdam

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--digits", type=int, default=5, help="digits to sort")
parser.add_argument("--sft-steps", type=int, default=150)
parser.add_argument("--dpo-steps", type=int, default=30)
parser.add_argument("--grpo-steps", type=int, default=80)
parser.add_argument("--wrong", type=float, default=0.4, help="share of demonstrations with two tokens swapped")
parser.add_argument("--batch", type=int, default=128, help="sequences of a step")
parser.add_argument("--group", type=int, default=8, help="answers to a prompt that GRPO compares")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--lr", type=float, default=3e-3, help="of SFT; DPO and GRPO take a tenth of it")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--plot", default="reward.png", help="file to draw the reward to")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
args = parser.parse_args()
torch.manual_seed(args.seed)
length = args.digits + 1  # of a prompt, and of an answer


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(FusedRMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A model that returns hidden states; `head` is the weight that makes logits of them."""

    def __init__(self, width, layers):
        super().__init__()
        self.words, self.places = nn.Embedding(task.WORDS, width), nn.Embedding(2 * length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = FusedRMSNorm(width)
        self.head = nn.Parameter(torch.randn(task.WORDS, width) * width**-0.5)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.blocks(self.words(tokens) + self.places(places)))

    @torch.no_grad()
    def sample(self, prompts):
        """Return an answer to each prompt, drawn from the model."""
        tokens = prompts
        for _ in range(length):
            logits = functional.linear(self(tokens)[:, -1], self.head)
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
        return tokens[:, length:]


def hidden_states(model, prompts, answers):
    """Return the hidden states that predict the tokens of the answers."""
    return model(torch.cat([prompts, answers], 1)[:, :-1])[:, length - 1 :]


def sft_step(model, optimizer):
    prompts = task.draw_prompts(args.batch, args.digits, args.device)
    answers = task.demonstrations(prompts, args.wrong)
    step(optimizer, linear_cross_entropy(hidden_states(model, prompts, answers), model.head, answers))
    prompts = prompts[:32]
    return task.rewards_of(prompts, model.sample(prompts)).mean()


def dpo_step(model, optimizer, reference, loss_function):
    prompts = task.draw_prompts(args.batch, args.digits, args.device)
    first, second = model.sample(prompts), model.sample(prompts)
    of_first, of_second = task.rewards_of(prompts, first), task.rewards_of(prompts, second)
    better = (of_first > of_second)[:, None]
    chosen, rejected = torch.where(better, first, second), torch.where(better, second, first)
    target = torch.cat([chosen, rejected])
    equal = (of_first == of_second).repeat(2)[:, None]  # such pairs count nothing
    pairs = prompts.repeat(2, 1)
    with torch.no_grad():
        before = hidden_states(reference, pairs, target)
    hidden = hidden_states(model, pairs, target)
    loss, _ = loss_function(model.head, hidden, target.masked_fill(equal, -100), None, before, reference.head)
    step(optimizer, loss)
    return of_first.mean()


def grpo_step(model, optimizer, loss_function):
    prompts = task.draw_prompts(args.batch // args.group, args.digits, args.device).repeat_interleave(args.group, 0)
    answers = model.sample(prompts)
    rewards = task.rewards_of(prompts, answers)
    groups = rewards.view(-1, args.group)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    with torch.no_grad():
        old = linear_log_probs(hidden_states(model, prompts, answers), model.head, answers).log_probs
    for _ in range(2):  # the second update has ratios other than one
        hidden = hidden_states(model, prompts, answers)
        counted = torch.ones_like(answers)
        loss, _ = loss_function(hidden, model.head, answers, counted, advantages, old_per_token_logps=old)
        step(optimizer, loss)
    return rewards.mean()


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def draw(curves, path):
    """Draw the reward of each stage, a running mean over five steps."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4.5))).add_subplot(xlabel="step", ylabel="reward", ylim=(0, 1.02))
    begin = 0
    for name, values in curves.items():
        smooth = [sum(part := values[max(0, i - 4) : i + 1]) / len(part) for i in range(len(values))]
        axes.plot(range(begin, begin + len(values)), smooth, label=name)
        begin += len(values)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


model = GPT(args.width, args.layers).to(args.device)
curves = {}
columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[reward]}"))


def run_stage(name, steps, rate, one_step, *more):
    """Run the steps of a stage, keep its rewards, and tell how many new prompts are answered rightly after it."""
    optimizer = FusedAdam(model.parameters(), lr=rate)
    bar = progress.add_task(name, total=steps, reward="")
    values = curves[name] = []
    for _ in range(steps):
        values.append(one_step(model, optimizer, *more).item())
        progress.update(bar, advance=1, reward=f"reward {values[-1]:.3f}")
    prompts = task.draw_prompts(512, args.digits, args.device)
    right = (task.rewards_of(prompts, model.sample(prompts)) == 1.0).float().mean().item()
    progress.console.print(f"after {name}: reward {sum(values[-5:]) / len(values[-5:]):.3f}, {right:.1%} right")


with Progress(*columns, TimeElapsedColumn(), console=Console()) as progress:
    run_stage("SFT", args.sft_steps, args.lr, sft_step)
    run_stage("DPO", args.dpo_steps, args.lr / 10, dpo_step, copy.deepcopy(model), FusedLinearDPOLoss(beta=0.3))
    run_stage("GRPO", args.grpo_steps, args.lr / 10, grpo_step, FusedLinearGRPOLoss(beta=0.0, epsilon_high=0.28))
try:
    draw(curves, args.plot)
    print(f"drawn to {args.plot}")
except ImportError:
    print("no plot: pip install matplotlib")
