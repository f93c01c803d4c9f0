"""Batches as torch tensors: the one module of this package that imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:
    raise ImportError("StreamingDataLoader needs torch: pip install 'hocket-stream[torch]'") from error

from hocket.stream.arguments import switch, whole
from hocket.stream.dataset import StreamingDataset
from hocket.stream.encodings import Column
from hocket.stream.engine import RankBatch
from hocket.stream.errors import ConfigError

#: What makes a batch of a list of samples.
CollateFn = Callable[[list[dict[str, Any]]], Any]


#: Arguments of torch's DataLoader that have no counterpart, and what to use.
_INSTEAD = {
    "batch_sampler": "the data set has the order; give it `batch_size`",
    "drop_last": "give the data set `tail='drop'`",
    "generator": "give the data set `shuffle_seed`",
    "persistent_workers": "workers begin anew with each epoch; leave it out",
    "sampler": "the data set has the order; leave it out",
    "shuffle": "give the data set `shuffle`",
    "timeout": "it is `timeout_s` here",
    "worker_init_fn": "set up what `collate_fn` needs when it is first called",
}


class StreamingDataLoader:
    """This rank's batches as tensors, with a state that is exact however much was fetched ahead.

    With `num_workers=0` native threads read, decode and batch ahead of the loop; that is the fast way where
    samples need no Python work. Workers (torch's own, by fork, forkserver or spawn) are for a costly
    `collate_fn`: worker `w` makes every `num_workers`-th batch, and the batches are the same ones.

    Without `collate_fn`, columns of one size are stacked into tensors that share memory with what was read
    (`int` becomes int64); columns of bytes or text are lists, those of differing arrays lists of tensors.

    Args:
        dataset: What to read.
        batch_size: Samples of a batch on each rank, unless the data set has its size.
        num_workers: Processes that collate.
        collate_fn: Makes a batch of a list of samples (each a value by column).
        prefetch_factor: Batches that each worker makes ahead.
        multiprocessing_context: How workers are started: `fork`, `forkserver`, `spawn`.
        timeout_s: Seconds to wait for a worker's batch; 0 waits for ever.
        pin_memory: Put tensors into page-locked memory, where there is an accelerator.
        others: torch's other arguments, which are refused with what to use here.

    Raises:
        ConfigError: There is no batch size, or another one than the data set's; or an argument of torch's
            DataLoader has no counterpart.

    Example:
        >>> loader = StreamingDataLoader(dataset, batch_size=32)
        >>> for batch in loader:
        ...     loss = model(batch["tokens"])
        ...     state = loader.state_dict()  # goes on after this batch
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: CollateFn | None = None,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        timeout_s: float = 0,
        pin_memory: bool = False,
        **others: object,
    ) -> None:
        for name in others:
            if name not in _INSTEAD:
                raise TypeError(f"StreamingDataLoader got an unexpected argument `{name}`")
            raise ConfigError(f"`{name}` is torch's own: {_INSTEAD[name]}")
        num_workers = whole("num_workers", num_workers)
        if batch_size is not None:
            dataset.set_batch_size(batch_size)
        dataset.plan  # noqa: B018 - without a batch size it is refused here, and not when the first batch is due
        self.dataset = dataset
        """The data set that is read."""
        self.data_parallel = dataset.data_parallel
        """This process's data-parallel (rank, number of ranks)."""
        self._num_workers = num_workers
        self._collate = _Collate(dataset, collate_fn)
        self._is_pinning = switch("pin_memory", pin_memory) and torch.accelerator.is_available()
        self._worker_options: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout_s,
        }

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on every rank."""
        return self.dataset.num_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield batches from the current position to the end of the epoch, then move to the next.

        After the last batch the state is `(epoch, num_batches)`; after the iteration's end, `(epoch + 1, 0)`.

        Raises:
            ShardNotFoundError: A shard is nowhere.
            ShardCorruptError: Its bytes are wrong, however often fetched.
            StoreError: The store's own errors, as they come.
        """
        self.dataset.begin_pass()
        cursor = self.dataset.cursor
        token = cursor.begin()
        for number, local, total, batch in self._read(cursor.epoch, cursor.batch):
            cursor.move(token, number + 1, share=(local, total))
            yield batch
        cursor.end_epoch(token)

    def batch_share(self) -> tuple[int, int]:
        """Return how many samples of the batch just yielded count here, and over all ranks.

        A rank without a share of a short last batch got one sample all the same; its share is 0.
        """
        return self.dataset.batch_share()

    def state_dict(self) -> dict[str, Any]:
        """Return the position just after the batch last yielded; see `StreamingDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; see `StreamingDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """Return what reading did in this process; see `StreamingDataset.metrics`."""
        return self.dataset.metrics()

    def _read(self, epoch: int, first: int) -> Iterator[tuple[int, int, int, Any]]:
        if first >= self.dataset.num_batches:
            return
        if self._num_workers == 0:
            for batch in map(self._collate, self.dataset.read_batches(epoch=epoch, first=first)):
                yield _pin(batch) if self._is_pinning else batch
            return
        source = _WorkerBatches(self.dataset, self._collate, epoch=epoch, first=first)
        yield from DataLoader(
            source,
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            pin_memory=self._is_pinning,
            **self._worker_options,
        )


class _WorkerBatches(IterableDataset[tuple[int, int, int, Any]]):
    """In worker `w` of `n`: batches `first + w`, `first + w + n`, …; torch takes from the workers in turn."""

    def __init__(self, dataset: StreamingDataset, collate: _Collate, *, epoch: int, first: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._epoch = epoch
        self._first = first

    def __iter__(self) -> Iterator[tuple[int, int, int, Any]]:
        info = get_worker_info()
        worker, count = (0, 1) if info is None else (info.id, info.num_workers)
        batches = self._dataset.read_batches(
            epoch=self._epoch, start=self._first, first=self._first + worker, stride=count
        )
        return map(self._collate, batches)


class _Collate:
    """From a batch's columns to what the loop gets, with the batch's number and shares."""

    def __init__(self, dataset: StreamingDataset, collate_fn: CollateFn | None) -> None:
        self._items = dataset.samples
        self._collate_fn = collate_fn

    def __call__(self, batch: RankBatch) -> tuple[int, int, int, Any]:
        if self._collate_fn is None:
            made: Any = {name: _to_tensor(column) for name, column in batch.columns.items()}
        else:
            made = self._collate_fn(self._items(batch))
        return batch.number, batch.local, batch.total, made


def _to_tensor(column: Column) -> torch.Tensor | list[Any]:
    if isinstance(column, np.ndarray):
        return torch.from_numpy(column)
    # Values of a ragged column begin wherever the one before ended; tensors want aligned memory.
    return [
        torch.from_numpy(np.require(v, requirements=["A", "W"])) if isinstance(v, np.ndarray) else v
        for v in column
    ]


def _pin(made: Any) -> Any:
    """The tensors of a batch, and what else can be pinned, in page-locked memory; the rest as it is."""
    if isinstance(made, (list, tuple)):
        items = [_pin(item) for item in made]
        return type(made)(*items) if hasattr(made, "_fields") else type(made)(items)
    if isinstance(made, dict):
        return {name: _pin(value) for name, value in made.items()}
    return made.pin_memory() if hasattr(made, "pin_memory") else made


def _as_it_is(batch: Any) -> Any:
    return batch
