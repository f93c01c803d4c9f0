"""torch's `DataLoader` with mosaicml-streaming's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from hocket.compat.streaming.dataset import StreamingDataset


class StreamingDataLoader(DataLoader[Any]):
    """A `DataLoader` that knows how far it is: `state_dict()` goes on after the batch just yielded.

    Takes the arguments of `DataLoader`; over any other data set it is one. Each iteration is of the next
    epoch. `persistent_workers` has no effect: workers begin anew with each epoch, which they are told so.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"persistent_workers": False})
        self._yielded = 0
        self._origin: dict[str, Any] | None = None
        """The state that the iteration began at."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches from the current position to the end of the epoch."""
        dataset = self.dataset
        if not isinstance(dataset, StreamingDataset):
            yield from super().__iter__()
            return
        if self._origin is not None:
            dataset.set_epoch(self._origin["epoch"] + 1)
        origin = self._origin = dataset.state_dict()
        self._yielded = 0
        dataset._is_told = True
        try:
            batches = super().__iter__()
        finally:
            dataset._is_told = False
        for batch in batches:
            if self._origin is origin:
                self._yielded += _count(batch)
            yield batch

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position after the batch just yielded, as mosaicml-streaming has it; ranks keep step.

        None over a data set of another kind.
        """
        dataset = self.dataset
        if not isinstance(dataset, StreamingDataset):
            return None
        origin = dataset.state_dict() if self._origin is None else self._origin
        done = self._yielded * dataset.data_parallel[1]
        return origin | {"sample_in_epoch": origin["sample_in_epoch"] + done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            StateMismatchError: It has another seed, or other canonical nodes; the message names the field.
            ConfigError: It is no state of this kind.
        """
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.load_state_dict(state)
            self._origin, self._yielded = None, 0


def _count(batch: Any) -> int:
    """Samples of a batch of any shape that a `collate_fn` may give it."""
    if isinstance(batch, Mapping):
        return len(next(iter(batch.values())))
    return len(batch) if isinstance(batch, Tensor) else len(batch[0])
