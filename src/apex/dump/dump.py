"""Dumps of a step: every module's output and the gradients, in the order of computation.

A file has one HDF5 group for each record, called `0007_Linear`: a running number and the class. Its attributes are the
module's name in the model (`module`) and the `kind` of the record: forward, backward or parameter. Its datasets are
`feat_output` (and `feat_input`), `grad_output` or `grad`, with a number appended if there are several tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def import_h5py() -> Any:
    """Import the package that reads and writes HDF5 files."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        error.msg = "apex.dump needs h5py, which is not installed; pip install 'apex[dump]'"
        raise
    return h5py


class HDF5FileOperation:
    """A dump file; `is_cover` empties it first."""

    def __init__(self, file_path: str, is_cover: bool = True) -> None:
        self.file_path = str(file_path)
        if is_cover:
            import_h5py().File(self.file_path, "w").close()

    def read_data(self) -> None:
        """Print the names, dtypes and shapes of everything in the file."""

        def show(name: str, item: Any) -> None:
            dtype = item.attrs.get("dtype", getattr(item, "dtype", ""))
            print(f"{name}  {dtype} {tuple(item.shape)}" if hasattr(item, "shape") else f"{name}  {dict(item.attrs)}")

        with import_h5py().File(self.file_path, "r") as file:
            file.visititems(show)

    def write_data(
        self, groupName: str, datasetName: str, data_dump: Any, attributes: Mapping[str, Any] | None = None
    ) -> None:
        """Add the tensors of `data_dump` to a group and set its `attributes`; dtypes NumPy lacks become float32."""
        tensors = [leaf for leaf in tree_leaves(data_dump) if isinstance(leaf, Tensor)]
        with import_h5py().File(self.file_path, "a") as file:
            group = file.require_group(groupName)
            group.attrs.update(attributes or {})
            for number, tensor in enumerate(tensors):
                plain = (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach().cpu()
                if plain.is_floating_point() and plain.dtype not in (torch.float16, torch.float32, torch.float64):
                    plain = plain.float()
                name = datasetName if len(tensors) == 1 else f"{datasetName}{number}"
                group.create_dataset(name, data=plain.numpy()).attrs["dtype"] = str(tensor.dtype).removeprefix("torch.")


class HookerAndDumper:
    """A recorder of a model's steps from `register_hooks` to `remove_hooks`; file names begin with `file_path`.

    `inputs` also records the modules' inputs. Modules are not changed and may work in place.
    """

    def __init__(self, file_path: str = "", *, inputs: bool = False) -> None:
        self.prefix = self.file_path = str(file_path)
        self.inputs = inputs
        self.handles: list[Any] = []
        self._names: dict[nn.Module, str] = {}

    def register_hooks(self, model: nn.Module, epoch: int, step: int, *, loss_scale: float = 1.0) -> str:
        """Start recording and return the file's path, which contains the rank if there are several processes."""
        if self.handles:
            raise RuntimeError(f"{self.file_path} is still being written; call remove_hooks() first")
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        rank = f"_{dist.get_rank()}-rank" if together else ""
        self.file_path = f"{self.prefix}{epoch}-epoch_{step}-step{rank}_dump.hdf5"
        self._file = HDF5FileOperation(self.file_path)
        self._count, self._loss_scale = 0, float(loss_scale)
        self._names = {module: name for name, module in model.named_modules()}
        self.handles += [module.register_forward_hook(self.forward_hook_fn) for module in self._names]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = functools.partial(lambda name, leaf: self._write(name, "parameter", grad=leaf.grad), name)
                self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return self.file_path

    def forward_hook_fn(self, module: nn.Module, input: Any, output: Any) -> None:
        """Record a module's output, and register a hook that records its gradient."""
        inputs = {"feat_input": input} if self.inputs else {}
        self._write(module, "forward", feat_output=output, **inputs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                # On the tensor, not the module: PyTorch's backward hooks of modules fail if a module works in place.
                self.handles.append(leaf.register_hook(lambda grad: self.backward_hook_fn(module, (), grad)))

    def backward_hook_fn(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        """Record the gradient of a module's output."""
        self._write(module, "backward", grad_output=grad_output, grad_input=grad_input)

    def _write(self, source: nn.Module | str, kind: str, **data: Any) -> None:
        """Write a record of a module, or of a parameter by name; its gradients are multiplied by the loss scale."""
        name, layer = source, "Parameter"
        if isinstance(source, nn.Module):
            name, layer = self._names.get(source, ""), source._get_name()
        attributes = {"module": name, "kind": kind, "loss_scale": 1.0 if kind == "forward" else self._loss_scale}
        for dataset, tensors in data.items():
            self._file.write_data(f"{self._count:04d}_{layer}", dataset, tensors, attributes)
        self._count += 1

    def remove_hooks(self) -> None:
        """Stop recording; the file is complete."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def read_h5py_data(self) -> None:
        """Print the names, dtypes and shapes of the recorded tensors."""
        HDF5FileOperation(self.file_path, is_cover=False).read_data()
