"""Sums in words, made on the spot: "four plus nine is thirteen. " and so on, as ASCII characters."""

import random

import torch

WORDS = 128  # characters
_NAMES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
_NUMBERS = f"{_NAMES} seventeen eighteen".split()


def rows(seed: int, count: int, length: int) -> torch.Tensor:
    """`count` rows of `length` + 1 characters, always the same for a seed."""
    source, found = random.Random(seed), []
    for _ in range(count):
        text = ""
        while len(text) <= length + 8:
            one, other = source.randrange(10), source.randrange(10)
            text += f"{_NUMBERS[one]} plus {_NUMBERS[other]} is {_NUMBERS[one + other]}. "
        start = source.randrange(8)
        found.append(list(text[start : start + length + 1].encode("ascii")))
    return torch.tensor(found, dtype=torch.int64)
