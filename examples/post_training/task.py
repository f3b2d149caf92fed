"""The task: digits to be sorted, and the rule that checks an answer."""

import torch
from torch.nn import functional

ASK, END, WORDS = 10, 11, 12  # tokens: the ten digits, ">", "."


def draw_prompts(count, digits, device):
    """Return random prompts such as "40721>"."""
    return functional.pad(torch.randint(0, 10, (count, digits), device=device), (0, 1), value=ASK)


def right_answers(prompts):
    """Return the answers, such as "01247."."""
    return functional.pad(prompts[:, :-1].sort(-1).values, (0, 1), value=END)


def rewards_of(prompts, answers):
    """Return the share of tokens of each answer that are right: the rule."""
    return (answers == right_answers(prompts)).float().mean(-1)


def demonstrations(prompts, wrong):
    """Return answers, of which the share `wrong` has two neighbours swapped."""
    answers = right_answers(prompts)
    index = torch.arange(answers.shape[1], device=answers.device)
    place = torch.randint(0, answers.shape[1] - 1, (len(answers), 1), device=answers.device)
    after = torch.where(index == place + 1, answers.roll(1, 1), answers)
    swapped = torch.where(index == place, answers.roll(-1, 1), after)
    return torch.where(torch.rand(len(answers), 1, device=answers.device) < wrong, swapped, answers)
