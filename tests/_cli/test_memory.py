"""`apex memory`: the table, JSON, Hugging Face configs and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from apex._cli.app import app
from apex._cli.memory import parse_size

from .helpers import words

FACTORIES = """
from torch import nn

def network():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

def loss(model, batch, device):
    import torch
    return model(torch.randn(batch, 64, device=device)).square().mean()

def both():
    return network(), loss

model = network()
"""


@pytest.fixture
def factories(tmp_path: Path) -> str:
    path = tmp_path / "factories_of_a_test.py"
    path.write_text(FACTORIES)
    return str(path)


def test_table(factories: str) -> None:
    result = CliRunner().invoke(app, ["memory", f"{factories}:both", "--opt-level", "O0,O2", "--batch", "16"])
    assert result.exit_code == 0
    text = words(result.stdout)
    assert "batch 16" in text
    assert "O0 O2" in text
    assert "768 MiB for the driver's context" in text


def test_json_with_a_limit(factories: str) -> None:
    arguments = ["--opt-level", "O5", "--device-limit", "1GiB", "--input-shape", "64", "--json", "--batch", "4"]
    result = CliRunner().invoke(app, ["memory", f"{factories}:network", *arguments])
    document = json.loads(result.stdout)
    (level,) = document["levels"]
    assert document["limit"] == 1 << 30
    assert level["opt_level"] == "O5"
    assert level["estimated"]["parameters"] == 2 * (64 * 128 + 128 + 128 * 8 + 8)
    assert level["largest_batch"] > 1000
    assert level["measured"] is None


def test_hugging_face_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["memory", str(tmp_path), "--opt-level", "O0", "--json", "--checkpointing"])
    count = sum(param.numel() for param in transformers.AutoModelForCausalLM.from_config(config).parameters())
    (level,) = json.loads(result.stdout)["levels"]
    assert level["estimated"]["parameters"] == 4 * count


def test_hugging_face_config_without_a_class_that_names_a_dtype(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 50, "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    assert CliRunner().invoke(app, ["memory", str(tmp_path), "--opt-level", "O2"]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type":', "cannot be read"),
        ('{"model_type": "vit", "architectures": ["ViTForImageClassification"]}', "takes pixel_values, not input_ids"),
    ],
)
def test_wrong_hugging_face_configs(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(app, ["memory", str(tmp_path)])
    assert result.exit_code == 2
    assert message in words(result.output)


def test_a_file_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # its folder must not stay there for other tests
    path = tmp_path / "random.py"  # the name of a module that is imported already
    path.write_text(FACTORIES)
    assert CliRunner().invoke(app, ["memory", f"{path}:both", "--opt-level", "O0"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.such.module:network"], "no.such.module"),
        (["nothing"], "neither MODULE:FACTORY nor"),
        (["nothing.json"], "there is no file 'nothing.json'"),
        (["nothing.py"], "there is no file 'nothing.py'"),
        (["."], "there is no file 'config.json'"),
        (["binary.py"], "lacks its factory, the function or class that makes the model: binary.py:FACTORY"),
        (["binary.py:network"], "'binary.py:network' cannot be imported"),
        (["--states", "{}:both"], "--states lists all optimizers and takes no model"),
        (["{}:missing"], "no function or class 'missing'"),
        (["{}:model"], "is a model, not a function"),
        (["{}:network"], "--input-shape"),
        (["{}:network", "--input-shape", "63"], "63"),
        (["{}:both", "--opt-level", "O9"], "'O9'"),
        (["{}:both", "--device-limit", "much"], "'much'"),
        (["{}:both", "--device-limit", "80"], "'80' has no unit: write 80GiB, 80GB or 80B"),
        (["{}:both", "--measure"], "needs a GPU"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, factories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("binary.py").write_bytes(b"\x7fELF\x00")
    result = CliRunner().invoke(app, ["memory", *(each.format(factories) for each in arguments)])
    assert result.exit_code == 2
    assert message in words(result.output)
    assert "hint:" in result.output


def test_sizes() -> None:
    assert [parse_size(text) for text in ("80GiB", "80 gb", "1.5MiB", "7B")] == [80 << 30, 80 * 10**9, 3 << 19, 7]
