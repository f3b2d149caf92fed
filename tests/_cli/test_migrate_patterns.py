"""`apex migrate --to apex`: scripts with the forms of torch.amp that published code uses, run before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="apex migrate needs libcst")

from .test_migrate import SETUP, losses_of, rewritten

IMPORTS = "from contextlib import nullcontext\nfrom torch.amp import GradScaler, autocast\n"
NET = "nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))"

# A context in a variable, a type chosen by name, a scaler with a flag of its own, an optimizer made by the model.
CONTEXT = f"""
dtype = "DTYPE"
ptdtype = {{"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}}[dtype]
casts = CASTS
ctx = nullcontext() if not casts else torch.amp.autocast(device_type="cpu", dtype=ptdtype)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = {NET}

    def configure(self, rate):
        return torch.optim.SGD(self.parameters(), lr=rate)

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y)

model = Net()
scaler = GradScaler("cpu", enabled=(dtype == "float16"))
optimizer = model.configure(0.1)

@torch.no_grad()
def estimate():
    for x, y in batches:
        with ctx:
            losses.append(model(x, y).item())

for x, y in batches:
    with ctx:
        loss = model(x, y) / 2
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
estimate()
"""

# A scaler that is None without a flag, an optimizer in each branch of an `if`, an evaluation without casts.
OPTIONAL = f"""
def train(model, optimizer, clip, scaler=None):
    for x, y in batches:
        with torch.autocast("cpu", dtype=torch.float16, enabled=scaler is not None):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if clip:
                # so that the norm is that of the gradients
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        losses.append(loss.item())

def evaluate(model):
    for x, y in batches:
        output = model(x)
        losses.append(F.cross_entropy(output, y).item())

def groups_of(model):
    return [{{"params": list(model.parameters())}}]

def main(args):
    model = {NET}
    model_without_ddp = model
    groups = groups_of(model)
    if args.kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.1)
    elif args.kind == "adam":
        optimizer = torch.optim.Adam(groups, lr=0.1)
    else:
        raise ValueError(args.kind)
    SCALER
    train(model, optimizer, True, scaler=scaler)
    evaluate(model)
    if scaler:
        state = scaler.state_dict()
        losses.append(scaler.get_scale())

class args:
    amp, kind = FLAG, "adam"

main(args)
"""
SCALERS = [
    'scaler = GradScaler("cpu") if args.amp else None',
    'scaler = None\n    if args.amp:\n        scaler = GradScaler("cpu")',
    'if not args.amp:\n        scaler = None\n    else:\n        scaler = GradScaler("cpu")',
]

# The flag has another name in each function, the scaler too; branches that differ; a name of apex's is taken.
RENAMED = f"""
def train(model, optimizer, grad_scaler, use_amp):
    for x, y in batches:
        with autocast("cpu", dtype=torch.float16, enabled=use_amp):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if grad_scaler.is_enabled():
            grad_scaler.scale(loss).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update()
            losses.append(grad_scaler.get_scale())
        else:
            losses.append(1.0)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())

def main(amp):
    model = {NET}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=amp)
    train(model, optimizer, scaler, amp)
    losses.append(scaler.get_scale())

main(amp=FLAG)
"""

DECORATED = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = {NET}

    @autocast("cpu", dtype=torch.float16)
    def forward(self, x):
        return self.layers(x)

@autocast("cpu", dtype=torch.float16)
def loss_of(output, y):
    return F.cross_entropy(output, y)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu")
for x, y in batches:
    loss = loss_of(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
"""

# Wrapped before the optimizer is made; a type that depends on the device; float16 without a scaler.
WRAPPED = f"""
device = torch.device("cpu")
model = nn.DataParallel({NET})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches:
    with torch.autocast(device.type):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""
UNSCALED = WRAPPED.replace("device.type", '"cpu", dtype=torch.float16')


SCRIPTS = {
    **{
        f"context-{dtype}-{casts}": CONTEXT.replace("DTYPE", dtype).replace("CASTS", casts)
        for dtype, casts in (("float16", "True"), ("bfloat16", "True"), ("bfloat16", "False"))
    },
    **{
        f"optional-{place}": OPTIONAL.replace("SCALER", text).replace("FLAG", "True")
        for place, text in enumerate(SCALERS)
    },
    "optional-off": OPTIONAL.replace("SCALER", SCALERS[0]).replace("FLAG", "False"),
    "renamed": RENAMED.replace("FLAG", "True"),
    "renamed-off": RENAMED.replace("FLAG", "False"),
    "decorated": DECORATED,
    "wrapped": WRAPPED,
    "unscaled": UNSCALED,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_the_same_before_and_after(name: str, tmp_path: Path) -> None:
    source = SETUP + IMPORTS + SCRIPTS[name]
    code = rewritten(source, tmp_path, "apex")
    assert "autocast(" not in code
    assert "GradScaler(" not in code
    assert ".initialize(" in code
    expected = losses_of(source)
    assert losses_of(code) == expected


def test_branches_that_differ_by_the_scaler_alone_become_one(tmp_path: Path) -> None:
    code = rewritten(SETUP + IMPORTS + SCRIPTS["optional-0"], tmp_path, "apex")
    assert code.count(".backward(") == 1
    assert code.count("optimizer.step()") == 1
    assert "# so that the norm is that of the gradients" in code
    assert "def train(model, optimizer, clip):" in code
    assert "train(model, optimizer, True)" in code
    assert "        if args.amp:\n" not in code
    assert "    if args.amp:\n        state = amp.state_dict()" in code


def test_a_model_called_without_autocast_runs_without_casts(tmp_path: Path) -> None:
    code = rewritten(SETUP + IMPORTS + SCRIPTS["optional-0"], tmp_path, "apex")
    assert "        with amp.disable_casts():\n            output = model(x)\n            losses.append(F." in code


def test_options_known_only_at_run_time(tmp_path: Path) -> None:
    code = rewritten(SETUP + IMPORTS + SCRIPTS["context-float16-True"], tmp_path, "apex")
    assert 'opt_level={torch.float32: "O0", torch.float16: "O1", torch.bfloat16: "O4"}[ptdtype]' in code
    assert 'loss_scale="dynamic" if dtype == "float16" else 1.0, enabled=casts)' in code
    assert "ctx" not in code
    renamed = rewritten(SETUP + IMPORTS + SCRIPTS["renamed"], tmp_path, "apex")
    assert "from apex import amp as apex_amp\n" in renamed
    assert 'apex_amp.initialize(model, optimizer, opt_level="O1", enabled=amp)' in renamed
    assert "if apex_amp._amp_state.opt_properties.enabled:" in renamed
