"""Random number streams of tensor-parallel ranks, and activation checkpoints that reproduce random numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..._arguments import Count, checked
from ...ops._host import HOST
from .._groups.device import parameter_device
from ..context_parallel._parts import size_and_rank
from ..parallel_state import (
    get_expert_model_parallel_rank,
    get_expert_tensor_parallel_rank,
    get_tensor_model_parallel_rank,
)
from ..utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from .memory import MemoryBuffer, allocate_mem_buff

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
# Far from the seeds of data-parallel ranks, which are consecutive.
_MODEL_PARALLEL_SEED_OFFSET = 2718
# The stream of a rank's experts, and the distance of its seed; ranks with the same experts share it.
_EXPERT_PARALLEL_RNG_TRACKER_NAME = "expert-parallel-rng"
_EXPERT_PARALLEL_SEED_OFFSET, _EXPERT_PARALLEL_SEED_STRIDE = 1024, 100
# The stream of a context-parallel rank that its tensor-parallel ranks share.
CONTEXT_PARALLEL_STREAM = "context-parallel-rng"
# Distance between the seeds of context-parallel ranks; tensor-parallel ranks are in the first half of it.
_CONTEXT_PARALLEL_SEED_STRIDE = 1024

_activations: MemoryBuffer | None = None


def _generator(device: Any = -1) -> torch.Generator:
    """Return the default generator of a device; -1 means the device of the parameters."""
    device = parameter_device() if device == -1 else torch.device(device)
    if device.type in (HOST.type, "meta"):  # nothing is drawn on meta
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _set_cuda_rng_state(new_state: Tensor, device: Any = -1) -> None:
    """Set the state of a device's random number generator."""
    _generator(device).set_state(new_state)


def _state_after(seed: int) -> Tensor:
    """Return the state of a device's generator after it was seeded; raise ValueError if it takes no such seed."""
    try:
        return _generator().clone_state().manual_seed(seed).get_state()
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ValueError(f"seed={seed} is no seed of a generator: {error}") from error


class CudaRNGStatesTracker:
    """Named random number streams beside the device's default stream."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Remove all streams."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of each stream."""
        return dict(self.states_)

    @checked
    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all streams."""
        self.states_ = dict(states)
        self.seeds_ = set()

    @checked
    def add(self, name: str, seed: int) -> None:
        """Add a stream; raise if another stream has its name or its seed."""
        if seed in self.seeds_:
            raise Exception(f"seed {seed} already exists")
        if name in self.states_:
            raise Exception(f"cuda rng state {name} already exists")
        self.states_[name] = _state_after(seed)
        self.seeds_.add(seed)

    @checked
    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw random numbers from the stream `name` inside this context; the default stream does not advance."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added: call model_parallel_cuda_manual_seed first")
        generator = _generator()
        outside = generator.get_state()
        generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(outside)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the random number streams of this process."""
    return _tracker


def own_random_numbers(own: bool) -> contextlib.AbstractContextManager:
    """Return a context that draws this rank's own random numbers if `own`, for activations that ranks split.

    Otherwise tensor-parallel ranks draw the same numbers, and context-parallel ranks different ones.
    """
    if own:
        return _tracker.fork()
    if size_and_rank(None)[0] > 1:
        return _tracker.fork(CONTEXT_PARALLEL_STREAM)
    return contextlib.nullcontext()


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the random number stream of this rank's experts, for `fork`."""
    return _EXPERT_PARALLEL_RNG_TRACKER_NAME


@checked
def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default stream equally on all tensor-parallel ranks, and a second stream differently on each.

    The default stream serves computations that all ranks repeat, such as dropout outside of split layers. The second
    stream, used inside `fork()`, serves each rank's own part. Ranks that have different parts of the same sequences
    (context) also get a third stream, for dropout that tensor-parallel ranks repeat. The stream
    `get_expert_parallel_rng_tracker_name()` is shared by ranks with the same part of the same experts.
    """
    ranks, rank = size_and_rank(None)
    first = seed + _MODEL_PARALLEL_SEED_OFFSET + _CONTEXT_PARALLEL_SEED_STRIDE * rank
    own, shared = first + get_tensor_model_parallel_rank(), first + _CONTEXT_PARALLEL_SEED_STRIDE // 2
    expert = seed + _EXPERT_PARALLEL_SEED_OFFSET + get_expert_tensor_parallel_rank()
    expert += _EXPERT_PARALLEL_SEED_STRIDE * get_expert_model_parallel_rank()
    for each in (seed, own, shared, expert):
        _state_after(each)  # raises before anything is changed
    _generator().manual_seed(seed)
    _tracker.reset()
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, own)
    _tracker.add(_EXPERT_PARALLEL_RNG_TRACKER_NAME, expert)
    if ranks > 1:
        _tracker.add(CONTEXT_PARALLEL_STREAM, shared)


@checked
def init_checkpointed_activations_memory_buffer(
    micro_batch_size: Count,
    max_position_embeddings: Count,
    hidden_size: Count,
    num_layers: Count,
    tensor_model_parallel_size: Count,
    checkpoint_num_layers: Count,
    fp16: bool,
) -> None:
    """Allocate the buffer for activations of all layers with `checkpoint(..., distribute_saved_activations=True)`."""
    global _activations
    assert num_layers % checkpoint_num_layers == 0, "number of layers is not divisible by checkpoint-num-layers"
    numel_per_layer = micro_batch_size * max_position_embeddings * hidden_size // tensor_model_parallel_size
    numel = numel_per_layer * (num_layers // checkpoint_num_layers)
    dtype = torch.half if fp16 else torch.float
    assert _activations is None, "checkpointed activations memory buffer is already allocated."
    _activations = allocate_mem_buff("checkpointed activations", numel, dtype, track_usage=False)


def reset_checkpointed_activations_memory_buffer() -> None:
    """Mark the memory of checkpointed activations as free; call it once per iteration."""
    if _activations is not None:
        _activations.reset()


class _RandomState:
    """A snapshot of all random number streams."""

    def __init__(self) -> None:
        self.host = torch.get_rng_state()
        self.device = _generator().get_state()
        self.tracker = _tracker.get_states()
        self.seeds = set(_tracker.seeds_)

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        _generator().set_state(self.device)
        _tracker.set_states(self.tracker)
        _tracker.seeds_ = set(self.seeds)


def _check_outputs(outputs: Any) -> None:
    """Raise a TypeError if `outputs` has tensors where autograd would not find them, so that they had no gradients."""
    items = outputs if isinstance(outputs, tuple) else (outputs,)
    for item in items:
        if not isinstance(item, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(item)):
            raise TypeError(
                f"a checkpointed function must return a tensor or a tuple of tensors; tensors in a "
                f"{type(item).__name__} would have no gradients"
            )


class CheckpointFunction(torch.autograd.Function):
    """A function that saves only its inputs and runs again in the backward pass.

    With `distribute_saved_activations` each tensor-parallel rank saves only its part of the first argument.
    """

    @staticmethod
    def forward(ctx, run_function, distribute_saved_activations, *args):  # type: ignore[override]
        ctx.run_function = run_function
        ctx.random_state = _RandomState()
        devices = {HOST.type, parameter_device().type}
        ctx.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in sorted(devices)
        ]
        ctx.shape = args[0].shape if distribute_saved_activations else None
        with torch.no_grad():
            outputs = run_function(*args)
        _check_outputs(outputs)
        saved = list(args)
        if distribute_saved_activations:
            part = split_tensor_into_1d_equal_chunks(args[0].detach())
            saved[0] = part.clone() if _activations is None else _activations.add(part)
        ctx.tensor_indices = [index for index, value in enumerate(saved) if isinstance(value, Tensor)]
        ctx.plain_arguments = [None if isinstance(value, Tensor) else value for value in saved]
        ctx.save_for_backward(*[saved[index] for index in ctx.tensor_indices])
        ctx.tensors_require_grad = [isinstance(value, Tensor) and value.requires_grad for value in args]
        return outputs

    @staticmethod
    def backward(ctx, *args):  # type: ignore[override]
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "checkpoint works with backward() alone, not with torch.autograd.grad, which zero-bubble schedules "
                "call: do not recompute layers there, or use another schedule"
            )
        inputs = list(ctx.plain_arguments)
        for index, tensor in zip(ctx.tensor_indices, ctx.saved_tensors, strict=True):
            inputs[index] = tensor
        if ctx.shape is not None:
            inputs[0] = gather_split_1d_tensor(inputs[0]).view(ctx.shape)
        inputs = [
            value.detach().requires_grad_(needed) if isinstance(value, Tensor) else value
            for value, needed in zip(inputs, ctx.tensors_require_grad, strict=True)
        ]
        current = _RandomState()
        ctx.random_state.restore()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for kind, enabled, dtype, cache in ctx.autocast:
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
                outputs = ctx.run_function(*inputs)
        finally:
            current.restore()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, args, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and gradient is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return None, None, *(value.grad if isinstance(value, Tensor) else None for value in inputs)


@checked
def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Return `function(*args)`; the backward pass recomputes its activations with the same random numbers.

    One of the arguments must require a gradient, as for PyTorch's reentrant checkpoints; otherwise the parameters in
    `function` get none, and a warning says so. Tensors are returned alone or in a tuple.
    """
    if distribute_saved_activations and not (args and isinstance(args[0], Tensor)):
        raise TypeError("args[0] must be a tensor with distribute_saved_activations: it is what ranks divide")
    if torch.is_grad_enabled() and not any(isinstance(value, Tensor) and value.requires_grad for value in args):
        warnings.warn(
            "no argument of a checkpointed function requires a gradient, so the parameters in it get none either: "
            "call requires_grad_() on its input",
            stacklevel=3,
        )
    return CheckpointFunction.apply(function, distribute_saved_activations, *args)
