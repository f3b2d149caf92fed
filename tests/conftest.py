"""Where tests run: on a GPU for real when there is one, else on the CPU with Triton's interpreter."""

import gc
import importlib.util
import logging
import os
import re
from collections.abc import Generator, Iterator

import pytest
import torch

from .support import quick_interpreter
from .support.drawn import HealthCheck, settings

GPU = torch.cuda.is_available()

# Names of files of which one or more take ten seconds or longer.
LONG = (
    "test_checkpoint.py",
    "test_compile.py",
    "test_context_parallel.py",
    "test_gradients.py",
    "test_models.py",
    "test_moe_models.py",
    "test_parallel_state.py",
    "test_pipelines.py",
    "test_processes.py",
    "test_sharded.py",
    "test_site.py",
    "test_state_formats.py",
    "test_survival.py",
    "test_tensor_parallel.py",
    "test_transformer.py",
)

# How long Hypothesis takes to draw numbers depends on what else the machine does: no test fails for that.
settings.register_profile("apex", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("apex")
# Asked for by --hypothesis-profile=campaign: many more random calls, others each time.
settings.register_profile("campaign", settings.get_profile("apex"), max_examples=100, deadline=None)

# Processes that tests start in other folders find a source tree that was given by relative paths.
if os.environ.get("PYTHONPATH"):
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))

# Before anything imports triton: kernels become interpreted functions at import.
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # On a GPU garbage may hold its memory; tracing and collecting tests take a tenth less with fewer searches for it.
    gc.set_threshold(50_000, 20, 20)
    # PyTorch's compiler tries out vectors of each width for 13 seconds, and takes longer for loops that have them.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    quick_interpreter.install()
    # For devices that may come PyTorch would keep the stack of every call that seeds them: a millisecond each time.
    for devices in (torch.cuda, torch.mtia, torch.xpu):
        devices.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--every-launch", action="store_true", help="compile every launch of a kernel for every GPU")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "how many seconds a test may take, for the plugin pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): how long a test may take, for the plugin pytest-timeout")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip modules that use the command line where what it needs is missing: a GPU machine may have PyTorch alone."""
    report = yield
    missing = re.search(r"No module named '(rich|typer)\b", str(report.longrepr)) if report.failed else None
    if missing and importlib.util.find_spec(missing[1]) is None:
        report.outcome = "skipped"
        report.longrepr = (os.fspath(collector.path), 0, f"Skipped: {missing[1]} is not installed")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files that take long first, the one that takes minutes before all, so that at the end no process is left alone.
    items.sort(key=lambda item: (item.path.name != "test_cross_compile.py", item.path.name not in LONG))
    if GPU:
        return
    away = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=away)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """What was imported and collected stays: whoever collects garbage need not look through it each time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        importlib.import_module("torch._dynamo")  # which PyTorch's optimizers import; tests alone may do without
    # Six times per test pytest attaches a handler to each logger that keeps its messages, of which PyTorch has 80.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch."):
            logging.getLogger(name).propagate = True
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=GPU)
def _release_gpu_memory() -> Iterator[None]:
    """Give a large cache of freed memory back after a test, since other test processes share the GPU."""
    yield
    if torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN, so that an element nobody wrote or a read out of bounds shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    previous = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = previous
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def forked_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let writers of asynchronous saves be forks; end a test without a save in flight and without a writer.

    On a GPU they are real processes.
    """
    from apex.checkpoint import _background

    from .support.forked_writer import ForkedWriter

    if not GPU:
        monkeypatch.setattr(_background, "start_process", ForkedWriter)
    monkeypatch.setattr(_background, "_writer_of_process", None)
    yield
    _background.wait()
    _background._close()
