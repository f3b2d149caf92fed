"""The loss scaler of an `FP16_Optimizer` in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..amp.scaler import LossScaler


def saved_scaler(scaler: LossScaler, arguments: dict[str, Any]) -> dict[str, Any]:
    """Plain numbers, which `torch.load` reads without running code; `arguments` are those of a dynamic scaler."""
    return {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped, "dynamic_loss_args": dict(arguments)}


def load_scaler(saved: Any, dynamic: bool) -> tuple[LossScaler, dict[str, Any]]:
    """A scaler in the saved state, and the arguments it was made with.

    The original pickles its scaler whole; such an object is read too.
    """
    numbers = saved if isinstance(saved, Mapping) else _numbers_of(saved)
    arguments = dict(numbers.get("dynamic_loss_args") or {})
    scale = float(numbers["loss_scale"])
    scaler = LossScaler("dynamic", **arguments) if dynamic else LossScaler(scale)
    scaler._loss_scale = scale
    scaler._unskipped = int(numbers["unskipped"])
    return scaler, arguments


def _numbers_of(pickled: Any) -> dict[str, Any]:
    # Unpickling fills the object's dictionary with the original's attributes, whatever properties the class has.
    attributes = vars(pickled)
    if "cur_scale" in attributes:  # a scaler of apex.fp16_utils, as in checkpoints from before 2019
        since = attributes.get("cur_iter", 0) - attributes.get("last_overflow_iter", -1) - 1
        names = {"scale_factor": "scale_factor", "scale_window": "scale_window"}
        scale, unskipped = attributes["cur_scale"], since % attributes.get("scale_window", since + 1)
    else:
        names = {
            "scale_window": "_scale_seq_len",
            "min_loss_scale": "_min_loss_scale",
            "max_loss_scale": "_max_loss_scale",
        }
        scale, unskipped = attributes["_loss_scale"], attributes["_unskipped"]
    arguments = {name: attributes[source] for name, source in names.items() if source in attributes}
    return {"loss_scale": scale, "unskipped": unskipped, "dynamic_loss_args": arguments}
