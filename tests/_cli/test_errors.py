"""Errors of all commands, which end with a hint, and the screen of `apex` without a command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

import apex
from apex._cli.app import app
from apex._cli.welcome import EXAMPLES

COMMANDS = {name: command for name, command in get_command(app).commands.items() if not command.hidden}  # type: ignore[attr-defined]


def failed(*arguments: str) -> tuple[str, str]:
    """Return the message and the hint of a command that fails."""
    result: Result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    *message, hint = result.stderr.rstrip().splitlines()
    assert hint.startswith("hint: "), result.stderr
    return "\n".join(message), hint.removeprefix("hint: ")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_name_of_a_command_or_an_option_gets_the_nearest(name: str) -> None:
    assert failed(name[:-1]) == (f"apex: there is no command {name[:-1]!r}", f"did you mean `apex {name}`?")
    options = [option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("--")]
    wrong = max(options, key=len) + "x"
    if COMMANDS[name].context_settings.get("ignore_unknown_options"):  # which torchrun or a script takes
        assert failed(name, wrong, "script.py")[1]
    else:
        message, hint = failed(name, wrong)
        assert message.endswith(f"No such option: {wrong}")
        assert f"did you mean {wrong[:-1]}" in hint


def test_a_word_that_is_near_no_command_gets_them_all() -> None:
    assert all(name in failed("qqqqq")[1] for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run"], "`apex run --help` shows what it takes"),
        (["compare", "a.h5"], "`apex compare --help` shows what it takes"),
        (["demo", "--levels", "O7"], "`apex demo --help` shows what it takes"),
        (["bench", "nrom"], "`apex bench --list` shows what it takes"),
        (["build", "nrom"], "`apex build --list` shows what it takes"),
        (["jit-module", "my-op", "--cuda", "--source", "a.cu"], "`apex jit-module --help` shows what it takes"),
        (["doctor", "now"], "`apex doctor --help` shows what it takes"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_request_gets_where_to_look(arguments: list[str], hint: str) -> None:
    assert failed(*arguments)[1].replace("root ", "apex ") == hint


@pytest.mark.parametrize(
    "arguments", [["run"], ["compare"], ["build"], ["migrate"], ["run", "--hostfile"]], ids=" ".join
)
def test_a_missing_file_gets_the_nearest_one_or_the_folder(arguments: list[str], tmp_path: Path) -> None:
    if arguments == ["migrate"]:
        pytest.importorskip("libcst")
    more = [] if arguments in (["build"], ["migrate"]) else ["other.py"]
    assert failed(*arguments, "training.py", *more)[1] == f"paths begin at the current folder, {tmp_path}"
    (tmp_path / "train.py").touch()
    message, hint = failed(*arguments, "trian.py", *more)
    assert "trian.py" in message
    assert hint == "did you mean train.py?"


def test_a_missing_package_gets_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.h5", "b.h5"):
        (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, "h5py", None)
    requirements = ['h5py>=3.8; extra == "dump"', "torch>=2.6"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requirements)
    assert failed("compare", "a.h5", "b.h5")[1] == "pip install h5py, or install apex with its extra: 'apex[dump]'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["demo", "bench", "tune"])
def test_no_gpu_gets_where_to_look(command: str) -> None:
    if command == "tune":
        pytest.importorskip("triton")  # which it asks for first
    message, hint = failed(command, *([] if command == "tune" else ["--device", "cuda"]))
    assert "'cuda'" in message or "no GPU" in message
    assert "`apex doctor`" in hint


def test_a_defect_shows_its_traceback_and_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("apex._cli.doctor.facts.collect", fail)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "KeyError: 'a defect'" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("hint: this was not expected; `apex doctor`")


def test_a_package_that_does_not_import_gets_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("apex._cli.doctor.facts.collect", fail)
    message, hint = failed("doctor")
    assert "libcudart.so.13" in message
    assert "`apex doctor` says" in hint


def test_apex_alone_lists_commands_and_examples() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    text = result.stdout
    assert text.startswith(f"apex {apex.__version__}:")
    assert f"PyTorch {torch.__version__}" in text
    assert "runs on" in text
    for name, command in COMMANDS.items():
        assert f"apex {name} " in text
        assert command.rich_help_panel in text
    for line, _ in EXAMPLES:
        assert line in text
        assert line.split()[1] in COMMANDS
    assert len(text.splitlines()) <= 30


def test_apex_alone_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex._cli.devices", None)  # which is the first to import it
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert "`pip install torch`" in result.stdout
