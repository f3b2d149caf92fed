"""What holds for every launch of every test of kernels."""

import pytest
from torch import Tensor

from apex.ops import _library


@pytest.fixture(autouse=True)
def _launches_keep_their_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound launch gets tensors of the same dtypes every time, and the same ones absent.

    On a GPU the second call goes straight to what was compiled for the first; the interpreter would not notice.
    """
    if _library.triton_problem() is not None:
        return
    from apex.ops._launch import BoundLaunch

    launch = BoundLaunch.__call__

    def checked(self: BoundLaunch, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> None:
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        first = self.__dict__.setdefault("_first_dtypes", dtypes)
        assert dtypes == first, f"{self.kernel.name} was bound for {first}, now it gets {dtypes}"
        launch(self, tensors, floats)

    monkeypatch.setattr(BoundLaunch, "__call__", checked)
