"""What others hand over in a campaign: files, names and links that point elsewhere, and arguments of wrong kinds."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apex import checkpoint
from apex.booster import Booster
from tests.campaign.boosted import model_of, numbers_in, save
from tests.campaign.trials import Trials

SECRET = "a secret"
SCRIPT = "from apex import amp\nfrom apex.optimizers import FusedAdam\noptimizer = FusedAdam([])\n"


def elsewhere(trials: Trials) -> None:
    """Links, paths and code in what commands and loads are given: nothing outside is read, written or run."""
    kinds = [migrated_links, names_of_machines, index_files, names_of_sources, linked_locks, nested_tables]
    with contextlib.suppress(ImportError):
        import h5py  # noqa: F401

        kinds.append(linked_data)
    for folder in trials:
        kind = trials.rng.choice(kinds)
        outside, inside = folder / "outside", folder / "inside"
        for each in (outside, inside):
            each.mkdir()
        for name in ("secret.py", "secret.txt"):
            (outside / name).write_text(f"# {SECRET}\n{SCRIPT}")
        before = {each: each.read_bytes() for each in outside.rglob("*")}
        with trials.expecting(f"{kind.__name__}, trial {trials.done}"), contextlib.redirect_stdout(io.StringIO()):
            kind(inside, outside, trials.rng)
            assert {each: each.read_bytes() for each in outside.rglob("*")} == before, "something outside has changed"
            trials.outcomes[kind.__name__] += 1


def migrated_links(inside: Path, outside: Path, rng: random.Random) -> None:
    """`apex migrate --write FOLDER` changes files in the folder, and none that a link in it points to."""
    from typer.testing import CliRunner

    from apex._cli.app import app

    (inside / "own.py").write_text(SCRIPT)
    for number in range(rng.randint(1, 4)):
        target = rng.choice((outside, outside / "secret.py", outside / "nothing.py", Path("..") / "outside"))
        (inside / rng.choice((f"link{number}", f"link{number}.py"))).symlink_to(target)
    found = CliRunner().invoke(app, ["migrate", str(inside), "--to", "torch", "--write"])
    assert found.exit_code == 0, found.output
    assert "FusedAdam" not in (inside / "own.py").read_text()


def names_of_machines(inside: Path, outside: Path, rng: random.Random) -> None:
    """Lines of a host file that ssh would take for options are refused."""
    from apex.parallel._hosts import chosen_hosts

    lines = [rng.choice(("one", "two slots=4", "# -x", "")) for _ in range(rng.randint(0, 4))]
    option = rng.choice(("-oProxyCommand=touch x", "-F/x", "--", "-"))
    lines.insert(rng.randint(0, len(lines)), rng.choice(("", " ", "\t")) + option)
    (inside / "hosts").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="is no name of a machine"):
        chosen_hosts(None, inside / "hosts", None, None, -1)


def index_files(inside: Path, outside: Path, rng: random.Random) -> None:
    """An index that names files outside of its folder is refused, and the model has its old weights."""
    save(inside / "model", 7.0, {"shard": True, "use_safetensors": rng.random() < 0.5})
    (inside / "model" / "manifest.json").unlink()
    shutil.copytree(inside / "model", inside / "other")
    (index,) = (inside / "model").glob("*.index.json")
    saved = json.loads(index.read_text())
    key, file = rng.choice(sorted(saved["weight_map"].items()))
    names = (f"../other/{file}", f"..\\other\\{file}", str(inside / "other" / file), "..", "", 3, None, [file])
    saved["weight_map"][key] = rng.choice(names)
    index.write_text(json.dumps(saved))
    model = model_of(1.0)
    with pytest.raises(checkpoint.DamagedCheckpoint):
        Booster("cpu").load_model(model, inside / "model")
    assert numbers_in(model) == {1.0}


def names_of_sources(inside: Path, outside: Path, rng: random.Random) -> None:
    """A name of a source in `apex jit-module` is written as a string, whatever is in it."""
    from apex._cli.jit_module import write_module

    parts = ('"]', "'", "\\", "\n", "; import os", "]\nraise SystemExit", "{name}", "\u2028", "a.cpp", "\x7f")
    sources = ["".join(rng.choices(parts, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
    builder, loader = write_module("toy", sources, gpu=rng.random() < 0.5, folder=inside)
    tree = ast.parse(builder.read_text(encoding="utf-8"))
    (returned,) = (node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and not _is_name(node.value))
    assert returned is not None
    assert ast.literal_eval(returned) == sources
    assert [type(node).__name__ for node in tree.body] == ["Expr", "ImportFrom", "ClassDef"]
    ast.parse(loader.read_text(encoding="utf-8"))


def _is_name(node: Any) -> bool:
    return isinstance(node, ast.Attribute)


def linked_locks(inside: Path, outside: Path, rng: random.Random) -> None:
    """The lock of a compiled extension is no link to a file that would be made or opened."""
    from apex._atomic import locked_file

    (inside / "apex.lock").symlink_to(outside / rng.choice(("secret.txt", "nothing")))
    with pytest.raises(OSError, match="is a link"), locked_file(inside / "apex.lock"):
        pass


def nested_tables(inside: Path, outside: Path, rng: random.Random) -> None:
    """A table of tuned launches that is damaged or nested without end is no table; nothing else happens."""
    from apex.ops import _tuned

    table = {"format": 1, "tables": [{"gpus": ["x"], "entries": []}]}
    opening = rng.choice(("[", '{"tables":[', '{"a":'))
    text = rng.choice((opening * rng.randint(1, 200_000), json.dumps(table)[: rng.randrange(30)], "3", "null"))
    (inside / "table.json").write_text(text)
    (found,) = _tuned.read_tables(inside / "table.json")
    assert found.problem is not None, f"{text[:40]} is a table"


def linked_data(inside: Path, outside: Path, rng: random.Random) -> None:
    """`apex compare` reads data of the files that it was given, not of others that they point to."""
    import h5py

    from apex.dump import compare

    for name in ("a.hdf5", "b.hdf5", "c.hdf5"):
        with h5py.File(inside / name, "w") as file:
            file.create_group("0_Linear").create_dataset("output", data=[1.0, 2.0])
    with h5py.File(inside / "b.hdf5", "a") as file:
        link = rng.choice((h5py.ExternalLink("c.hdf5", "/0_Linear"), h5py.SoftLink("/0_Linear")))
        file["1_Linear"] = link
    with pytest.raises(ValueError, match="points to data elsewhere"):
        compare(inside / "a.hdf5", inside / "b.hdf5")


def arguments(trials: Trials) -> None:
    """One argument of a public function is of a wrong kind: an error names it, and tensors and states stay."""
    from tests import test_arguments, test_checked

    wrong_ones: list[tuple[str, Callable[..., Any], dict[str, Any], str, str, Any]] = []
    for name, call in test_arguments.CALLS.items():
        for key, value in call.arguments.items():
            found = test_arguments.wrong_kinds(value)
            if isinstance(value, torch.Tensor):
                found = test_arguments.wrong_values(call, key)
            wrong_ones += [(name, call, {}, key, what, value) for what, value in found.items()]
    for name, function in test_checked.FUNCTIONS.items():
        if getattr(function, "is_checked", False):
            hints = test_checked.hints_of(function)
            values = {key: test_checked.good(hint) for key, hint in hints.items()}
            for key, hint in hints.items():
                found = test_checked.wrong(hint)
                wrong_ones += [(name, function, values, key, what, value) for what, value in found.items()]
    generator = torch.get_rng_state()
    for _ in trials:
        name, function, values, key, what, value = trials.rng.choice(wrong_ones)
        kept = function.tensors() if hasattr(function, "tensors") else {}
        before = {each: tensor.detach().clone() for each, tensor in kept.items()}
        with trials.expecting(f"{name}: {what} for {key}"):
            with pytest.raises((TypeError, ValueError), match=rf"\b{key.strip('_')}") as raised:
                function(**{**values, key: value})
            trials.outcomes[raised.type.__name__] += 1
            for each, tensor in before.items():
                assert torch.equal(tensor.nan_to_num(7), kept[each].nan_to_num(7)), f"{each} has changed"
    assert torch.equal(generator, torch.get_rng_state()), "random numbers were drawn"
