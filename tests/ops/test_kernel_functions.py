"""The random words that kernels drop elements by, against Philox in whole numbers (Salmon et al. 2011)."""

import ast
from pathlib import Path

import pytest
import torch

import apex

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from apex.ops._kernel_functions import random_words  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORD = 0xFFFFFFFF


@triton.jit
def _draw(seed, places, words, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    index = tl.arange(0, SIZE)
    a, b, c, d = random_words(tl.load(seed), tl.load(places + index), ROUNDS)
    tl.static_assert(a.dtype == tl.uint32)
    tl.store(words + index, a.to(tl.int64))
    tl.store(words + SIZE + index, b.to(tl.int64))
    tl.store(words + 2 * SIZE + index, c.to(tl.int64))
    tl.store(words + 3 * SIZE + index, d.to(tl.int64))


def philox(seed: int, place: int, rounds: int) -> list[int]:
    """Four words of a 64-bit seed and counter, by the definition."""
    a, b, c, d = place & WORD, place >> 32, 0, 0
    first_key, second_key = seed & WORD, seed >> 32
    for _ in range(rounds):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ first_key, right & WORD, (left >> 32) ^ d ^ second_key, left & WORD
        first_key, second_key = (first_key + 0x9E3779B9) & WORD, (second_key + 0xBB67AE85) & WORD
    return [a, b, c, d]


@pytest.mark.parametrize("rounds", [7, 10])
@pytest.mark.parametrize("seed", [0, 123456789012345])
def test_places_beyond_32_bits_have_words_of_their_own(seed: int, rounds: int) -> None:
    places = [0, 1, WORD, 1 << 32, (1 << 32) + 1, (5 << 32) + 7, (1 << 40) - 1, 1 << 40]
    words = torch.empty(4, len(places), dtype=torch.int64, device=DEVICE)
    _draw[(1,)](torch.tensor([seed], device=DEVICE), torch.tensor(places, device=DEVICE), words, len(places), rounds)
    assert words.T.tolist() == [philox(seed, place, rounds) for place in places]


def test_no_kernel_draws_otherwise() -> None:
    """`tl.rand` and its kin give 64-bit places words of 64 bits before Triton 3.4."""
    calls = {"rand", "rand4x", "randint", "randint4x", "randn", "randn4x"}
    for path in sorted(Path(apex.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl":
                assert node.attr not in calls, f"{path}:{node.lineno}"
