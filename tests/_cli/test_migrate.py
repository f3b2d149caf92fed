"""`apex migrate`: scripts in the style of published ones, run before and after; every rule that leaves code alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("libcst", reason="apex migrate needs libcst")

from apex import amp
from apex._cli.app import app
from apex._cli.migrate.command import migrate
from apex._cli.migrate.rules import ADVICE

SETUP = """
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(4)]
losses = []
"""

PLAIN = """
from apex import amp
from apex.optimizers import FusedAdam

model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = FusedAdam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for x, y in batches:
    optimizer.zero_grad()
    output = model(x)
    loss = F.cross_entropy(output, y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.3)
    optimizer.step()
    losses.append(loss.item())
"""

# Guarded by a flag, imported where it is needed, accumulation, clipping in both branches.
GUARDED = """
class args:
    fp16, max_grad_norm, accumulation = True, 0.3, 2

def train(model, optimizer):
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install apex to use fp16 training.")
        model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
    for step, batch in enumerate(batches):
        model.train()
        batch = tuple(t.to("cpu") for t in batch)
        outputs = model(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        if args.accumulation > 1:
            loss = loss / args.accumulation
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        losses.append(loss.item())
        if (step + 1) % args.accumulation == 0:
            if args.fp16:
                norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            losses.append(norm.item())
            optimizer.step()
            model.zero_grad()

model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""

TRAINER = """
import apex.amp as amp

class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="%s", verbosity=0)

    def compute_loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def train_step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.compute_loss(x, y)
        with amp.scale_loss(loss, self.optimizer) as scaled: scaled.backward()
        self.optimizer.step(); losses.append(loss.item())  # both in one line

    def evaluate(self):
        with torch.no_grad():
            for x, y in batches:
                output = self.model(x)
                losses.append(F.cross_entropy(output, y).item())

trainer = Trainer(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
for x, y in batches:
    trainer.train_step(x, y)
trainer.evaluate()
"""

# initialize in one function, the loop in another; a fallback to None; a checkpoint; norms and optimizers.
TWO_FUNCTIONS = """
try:
    from apex import amp
    from apex.normalization import FusedLayerNorm as LayerNorm
    from apex.optimizers import FusedSGD
    has_apex = True
except ImportError:
    amp = None
    has_apex = False

def main():
    model = nn.Sequential(LayerNorm(6, 1e-5), nn.Linear(6, 12), nn.Linear(12, 3))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    net, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic")
    train(net, optimizer)
    state = {"amp": amp.state_dict()}
    amp.load_state_dict(state["amp"])
    train(net, optimizer)

def train(network, optimizer):
    for x, y in batches:
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss / 2, optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=False)
        for parameter in network.parameters():
            losses.append(parameter.grad.norm().item())
        optimizer.step()
        losses.append(loss.item())

main()
"""

TWO_OPTIMIZERS = """
import apex

encoder, decoder = nn.Linear(6, 12), nn.Linear(12, 3)
optimizers = [torch.optim.SGD(encoder.parameters(), lr=0.1), torch.optim.SGD(decoder.parameters(), lr=0.1)]
first, second = optimizers
[encoder, decoder], [first, second] = apex.amp.initialize([encoder, decoder], [first, second], opt_level="O1")
for x, y in batches:
    codes = encoder(x).relu()
    with apex.amp.disable_casts():
        penalty = 1e-3 * (codes.float() @ codes.float().t()).mean()
    loss = F.cross_entropy(decoder(codes), y) + penalty
    first.zero_grad(), second.zero_grad()
    with apex.amp.scale_loss(loss, [first, second]) as scaled_loss:
        scaled_loss.backward()
    first.step()
    second.step()
    losses.append(loss.item())
"""

APEX = {
    "plain": PLAIN,
    "guarded": GUARDED,
    "trainer-O1": TRAINER % "O1",
    "trainer-O4": TRAINER % "O4",
    "trainer-O0": TRAINER % "O0",
    "two-functions": TWO_FUNCTIONS,
    "two-optimizers": TWO_OPTIMIZERS,
}

RECIPE = """
use_amp = True
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu", init_scale=1024.0, enabled=use_amp)
for x, y in batches:
    with torch.no_grad(), autocast("cpu", dtype=torch.float16, enabled=use_amp):
        before = F.cross_entropy(model(x), y)
    with autocast("cpu", dtype=torch.float16, enabled=use_amp):  # casts
        output = model(x)
        loss = F.cross_entropy(output, y)
        # the end of the casts
    # Scaled, so that small gradients do not vanish.
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer); scaler.update()
    optimizer.zero_grad()
    losses += [before.item(), loss.item()]
checkpoint = {"scaler": scaler.state_dict()}
scaler.load_state_dict(checkpoint["scaler"])
"""

PASSED_ON = """
def train(model, optimizer, loader, scaler, epoch=0):
    model.train()  # not this function
    for x, y in loader:
        with autocast("cpu", dtype=torch.float16): loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

def main():
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu")
    for epoch in range(2):
        train(model, optimizer, batches, scaler, epoch)

main()
"""

BFLOAT16 = """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x, y):
        with autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

trainer = Trainer()
losses = [trainer.step(x, y).item() for x, y in batches]
"""

IMPORTS = "from torch.amp import GradScaler, autocast\n"
TORCH = {name: IMPORTS + code for name, code in [("recipe", RECIPE), ("passed-on", PASSED_ON), ("bf16", BFLOAT16)]}


def rewritten(source: str, folder: Path, to: str, refused: tuple[str, ...] = ()) -> str:
    """Return a rewritten script; check that a second rewrite changes nothing."""
    path = folder / "script.py"
    path.write_text(source)
    result = migrate(path, to=to, device="cpu")
    assert tuple(refusal.rule for refusal in result.refused) == refused, result.refused
    path.write_bytes(result.after)
    again = migrate(path, to=to, device="cpu")
    assert again.after == again.before
    return result.after.decode()


def losses_of(source: str) -> list[float]:
    """Run a script and return the losses that it collects."""
    names: dict = {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, "script.py", "exec"), names)
    finally:
        amp.shutdown()
    assert len(names["losses"]) >= 4
    return names["losses"]


@pytest.mark.parametrize("name", APEX)
def test_apex_to_torch_and_back(name: str, tmp_path: Path) -> None:
    source = SETUP + APEX[name]
    expected = losses_of(source)
    torch_code = rewritten(source, tmp_path, "torch")
    assert "apex" not in torch_code.replace("has_apex", "")
    assert ("autocast" in torch_code) is not name.endswith("O0")
    assert ("GradScaler" in torch_code) is not name.endswith(("O0", "O4"))
    # Two implementations of layer norm round differently.
    assert losses_of(torch_code) == (pytest.approx(expected, rel=1e-3) if name == "two-functions" else expected)
    if name in ("plain", "trainer-O4"):
        apex_code = rewritten(torch_code, tmp_path, "apex")
        assert "amp.scale_loss" in apex_code
        assert "autocast" not in apex_code
        assert losses_of(apex_code) == expected


@pytest.mark.parametrize("name", ["plain", "guarded", "trainer-O1", "trainer-O4", "two-functions"])
def test_apex_to_the_booster(name: str, tmp_path: Path) -> None:
    source = SETUP + APEX[name]
    code = rewritten(source, tmp_path, "booster")
    assert "Booster(" in code
    assert "scale_loss" not in code
    assert losses_of(code) == losses_of(source)


def test_clipping_of_master_parameters_becomes_the_optimizers(tmp_path: Path) -> None:
    assert "    optimizer.clip_grad_by_norm(0.3)\n" in rewritten(SETUP + PLAIN, tmp_path, "booster")
    listed = PLAIN.replace(
        "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.3)", "print(amp.master_params(optimizer))"
    )
    assert "    print(optimizer.parameters)\n" in rewritten(SETUP + listed, tmp_path, "booster")


def test_a_function_that_is_called_under_autocast_gets_no_second_one(tmp_path: Path) -> None:
    """`compute_loss` is called by `train_step` alone; `evaluate` runs the model by itself."""
    code = rewritten(SETUP + APEX["trainer-O1"], tmp_path, "torch")
    assert code.count("autocast(") == 2
    assert "        return F.cross_entropy(self.model(x), y)\n" in code


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_booster_accepts_o2_which_torch_refuses(level: str, tmp_path: Path) -> None:
    source = SETUP + PLAIN.replace("O1", level)
    assert losses_of(rewritten(source, tmp_path, "booster")) == losses_of(source)


@pytest.mark.parametrize("to", ["apex", "booster"])
@pytest.mark.parametrize("name", TORCH)
def test_torch_to_apex_and_to_the_booster(name: str, to: str, tmp_path: Path) -> None:
    source = SETUP + (TORCH[name] if to == "apex" else TORCH[name].replace(", enabled=use_amp", ""))
    code = rewritten(source, tmp_path, to)
    assert "GradScaler(" not in code
    assert "scaler." not in code
    assert "autocast(" not in code
    assert losses_of(code) == losses_of(source)


@pytest.mark.parametrize(
    ("imports", "cast", "scaler"),
    [
        ("from torch.cuda.amp import autocast, GradScaler\n", "autocast(", "GradScaler("),
        ("from torch.cuda import amp\n", "amp.autocast(", "amp.GradScaler("),
        ("", "torch.cuda.amp.autocast(", "torch.cuda.amp.GradScaler("),
        ("", 'torch.autocast("cuda", ', 'torch.amp.GradScaler("cuda", '),
        ("", 'torch.amp.autocast(device_type="cuda", ', 'torch.amp.GradScaler(device="cuda", '),
    ],
)
def test_every_way_to_spell_autocast_and_gradscaler(imports: str, cast: str, scaler: str, tmp_path: Path) -> None:
    code = RECIPE.replace('autocast("cpu", dtype=torch.float16, ', cast).replace('GradScaler("cpu", ', scaler)
    assert rewritten(SETUP + imports + code, tmp_path, "apex") == rewritten(SETUP + TORCH["recipe"], tmp_path, "apex")


def test_comments_and_layout_stay(tmp_path: Path) -> None:
    source = '''\
    """A script."""
    import torch
    from apex import amp  # mixed precision


    def main():
    \tmodel = Net( 3,4 )
    \tmodel, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # the level
    \tfor x in loader:
    \t\tx = x.cuda()

    \t\t# The forward pass.
    \t\tloss = model(x)

    \t\t# Backward.
    \t\twith amp.scale_loss(loss, optimizer) as scaled_loss:  # scaled
    \t\t\tscaled_loss.backward( create_graph = True )
    \t\toptimizer.step()  # a step
    '''
    expected = '''\
    """A script."""
    import torch


    def main():
    \tmodel = Net( 3,4 )
    \tscaler = torch.amp.GradScaler("cpu")  # the level
    \tfor x in loader:
    \t\tx = x.cuda()

    \t\t# The forward pass.
    \t\twith torch.autocast("cpu", dtype=torch.float16):
    \t\t\tloss = model(x)

    \t\t# Backward.
    \t\tscaler.scale(loss).backward(create_graph = True)  # scaled
    \t\tscaler.step(optimizer)  # a step
    \t\tscaler.update()
    '''
    assert rewritten(textwrap.dedent(source), tmp_path, "torch") == textwrap.dedent(expected)


def test_constructors_and_their_defaults(tmp_path: Path) -> None:
    source = """\
    from apex.optimizers import FusedAdam, FusedAdagrad, FusedSGD
    from apex.normalization import FusedLayerNorm, FusedRMSNorm
    from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model, SyncBatchNorm
    FusedAdam(p, 1e-3, True, (0.9, 0.95), 1e-6, weight_decay=0.1)
    FusedAdam(p, adam_w_mode=False)
    FusedAdagrad(p, 0.1, 1e-8)
    FusedSGD(p, 0.1, 0.9, nesterov=True)
    FusedLayerNorm(8, 1e-6), FusedRMSNorm(8), isinstance(m, FusedLayerNorm)
    DDP(model), DDP(model, delay_allreduce=True, message_size=2**25)
    convert_syncbn_model(model, process_group=g), SyncBatchNorm(8)
    """
    expected = """\
    import torch
    torch.optim.AdamW(p, 1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    torch.optim.Adam(p)
    torch.optim.Adagrad(p, 0.1, eps=1e-8)
    torch.optim.SGD(p, 0.1, 0.9, nesterov=True)
    torch.nn.LayerNorm(8, 1e-6), torch.nn.RMSNorm(8, eps=1e-05), isinstance(m, torch.nn.LayerNorm)
    torch.nn.parallel.DistributedDataParallel(model), \\
    torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group=g), torch.nn.SyncBatchNorm(8)
    """
    found = rewritten(textwrap.dedent(source), tmp_path, "torch")
    assert found == textwrap.dedent(expected).replace("\\\n", "")


def test_every_number_of_the_loss_scale_keeps_its_meaning(tmp_path: Path) -> None:
    """Convert arguments of `amp.initialize` and `GradScaler`, whose names and order differ, in both directions."""
    numbers = {"dynamic_init_scale": 1024.0, "scale_growth_factor": 3.0, "scale_backoff_factor": 0.25}
    numbers["scale_window"] = 7
    theirs = {"init_scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    given = "".join(f", {name}={value}" for name, value in numbers.items())
    to_torch = rewritten(with_options(given), tmp_path, "torch")
    (call,) = re.findall(r"GradScaler\((.*)\)", to_torch)
    assert dict(re.findall(r"(\w+)=([\d.]+)", call)) == {name: str(value) for name, value in theirs.items()}
    for positional in (False, True):
        arguments = [str(value) if positional else f"{name}={value}" for name, value in theirs.items()]
        source = NATIVE.replace("GradScaler()", f"GradScaler('cuda', {', '.join(arguments)})")
        (call,) = re.findall(r"amp\.initialize\((.*)\)", rewritten("import torch\n" + source, tmp_path, "apex"))
        found = dict(re.findall(r"(\w+)=([\d.]+)", call))
        assert found.items() >= {name: str(value) for name, value in numbers.items()}.items()


LOOP = "for x, y in data:\n    loss = model(x)\n    {0}\n    optimizer.step()\n"
SCALED = "with amp.scale_loss(loss, optimizer{}) as scaled_loss:\n        {}scaled_loss.backward()"
START = "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer{})\n"
SCRIPT = START.format("") + LOOP.format(SCALED.format("", ""))
NATIVE = """\
from torch.amp import GradScaler, autocast
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler()
for x, y in data:
    with autocast("cuda"):
        loss = model(x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


GUARDED_BACKWARD = START.format("") + LOOP.format(
    "if scale:\n        " + SCALED.format("", "    ").replace("\n", "\n    ") + "\n    else: loss.backward()"
)
# Autocast in `evaluate` would have to ask a scaler that it cannot see.
EVALUATION = (
    "def train(model, optimizer, data):\n"
    + textwrap.indent(SCRIPT.replace("model, opt", "if fp16: model, opt", 1), "    ")
    + "def evaluate(model, x):\n    return model(x)\nevaluate(model, train(model, optimizer, data))\n"
)
SKIPPED_STEP = SCRIPT.replace("    opt", "    if clip_grad_norm_(model.parameters(), 1) > 9: continue\n    opt")
FALLBACK = """\
try:
    from apex.normalization import FusedLayerNorm as LN
except ImportError:
    from torch.nn import LayerNorm as LN
LN(8)
"""
CASTS_ONLY = """\
import torch
optimizer = torch.optim.SGD(m.parameters())
with torch.autocast("cuda"): loss = m(x)
loss.backward()
optimizer.step()
"""


# Autocast decorates only a part of the model.
DECORATED_PART = NATIVE.replace(
    "\nmodel", "\nclass Part(Module):\n    @autocast('cuda')\n    def forward(self, x): pass\nmodel"
)


def with_options(options: str, scale_options: str = "", first: str = "") -> str:
    return START.format(options) + LOOP.format(SCALED.format(scale_options, first))


REFUSED = [
    # rule, line, target, script
    ("syntax", 1, "torch", "from apex import amp ("),
    ("opt-level", 2, "torch", with_options(", opt_level='O2'")),
    ("opt-level", 2, "torch", with_options(", opt_level='O3'")),
    ("not-literal", 2, "torch", with_options(", opt_level=args.opt_level")),
    ("not-literal", 2, "torch", with_options(", loss_scale=args.loss_scale")),
    ("argument", 2, "torch", with_options(", loss_scale=128.0")),
    ("argument", 2, "torch", with_options(", keep_batchnorm_fp32=True")),
    ("argument", 2, "booster", with_options(", enabled=args.fp16")),
    ("argument", 2, "torch", "from apex.optimizers import FusedAdam\nFusedAdam(p, bias_correction=False)\n"),
    ("call-form", 2, "torch", with_options(", **options")),
    ("call-form", 2, "torch", SCRIPT.replace("model, optimizer = amp", "prepared[0] = 1, amp")),
    ("several-initialize", 8, "torch", SCRIPT + "model2 = amp.initialize(model2)\n"),
    ("initialize-elsewhere", 4, "torch", "from apex import amp\n" + LOOP.format(SCALED.format("", ""))),
    ("scale-loss-elsewhere", 2, "torch", START.format("")),
    ("conditional", 2, "torch", SCRIPT.replace("model, opt", "if ready(): model, opt", 1)),
    ("conditional", 2, "torch", with_options(", enabled=args.fp16, opt_level='O4'")),
    ("conditional", 3, "torch", EVALUATION),
    ("several-losses", 2, "torch", with_options(", num_losses=2")),
    ("several-losses", 5, "torch", with_options("", ", loss_id=1")),
    (
        "several-losses",
        7,
        "torch",
        SCRIPT.replace("    optimizer.step", "    " + SCALED.format("", "") + "\n    optimizer.step"),
    ),
    (
        "several-losses",
        9,
        "apex",
        NATIVE.replace("    scaler.step", "    scaler.scale(loss).backward()\n    scaler.step"),
    ),
    ("several-losses", 9, "torch", SCRIPT + "def pretrain(loss):\n    loss.backward()\n"),
    ("several-losses", 8, "torch", GUARDED_BACKWARD),
    ("delayed", 5, "torch", with_options("", ", delay_unscale=True")),
    ("delayed", 5, "booster", with_options("", ", delay_unscale=step % 2")),
    ("scaled-loss", 5, "torch", with_options("", "", "print(scaled_loss)\n        ")),
    ("scaled-loss", 5, "booster", with_options("", "", "print(scaled_loss)\n        ")),
    ("registration", 2, "torch", SCRIPT.replace("\n", "\namp.register_half_function(torch, 'einsum')\n", 1)),
    ("registration", 8, "torch", SCRIPT + "@amp.float_function\ndef f(): pass\n"),
    ("amp-internals", 8, "torch", SCRIPT + "amp._amp_state.loss_scalers[0]._loss_scale\n"),
    ("amp-internals", 2, "torch", SCRIPT.replace("\n", "\nassert amp is not None\n", 1)),
    ("forward-elsewhere", 5, "torch", SCRIPT.replace("model(x)", "criterion(x)")),
    ("forward-elsewhere", 4, "torch", SCRIPT.replace("    loss = model(x)\n", "").replace("(loss,", "(model(x),")),
    ("step-elsewhere", 5, "torch", SCRIPT.replace("optimizer.step()", "opt.step()")),
    ("step-form", 7, "torch", SCRIPT.replace("optimizer.step()", "optimizer.step(closure)")),
    ("gradients", 7, "torch", SKIPPED_STEP),
    ("gradients", 9, "torch", SCRIPT + "def clip(m):\n    return [p.grad for p in m.parameters()]\n"),
    (
        "gradients",
        9,
        "apex",
        NATIVE.replace("    scaler.step", "    clip_grad_norm_(model.parameters(), 1)\n    scaler.step"),
    ),
    ("no-loss-scale", 8, "torch", with_options(", opt_level='O4'") + "torch.save(amp.state_dict(), path)\n"),
    ("names-taken", 2, "torch", SCRIPT + "scaler = grad_scaler = 1\n"),
    ("names-taken", 11, "apex", NATIVE + "amp = apex_amp = 1\n"),
    ("names-taken", 2, "booster", SCRIPT + "booster = xgboost.Booster()\n"),
    ("both", 8, "torch", SCRIPT + "torch.cuda.amp.GradScaler()\n" + "import torch\n"),
    ("both", 12, "apex", NATIVE + SCRIPT.split("\n", 1)[0] + "\nmodel = amp.initialize(model)\n"),
    ("fallback", 5, "torch", FALLBACK),
    ("no-equivalent", 2, "torch", "from apex.optimizers import FusedLAMB\nFusedLAMB(p)\n"),
    ("no-equivalent", 2, "torch", "from apex.optimizers import FusedAdam\nclass Mine(FusedAdam): pass\n"),
    (
        "no-equivalent",
        2,
        "torch",
        "from apex.parallel import DistributedDataParallel\nm = DistributedDataParallel(m)\nm.disable_allreduce()\n",
    ),
    (
        "autocast-form",
        6,
        "apex",
        NATIVE.replace("with autocast", "context = autocast").replace(":\n        loss", "\n    loss"),
    ),
    (
        "autocast-form",
        6,
        "apex",
        NATIVE.replace("with autocast(", "context = make(autocast(").replace('"):\n    ', '"))\n'),
    ),
    ("autocast-form", 7, "apex", DECORATED_PART),
    ("autocast-type", 4, "apex", NATIVE.replace('"cuda"', "x.device.type")),
    ("autocast-type", 11, "apex", NATIVE + "with autocast('cuda', dtype=torch.bfloat16): model(x)\n"),
    ("autocast-elsewhere", 4, "apex", NATIVE.replace('with autocast("cuda")', "with casts()")),
    ("autocast-only", 3, "apex", CASTS_ONLY.replace("loss.backward()\n", "")),
    ("not-literal", 11, "apex", NATIVE + "with autocast('cuda', enabled=flag): model(x)\n"),
    ("scaler-use", 11, "apex", NATIVE + "checkpoints.save(model, scaler)\n"),
    ("scaler-use", 9, "apex", NATIVE.replace("    scaler.step", "    print(scaler.get_scale())\n    scaler.step")),
    ("scaler-use", 1, "apex", "def log(scaler=0):\n    if scaler: print()\n" + NATIVE + "log()\nlog(scaler)\n"),
    ("scaler-use", 11, "apex", NATIVE.replace("scaler", "self.scaler") + "trainer.scaler.update()\n"),
    ("several-scalers", 11, "apex", NATIVE + "other = GradScaler()\n"),
    ("optimizer-unknown", 4, "apex", NATIVE.replace("model.parameters()", "groups")),
    ("outside-autocast", 11, "apex", NATIVE + "predict = lambda x: model(x)\n"),
    ("outside-autocast", 5, "apex", NATIVE.replace("in data", "in model(data)")),
    ("model-order", 5, "apex", NATIVE.replace("scaler = GradScaler()\n", "scaler = GradScaler()\nmodel.cuda()\n")),
    ("several-models", 2, "booster", SCRIPT.replace("= amp.initialize(model,", "= amp.initialize([model, head],")),
]


@pytest.mark.parametrize(("rule", "line", "to", "source"), REFUSED)
def test_unsupported_code_is_refused_with_its_rule(rule: str, line: int, to: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(source)
    result = migrate(path, to=to)
    assert result.after == result.before
    assert (rule, line) in [(refusal.rule, refusal.line) for refusal in result.refused], result.refused
    assert all("{" not in refusal.advice and "None" not in refusal.advice for refusal in result.refused)


def test_every_rule_is_tested_and_documented() -> None:
    from_colossalai = {"no-counterpart"}  # tested with a script of Colossal-AI
    assert {rule for rule, *_ in REFUSED} | from_colossalai == set(ADVICE)
    page = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
    assert set(re.findall(r"^\| `([a-z][a-z-]+)` \|", page, re.MULTILINE)) == set(ADVICE)


def test_models_that_are_wrapped_between_initialize_and_the_loop(tmp_path: Path) -> None:
    start = START.format("") + "model = DistributedDataParallel(convert_syncbn_model(model))\n"
    imports = "from apex.parallel import DistributedDataParallel, convert_syncbn_model\n"
    found = rewritten(imports + start + LOOP.format(SCALED.format("", "")), tmp_path, "torch")
    assert "apex" not in found
    assert "model = torch.nn.parallel.DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync" in found
    assert found.count("with torch.autocast") == 1


def test_an_attribute_of_a_call_is_not_a_use_of_the_import(tmp_path: Path) -> None:
    source = "from apex.logging import get_dist_logger\nget_dist_logger().info(1)\n"
    assert rewritten(source, tmp_path, "torch", refused=("no-equivalent",)) == source


def test_an_existing_import_is_not_repeated(tmp_path: Path) -> None:
    found = rewritten("import os, torch, torch.nn as nn\n" + SCRIPT, tmp_path, "torch")
    assert found.count("import") == 1


def test_new_imports_follow_a_guarded_import(tmp_path: Path) -> None:
    guarded = "import os\ntry:\n    import wandb\n    has_wandb = True\nexcept ImportError:\n    has_wandb = False\n"
    found = rewritten(guarded + SCRIPT, tmp_path, "torch")
    assert found.index("import torch\n") > found.index("has_wandb = False")


def test_a_scaler_behind_a_flag_is_made_before_the_condition(tmp_path: Path) -> None:
    source = """\
    import torch
    from apex import amp


    def train(model, optimizer, loader, fp16):
        if fp16:
            print("mixed precision")
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        for x in loader:
            loss = model(x)
            if fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
    """
    found = rewritten(textwrap.dedent(source), tmp_path, "torch")
    assert found.index("scaler = torch.amp.GradScaler(") < found.index("if fp16:")


def test_line_ends_stay(tmp_path: Path) -> None:
    path = tmp_path / "windows.py"
    path.write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    after = migrate(path, to="torch").after
    assert b"GradScaler" in after
    assert after.count(b"\n") == after.count(b"\r\n")


def test_refused_amp_code_stays_whole_and_the_rest_changes(tmp_path: Path) -> None:
    source = "from apex.optimizers import FusedSGD\n" + with_options(", opt_level='O2'") + "FusedSGD(p, 0.1)\n"
    code = rewritten(source, tmp_path, "torch", refused=("opt-level",))
    lines = source.replace("FusedSGD(", "torch.optim.SGD(").splitlines(keepends=True)
    assert code == "".join([lines[1], "import torch\n", *lines[2:]])


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["migrate", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_a_diff_is_printed_and_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    code, output, _ = run(path)
    assert code == 0
    assert output.startswith(f"--- {path}\n+++ {path}\n@@ ")
    assert "\n+    scaler.step(optimizer)\n" in output
    assert path.read_text() == SCRIPT
    assert run(path, "--check")[0] == 1
    assert run(path, "--check", "--write")[0] == 1
    assert path.read_text() == SCRIPT


def test_files_of_a_folder_are_written(tmp_path: Path) -> None:
    for name in ("a.py", "deep/b.py", ".hidden/c.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SCRIPT)
    (tmp_path / "a.py").chmod(0o750)
    (tmp_path / "unrelated.py").write_text("broken (")
    assert run(tmp_path, "--write")[0] == 0
    changed = [path.name for path in tmp_path.rglob("*.*") if path.is_file() and "GradScaler" in path.read_text()]
    assert sorted(changed) == ["a.py", "b.py"]
    assert os.stat(tmp_path / "a.py").st_mode & 0o777 == 0o750
    assert run(tmp_path, "--check") == (0, "", "nothing to rewrite\n")


def test_links_in_a_folder_are_left_alone(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir(), folder.mkdir()
    for path in (outside / "other.py", folder / "own.py"):
        path.write_text(SCRIPT)
    (folder / "linked.py").symlink_to(outside / "other.py")
    (folder / "deep").symlink_to(outside)
    (folder / "gone.py").symlink_to(outside / "nothing.py")
    assert run(folder, "--write")[:2] == (0, f"wrote {folder / 'own.py'}\n")
    assert (outside / "other.py").read_text() == SCRIPT
    assert (folder / "linked.py").is_symlink()
    assert run(folder / "linked.py", "--write")[0] == 0  # a file that is named is meant
    assert "GradScaler" in (outside / "other.py").read_text()


def test_refused_places_are_printed_with_file_line_and_rule(tmp_path: Path) -> None:
    good, bad, broken = (tmp_path / name for name in ("good.py", "bad.py", "broken.py"))
    for path, text in ((good, SCRIPT), (bad, with_options(", opt_level='O2'")), (broken, "import apex\nclass")):
        path.write_text(text)
    code, _, errors = run(tmp_path, "--write")
    assert code == 2
    assert f"{bad}:2: opt-level: 'O2' casts weights" in errors
    assert f"{broken}:2: syntax: " in errors
    assert "1 file rewritten, 2 places left as they are" in errors
    assert "GradScaler" in good.read_text()
    assert broken.read_text() == "import apex\nclass"


def test_binary_files_are_no_python(tmp_path: Path) -> None:
    for content in (b"\x7fELF\x02\x00\x00", SCRIPT.encode("utf-16"), SCRIPT.encode("utf-16-le")):
        path = tmp_path / "binary.py"
        path.write_bytes(content)
        code, _, errors = run(path, "--write")
        assert code == 2
        assert f"{path}:1: syntax: not Python: it has zero bytes" in errors
        assert path.read_bytes() == content


def test_json(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(with_options(", opt_level='O2'"))
    (tmp_path / "good.py").write_text(SCRIPT)
    code, output, _ = run(tmp_path, "--json")
    document = json.loads(output)
    assert code == 2
    assert (document["to"], document["written"]) == ("torch", False)
    bad, good = document["files"]
    assert (bad["changed"], bad["diff"], bad["refused"][0]["rule"], bad["refused"][0]["line"]) == (
        False,
        "",
        "opt-level",
        2,
    )
    assert (good["changed"], good["refused"]) == (True, [])
    assert good["diff"].startswith("---")


def test_missing_paths_and_packages_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = run(tmp_path / "nothing.py")
    assert (code, "nothing.py' does not exist" in errors) == (2, True)
    for name in [name for name in sys.modules if name.startswith(("libcst", "apex._cli.migrate"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    code, _, errors = run(tmp_path)
    assert (code, "pip install libcst" in errors) == (2, True)


COLOSSAL = """\
import colossalai
from colossalai.booster import Booster
from colossalai.nn.optimizer import HybridAdam, DistributedLamb
import colossalai.cluster as cluster  # stays


def main(colossalai_config=None):
    colossalai.launch_from_torch()
    print("colossalai", cluster, thing.colossalai)
"""


def test_colossalai_is_replaced_by_apex(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(COLOSSAL)
    done = CliRunner().invoke(app, ["migrate", "--from", "colossalai", "--write", str(path)])
    assert done.exit_code == 2
    assert "train.py:3: no-counterpart: colossalai.nn.optimizer.DistributedLamb has no counterpart" in done.stderr
    expected = COLOSSAL.replace("import colossalai", "import apex").replace("from colossalai", "from apex")
    assert path.read_text() == expected.replace("    colossalai.launch", "    apex.launch")
    path.write_text("from colossalai.zero import LowLevelZeroOptimizer\nfrom colossalai import kernel\n")
    done = CliRunner().invoke(app, ["migrate", "--from", "colossalai", str(path)])
    assert done.exit_code == 0, done.stderr
    assert "+from apex.zero import LowLevelZeroOptimizer" in done.stdout
