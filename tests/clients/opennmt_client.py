"""OpenNMT-py: its training command with its fused Adam, under apex's amp and under FP16_Optimizer."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import falls, run

import apex

TRAIN = "from onmt.bin.train import main; main()"
BUILD = "from onmt.bin.build_vocab import main; main()"

SETTINGS = """
save_data: {folder}
src_vocab: {folder}/source.vocab
tgt_vocab: {folder}/target.vocab
overwrite: true
data:
    corpus:
        path_src: {folder}/source.txt
        path_tgt: {folder}/target.txt
save_model: {folder}/model
encoder_type: transformer
decoder_type: transformer
layers: 1
hidden_size: 32
word_vec_size: 32
transformer_ff: 64
heads: 2
dropout: [0.0]
attention_dropout: [0.0]
batch_size: 16
batch_type: sents
train_steps: {steps}
save_checkpoint_steps: {steps}
report_every: 1
optim: fusedadam
learning_rate: 0.01
max_grad_norm: 1.0
num_workers: 0
bucket_size: 64
seed: 1
"""


def train(folder: str, steps: int, settings: str) -> list[float]:
    """Losses per word of `onmt_train` on sentences that are copied."""
    lines = "\n".join(" ".join(f"w{(row + column) % 12}" for column in range(5)) for row in range(64))
    for name in ("source", "target"):
        Path(f"{folder}/{name}.txt").write_text(lines + "\n")
    config = Path(f"{folder}/config.yaml")
    config.write_text(SETTINGS.format(folder=folder, steps=steps) + settings)
    for code, more in ((BUILD, ["-n_sample", "-1"]), (TRAIN, [])):
        command = [sys.executable, "-W", "ignore", "-c", code, "-config", str(config), *more]
        process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
        assert process.returncode == 0, process.stdout + process.stderr
    return [float(number) for number in re.findall(r"xent: *([0-9.]+)", process.stdout + process.stderr)]


def check_amp() -> str:
    """`onmt_train` of a transformer with `optim: fusedadam`, `model_dtype: fp16` and `apex_opt_level: O1`"""
    with tempfile.TemporaryDirectory() as folder:
        return falls(train(folder, 40, "model_dtype: fp16\napex_opt_level: O1\n"))


def check_legacy() -> str:
    """the same without `apex_opt_level`, which takes `apex.contrib.optimizers.FP16_Optimizer`"""
    with tempfile.TemporaryDirectory() as folder:
        return falls(train(folder, 40, "model_dtype: fp16\nloss_scale: 128\n"))


def check_rms_norm() -> str:
    """a transformer with `layer_norm: rms`, on `apex.normalization.FusedRMSNorm`"""
    from onmt.encoders.transformer import RMSNorm

    assert RMSNorm is apex.normalization.FusedRMSNorm
    with tempfile.TemporaryDirectory() as folder:
        return falls(train(folder, 40, "layer_norm: rms\nmodel_dtype: fp32\n"))


run(__name__, "OpenNMT-py")
