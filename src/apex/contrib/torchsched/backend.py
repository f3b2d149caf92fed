"""A torch.compile backend that splits the gradients of convolutions, and the choice of a default backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import list_backends, lookup_backend, register_backend

_SCHEMES = ("dwb", "wbd")
_torch_compile = torch.compile


def get_backend(backend: str = "torch", scheme: str = "dwb") -> Callable:
    """Return Inductor ("torch"), or Inductor with the gradients of convolutions split ("torchsched").

    `scheme` is the order of the split gradients: "dwb" for data, weight, bias, or "wbd".
    """
    if backend not in ("torch", "torchsched"):
        raise ValueError(f"backend={backend!r}: torch or torchsched is needed")
    if scheme not in _SCHEMES:
        raise ValueError(f"scheme={scheme!r}: one of {', '.join(_SCHEMES)} is needed")
    if backend == "torch":
        return lookup_backend("inductor")
    return functools.partial(_compile, scheme)


def _compile(scheme: str, model_: Any, example_inputs_: Any, *, decompositions: Any = None, **options: Any) -> Callable:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    split = {torch.ops.aten.convolution_backward.default: functools.partial(split_convolution_backward, scheme)}
    table = {**(decompositions or select_decomp_table()), **split}
    return compile_fx(model_, example_inputs_, decompositions=table, **options)


def split_convolution_backward(
    scheme: str, grad_output: Any, input: Any, weight: Any, bias_sizes: Any, *settings: Any
) -> Any:
    """Compute the gradients of data, weight and bias by one operator each, in the order of the scheme."""
    *geometry, output_mask = settings
    if sum(output_mask) < 2:
        return NotImplemented
    gradients: list[Any] = [None, None, None]
    for index in map("dwb".index, scheme):
        if not output_mask[index]:
            continue
        if index == 2:
            gradients[2] = grad_output.sum([0, *range(2, grad_output.dim())])
        else:
            single = [position == index for position in range(3)]
            gradients[index] = torch.ops.aten.convolution_backward.default(
                grad_output, input, weight, bias_sizes, *geometry, single
            )[index]
    return tuple(gradients)


@register_backend
def torchsched(model_: Any, example_inputs_: Any, **options: Any) -> Callable:
    """Compile by the split-gradient backend; `options` are passed to Inductor's compile_fx."""
    return get_backend("torchsched", "dwb")(model_, example_inputs_, **options)


def set_default_backend(backend: str) -> None:
    """Make torch.compile use this backend if none is named; "inductor" restores PyTorch's own function."""
    known = list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f"backend={backend!r} is not known; {', '.join(known)} are")
    if backend == "inductor":
        torch.compile = _torch_compile
        return

    @functools.wraps(_torch_compile)
    def compile_by_default(*args: Any, **kwargs: Any) -> Any:
        return _torch_compile(*args, **{"backend": backend, **kwargs})

    torch.compile = compile_by_default
