"""The examples, run as users run them, on the CPU with tiny data."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import apex
from tests.parallel.processes import launched
from tests.support.grids import full_grids
from tests.support.warm import run_together

SOURCE = Path(apex.__file__).resolve().parents[1]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SYNTHETIC = ("--synthetic", "24", "--arch", "tiny", "--side", "16", "--batch", "8", "--workers", "0", "--epochs", "2")


def run_example(name: str, *arguments: str, cwd: Path, processes: int | None = None) -> str:
    """Runs an example on the CPU, in so many processes with numbers if need be, and returns what the first prints."""
    results = results_of(name, *arguments, cwd=cwd, processes=processes)
    for result in results:
        assert result.returncode == 0, result.stderr
    return results[0].stdout


def results_of(name: str, *arguments: str, cwd: Path, processes: int | None = None, **variables: str) -> list[Any]:
    """Runs an example with further environment variables, and returns how each of its processes ended."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("APEX_IMPL", "TRITON_INTERPRET")}
    environment = {**inherited, "PYTHONPATH": str(SOURCE)}
    with contextlib.ExitStack() as stack:
        environments = [environment]
        if processes is not None:
            numbered = stack.enter_context(launched(processes))
            environments = [{**environment, **numbers, **variables} for numbers in numbered]
        commands = [(str(EXAMPLES / name / "main.py"), *arguments)] * len(environments)
        return run_together(commands, cwd=cwd, environments=environments, timeout=240)


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_simple_learns(level: str, tmp_path: Path) -> None:
    output = run_example("simple", "--device", "cpu", "--steps", "100", "--opt-level", level, cwd=tmp_path)
    first, last = losses(output)[0], losses(output)[-1]
    assert last < 0.7 * first


def test_dcgan_scales_three_losses(tmp_path: Path) -> None:
    sizes = ("--steps", "3", "--batch", "2", "--width", "2", "--noise", "2")
    output = run_example("dcgan", "--device", "cpu", "--opt-level", "O2", *sizes, cwd=tmp_path)
    assert re.search(r"step 3: real \d+\.\d+, made \d+\.\d+, generator \d+\.\d+", output)
    assert (tmp_path / "step3.pgm").read_bytes().startswith(b"P5 256 16 255\n")


def test_pruned_models_are_as_good_as_dense_ones(tmp_path: Path) -> None:
    """Dense, pruned, retrained: within 1% of the dense model, with a permutation and, beside it, without."""
    output = run_example("sparsity", "--device", "cpu", "--steps", "150", "--width", "64", cwd=tmp_path)
    dense = float(re.search(r"dense: accuracy (\d\.\d+)", output)[1])
    retrained = [float(number) for number in re.findall(r"retrained (\d\.\d+), 50\.0% zeros", output)]
    assert dense > 0.7
    assert len(retrained) == 2
    assert min(retrained) > dense - 0.01


def test_post_training_raises_the_reward(tmp_path: Path) -> None:
    sizes = ("--digits", "2", "--width", "32", "--layers", "1", "--batch", "64", "--wrong", "0.5")
    steps = ("--sft-steps", "50", "--dpo-steps", "8", "--grpo-steps", "12")
    output = run_example("post_training", "--device", "cpu", *sizes, *steps, cwd=tmp_path)
    rewards = [float(number) for number in re.findall(r"after \w+: reward (\d\.\d+)", output)]
    assert len(rewards) == 3
    assert rewards[0] > 0.3  # a twelfth by chance
    assert rewards[2] > rewards[0] + 0.02
    if "no plot" not in output:
        assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_distributed_learns_alike_and_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(folder: str) -> str:
        arguments = ("--device", "cpu", "--steps", "40", "--batch", "8", "--save-every", "20", "--checkpoints", folder)
        return run_example("distributed", *arguments, cwd=tmp_path, processes=2)

    output = run("whole")
    assert losses(output)[-1] < 0.6 * losses(output)[0]
    assert "largest difference between 2 processes: 0.0\n" in output
    (tmp_path / "halves").mkdir()
    shutil.copy(tmp_path / "whole" / "step-00000020.pt", tmp_path / "halves")
    assert "resumed after step 20\n" in run("halves")
    whole, halves = (
        torch.load(tmp_path / folder / "step-00000040.pt", weights_only=True) for folder in ("whole", "halves")
    )
    assert whole["model"]["0.weight"].shape == (128, 8)
    assert whole["amp"]["loss_scaler0"]["loss_scale"] >= 1
    assert_equal(halves.pop("optimizer")["state"], whole.pop("optimizer")["state"])
    assert_equal(halves, whole)


def test_elastic_goes_on_to_the_bit_after_a_kill_and_in_one_process(tmp_path: Path) -> None:
    """The steps after a restart, and those in one process instead of two, have the losses of a run without a kill."""
    common = ("--device", "cpu", "--steps", "6", "--save-every", "2", "--dropout", "0", "--batch", "250")
    expected = run_example("elastic", *common, "--wait", "--checkpoints", "whole", cwd=tmp_path, processes=2)
    assert losses(expected)[-1] < losses(expected)[0]
    lines = expected.splitlines()
    assert len(lines) == 6

    folder = ("--checkpoints", "killed")
    first = results_of("elastic", *common, "--wait", *folder, "--kill-at", "4", cwd=tmp_path, processes=2)
    assert first[1].returncode == -signal.SIGKILL
    assert first[0].returncode == 1
    assert re.search(r"RuntimeError: rank 0 of 2: .* failed", first[0].stderr)
    assert first[0].stdout.splitlines() == lines[:3]
    shutil.copytree(tmp_path / "killed", tmp_path / "restarted")
    alone = run_example("elastic", *common, *folder, cwd=tmp_path, processes=1)
    assert alone.splitlines() == ["resumed after step 2 in 1 processes", *lines[2:]]
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == ["step-00000004", "step-00000006"]

    # As the second attempt of a launcher, in which no process kills itself.
    arguments = (*common, "--wait", "--checkpoints", "restarted", "--kill-at", "4")
    second = results_of("elastic", *arguments, cwd=tmp_path, processes=2, TORCHELASTIC_RESTART_COUNT="1")
    assert [result.returncode for result in second] == [0, 0], second[0].stderr
    assert second[0].stdout.splitlines() == ["resumed after step 2 in 2 processes", *lines[2:]]
    if full_grids():
        assert_a_launcher_restarts(lines, arguments[:-3], tmp_path)


def assert_a_launcher_restarts(lines: list[str], arguments: tuple[str, ...], folder: Path) -> None:
    """The launcher's processes are real ones, and import PyTorch and its compiler: 25 s of CPU time."""
    launcher = (sys.executable, "-m", "apex", "run", "--nproc-per-node", "2", "--max-restarts", "1")
    script = (str(EXAMPLES / "elastic" / "main.py"), *arguments, "launched", "--kill-at", "4")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    restarted = subprocess.run(
        (*launcher, *script), cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert restarted.returncode == 0, restarted.stderr
    assert restarted.stdout.splitlines() == [*lines[:3], "resumed after step 2 in 2 processes", *lines[2:]]


def test_imagenet_resumes_to_the_bit(tmp_path: Path) -> None:
    common = (*SYNTHETIC, "--device", "cpu", "--opt-level", "O2", "--fused", "--graph")
    whole = run_example("imagenet", *common, "--checkpoint", "whole{epoch}.pt", cwd=tmp_path)
    assert "epoch 2: accuracy" in whole
    rest = run_example("imagenet", *common, "--resume", "whole1.pt", "--checkpoint", "rest{epoch}.pt", cwd=tmp_path)
    assert "resumed from whole1.pt after epoch 1" in rest
    assert losses(rest) == losses(whole)[1:]
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("whole2.pt", "rest2.pt"))
    assert found.keys() == expected.keys()
    assert_equal(found.pop("optimizer")["state"], expected.pop("optimizer")["state"])
    assert_equal(found, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rest2.pt", "whole1.pt", "whole2.pt"]


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_imagenet_reads_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 4), ("val", 2)):
        for name, colour in (("dark", (20, 10, 30)), ("light", (220, 230, 200))):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(count):
                image.new("RGB", (20 + index, 24), colour).save(tmp_path / part / name / f"{index}.png")
    sizes = ("--arch", "tiny", "--side", "16", "--batch", "4", "--workers", "1", "--epochs", "1", "--fused-norms")
    arguments = (str(tmp_path), *sizes, "--device", "cpu", "--opt-level", "O4")
    assert "epoch 1: accuracy" in run_example("imagenet", *arguments, cwd=tmp_path)
    plain = arguments[: arguments.index("--fused-norms")] + arguments[arguments.index("--fused-norms") + 1 :]
    again = run_example("imagenet", *plain, "--resume", "checkpoint.pt", "--evaluate", cwd=tmp_path)
    assert "resumed from checkpoint.pt after epoch 1" in again


def test_imagenet_explains_itself(tmp_path: Path) -> None:
    output = " ".join(run_example("imagenet", "--help", cwd=tmp_path).split())
    assert "checkpoint to go on from" in output
    assert "(default: O1)" in output


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 200


@pytest.mark.parametrize(
    "name", ["simple", "dcgan", "distributed", "imagenet", "transformer", "booster", "post_training"]
)
def test_examples_have_a_readme(name: str) -> None:
    assert (EXAMPLES / name / "README.md").read_text().startswith("# ")
