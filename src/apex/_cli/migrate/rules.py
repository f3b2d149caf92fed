"""Tables of `apex migrate`: the advice of each rule, and torch's counterpart of each class and argument of apex."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import libcst as cst
import torch

import apex

# By rule: why code is not rewritten, and what the user can do. A rule about amp stops the rewrite of all amp code.
ADVICE = {
    "syntax": "not Python: {problem}",
    "opt-level": "{value} casts weights, torch.amp does not: use 'O1' or 'O4', or --to booster, which has every level",
    "not-literal": "{name}={value} is known only when the script runs: write the value that is meant",
    "argument": "{name}={value} of {function} has no counterpart: leave it out if the default will do",
    "call-form": "{function}: {problem}, which cannot be followed: write it plainly",
    "several-initialize": "a second amp.initialize in this file: leave one of them",
    "initialize-elsewhere": "amp.initialize is not in this file, and so not its opt level: rewrite both files by hand",
    "scale-loss-elsewhere": "amp.scale_loss is not in this file: rewrite both files by hand",
    "conditional": "amp.initialize under a condition that cannot be moved ({problem}): call it with enabled=...",
    "several-losses": "several losses with backward passes of their own: add them up, or rewrite by hand",
    "delayed": "{name} leaves gradients scaled: remove it, each backward pass may unscale by itself",
    "scaled-loss": "more than one backward pass is done with the scaled loss: use the loss itself for the rest",
    "registration": "{name} changes what is cast: use torch.autocast or torch.amp.custom_fwd in that function",
    "amp-internals": "{name} has no counterpart in torch.amp: remove this use",
    "forward-elsewhere": "no model of amp.initialize is called where the loss is made: call it in the same loop",
    "step-elsewhere": "no {optimizer}.step() beside the backward pass: put both into one file and function",
    "step-form": "{optimizer}.step must be a plain statement, for several optimizers all in one block",
    "gradients": "gradients that may still be scaled are used here: do it between backward pass and step, beside it",
    "no-loss-scale": "{level} has no loss scale: remove what saves and loads it",
    "names-taken": "{names} mean something else in this file: rename that",
    "no-counterpart": "{reason}",
    "both": "the file uses apex.amp and torch.amp: remove one of them",
    "fallback": "{name} is defined here for want of apex: use that, and remove the import of apex",
    "no-equivalent": "{name} has no counterpart in torch; it works beside torch.amp too",
    "autocast-form": "autocast in a form that cannot be followed: write `with autocast(...)` around the model's call",
    "autocast-type": "autocast to {dtype}: all of a file must be to one type, known where the optimizer is made",
    "autocast-elsewhere": "a GradScaler without autocast in this file: rewrite both files by hand",
    "autocast-only": "autocast without a backward pass in this file: rewrite the file that trains first, by hand",
    "scaler-use": "`{use}` uses the GradScaler for something that apex.amp has not, or not there: remove it",
    "several-scalers": "a second GradScaler: write amp.initialize(..., num_losses=2) by hand",
    "optimizer-unknown": "{optimizer} must be made once in this file, from model.parameters(): rewrite by hand",
    "outside-autocast": "{model} is called outside of autocast, where amp.initialize casts too: give it its own line",
    "model-order": "{model} is moved after the optimizer is made: move it first, amp.initialize needs it on its device",
    "several-models": "a Booster takes one model and one optimizer: boost others by hand",
}


# Arguments that torch does not have, with the values that mean torch's behaviour; None if every value does.
Drops = dict[str, set[str] | None]


@dataclass(frozen=True)
class Counterpart:
    """A function or class of torch that can replace one of apex, for calls whose arguments fit."""

    name: str
    dropped: Drops = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)  # apex's default, if torch has another, for calls without it
    bare: bool = False  # whether the name can also be replaced where it is not called
    own: tuple[str, ...] = ()  # attributes of apex's object that torch's does not have


def parameters_of(name: str) -> list[str]:
    """Return the parameter names of a function or class of apex or torch, in order."""
    package, _, path = name.partition(".")
    return list(inspect.signature(attrgetter(path)({"apex": apex, "torch": torch}[package])).parameters)


_NO, _YES, _NONE = {"False", "0"}, {"True", "1"}, {"None"}
_ADAM_DROPS: Drops = {"bias_correction": _YES, "set_grad_none": _YES, "master_weights": _NO}
_SGD_DROPS: Drops = {"wd_after_momentum": _NO, "materialize_master_grads": None, "set_grad_none": None}
_TUNING = ("message_size", "allreduce_trigger_params", "allreduce_always_fp32", "num_allreduce_streams")
_DDP_DROPS: Drops = {"shared_param": _NONE, "retain_allreduce_buffers": _NO, "gradient_average": _YES}
_DDP_DROPS |= {**dict.fromkeys(_TUNING), "gradient_predivide_factor": {"1.0", "1"}}
_DDP_NAME, _DDP_OWN = "nn.parallel.DistributedDataParallel", ("enable_allreduce", "disable_allreduce")

# Counterparts of each function and class of apex, in order of preference.
COUNTERPARTS = {
    "optimizers.FusedAdam": (
        Counterpart("optim.AdamW", {**_ADAM_DROPS, "adam_w_mode": _YES}, added={"weight_decay": "0.0"}),
        Counterpart("optim.Adam", {**_ADAM_DROPS, "adam_w_mode": _NO}),
    ),
    "optimizers.FusedSGD": (Counterpart("optim.SGD", _SGD_DROPS),),
    "optimizers.FusedAdagrad": (Counterpart("optim.Adagrad", {"set_grad_none": _YES, "adagrad_w_mode": _NO}),),
    "normalization.FusedLayerNorm": (Counterpart("nn.LayerNorm", {"memory_efficient": None}, bare=True),),
    "normalization.FusedRMSNorm": (Counterpart("nn.RMSNorm", {"memory_efficient": None}, added={"eps": "1e-05"}),),
    "parallel.DistributedDataParallel": (
        Counterpart(_DDP_NAME, {**_DDP_DROPS, "delay_allreduce": _NO}, bare=True, own=_DDP_OWN),
        Counterpart(_DDP_NAME, {**_DDP_DROPS, "delay_allreduce": _YES}, added={"find_unused_parameters": "True"}),
    ),
    "parallel.convert_syncbn_model": (Counterpart("nn.SyncBatchNorm.convert_sync_batchnorm", {"channel_last": _NO}),),
    "parallel.SyncBatchNorm": (Counterpart("nn.SyncBatchNorm", {"channel_last": _NO, "fuse_relu": _NO}, bare=True),),
}

# amp.initialize with an argument that is not in these tables is refused, unless its value is None.
INITIALIZE, SCALE_LOSS = parameters_of("apex.amp.initialize"), parameters_of("apex.amp.scale_loss")
GRAD_SCALER = ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"]
AUTOCAST = ["device_type", "dtype", "enabled", "cache_enabled"]
# Arguments of amp.initialize for the dynamic loss scale, and GradScaler's names for them.
SCALING = {
    "dynamic_init_scale": "init_scale",
    "scale_growth_factor": "growth_factor",
    "scale_backoff_factor": "backoff_factor",
    "scale_window": "growth_interval",
}
WITHOUT_EFFECT = ("verbosity", "overflow_patience")  # arguments that change no numbers
LEVELS = {"O0": None, "O1": "float16", "O4": "bfloat16"}  # the dtype that autocast casts to
# Calls that autocast does not affect. Statements at the start of a run that call nothing else stay outside of autocast.
INERT = {"to", "cuda", "cpu", "Variable", "float", "long", "int", "len", "next", "range", "zip", "enumerate", "time"}
INERT |= {"list", "tuple", "dict", "get", "items", "size", "view", "reshape", "unsqueeze", "squeeze", "zero_grad"}


def literal(node: cst.CSTNode) -> object:
    """Return the value of a literal, or `...` for any other expression."""
    if isinstance(node, cst.SimpleString | cst.Integer | cst.Float):
        return node.evaluated_value
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
        return {"True": True, "False": False}.get(node.value)
    return ...


def bound(call: cst.Call, parameters: Sequence[str]) -> dict[str, cst.Arg] | None:
    """Return a call's arguments by parameter name, or None if the call uses `*` or `**` or has too many arguments."""
    if any(arg.star for arg in call.args) or sum(arg.keyword is None for arg in call.args) > len(parameters):
        return None
    return {arg.keyword.value if arg.keyword else parameters[index]: arg for index, arg in enumerate(call.args)}


def with_keyword(arg: cst.Arg, name: str) -> cst.Arg:
    """Return an argument written as `name=value`."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return arg.with_changes(keyword=cst.Name(name), equal=equal)


def matching(call: cst.Call, name: str, choices: tuple[Counterpart, ...]) -> Counterpart | tuple[str, str]:
    """Return the first counterpart that a call of apex's `name` fits.

    If none fits, return the name and value of an argument that the last one does not accept.
    """
    misfit = ("*args", "...")
    arguments = bound(call, parameters_of(f"apex.{name}"))
    if arguments is None:
        return misfit
    values = {parameter: code_of(arg.value) for parameter, arg in arguments.items()}
    for choice in choices:
        unfit = [(parameter, value) for parameter, value in values.items() if not _fits(parameter, value, choice)]
        if not unfit:
            return choice
        misfit = unfit[0]
    return misfit


def _fits(name: str, value: str, choice: Counterpart) -> bool:
    """Return whether torch has a parameter of this name, or behaves as `value` asks without it."""
    if name in choice.dropped:
        allowed = choice.dropped[name]
        return allowed is None or value in allowed
    return name in parameters_of(f"torch.{choice.name}")


def exchanged(call: cst.Call, name: str, choice: Counterpart, torch: str) -> cst.Call:
    """Return a call of apex's `name` rewritten as a call of torch's counterpart."""
    ours, theirs = parameters_of(f"apex.{name}"), parameters_of(f"torch.{choice.name}")
    arguments = bound(call, ours)
    assert arguments is not None
    args = []
    for index, (parameter, arg) in enumerate(arguments.items()):
        if parameter not in choice.dropped:
            stays = arg.keyword is not None or ours[: index + 1] == theirs[: index + 1]
            args.append(arg if stays else with_keyword(arg, parameter))
    for parameter, value in choice.added.items():
        if parameter not in arguments:
            if args:
                args[-1] = args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            args.append(with_keyword(cst.Arg(cst.parse_expression(value)), parameter))
    if args and len(args) < len(call.args):
        args[-1] = args[-1].with_changes(comma=call.args[-1].comma)
    return call.with_changes(func=cst.parse_expression(f"{torch}.{choice.name}"), args=args)


def code_of(node: cst.CSTNode) -> str:
    """Return the source code of a node."""
    return cst.Module([]).code_for_node(node)
