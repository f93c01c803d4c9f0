"""The loader of packed rows as torch tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hocket.stream.errors import ConfigError
from hocket.stream.packing import PackedDataset
from hocket.stream.settings.validation import switch
from hocket.stream.torch.loader import pin


class PackedDataLoader:
    """A loader of the batches of a `PackedDataset` as tensors, for a loop or a trainer. Its state is exact.

    Args:
        dataset: The data set.
        pin_memory: Copy tensors to page-locked memory if there is an accelerator.

    Raises:
        ConfigError: `dataset` is not a `PackedDataset`.

    Example:
        >>> loader = PackedDataLoader(dataset)
        >>> for batch in loader:
        ...     loss = model(batch["input_ids"], batch["position_ids"], batch["labels"])
        ...     state = loader.state_dict()  # goes on after this batch
    """

    def __init__(self, dataset: PackedDataset, *, pin_memory: bool = False) -> None:
        if not isinstance(dataset, PackedDataset):
            raise ConfigError(
                f"`dataset` is a `{type(dataset).__name__}`: expected a `PackedDataset`; give a "
                "`StreamingDataset` to `StreamingDataLoader`"
            )
        self.dataset = dataset
        """The data set."""
        self._is_pinning = switch("pin_memory", pin_memory) and torch.accelerator.is_available()

    @property
    def data_parallel(self) -> tuple[int, int]:
        """This process's data-parallel (rank, number of ranks)."""
        return self.dataset.data_parallel

    def follow_ranks(self, rank: int, num_ranks: int) -> None:
        """Serve these data-parallel ranks; see `StreamingDataset.follow_ranks`."""
        self.dataset.follow_ranks(rank, num_ranks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.dataset!r}>"

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches of an epoch; see `PackedDataset.batches`. Their number is not known before."""
        for batch in self.dataset.batches():
            tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
            yield pin(tensors) if self._is_pinning else tensors

    def batch_share(self) -> tuple[int, int]:
        """Return how many rows of the last yielded batch count on this rank, and over all ranks."""
        return self.dataset.batch_share()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch; see `PackedDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position from a saved state; see `PackedDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)

    def end_epoch(self) -> None:
        """Move to the start of the next epoch, for a caller that reads only a part of each epoch."""
        self.dataset.end_epoch()

    def metrics(self) -> dict[str, float]:
        """Return counters of this process; see `PackedDataset.metrics`."""
        return self.dataset.metrics()
