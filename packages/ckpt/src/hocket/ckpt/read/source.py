"""The protocol of what the rewriting pipeline reads tensors from."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from hocket.ckpt.document.planning import Box
from hocket.ckpt.document.records import TensorRecord

__all__ = ["TensorSource"]


class TensorSource(Protocol):
    """A reader of tensors by name and box, such as `Checkpoint`; thread-safe."""

    @property
    def identifies_data(self) -> bool:
        """Whether equal identities mean equal data."""

    @property
    def is_sequential(self) -> bool:
        """Whether reads are fastest by one thread, in order."""

    def record(self, name: str) -> TensorRecord:
        """Return the record of a tensor; its dtype is that of the arrays that `read` fills."""

    def locate(self, names: Iterable[str]) -> None:
        """Prepare the reads of tensors."""

    def read(
        self, wanted: Sequence[tuple[str, Box]], into: Sequence[npt.NDArray[Any]]
    ) -> list[npt.NDArray[Any]]:
        """Read boxes of tensors into arrays of their sizes and dtypes, and return these."""
