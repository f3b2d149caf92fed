"""One training step as a script would write it, with real tensors or with fake tensors that have no memory."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .. import amp, optimizers
from ..amp._amp_state import _amp_state
from ..amp.frontend import opt_levels
from ..ops import _device, _library
from ..ops._host import HOST
from ..transformer import parallel_state
from .storages import LiveStorages, Owners, is_fake

OPT_LEVELS = tuple(sorted(opt_levels))

# A `Task` makes a model and its `Loss`, which makes a batch of a given size on a device and computes the model's loss.
Loss = Callable[[nn.Module, int, torch.device], Tensor]
Task = Callable[[], tuple[nn.Module, Loss]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a training run.

    `optimizer` is a class of apex.optimizers, or MODULE:CLASS, and its options: "FusedSGD,momentum=0.9". With `zero`
    its state is sharded over `world` processes; otherwise the model is wrapped in DistributedDataParallel if there are
    several. A pipeline has as many batches in flight as `pipeline_parallel` stages: their forward passes come first.
    """

    opt_level: str = "O0"
    optimizer: str = "FusedAdam"
    batch: int = 1
    zero: bool = False
    world: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    checkpointing: bool = False

    @property
    def data_parallel(self) -> int:
        """Return the number of processes that have the same parameters."""
        return self.world // (self.tensor_parallel * self.pipeline_parallel)

    def __post_init__(self) -> None:
        """Raise an error for impossible settings."""
        if self.opt_level not in OPT_LEVELS:
            raise ValueError(f"opt_level={self.opt_level!r} is not one of {', '.join(OPT_LEVELS)}")
        for name in ("batch", "world", "tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.world != self.data_parallel * self.tensor_parallel * self.pipeline_parallel:
            raise ValueError(
                f"world={self.world} is no multiple of tensor_parallel={self.tensor_parallel} times "
                f"pipeline_parallel={self.pipeline_parallel}"
            )


class Training:
    """A model, its optimizer and amp; `step` trains it. Its tensors are fake unless a device is given.

    Fake tensors are on the host's device, whose autocast has the rules of GPUs under apex.amp. A PyTorch without GPU
    support cannot differentiate fake tensors on a GPU.
    """

    def __init__(self, task: Task, settings: Settings, device: torch.device | None = None) -> None:
        self.settings = settings
        self.device = device or HOST
        self.storages = LiveStorages() if device is None else None
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with device or torch.device("meta"):
            self.model, self._loss = task()
        self.model.train()
        if settings.checkpointing:
            checkpoint_blocks(self.model)
        with self._running():
            if device is None:
                _replace_by_fake_tensors(self.model)
            self.optimizer = make_optimizer(settings, self.model)
            self.model, self.optimizer = amp.initialize(
                self.model, self.optimizer, opt_level=settings.opt_level, verbosity=0
            )
            if settings.data_parallel > 1 and not settings.zero:
                from ..parallel import DistributedDataParallel

                self.model = DistributedDataParallel(self.model)

    def _running(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that makes new tensors fake and counts storages; with a device it is empty."""
        stack = contextlib.ExitStack()
        for mode in () if self.storages is None else (self._fake, self.storages, _GpuOperators()):
            stack.enter_context(mode)
        return stack

    def _with_real_host(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that makes step counts and tables on the host real tensors instead of fake ones.

        It does nothing for ZeRO, whose tables are as large as a model.
        """
        stack = contextlib.ExitStack()
        if self.storages is not None and not self.settings.zero:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(self.storages)
        return stack

    def step(self, after_forward: Callable[[], Any] = int, before_update: Callable[[], Any] = int) -> None:
        """Perform one step; call the functions after the forward passes and before the parameters are updated."""
        with self._running():
            count = self.settings.pipeline_parallel
            losses = [checked_loss(self._loss(self.model, self.settings.batch, self.device)) for _ in range(count)]
            after_forward()
            while losses:
                loss = losses.pop(0)
                with amp.scale_loss(loss, self.optimizer, delay_unscale=bool(losses)) as scaled:
                    scaled.backward()
            del loss, scaled
            before_update()
            with self._with_real_host():
                self.optimizer.step()
            self.optimizer.zero_grad()

    def owners(self) -> dict[str, int]:
        """Return bytes of parameters, buffers, gradients, masters and state, and their sum in allocator blocks."""
        owners, stash = Owners(), self.optimizer._amp_stash
        params = list(self.model.parameters())
        masters, state = stash.all_fp32_from_fp16_params, tensors_in(dict(self.optimizer.state))
        sizes = {
            "parameters": owners.add(params),
            "buffers": owners.add(self.model.buffers()),
            "gradients": owners.add(param.grad for param in (*params, *masters)),
            "masters": owners.add(masters),
            "state": owners.add(value for value in state if is_fake(value) or value.dim()),  # no step counts
        }
        return {**sizes, "rounded": owners.rounded}


@contextlib.contextmanager
def trained(task: Task, settings: Settings, device: torch.device | None = None) -> Iterator[Training]:
    """Yield a `Training`, fake unless a device is given, and shut amp down on exit."""
    if _amp_state.optimizers or _amp_state.models:
        raise RuntimeError(
            "amp.initialize was called in this process; estimate memory before it, after amp.shutdown(), or with the "
            "command `apex memory`"
        )
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback if shapes do not fit
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with _planning_for_a_gpu() if device is None else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            warnings.filterwarnings("ignore", message="Only .* of buckets are used")
            yield Training(task, settings, device)
    except DynamicOutputShapeException as error:
        raise ValueError(
            f"{error} has a result whose shape depends on values, which an estimate does not have"
        ) from error
    finally:
        log.setLevel(level)
        amp.shutdown()


def _planning_for_a_gpu() -> contextlib.AbstractContextManager[Any]:
    """Return a context that makes ops on fake tensors allocate as on a GPU: this machine's, or else an H200.

    Without Triton the ops run PyTorch's operators.
    """
    if _library.triton_problem() is not None:
        return _device.pretend(_device.INTERPRETER)
    from ..ops import _compile_ahead

    return _compile_ahead.planning([*_compile_ahead.gpu_here().values(), _compile_ahead.GPUS["sm_90"]][0], keep=False)


def checked_loss(loss: Any) -> Tensor:
    """Return the loss; raise TypeError unless it is a tensor with one element that can be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        actual = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the loss must be a tensor with one element that depends on the parameters, not {actual}")
    return loss


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested dicts, lists and tuples, and in apex's objects that hold an optimizer's state."""
    for leaf in tree_leaves(value):
        values = vars(leaf).values() if type(leaf).__module__.startswith("apex.") else (leaf,)
        yield from (value for value in values if isinstance(value, Tensor))


def _replace_by_fake_tensors(model: nn.Module) -> None:
    """Replace a model's tensors on the device "meta" by fake tensors; shared tensors stay shared."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def fake_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            fake = torch.empty_like(tensor, device=HOST, requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
                vars(fake).update(vars(tensor))
            known[id(tensor)] = tensor, fake
        return known[id(tensor)][1]

    for module in model.modules():
        dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for tensors in dicts:
            for name, value in tensors.items():
                if isinstance(value, Tensor):
                    tensors[name] = fake_of(value)


class _GpuOperators(torch.overrides.TorchFunctionMode):
    """A mode that calls PyTorch's GPU operators if the CPU's save other tensors: dropout's mask on a GPU is bytes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            return _dropout(*args, **kwargs)
        if func is nn.functional.cross_entropy and _library.autocast_dtype(args[0]) == args[0].dtype == torch.float16:
            return _cross_entropy(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention and kwargs.get("dropout_p"):
            kwargs = {**kwargs, "dropout_p": 0.0}  # with dropout the host would save the scores; a GPU saves a seed
        if func is nn.functional.multi_head_attention_forward and not kwargs.get("need_weights", True):
            args = (*args[:10], 0.0, *args[11:])  # no dropout, for the same reason
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1:
        return nn.functional.dropout(input, p, training, inplace)
    output = torch.native_dropout(input, p, True)[0]
    return input.copy_(output) if inplace else output


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute cross-entropy without float32 copies of float16 logits and gradients, if targets are class indices."""
    if target.is_floating_point() or args or kwargs.get("label_smoothing"):
        return nn.functional.cross_entropy(input, target, *args, **kwargs)
    kwargs.pop("label_smoothing", None)
    return nn.functional.nll_loss(torch._log_softmax(input, min(1, input.dim() - 1), True), target, **kwargs)


def checkpoint_blocks(model: nn.Module) -> None:
    """Make the blocks of a model's longest ModuleList or Sequential recompute their forward pass in the backward."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        return
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    blocks: Any = max(lists, key=len, default=())
    if len(blocks) < 2:
        raise ValueError(f"{type(model).__name__} has no ModuleList or Sequential of blocks to checkpoint")
    for block in blocks:
        forward = block.forward
        vars(block)["forward"] = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


def make_optimizer(settings: Settings, model: nn.Module) -> Any:
    """Make the optimizer that the settings name, with a learning rate of 1e-3 unless they give another."""
    name, *texts = settings.optimizer.split(",")
    options: dict[str, Any] = {"lr": 1e-3}
    for option in texts:
        key, _, value = option.partition("=")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            raise ValueError(f"optimizer={settings.optimizer!r}: {option!r} is not NAME=VALUE") from None
    params = [param for param in model.parameters() if param.requires_grad]
    if settings.zero:
        if name != "FusedAdam":
            raise ValueError(f"optimizer={name!r} has no ZeRO counterpart that goes with apex.amp; FusedAdam has")
        from ..contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

        return DistributedFusedAdam(params, process_group=parallel_state.get_data_parallel_group(), **options)
    module, _, attribute = name.rpartition(":")
    known = [public for public in optimizers.__all__ if public not in ("FP16_Optimizer", "muon_groups")]
    if not module and name not in known:
        raise ValueError(f"optimizer={name!r} is not known; use MODULE:CLASS or one of {', '.join(known)}")
    try:
        kind = getattr(importlib.import_module(module) if module else optimizers, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer={name!r} is not MODULE:CLASS of something installed: {error}") from error
    if kind is optimizers.OffloadedOptimizer:
        raise ValueError(
            "optimizer='OffloadedOptimizer' keeps its state in host memory; estimate the optimizer that it offloads "
            "and subtract `state`"
        )
    return kind(params, **options)
