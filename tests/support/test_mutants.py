"""The mutants of `make mutants`: what is changed, what is left alone, and the table."""

from __future__ import annotations

from collections import Counter

from tests.support.mutants import mutants_of, report

SOURCE = '''\
def scale(values: list[int | None], limit=2) -> "é":
    """Return values > 0."""
    if (limit) < len(values) and not values:
        raise ValueError(f"{limit + 1}")
    values.sort(key=abs, reverse=True)
    values[0] += max(limit, 3)
    print(limit + 1, "is cuda")
    on_cuda = limit + 1
    return values if limit else None
'''


def test_every_kind_of_mutant() -> None:
    """A change in each part that computes; none in annotations, docstrings, errors, messages and code for a GPU."""
    found = [mutant.line() for mutant in mutants_of("a.py", SOURCE)]
    lines = SOURCE.splitlines()
    assert all(before == lines[number - 1].strip() != after for number, before, after in found)
    assert sorted((number, after) for number, _, after in found) == [
        (1, 'def scale(values: list[int | None], limit=3) -> "é":'),
        (3, "if (limit) < len(values) and values:"),
        (3, "if (limit) < len(values) or not values:"),
        (3, "if (limit) <= len(values) and not values:"),
        (5, "pass"),
        (5, "values.sort(key=abs)"),
        (5, "values.sort(key=abs, reverse=False)"),
        (6, "pass"),
        (6, "values[0] += max(limit, 4)"),
        (6, "values[0] += min(limit, 3)"),
        (6, "values[1] += max(limit, 3)"),
        (9, "return values if not limit else None"),
    ]


def test_the_table_counts_and_lists() -> None:
    counts = Counter(
        {("amp", "noticed"): 7, ("amp", "survived"): 1, ("fp8", "noticed"): 2, ("fp8", "without effect"): 1}
    )
    listed = {"survived": ["a.py:3\n    - x < 1\n    + x <= 1"], "without effect": ["b.py:1"], "noticed": ["c.py:1"]}
    text = report({"amp": 50, "fp8": 20}, counts, listed, "seed 0")
    rows = [line.split() for line in text.splitlines() if line.startswith(("amp", "fp8", "all"))]
    assert rows == [["amp", "50", "7", "1", "0"], ["fp8", "20", "2", "0", "1"], ["all", "70", "9", "1", "1"]]
    assert "Tests noticed 9 of 10 mutants that change behaviour." in text
    assert "a.py:3" in text.partition("Survived:")[2].partition("Without effect:")[0]
    assert "c.py" not in text
