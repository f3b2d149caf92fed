"""Helpers of Colossal-AI's tests: parameters inside of a process, processes, repetitions."""

from __future__ import annotations

import functools
import gc
import inspect
import re
import socket
import unittest
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..accelerator import get_accelerator

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def parameterize(argument: str, values: Iterable[Any]) -> Decorator:
    """Return a decorator that calls a function with each value of an argument, one after the other.

    The decorated function takes keyword arguments only. Unlike pytest's parameters, all values run in one process.
    """
    chosen = list(values)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(**kwargs: Any) -> None:
            for value in chosen:
                function(**{argument: value}, **kwargs)

        return run  # without the signature: pytest would look for fixtures in it

    return decorate


def rerun_on_exception(
    exception_type: type[BaseException] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Decorator:
    """Return a decorator that calls a function again after an exception, up to `max_try` times (None: without end).

    If `pattern` is given, a line of the exception's message must match it.
    """
    if max_try is not None and (not isinstance(max_try, int) or max_try < 1):
        raise ValueError(f"max_try={max_try!r} must be an integer of at least 1, or None")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            tries = 0
            while True:
                tries += 1
                try:
                    return function(*args, **kwargs)
                except exception_type as error:
                    matches = pattern is None or any(re.match(pattern, line) for line in str(error).split("\n"))
                    if not matches or tries == max_try:
                        raise

        run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return run

    return decorate


def rerun_if_address_is_in_use() -> Decorator:
    """Return a decorator that repeats a test whose processes found their port in use."""
    from torch.multiprocessing import ProcessRaisedException

    return rerun_on_exception(ProcessRaisedException, ".*(A|a)ddress already in use.*")


def skip_if_not_enough_gpus(min_gpus: int) -> Decorator:
    """Return a decorator that skips a test if there are fewer than `min_gpus` accelerators."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            found = 0 if get_accelerator().is_synchronous else get_accelerator().device_count()
            if found < min_gpus:
                raise unittest.SkipTest(f"{function.__name__} needs {min_gpus} accelerators; there are {found}")
            return function(*args, **kwargs)

        return run

    return decorate


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def spawn(func: Callable[..., Any], nprocs: int = 1, **kwargs: Any) -> None:
    """Call `func(rank, world_size=nprocs, port=port, **kwargs)` in `nprocs` processes and wait for them."""
    import torch.multiprocessing

    called = functools.partial(func, world_size=nprocs, port=free_port(), **kwargs)
    torch.multiprocessing.spawn(_call_and_leave, (called,), nprocs)


def _call_and_leave(rank: int, function: Callable[[int], Any]) -> None:
    """Call a function in a process of `spawn`, and destroy its process groups, whose threads may abort the exit."""
    import torch.distributed as dist

    function(rank)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def clear_cache_before_run() -> Decorator:
    """Return a decorator that empties the device's cache and resets its counters before a test."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            get_accelerator().empty_cache()
            get_accelerator().reset_peak_memory_stats()
            return function(*args, **kwargs)

        return run  # without the signature, because `parameterize` below it gives the arguments

    return decorate


class DummyDataloader:
    """An iterable of `length` batches, each made by `data_gen_fn()`."""

    def __init__(self, data_gen_fn: Callable[[], Any], length: int = 10) -> None:
        self.data_gen_fn, self.length, self.step = data_gen_fn, length, 0

    def __iter__(self) -> Iterator[Any]:
        self.step = 0
        return self

    def __next__(self) -> Any:
        if self.step == self.length:
            raise StopIteration
        self.step += 1
        return self.data_gen_fn()

    def __len__(self) -> int:
        return self.length
