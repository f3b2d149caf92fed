"""The one way in which tests fork."""

from __future__ import annotations

import os

import pytest
import torch


def fork() -> int:
    """Fork as `os.fork` does; where a GPU can be seen, skip the test instead.

    `torch.cuda.is_available()` is enough to start a GPU's driver, which cannot be used in forks of the process. A
    script that forks gets `tests.parallel.processes.environment()`, which hides the GPUs from it.
    """
    if torch.cuda.is_available():
        pytest.skip("a process that sees a GPU cannot be forked: give scripts processes.environment(), which hides it")
    return os.fork()
