"""Layers whose parameters are split over tensor-parallel ranks. Activations are [sequence, batch, hidden]."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init
from torch.nn.parameter import Parameter
from typing_extensions import Unpack

from ..._arguments import Count, checked
from ..._autocast_utils import _cast_if_autocast_enabled
from ..._distributed import exchange
from ..._distributed.experts import is_expert
from ...ops._host import HOST
from ...ops._library import autocast_off, once_differentiable
from ...ops.dense.parts import wgrad_gemm_accum
from .._groups.device import parameter_device
from .._marks import MarkedModule
from ..parallel_state import (
    get_expert_tensor_parallel_rank,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from ..utils import divide
from . import backward_part
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .random import get_cuda_rng_tracker
from .utils import VocabUtility

Init = Callable[[Tensor], Any]

_ATTRIBUTE_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


@checked
def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Return True if this rank counts `param`: the parameter is split, or this is the first tensor-parallel rank.

    An expert (`allreduce = False`) may be split over other ranks than dense layers are.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    return (get_expert_tensor_parallel_rank() if is_expert(param) else get_tensor_model_parallel_rank()) == 0


@checked
def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Record on a parameter whether and how it is split; raise if that was recorded before."""
    for name in _ATTRIBUTE_DEFAULTS:
        assert not hasattr(tensor, name), f"the tensor has the attribute {name} already"
    for name, value in zip(_ATTRIBUTE_DEFAULTS, (is_parallel, dim, stride), strict=True):
        setattr(tensor, name, value)


@checked
def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Record on a parameter that it is not split, unless something was recorded before."""
    for name, value in _ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


@checked
def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the attributes that record how a tensor is split."""
    for name in _ATTRIBUTE_DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def _initialize_affine_weight_gpu(
    weight: Tensor, init_method: Init, partition_dim: int, stride: int = 1, *, params_dtype: Any = None
) -> None:
    """Initialize this rank's part of a weight with random numbers of its own."""
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with get_cuda_rng_tracker().fork():
        init_method(weight)


def _initialize_affine_weight_cpu(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Init,
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """Initialize this rank's part from the whole weight, which every rank makes.

    The result does not depend on the number of ranks.
    """
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    master = torch.empty(output_size, input_size, dtype=torch.float32, device=HOST)
    init_method(master)
    master = master.to(params_dtype)
    parts = master.split(divide(per_partition_size, stride, "a rank's part over stride"), dim=partition_dim)
    own_parts = parts[get_tensor_model_parallel_rank() :: get_tensor_model_parallel_world_size()]
    with torch.no_grad():
        weight.copy_(torch.cat(own_parts, dim=partition_dim))
    return master if return_master_weight else None


class _SplitWeight(MarkedModule):
    """A layer with a weight [rows, columns] that is split over the ranks along one dimension."""

    def _make_weight(
        self,
        rows: int,
        columns: int,
        partition_dim: int,
        init_method: Init,
        stride: int,
        params_dtype: torch.dtype,
        use_cpu_initialization: bool,
        keep_master_weight: bool = False,
    ) -> None:
        shape = [rows, columns]
        description = f"{('output_size', 'input_size')[partition_dim]} over the tensor-parallel ranks"
        shape[partition_dim] = divide(shape[partition_dim], get_tensor_model_parallel_world_size(), description)
        device = HOST if use_cpu_initialization else parameter_device()
        self.weight = Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        self.master_weight: Tensor | None = None
        if use_cpu_initialization:
            self.master_weight = _initialize_affine_weight_cpu(
                self.weight,
                rows,
                columns,
                shape[partition_dim],
                partition_dim,
                init_method,
                stride,
                keep_master_weight,
                params_dtype=params_dtype,
            )
        else:
            _initialize_affine_weight_gpu(self.weight, init_method, partition_dim, stride)

    def _make_bias(self, size: int, bias: bool) -> None:
        if bias:
            self.bias = Parameter(torch.zeros(size, dtype=self.weight.dtype, device=self.weight.device))
        else:
            self.register_parameter("bias", None)


class VocabParallelEmbedding(_SplitWeight):
    """An embedding whose vocabulary is split equally over the ranks."""

    @checked
    def __init__(
        self,
        num_embeddings: Count,
        embedding_dim: Count,
        init_method: Init = init.xavier_normal_,
        *,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.tensor_model_parallel_size = get_tensor_model_parallel_world_size()
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, get_tensor_model_parallel_rank(), self.tensor_model_parallel_size
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        self._make_weight(num_embeddings, embedding_dim, 0, init_method, 1, params_dtype, use_cpu_initialization)

    @checked
    def forward(self, input_: Tensor) -> Tensor:
        """Return the embeddings of `input_`, word indices of the whole vocabulary."""
        if input_.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"input_ must be int64 or int32, the numbers of words, got {input_.dtype}")
        if self.tensor_model_parallel_size == 1:
            return F.embedding(input_, self.weight)
        not_local = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        # Indices outside of the whole vocabulary are kept: PyTorch refuses them, instead of all ranks adding zeros.
        of_others = not_local & (input_ >= 0) & (input_ < self.num_embeddings)
        embedded = F.embedding((input_ - self.vocab_start_index).masked_fill(of_others, 0), self.weight)
        # Each word is in one rank's part and zero in the others, so the sum is its embedding.
        return reduce_from_tensor_model_parallel_region(embedded.masked_fill(not_local.unsqueeze(-1), 0.0))


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """A linear layer whose backward pass overlaps communication with computation.

    With `sequence_parallel_enabled` the input is this rank's part of the sequence. The whole sequence is gathered for
    the products and not saved; the backward pass gathers it again while it computes the input's gradient. While the
    weight's gradient is computed, the input's gradient is summed over the ranks (`async_grad_allreduce`) or
    reduce-scattered (`sequence_parallel_enabled`). With `gradient_accumulation_fusion` the weight's gradient is added
    to `weight.main_grad`, and `weight.grad` is not set.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        input,
        weight,
        bias,
        gradient_accumulation_fusion,
        async_grad_allreduce,
        sequence_parallel_enabled,
        use_16bit_in_wgrad_accum_fusion=None,
    ):
        cast = _cast_if_autocast_enabled(input, weight, bias)
        ctx.save_for_backward(cast[0], cast[1])
        ctx.weight = weight  # holds main_grad; the saved weight may be a copy in another dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.input_dtype = input.dtype
        ctx.fusion = gradient_accumulation_fusion
        ctx.half_sums = use_16bit_in_wgrad_accum_fusion
        ctx.all_reduce = async_grad_allreduce and get_tensor_model_parallel_world_size() > 1
        ctx.sequence_parallel = sequence_parallel_enabled and get_tensor_model_parallel_world_size() > 1
        whole = cast[0]
        if ctx.sequence_parallel:
            group = get_tensor_model_parallel_group()
            whole = exchange.gather(whole, group, "the all-gather of a sequence")
        with autocast_off(input):
            return F.linear(whole, cast[1], cast[2])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        whole, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = backward_part.wanted(*ctx.needs_input_grad[:3])
        group = get_tensor_model_parallel_group() if ctx.sequence_parallel or ctx.all_reduce else None
        gathered = exchanged = None
        if ctx.sequence_parallel and needs_weight:
            whole, gathered = exchange.start_gather(whole, group, "the all-gather of a sequence")
        grad_input = grad_weight = grad_bias = None
        grad_output = grad_output.to(weight.dtype)
        if needs_input:
            grad_input = grad_output @ weight
            if ctx.all_reduce:
                description = "the all-reduce of an input's gradient"
                grad_input, exchanged = exchange.start_sum_in_place(grad_input.contiguous(), group, description)
            elif ctx.sequence_parallel:
                description = "the reduce-scatter of an input's gradient"
                grad_input, exchanged = exchange.start_sum_of_part(grad_input, group, description)
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        if needs_weight:
            if gathered is not None:
                gathered.wait()
            whole = whole.reshape(-1, whole.shape[-1])
            if ctx.fusion:
                wgrad_gemm_accum(whole, rows, _main_grad(ctx.weight, ctx.half_sums))
            else:
                grad_weight = (rows.t() @ whole).to(ctx.weight.dtype)
        if needs_bias:
            grad_bias = rows.sum(0).to(ctx.bias_dtype)
        if exchanged is not None:
            exchanged.wait()
        grad_input = None if grad_input is None else grad_input.to(ctx.input_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _main_grad(weight: Tensor, half_sums: bool | None) -> Tensor:
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "gradient_accumulation_fusion adds the weight's gradient to `weight.main_grad`, which does not exist: "
            "allocate it, for example `weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)`"
        )
    if main_grad.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeError(f"weight.main_grad must be float32, float16 or bfloat16, got {main_grad.dtype}")
    if half_sums and main_grad.dtype == torch.float32:
        raise RuntimeError("accumulation_in_fp16=True needs a weight.main_grad in half precision, got float32")
    return main_grad


def _check_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise for shapes and types that a linear layer cannot multiply."""
    if not input.is_floating_point():
        raise TypeError(f"input must be floating-point, got {input.dtype}")
    if weight.dim() != 2 or not input.dim() or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input of shape {list(input.shape)} and weight of shape {list(weight.shape)} do not fit: expected "
            "[..., inputs] and [outputs, inputs]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}, expected {list(weight.shape[:1])}")


@checked
def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
) -> Tensor:
    """Apply LinearWithGradAccumulationAndAsyncCommunication; autocast casts its arguments."""
    _check_product(input, weight, bias)
    no_communication = not (sequence_parallel_enabled or async_grad_allreduce)
    if not gradient_accumulation_fusion and (no_communication or torch.compiler.is_compiling()):
        # Collectives that the compiler can trace and overlap itself.
        if sequence_parallel_enabled:
            input = gather_from_sequence_parallel_region(input)
        elif async_grad_allreduce:
            input = copy_to_tensor_model_parallel_region(input)
        return F.linear(input, weight, bias)
    settings = (gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel_enabled)
    return LinearWithGradAccumulationAndAsyncCommunication.apply(input, weight, bias, *settings, None)


@checked
def linear_with_grad_accumulation_and_async_allreduce_in16bit(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
) -> Tensor:
    """Apply LinearWithGradAccumulationAndAsyncCommunication with `weight.main_grad` in half precision."""
    _check_product(input, weight, bias)
    settings = (gradient_accumulation_fusion, async_grad_allreduce, sequence_parallel_enabled)
    return LinearWithGradAccumulationAndAsyncCommunication.apply(input, weight, bias, *settings, True)


class LinearOptions(TypedDict, total=False):
    """Keyword options of both linear layers; `_ParallelLinear` has their defaults."""

    params_dtype: torch.dtype
    use_cpu_initialization: bool
    gradient_accumulation_fusion: bool
    sequence_parallel_enabled: bool
    accumulation_in_fp16: bool | None


class _ParallelLinear(_SplitWeight):
    """Base of both linear layers; `split` is the dimension of the weight that is split over the ranks."""

    def __init__(
        self,
        split: int,
        input_size: int,
        output_size: int,
        initialization: tuple[Init, int, bool],
        skip_bias_add: bool,
        params_dtype: torch.dtype = torch.float32,
        use_cpu_initialization: bool = False,
        gradient_accumulation_fusion: bool = False,
        sequence_parallel_enabled: bool = False,
        accumulation_in_fp16: bool | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add = skip_bias_add
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.tensor_model_parallel_size = get_tensor_model_parallel_world_size()
        self._linear = (
            linear_with_grad_accumulation_and_async_allreduce_in16bit
            if accumulation_in_fp16
            else linear_with_grad_accumulation_and_async_allreduce
        )
        if sequence_parallel_enabled and self.tensor_model_parallel_size == 1:
            warnings.warn(
                "`sequence_parallel_enabled` is set to `True`, but tensor model parallel size is 1: it has no effect",
                stacklevel=4,
            )
            self.sequence_parallel_enabled = False
        init_method, stride, keep_master_weight = initialization
        weight_options = (params_dtype, use_cpu_initialization, keep_master_weight)
        self._make_weight(output_size, input_size, split, init_method, stride, *weight_options)


class ColumnParallelLinear(_ParallelLinear):
    """y = x A^T + b with the outputs split equally over the ranks; returns (y, b or None).

    b is returned if `skip_bias_add` leaves its addition to the caller. `gather_output` gives all outputs to every rank.
    The input is whole or, with `sequence_parallel_enabled`, this rank's part of the sequence.
    """

    @checked
    def __init__(
        self,
        input_size: Count,
        output_size: Count,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Init = init.xavier_normal_,
        stride: Count = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        no_async_tensor_model_parallel_allreduce: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        overlaps = not no_async_tensor_model_parallel_allreduce and get_tensor_model_parallel_world_size() > 1
        if overlaps and options.get("sequence_parallel_enabled", False):
            raise RuntimeError(
                "`async_tensor_model_parallel_allreduce` and `sequence_parallel_enabled` cannot be enabled at the same "
                "time."
            )
        initialization = (init_method, stride, keep_master_weight_for_test)
        super().__init__(0, input_size, output_size, initialization, skip_bias_add, **options)
        self.gather_output = gather_output
        self.async_tensor_model_parallel_allreduce = overlaps
        self.output_size_per_partition = divide(output_size, self.tensor_model_parallel_size)
        self._make_bias(self.output_size_per_partition, bias)
        if self.bias is not None:
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and the bias if `skip_bias_add` leaves its addition to the caller."""
        assert not (self.gather_output and self.sequence_parallel_enabled), (
            "gather_output cannot be used with sequence_parallel_enabled"
        )
        if not (self.async_tensor_model_parallel_allreduce or self.sequence_parallel_enabled):
            input_ = copy_to_tensor_model_parallel_region(input_)
        output = self._linear(
            input_,
            self.weight,
            None if self.skip_bias_add else self.bias,
            self.gradient_accumulation_fusion,
            self.async_tensor_model_parallel_allreduce,
            self.sequence_parallel_enabled,
        )
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_ParallelLinear):
    """y = x A^T + b with the inputs split equally over the ranks; returns (y, b or None).

    b is returned if `skip_bias_add` leaves its addition to the caller. With `input_is_parallel` the input is this
    rank's part, otherwise it is whole. The output is whole or, with `sequence_parallel_enabled`, this rank's part of
    the sequence.
    """

    @checked
    def __init__(
        self,
        input_size: Count,
        output_size: Count,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Init = init.xavier_normal_,
        stride: Count = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        if options.get("sequence_parallel_enabled", False) and not input_is_parallel:
            raise RuntimeError("To enable `sequence_parallel_enabled`, `input_is_parallel` must be `True`")
        initialization = (init_method, stride, keep_master_weight_for_test)
        super().__init__(1, input_size, output_size, initialization, skip_bias_add, **options)
        self.input_is_parallel = input_is_parallel
        self.input_size_per_partition = divide(input_size, self.tensor_model_parallel_size)
        self._make_bias(output_size, bias)
        if self.bias is not None:
            self.bias.sequence_parallel_enabled = self.sequence_parallel_enabled  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and the bias if `skip_bias_add` leaves its addition to the caller."""
        part = input_ if self.input_is_parallel else scatter_to_tensor_model_parallel_region(input_)
        # A single rank has the whole sum, so the product adds the bias and saves a pass over the output.
        bias = self.bias if self.tensor_model_parallel_size == 1 and not self.skip_bias_add else None
        output = self._linear(part, self.weight, bias, self.gradient_accumulation_fusion, False, False)
        if self.sequence_parallel_enabled:
            output = reduce_scatter_to_sequence_parallel_region(output)
        else:
            output = reduce_from_tensor_model_parallel_region(output)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None or bias is not None else output + self.bias), None
