"""`StreamingDataLoader`: torch's `DataLoader` with the state of mosaicml-streaming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from hocket.compat.streaming.dataset import StreamingDataset


class StreamingDataLoader(DataLoader[Any]):
    """A `DataLoader` that counts the samples it has yielded, so that a state resumes after the last batch.

    Takes the arguments of `DataLoader`; over another data set than a `StreamingDataset` it is a plain
    `DataLoader`. Each iteration yields the next epoch, from its beginning unless a state was loaded.
    `persistent_workers` has no effect: workers start anew for each epoch, so that they see a state that was
    loaded meanwhile.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"persistent_workers": False})
        self.num_samples_yielded = 0
        """Samples that this rank yielded in the current iteration."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of an epoch, and count their samples."""
        self.num_samples_yielded = 0
        for batch in super().__iter__():
            self.num_samples_yielded += _count(batch)
            yield batch

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position after the batch just yielded, in mosaicml-streaming's format.

        All ranks are assumed to have yielded as many samples as this rank. Returns None over another data set
        than a `StreamingDataset`.
        """
        dataset = self.dataset
        if not isinstance(dataset, StreamingDataset):
            return None
        return dataset.state_dict(self.num_samples_yielded * dataset.data_parallel[1], False)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position from a saved state.

        Raises:
            StateMismatchError: The seed or the canonical nodes differ; the message names the field.
            ConfigError: `state` is not a state of this kind.
        """
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.load_state_dict(state)
            self.num_samples_yielded = 0


def _count(batch: Any) -> int:
    """Return the number of samples in a batch of any structure."""
    if isinstance(batch, Mapping):
        return len(next(iter(batch.values())))
    return len(batch) if isinstance(batch, Tensor) else len(batch[0])
