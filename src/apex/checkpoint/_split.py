"""Tensors whose boxes are spread over processes, for `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


class Split:
    """A set of boxes of a tensor of shape `whole`: the offsets of each box, and its elements as a view of any strides.

    The boxes that all processes write must fill the whole; a box that several processes have is written once. Some
    methods implement PyTorch's protocol for objects that it saves.
    """

    def __init__(self, whole: Sequence[int], dtype: torch.dtype) -> None:
        self.whole = torch.Size(whole)
        self.dtype = dtype
        self.boxes: list[tuple[torch.Size, Tensor]] = []

    def add(self, boxes: Iterable[tuple[Sequence[int], Tensor]]) -> None:
        """Add boxes; boxes that are only read may overlap others."""
        self.boxes += [(torch.Size(offsets), view) for offsets, view in boxes]

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self.whole

    def to_write(self, index: MetadataIndex) -> Tensor:
        """Return the box at an offset."""
        return next(view for offsets, view in self.boxes if offsets == index.offset)

    def to_read(self, index: MetadataIndex) -> Tensor:
        """Return the box that a read item's index names."""
        assert index.index is not None
        return self.boxes[index.index][1]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, view.size()) for offsets, view in self.boxes]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]


class SavePlanner(DefaultSavePlanner):
    """PyTorch's save planner, extended to find the boxes of a `Split`."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.to_write(index) if isinstance(value, Split) else super().lookup_object(index)


class StagedPlanner(DefaultSavePlanner):
    """A save planner with a local plan that another process made, and the data of its items."""

    def __init__(self, plan: SavePlan, data: Sequence[Tensor | bytes]) -> None:
        super().__init__()
        self._local_plan = plan
        self._data = {item.index: value for item, value in zip(plan.items, data, strict=True)}

    def create_local_plan(self) -> SavePlan:
        self.plan = self._local_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self._data[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value
