"""Files that contain code: every reader refuses them and executes nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch import nn

import apex
from apex import checkpoint
from apex.checkpoint import _folders
from apex.contrib.optimizers import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.fp16_utils import FP16_Optimizer

SOURCE = Path(apex.__file__).resolve().parent
# Messages between a process and the writer that it has started, over a socket that no other process has.
PRIVATE = ("_background.py", "_writer.py")


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.fspath(self.folder),)


def in_a_file(folder: Path, payload: Any) -> None:
    path = folder / "checkpoint.pt"
    checkpoint.save({"weights": torch.ones(3), "x": payload}, path)
    checkpoint.load(path)


def in_a_series(folder: Path, payload: Any) -> None:
    series = checkpoint.Series(folder / "run")
    series.save({"x": payload}, 1)
    series.load()


def in_a_scaler(folder: Path, payload: Any) -> None:
    """Return a pickle of NVIDIA's FP16_Optimizer, which holds its whole scaler.

    Only who trusts such a file loads it.
    """
    optimizer = FP16_Optimizer(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))
    checkpoint.save({**optimizer.state_dict(), "loss_scaler": payload}, folder / "checkpoint.pt")
    optimizer.load_state_dict(checkpoint.load(folder / "checkpoint.pt"))


def signed(folder: Path) -> None:
    """Write a manifest that matches the files."""
    facts = {path.name: _folders.size_and_checksum(path) for path in folder.iterdir() if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps(facts))


def in_metadata(folder: Path, payload: Any) -> None:
    path = folder / "sharded"
    checkpoint.save_sharded({"weights": torch.ones(3)}, path)
    (path / ".metadata").write_bytes(pickle.dumps(payload))
    signed(path)
    checkpoint.load_sharded({"weights": torch.zeros(3)}, path)


def inside_metadata(folder: Path, payload: Any) -> None:
    path = folder / "sharded"
    checkpoint.save_sharded({"weights": torch.ones(3)}, path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = payload
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    signed(path)
    checkpoint.load_sharded({"weights": torch.zeros(3)}, path)


def in_a_value(folder: Path, payload: Any) -> None:
    checkpoint.save_sharded({"weights": torch.ones(3), "x": payload}, folder / "sharded")
    checkpoint.load_sharded({"weights": torch.zeros(3), "x": 0}, folder / "sharded")


def in_place_of_a_tensor(folder: Path, payload: Any) -> None:
    path = folder / "sharded"
    checkpoint.save_sharded({"weights": torch.ones(3), "x": payload}, path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    metadata.storage_data[places["weights"]] = metadata.storage_data[places["x"]]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    signed(path)
    checkpoint.load_sharded({"weights": torch.zeros(3)}, path)


def of_divided_adam(folder: Path, payload: Any) -> None:
    """Return a state of format 1, with bytes that the loader takes for a tensor."""
    optimizer = DistributedFusedAdam(nn.Linear(3, 2).parameters())
    local = io.BytesIO()
    torch.save({"state": payload, "param_groups": []}, local)
    packed = torch.frombuffer(bytearray(local.getvalue()), dtype=torch.uint8)
    checkpoint.save({"gathered_states": [packed], "format": 1}, folder / "checkpoint.pt")
    optimizer.load_state_dict(checkpoint.load(folder / "checkpoint.pt"))


def of_divided_adam_in_whole(folder: Path, payload: Any) -> None:
    optimizer = DistributedFusedAdam(nn.Linear(3, 2).parameters())
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = payload
    checkpoint.save(state, folder / "checkpoint.pt")
    optimizer.load_state_dict(checkpoint.load(folder / "checkpoint.pt"))


def of_divided_lamb(folder: Path, payload: Any) -> None:
    optimizer = DistributedFusedLAMB(nn.Linear(3, 2).parameters())
    checkpoint.save({**optimizer.state_dict(), "step": payload}, folder / "checkpoint.pt")
    optimizer.load_state_dict(checkpoint.load(folder / "checkpoint.pt"))


def of_divided_optimizers_sharded(folder: Path, payload: Any) -> None:
    optimizer = DistributedFusedAdam(nn.Linear(3, 2).parameters())
    state = {"optimizer": optimizer.sharded_state_dict()}
    checkpoint.save_sharded({"optimizer": {**state["optimizer"], "step": payload}}, folder / "sharded")
    checkpoint.load_sharded(state, folder / "sharded")
    optimizer.load_sharded_state_dict(state["optimizer"])


PLACES: list[Callable[[Path, Any], None]] = [
    in_a_file,
    in_a_series,
    in_a_scaler,
    in_metadata,
    inside_metadata,
    in_a_value,
    in_place_of_a_tensor,
    of_divided_adam,
    of_divided_adam_in_whole,
    of_divided_lamb,
    of_divided_optimizers_sharded,
]


@pytest.mark.parametrize("place", PLACES)
def test_code_in_files_is_not_run(place: Callable[[Path, Any], None], tmp_path: Path) -> None:
    payload = Payload(tmp_path / "ran")
    with pytest.raises((pickle.UnpicklingError, checkpoint.DamagedCheckpoint, RuntimeError), match=r"mkdir"):
        place(tmp_path, payload)
    assert not payload.folder.exists()


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").is_dir()


def test_classes_of_an_optimizer_are_reached_by_their_names_only(tmp_path: Path) -> None:
    """Pickles name a nested class by a call of getattr, which must not reach anything else."""
    optimizer = DistributedFusedAdam(nn.Linear(3, 2).parameters())

    class Reached:
        def __init__(self, *found: Any) -> None:
            self.found = found

        def __reduce__(self) -> tuple[Any, ...]:
            return self.found

    for found, match in (
        ((getattr, (DistributedFusedAdam, "load_state_dict")), "load_state_dict is no part"),
        ((getattr, (nn.Linear(1, 1), "forward")), "Linear"),
        ((DistributedFusedAdam, ()), "an optimizer is no part of its state"),
    ):
        with pytest.raises(pickle.UnpicklingError, match=match):
            of_divided_adam(tmp_path, Reached(*found))
    optimizer.load_state_dict(optimizer.state_dict(state_dict_format=1))


def test_plain_values_are_loaded(tmp_path: Path) -> None:
    """Everything that can be read without executing code is loaded; tensors have other dtypes and memory formats."""
    state = {
        "images": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half": torch.rand(3).to(torch.bfloat16),
        "plain": [1, 2.5, "text", None, True, {"deeper": (1, torch.ones(2))}],
        "pair": (torch.Size([2, 3]), torch.float16),
    }
    checkpoint.save_sharded(state, tmp_path / "sharded")
    found: dict[str, Any] = {
        "images": torch.zeros(2, 3, 4, 5),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "plain": [0, 0.0, "", 0, False, {"deeper": ()}],
        "pair": (),
    }
    checkpoint.load_sharded(found, tmp_path / "sharded")
    assert torch.equal(found["images"], state["images"])
    assert torch.equal(found["half"], state["half"])
    assert found["plain"][:5] == state["plain"][:5]
    assert torch.equal(found["plain"][5]["deeper"][1], torch.ones(2))
    assert found["pair"] == state["pair"]


def test_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    checkpoint.save_sharded({"weights": torch.ones(3)}, path)
    shutil.copy(path / "__0_0.distcp", tmp_path / "secret")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    signed(path)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"names files that manifest.json does not list: .*secret"):
        checkpoint.load_sharded({"weights": torch.zeros(3)}, path)


def test_metadata_changes_no_class(tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    checkpoint.save_sharded({"weights": torch.ones(3)}, path)
    # Takes the class PurePath and sets its attribute `suffix`.
    (path / ".metadata").write_bytes(b"\x80\x02cpathlib\nPurePath\nN}X\x06\0\0\0suffixX\x01\0\0\0Xs\x86b.")
    signed(path)
    before = PurePath.suffix
    try:
        with pytest.raises(checkpoint.DamagedCheckpoint, match="may not set attributes of <class 'pathlib"):
            checkpoint.load_sharded({"weights": torch.zeros(3)}, path)
        assert PurePath.suffix is before
    finally:
        PurePath.suffix = before  # type: ignore[method-assign]


def test_a_manifest_with_no_end_or_with_files_elsewhere_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    checkpoint.save_sharded({"weights": torch.ones(3)}, path)
    manifest = path / "manifest.json"
    (tmp_path / "other").write_bytes(b"")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "../other": [0, 0]}))
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"lists \.\./other, which is not in it"):
        checkpoint.verify(path)
    manifest.write_text("[" * 100_000)
    assert checkpoint.latest(tmp_path) is None


def test_no_other_unpickler_is_used() -> None:
    """No reader uses a function that executes code; a new exception belongs into the list above."""
    unsafe = re.compile(r"weights_only\s*=\s*False|pickle\.loads?\(|allow_pickle\s*=\s*True|jit\.load\(")
    for root in (
        SOURCE,
        SOURCE.parent / "compiled_names",
        *(SOURCE.parents[1] / each for each in ("examples", "docs")),
    ):
        for path in root.rglob("*.py"):
            assert path.name in PRIVATE or not unsafe.search(path.read_text()), path
