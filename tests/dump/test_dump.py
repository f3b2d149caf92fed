"""Dumps of a step: their contents, and the first module at which two of them differ."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from apex._cli.app import app
from apex.dump import HDF5FileOperation, HookerAndDumper, compare

h5py = pytest.importorskip("h5py")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.activation(self.fc(x))
        return self.activation(self.fc(inner)), inner


class Model(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.norm, self.head = Block(), nn.LayerNorm(6), nn.Linear(6, 3)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.block(x)
        hidden = self.norm(first + second + (1e-2 * torch.arange(6.0) if self.fault == "forward" else 0))
        if self.fault == "backward":
            hidden = hidden + (hidden.detach() * 0.1 - hidden * 0.1)
        return self.head(hidden)


BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def dump(path: Path, batch: Tensor = BATCH, *, fault: str = "", scale: float = 1.0, half: bool = False) -> str:
    """Return the path of a dump of one step of the model."""
    model, dumper = Model(fault), HookerAndDumper(f"{path}-")
    file = dumper.register_hooks(model, epoch=1, step=5, loss_scale=scale)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model(batch).float().square().mean()
    (loss * scale).backward()
    dumper.remove_hooks()
    model(batch).mean().backward()  # no longer recorded
    return file


def test_every_module_is_recorded_in_the_order_of_execution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = dump(tmp_path / "a", scale=4.0)
    assert file == f"{tmp_path}/a-1-epoch_5-step_dump.hdf5"
    with h5py.File(file) as found:
        groups = [found[name] for name in sorted(found)]
        records = [(g.attrs["kind"], g.attrs["module"]) for g in groups]
        assert [g.name for g in groups[:3]] == ["/0000_Linear", "/0001_ReLU", "/0002_Linear"]
        ahead = ["block.fc", "block.activation"] * 2 + ["block", "norm", "head", ""]
        assert records[:8] == [("forward", name) for name in ahead]
        backward = [name for kind, name in records[8:] if kind == "backward"]
        assert backward[:3] == ["head", "", "norm"]  # a model after its last layer, whose output is its own
        assert sorted(backward) == sorted([*ahead, "block"])
        parameters = {name for kind, name in records if kind == "parameter"}
        assert parameters == {name for name, _ in Model().named_parameters()}
        model = Model()
        expected = model(BATCH)
        expected.square().mean().mul(4.0).backward()
        assert torch.equal(torch.from_numpy(groups[7]["feat_output"][()]), expected.detach())
        gradient = next(g for g in groups if (g.attrs["kind"], g.attrs["module"]) == ("parameter", "head.weight"))
        assert torch.equal(torch.from_numpy(gradient["grad"][()]), model.head.weight.grad)
        assert set(groups[4]) == {"feat_output0", "feat_output1"}
    HDF5FileOperation(file, is_cover=False).read_data()
    assert "0000_Linear/feat_output  float32 (8, 6)" in capsys.readouterr().out


def test_a_second_recording_needs_the_first_to_end(tmp_path: Path) -> None:
    dumper = HookerAndDumper(f"{tmp_path}/", inputs=True)
    dumper.register_hooks(Model(), 0, 0)
    with pytest.raises(RuntimeError, match=r"0-epoch_0-step_dump.hdf5 is still being written.*remove_hooks"):
        dumper.register_hooks(Model(), 0, 1)
    dumper.remove_hooks()
    assert dumper.register_hooks(Model(), 0, 1) == f"{tmp_path}/0-epoch_1-step_dump.hdf5"


def test_each_of_several_processes_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    assert dump(tmp_path / "a") == f"{tmp_path}/a-1-epoch_5-step_2-rank_dump.hdf5"


def test_equal_steps_agree(tmp_path: Path) -> None:
    found = compare(dump(tmp_path / "a"), dump(tmp_path / "b", scale=1024.0), tolerance=0)
    assert found.first is None
    assert found.only_in_first == found.only_in_second == []
    assert {row.kind for row in found.rows} == {"forward", "backward", "parameter"}


@pytest.mark.parametrize(("fault", "module"), [("forward", "norm"), ("backward", "norm")])
def test_the_first_module_that_differs_is_found(tmp_path: Path, fault: str, module: str) -> None:
    first = compare(dump(tmp_path / "a"), dump(tmp_path / "b", fault=fault)).first
    assert first is not None
    assert (first.module, first.kind, first.layer) == (module, fault, "LayerNorm")
    assert 1e-4 < first.error < 0.2


def test_a_tolerance_follows_the_coarsest_dtype(tmp_path: Path) -> None:
    files = dump(tmp_path / "a"), dump(tmp_path / "b", half=True)
    found = compare(*files)
    assert found.first is None
    assert found.rows[0].dtypes == ("float32", "bfloat16")
    assert found.rows[0].error > 1e-4
    strict = compare(*files, tolerance=1e-4).first
    assert strict is not None
    assert (strict.module, strict.order) == ("block.fc", 0)


def test_four_processes_are_held_against_one(tmp_path: Path) -> None:
    whole = dump(tmp_path / "whole")
    for rank, part in enumerate(BATCH.chunk(4)):
        dump(tmp_path / f"part{rank}", part)
    found = compare(whole, f"{tmp_path}/part*", tolerance=1e-5)
    assert found.first is None, found.first
    wrong = [
        dump(tmp_path / f"part{rank}", part, fault="forward" * (rank == 2)) for rank, part in enumerate(BATCH.chunk(4))
    ]
    first = compare(whole, wrong, tolerance=1e-5).first
    assert first is not None
    assert first.module == "norm"


def test_a_tensor_that_one_of_several_processes_lacks_is_named(tmp_path: Path) -> None:
    whole, *parts = [str(tmp_path / name) for name in ("whole", "part0", "part1")]
    for file in (whole, *parts):
        for number, module in enumerate(("first", "second") if file != parts[1] else ("first",)):
            attributes = {"module": module, "kind": "parameter"}
            operation = HDF5FileOperation(file, is_cover=not number)
            operation.write_data(f"{number:04d}_Linear", "grad", torch.ones(3), attributes)
    found = compare(whole, parts)
    assert [row.module for row in found.rows] == ["first"]
    assert found.only_in_first == [("second", "parameter", "grad", 0)]


def test_nonfinite_values_differ_from_finite_ones(tmp_path: Path) -> None:
    files = []
    for name, values in (("a", [1.0, math.inf]), ("b", [1.0, 2.0]), ("c", [1.0, math.inf])):
        files.append(str(tmp_path / name))
        kind = {"module": "layer", "kind": "forward"}
        HDF5FileOperation(files[-1]).write_data("0000_Layer", "feat_output", torch.tensor(values), kind)
    first = compare(*files[:2]).first
    assert first is not None
    assert first.note == "1 and 0 values are not finite"
    assert compare(files[0], files[2]).first is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_nonfinite_values_differ_from_each_other(tmp_path: Path, dtype: torch.dtype) -> None:
    files = [str(tmp_path / name) for name in "abc"]
    for file, value in zip(files, (math.inf, -math.inf, math.nan), strict=True):
        kind = {"module": "layer", "kind": "forward"}
        HDF5FileOperation(file).write_data("0000_Layer", "feat_output", torch.tensor([1.0, value]).to(dtype), kind)
    for number, one in enumerate(files):
        assert compare(one, one).first is None
        first = compare(one, files[number - 1]).first
        assert first is not None
        assert first.note == "NaN and infinities are not the same"


def test_sparse_gradients_are_recorded(tmp_path: Path) -> None:
    files = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model, dumper = nn.Embedding(5, 3, sparse=sparse), HookerAndDumper(str(tmp_path / f"{sparse}-"))
        files.append(dumper.register_hooks(model, 0, 0))
        model(torch.tensor([1, 4, 1])).square().sum().backward()
        dumper.remove_hooks()
    found = compare(*files)
    assert [row.kind for row in found.rows] == ["forward", "backward", "parameter"]
    assert found.first is None


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    other, file = dump(tmp_path / "b1", fault="forward"), dump(tmp_path / "b[1]")
    assert compare(file, other).first is not None
    assert compare(other, file).first is not None  # the pattern is the name of `other`
    assert compare(file, file).first is None
    with pytest.raises(ValueError, match="second is an empty list"):
        compare(file, [])


def test_parts_of_other_shapes_differ(tmp_path: Path) -> None:
    files = []
    for number, (kind, shape) in enumerate([("forward", (4, 3)), ("forward", (2, 3)), ("forward", (2, 5))]):
        files.append(str(tmp_path / str(number)))
        attributes = {"module": "layer", "kind": kind}
        HDF5FileOperation(files[-1]).write_data("0000_Layer", "feat_output", torch.ones(shape), attributes)
    assert compare(files[0], [files[1], files[1]]).first is None
    first = compare(files[0], files[1:]).first
    assert first is not None
    assert first.note == "shapes (2, 3), (2, 5) of the processes"


def test_the_command_shows_and_draws_it(tmp_path: Path) -> None:
    files = [dump(tmp_path / "a"), dump(tmp_path / "b", fault="forward")]
    picture = tmp_path / "errors.png"
    shown = CliRunner().invoke(app, ["compare", *files, "--plot", str(picture)])
    assert shown.exit_code == 1
    assert "first difference: norm (LayerNorm), forward: relative error" in shown.stdout
    assert picture.read_bytes()[1:4] == b"PNG"
    document = json.loads(CliRunner().invoke(app, ["compare", *files, "--json"]).stdout)
    assert document["first"]["module"] == "norm"
    assert document["rows"][document["first"]["order"]] == document["first"]
    same = CliRunner().invoke(app, ["compare", files[0], files[0], "--plot", str(picture)])
    assert same.exit_code == 0
    assert "the dumps agree" in same.stdout


@pytest.mark.parametrize(
    ("content", "words"), [(None, "there is no dump"), (b"text", "is no HDF5 file"), ("other", "no module in common")]
)
def test_dumps_that_cannot_be_compared_raise(tmp_path: Path, content: object, words: str) -> None:
    file = tmp_path / "b"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        kind = {"module": "other", "kind": "forward"}
        HDF5FileOperation(str(file)).write_data("0000_Layer", "feat_output", torch.ones(1), kind)
    result = CliRunner().invoke(app, ["compare", dump(tmp_path / "a"), str(file)])
    assert result.exit_code == 2
    assert words in result.stderr


def test_hdf5_files_of_other_programs_raise(tmp_path: Path) -> None:
    good, other = dump(tmp_path / "good"), tmp_path / "other"
    contents = {
        "/weights' in it is no record": lambda file: file.create_group("weights"),
        "/x' in it is no record": lambda file: file.create_dataset("x", data=[1.0]),
        "/1_Linear/words' in it is no tensor": lambda file: file.create_dataset("1_Linear/words", data=["a"]),
        "/1_Linear/inner' in it is no tensor": lambda file: file.create_group("1_Linear/inner"),
    }
    for words, write in contents.items():
        with h5py.File(other, "w") as file:
            write(file)
        with pytest.raises(ValueError, match=re.escape(words)):
            compare(good, other)
    with pytest.raises(ValueError, match="is a folder, not a dump"):
        compare(good, tmp_path)


def test_a_bad_picture_is_refused_first(tmp_path: Path) -> None:
    file = dump(tmp_path / "a")
    for picture, words in (("x.foo", "does not end in"), ("no/x.png", "does not exist"), (".", "does not end in")):
        result = CliRunner().invoke(app, ["compare", file, file, "--plot", str(tmp_path / picture)])
        assert result.exit_code == 2
        assert words in result.stderr.replace("\n", " ")


def test_without_h5py_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'apex\[dump\]'"):
        HookerAndDumper(str(tmp_path)).register_hooks(Model(), 0, 0)


def test_data_of_other_files_is_not_read(tmp_path: Path) -> None:
    good = dump(tmp_path / "good")
    with h5py.File(good) as file:
        group, dataset = next((name, key) for name, group in file.items() for key in group)
    links = {
        "linked group": lambda file: file.__setitem__("999_Linear", h5py.ExternalLink(good, f"/{group}")),
        "linked dataset": lambda file: file[group].__setitem__("x", h5py.ExternalLink(good, f"/{group}/{dataset}")),
        "soft link": lambda file: file[group].__setitem__("x", h5py.SoftLink(f"/{group}/{dataset}")),
        "raw data elsewhere": lambda file: file[group].create_dataset(
            "x", (4,), "f4", external=[(good, 0, h5py.h5f.UNLIMITED)]
        ),
    }
    for name, add in links.items():
        path = tmp_path / f"{name}.hdf5"
        path.write_bytes(Path(good).read_bytes())
        with h5py.File(path, "a") as file:
            add(file)
        with pytest.raises(ValueError, match="points to data elsewhere"):
            compare(good, path)
