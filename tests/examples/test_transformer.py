"""`examples/transformer` on the CPU, split in several ways."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import apex
from tests.parallel.processes import launched
from tests.support.warm import run_python, run_together

SOURCE = Path(apex.__file__).resolve().parents[1]
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "transformer" / "train.py"
SIZES = ["--device", "cpu", "--layers", "4", "--hidden", "32", "--sequence", "32", "--batch", "4", "--save-every", "3"]


def run(processes: int, words: str, cwd: Path) -> str:
    """What all processes print."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("APEX_IMPL", "TRITON_INTERPRET")}
    environment = {**inherited, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    with launched(processes) as numbers:
        environments = [{**environment, **each} for each in numbers]
        commands = [(str(SCRIPT), *SIZES, *words.split())] * processes
        results = run_together(commands, cwd=cwd, environments=environments, timeout=240)
    for result in results:
        assert result.returncode == 0, result.stderr
    return "".join(result.stdout for result in results)


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"step \d+: loss (\d+\.\d+)", output)]


def test_a_split_model_goes_on_in_another_split(tmp_path: Path) -> None:
    whole = run(4, "--tensor 2 --pipeline 2 --sequence-parallel --opt-level O2 --steps 6 --checkpoints whole", tmp_path)
    assert losses(whole)[1] < losses(whole)[0] - 0.2
    (tmp_path / "rest").mkdir()
    shutil.copytree(tmp_path / "whole" / "step-00000003", tmp_path / "rest" / "step-00000003")
    rest = run(2, "--pipeline 2 --chunks 2 --zero-bubble --opt-level O2 --steps 6 --checkpoints rest", tmp_path)
    assert "goes on after step 3" in rest
    assert losses(rest)[1] == pytest.approx(losses(whole)[1], abs=1e-3)


def test_experts(tmp_path: Path) -> None:
    sizes = "--layers 2 --steps 4 --microbatch 1"
    output = run(2, f"--experts 4 --topk 1 --expert-parallel 2 --aux-loss 0.02 {sizes} --checkpoints experts", tmp_path)
    assert losses(output)[1] < losses(output)[0] - 0.1
    # Whole experts on ranks that divide the other layers.
    whole = "--tensor 2 --sequence-parallel --expert-tensor 1"
    split = run(
        2, f"--experts 4 --topk 1 --expert-parallel 2 --aux-loss 0.02 {whole} {sizes} --checkpoints b", tmp_path
    )
    assert losses(split) == pytest.approx(losses(output), abs=1e-3)


@pytest.mark.gpu
def test_experts_on_a_gpu(tmp_path: Path) -> None:
    sizes = "--experts 4 --aux-loss 0.02 --layers 2 --steps 20 --save-every 20"
    expected = losses(run(1, f"{sizes} --opt-level O0 --checkpoints cpu", tmp_path))
    assert expected[1] < expected[0] - 0.2
    for level, tolerance in (("O0", 0.02), ("O5", 0.1), ("O2", 0.1)):
        found = run(1, f"{sizes} --device cuda --opt-level {level} --checkpoints {level}", tmp_path)
        assert losses(found) == pytest.approx(expected, abs=tolerance), level


def test_refused_splits(tmp_path: Path) -> None:
    for words, said in (
        ("--zero --expert-parallel 2", "does not go with"),
        ("--recompute full --zero-bubble", "does not go with"),
        ("--zero-bubble", "--zero-bubble needs --pipeline"),
        ("--expert-parallel 2", "--expert-parallel, --expert-tensor, --topk and --aux-loss --experts"),
        ("--expert-tensor 1", "--expert-parallel, --expert-tensor, --topk and --aux-loss --experts"),
        ("--topk 1", "--expert-parallel, --expert-tensor, --topk and --aux-loss --experts"),
    ):
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        done = run_python(str(SCRIPT), *words.split(), cwd=tmp_path, environment=environment)
        assert done.returncode == 2
        assert said in done.stderr


def test_divided_optimizers(tmp_path: Path) -> None:
    # Some CPUs take milliseconds for each matrix product in bfloat16.
    sizes = "--layers 2 --steps 3"
    output = run(2, f"--zero --recompute selective --opt-level O5 {sizes} --checkpoints zero", tmp_path)
    assert losses(output)[1] < losses(output)[0] - 0.1


def test_split_sequences_and_float8(tmp_path: Path) -> None:
    """Sequences over two ranks give the losses of one process; float8 products stay near."""
    sizes = "--layers 1 --hidden 128 --steps 2 --save-every 9"
    alone = run(1, f"{sizes} --checkpoints alone", tmp_path)
    split = run(2, f"--context 2 {sizes} --checkpoints split", tmp_path)
    assert losses(split) == pytest.approx(losses(alone), abs=1e-4)
    blocks = run(2, f"--context 2 --fp8 blockwise {sizes} --checkpoints blocks", tmp_path)
    assert "4 of 4 linear layers of the last stage multiply in float8" in blocks
    assert losses(blocks) == pytest.approx(losses(alone), abs=0.2)
