"""LowLevelZeroOptimizer: ZeRO of stage 1 and 2 for an optimizer, without a Booster, with Colossal-AI's arguments."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from ...booster._precision import MixedOptimizer
from ...booster._zero import load_plain_state, whole_gradients, zero_optimizer
from ...booster.mixed_precision import FP16NaiveMixedPrecision
from ...booster.plugin.low_level_zero_plugin import zero_options
from ...ops._host import HOST

__all__ = ["LowLevelZeroOptimizer"]


class LowLevelZeroOptimizer(MixedOptimizer):
    """An optimizer whose state, and with `partition_grad` gradients, are divided among processes.

    Takes the optimizers of `LowLevelZeroPlugin`. Parameters keep their dtype, or get `forced_dtype`; float16 ones have
    a loss scale (`initial_scale` and the arguments after it), and the state has float32 weights (`master_weights`).
    `clip_grad_norm` is the norm that every step clips to, `reduce_bucket_size` the elements of a bucket. State is
    divided among `dp_process_group`, None for all processes, and replicated over `extra_dp_group`. With `cpu_offload`
    it is in the host's memory. `backward` runs inside of `backward_context()`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pg_to_param_list: Any = None,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2.0**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int = 2**20,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        dp_process_group: Any = None,
        extra_dp_group: Any = None,
        forced_dtype: torch.dtype | None = None,
        master_weights: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        backward_context: Any = None,
    ) -> None:
        if pg_to_param_list is not None:
            raise NotImplementedError("pg_to_param_list is not supported; use dp_process_group for all parameters")
        if fp8_communication:
            raise NotImplementedError("fp8_communication=True is not supported; use communication_dtype")
        if extra_dp_group is not None and dp_process_group is None:
            raise ValueError("extra_dp_group needs dp_process_group, the processes that the state is divided among")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params if forced_dtype is not None else ():
            param.data = param.data.to(forced_dtype)
        scaling = {"initial_scale": initial_scale, "min_scale": min_scale, "growth_factor": growth_factor}
        scaling |= {"backoff_factor": backoff_factor, "growth_interval": growth_interval, "hysteresis": hysteresis}
        is_half = any(param.dtype == torch.float16 for param in params)
        naive = FP16NaiveMixedPrecision(**scaling, max_scale=max_scale, verbose=verbose)  # type: ignore[arg-type]
        groups = {"distributed_process_group": dp_process_group, "redundant_process_group": extra_dp_group}
        divided, saved = zero_optimizer(
            optimizer,
            **zero_options(reduce_bucket_size / 1e6, communication_dtype, overlap_communication, overlap_allgather),
            store_params=master_weights,
            cpu_offload=cpu_offload,
            **{name: group for name, group in groups.items() if group is not None},
        )
        super().__init__(divided, naive.scaler() if is_half else None)
        self.max_norm = clip_grad_norm
        self._partition_grad, self._backward_context = partition_grad, backward_context or contextlib.nullcontext
        if saved is not None:
            load_plain_state(divided, saved)
        self._with_gradient: set[Tensor] = set()
        own: Any = weakref.ref(self)  # a reference cycle would keep an unused optimizer in memory

        def note(param: Tensor) -> None:
            if own() is not None:
                own()._with_gradient.add(param)

        trained = (param for param in params if param.requires_grad)
        self.grad_handles = [param.register_post_accumulate_grad_hook(note) for param in trained]

    def __del__(self) -> None:
        for handle in getattr(self, "grad_handles", ()):
            handle.remove()

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        with self._backward_context():
            super().backward(loss, inputs, retain_graph, **kwargs)

    def no_sync(self) -> Any:
        """Return a context whose backward passes keep gradients in `param.grad`; the next one outside sends them."""
        if self._partition_grad:
            raise RuntimeError("no_sync needs partition_grad=False: divided gradients are sent in every backward pass")
        return super().no_sync()

    def get_param_grad(self, working_param: Tensor) -> Tensor | None:
        """Return the whole mean gradient of a parameter, times the loss scale, or None if it has none.

        All processes must call it.
        """
        if working_param not in self._with_gradient:
            return None
        return whole_gradients(self.optim, [working_param])[working_param]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._with_gradient.clear()
        super().zero_grad(*args, **kwargs)

    def _force_wait_all_gather(self) -> None:
        """Wait for the parameters of the last step."""
        self.optim.param_sync()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in PyTorch's format and order, with the loss scale; all processes must call it."""
        saved = super().state_dict()
        saved["state"].pop("step", None)
        counted = [(float(group.pop("step")), group["params"]) for group in saved["param_groups"]]
        counts = {
            key: torch.tensor(step, dtype=torch.float32, device=HOST) for step, params in counted for key in params
        }
        names = self.optim._state_names()
        saved["state"] = {
            key: {"step": counts[key].clone(), **{name: state[name] for name in names}}
            for key, state in sorted(saved["state"].items())
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of PyTorch's optimizer; all processes must call it."""
        load_plain_state(self.optim, {name: state_dict[name] for name in ("state", "param_groups")})
        self.load_scaler_state(state_dict.get("scaler") or {})
