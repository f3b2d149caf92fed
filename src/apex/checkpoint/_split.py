"""A tensor of which this process has some boxes, for `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Split:
    """Boxes of a whole tensor of shape `whole`: where each begins in it, and its elements, a view of any strides.

    The boxes that all processes write must fill the whole; one that several have is written once. Some of the methods
    are what PyTorch asks an object for that it is to save.
    """

    def __init__(self, whole: Sequence[int], dtype: torch.dtype) -> None:
        self.whole = torch.Size(whole)
        self.dtype = dtype
        self.boxes: list[tuple[torch.Size, Tensor]] = []

    def add(self, boxes: Iterable[tuple[Sequence[int], Tensor]]) -> None:
        """More boxes; those that are only read may overlap others."""
        self.boxes += [(torch.Size(offsets), view) for offsets, view in boxes]

    def size(self) -> torch.Size:
        """The shape of the whole."""
        return self.whole

    def to_write(self, index: MetadataIndex) -> Tensor:
        """The box at an offset."""
        return next(view for offsets, view in self.boxes if offsets == index.offset)

    def to_read(self, index: MetadataIndex) -> Tensor:
        """The box of a number."""
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
    """PyTorch's, which looks for boxes in tensors alone."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.to_write(index) if isinstance(found, Split) else super().lookup_object(index)
