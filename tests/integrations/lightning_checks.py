"""Checks of `apex.integrations.lightning`; `make clients` runs them with the oldest and the newest Lightning."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import lightning
import torch
from torch import nn

import apex
from apex.integrations.lightning import ApexPrecision

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
CLOSE = {"32": 1e-4, "bf16": 2e-2, "bf16-true": 5e-2, "fp16": 1e-2}


def data() -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(24, 8, generator=generator), torch.randint(0, 4, (24,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = network(), list[float]()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(folder: str, steps: int = 3, checkpoint: str | None = None, **options: Any) -> tuple[Classifier, Any]:
    """Train a classifier with clipping; return it and its trainer."""
    model = Classifier()
    trainer = lightning.Trainer(
        max_steps=steps, max_epochs=9, gradient_clip_val=0.5, default_root_dir=folder, **QUIET, **options
    )
    trainer.fit(model, data(), ckpt_path=checkpoint)
    return model, trainer


def check_trainer() -> str:
    """`Trainer(plugins=[ApexPrecision(...)])` with clipping: float32, bfloat16 and float16, three steps"""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"enable_checkpointing": False}
        expected, _ = fit(folder, **options)
        for precision, tolerance in CLOSE.items():
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if precision == "fp16" else None
            plugin = ApexPrecision(precision, scaler=scaler)
            model, trainer = fit(folder, plugins=[plugin], **options)
            assert isinstance(trainer.optimizers[0], apex.optimizers.FusedAdam), str(plugin.report)
            assert "layer norm" in str(plugin.report), str(plugin.report)
            torch.testing.assert_close(
                torch.tensor(model.losses), torch.tensor(expected.losses), rtol=tolerance, atol=tolerance
            )
    return f"losses equal to those without it, within rounding: {', '.join(CLOSE)}"


class AtTheStart(lightning.pytorch.Callback):
    """Copies of weights and optimizer state, and the loss scale, when a training begins."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = copy.deepcopy(pl_module.state_dict())
        self.state = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
        self.scale = dict(trainer.precision_plugin.state_dict())


def check_resume() -> str:
    """the same from a checkpoint of the `Trainer`, with bfloat16 weights and float16's loss scale"""
    for precision in ("bf16-true", "fp16"):
        with tempfile.TemporaryDirectory() as folder:
            scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
            plugins = [ApexPrecision(precision, scaler=each if precision == "fp16" else None) for each in scalers]
            _, trainer = fit(folder, plugins=[plugins[0]])
            trainer.save_checkpoint(f"{folder}/last.ckpt")
            saved = torch.load(f"{folder}/last.ckpt", weights_only=False)
            start = AtTheStart()
            fit(folder, 4, f"{folder}/last.ckpt", plugins=[plugins[1]], callbacks=[start])
            assert start.scale == plugins[0].state_dict()
            torch.testing.assert_close(start.weights, saved["state_dict"], rtol=0.0, atol=0.0)
            torch.testing.assert_close(start.state, saved["optimizer_states"][0]["state"], rtol=0.0, atol=0.0)
            if precision == "bf16-true":
                assert all(state["master_param"].dtype == torch.float32 for state in start.state.values())
    return "weights, masters and loss scale equal, bit for bit"


def fabric_resumes(make: Any, allowed: float) -> None:
    """Train with bfloat16 weights from a checkpoint that was loaded after `fabric.setup`, before the first step."""

    def run(batches: list[Any], checkpoint: str = "", save: str = "") -> list[torch.Tensor]:
        fabric = lightning.Fabric(accelerator="cpu", plugins=[ApexPrecision("bf16-true")])
        net = network()
        model, optimizer = fabric.setup(net, make(net.parameters()))
        if checkpoint:
            fabric.load(checkpoint, {"model": model, "optimizer": optimizer})
        for inputs, targets in batches:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
        if save:
            fabric.save(save, {"model": model, "optimizer": optimizer})
        return [value.float() for value in model.state_dict().values()]

    batches, start = list(data()), [value.float() for value in network().state_dict().values()]
    with tempfile.TemporaryDirectory() as folder:
        run(batches[:2], save=f"{folder}/two")
        resumed, expected = run(batches[2:], f"{folder}/two"), run(batches)
    for value, wanted, before in zip(resumed, expected, start, strict=True):
        assert (value - wanted).norm() <= allowed * (wanted - before).norm()


def check_fabric() -> str:
    """`Fabric(plugins=[ApexPrecision(...)])` with clipping, three steps"""
    losses: dict[str, list[float]] = {}
    for precision in ("", *CLOSE):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if precision == "fp16" else None
        plugins = [ApexPrecision(precision, scaler=scaler)] if precision else None
        fabric = lightning.Fabric(accelerator="cpu", plugins=plugins)
        net = network()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        losses[precision] = []
        for inputs, targets in data():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses[precision].append(loss.item())
        if precision:
            assert isinstance(optimizer.optimizer, apex.optimizers.FusedAdam)
    for precision, tolerance in CLOSE.items():
        torch.testing.assert_close(
            torch.tensor(losses[precision]), torch.tensor(losses[""]), rtol=tolerance, atol=tolerance
        )
    fabric_resumes(lambda params: apex.optimizers.FusedAdam(params, lr=1e-2), 0.0)
    # PyTorch's optimizer rounds the state that it loads to the bfloat16 of its parameters.
    fabric_resumes(lambda params: torch.optim.AdamW(params, lr=1e-2), 0.2)
    return f"losses equal to those without it, within rounding: {', '.join(CLOSE)}"


class Inside(nn.Module):
    """A module that notes the dtype of its input, and returns what it got, with a product of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.dtype = batch["x"].dtype
        return {"logits": self.linear(batch["x"]), "x": batch["x"], "index": batch["index"], "words": "kept"}


def check_fabric_dtypes() -> str:
    """Dtypes of inputs and outputs as with Fabric's own precision, so that losses outside of a module are float32"""
    same = {"32": "32-true", "bf16": "bf16-mixed", "bf16-true": "bf16-true", "fp8": "bf16-mixed"}
    for precision, theirs in same.items():
        found = []
        for options in ({"plugins": [ApexPrecision(precision)]}, {"precision": theirs}):
            model = lightning.Fabric(accelerator="cpu", **options).setup(inside := Inside())
            for dtype in (torch.float32, *([torch.float64] if precision != "32" else [])):
                outputs = model({"x": torch.ones(2, 8, dtype=dtype), "index": torch.arange(2)})
                found.append([inside.dtype, *(getattr(each, "dtype", each) for each in outputs.values())])
        assert found[: len(found) // 2] == found[len(found) // 2 :], precision
        assert found[0][1] == torch.float32
    return f"equal: {', '.join(same)}"


def check_fabric_loss_scale() -> str:
    """The first step in float16 with a loss scale of 65536 is not skipped"""
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin := ApexPrecision("fp16")])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    before = [param.detach().clone() for param in net.parameters()]
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    inputs, targets = next(iter(data()))
    fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
    assert plugin.scaler.get_scale() == 2.0**16
    assert not any(torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))
    return "the loss is float32"


class Regression(Classifier):
    """A model whose targets are floats."""

    def training_step(self, batch: Any, index: int) -> Any:
        assert all(each.dtype == torch.float32 for each in batch)
        outputs = self.net(batch[0])
        assert outputs.dtype == torch.bfloat16  # as with a Trainer's own precision
        return nn.functional.mse_loss(outputs[:, 0].float(), batch[1])


def check_batches_of_a_trainer() -> str:
    """A `Trainer` does not cast batches, which have targets"""
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16)), 8)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=2, enable_checkpointing=False, default_root_dir=folder, plugins=[ApexPrecision("bf16")], **QUIET
        )
        trainer.fit(Regression(), batches)
    return "float32"


def refusal(*arguments: str) -> str:
    """Return the message of the error that a plugin with these arguments and a scaler raises."""
    try:
        ApexPrecision(*arguments, scaler=object())
    except ValueError as error:
        return str(error)
    return "no error"


def check_refusals() -> str:
    """`ApexPrecision` with an unknown precision, and with a loss scale for bfloat16"""
    assert "precision='fp4' is not known" in refusal("fp4")
    assert "scaler is for" in refusal("bf16")
    return "refused"
