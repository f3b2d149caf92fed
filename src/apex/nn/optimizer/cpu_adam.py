"""CPUAdam: Adam whose state is on the device of its parameters, with Colossal-AI's arguments."""

from __future__ import annotations

import warnings
from typing import Any

from .fused_adam import FusedAdam

__all__ = ["CPUAdam"]


class CPUAdam(FusedAdam):
    """Adam or AdamW (`adamw_mode`) for parameters on any device; the state is on the device of the parameters.

    Other keyword arguments have no effect, here as in Colossal-AI; a warning names them. State in files
    (`nvme_offload_fraction`) is not supported.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,
    ) -> None:
        if nvme_offload_fraction:
            raise NotImplementedError(
                f"nvme_offload_fraction={nvme_offload_fraction} is not supported; use 0.0, and "
                "GeminiPlugin(offload_optim_frac=1.0) to keep the state in the host's memory"
            )
        if defaults:
            names = ", ".join(f"{name}={value}" for name, value in defaults.items())
            warnings.warn(
                f"{type(self).__name__} ignores {names}. Give limits of norms and loss scales to the plugin "
                "(max_norm, initial_scale)",
                stacklevel=2,
            )
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay)
