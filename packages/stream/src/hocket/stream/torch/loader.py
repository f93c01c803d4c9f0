"""The loader of batches as torch tensors, with or without worker processes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
except ImportError as error:
    raise ImportError("StreamingDataLoader needs torch: pip install 'hocket-stream[torch]'") from error

from hocket.stream.dataset import StreamingDataset
from hocket.stream.encodings import Column
from hocket.stream.errors import ConfigError
from hocket.stream.packing import PackedDataset
from hocket.stream.read.dataset_reader import RankBatch
from hocket.stream.settings.validation import switch, whole
from hocket.stream.torch.worker_messages import (
    ReceivedBatches,
    WorkerInbox,
    WorkerOutbox,
    small_together,
    to_list,
)

#: A function that makes a batch from a list of samples.
CollateFn = Callable[[list[dict[str, Any]]], Any]

#: Arguments of torch's DataLoader that are not supported, and what to use instead.
INSTEAD = {
    "batch_sampler": "the data set has the order; give it `batch_size`",
    "drop_last": "give the data set `tail='drop'`",
    "generator": "give the data set `shuffle_seed`",
    "persistent_workers": "workers begin anew in each epoch; leave it out",
    "sampler": "the data set has the order; leave it out",
    "shuffle": "give the data set `shuffle`",
    "timeout": "it is `timeout_s` here",
    "worker_init_fn": "set up what `collate_fn` needs when it is first called",
}


class StreamingDataLoader:
    """A loader of this rank's batches as tensors. Its state is exact, however much was prefetched.

    With `num_workers=0`, native threads read, decode and batch ahead of the loop; this is the fastest setting
    unless samples need Python work. Worker processes (fork, forkserver or spawn) are for a costly
    `collate_fn`: worker `w` makes every `num_workers`-th batch, and the batches are the same.

    Before each batch, a worker that calls `collate_fn` seeds the generators of torch, NumPy and Python from
    the process's `torch.initial_seed()`, the rank, the epoch and the number of the batch, so that a run that
    continues from a state draws the same numbers.

    If a subclass of the data set overrides `__getitem__`, the samples are what it returns, and torch's
    `default_collate` is the default of `collate_fn`.

    Without `collate_fn`, columns of one size are tensors that share memory with the reader's buffers (`int`
    becomes int64); columns of bytes or text are lists, and columns of arrays of different sizes are lists of
    tensors.

    Args:
        dataset: The data set.
        batch_size: Number of samples in a batch on each rank, unless the data set has a batch size.
        num_workers: Number of worker processes.
        collate_fn: Function that makes a batch from a list of samples, each a mapping from columns to values.
        prefetch_factor: Number of messages that each worker makes ahead, 2 by default. A message has one
            batch, or several small ones, up to 2 MiB and 16 batches.
        multiprocessing_context: Start method of the workers: `fork`, `forkserver` or `spawn`.
        timeout_s: Seconds to wait for a worker's batch; 0 waits without limit.
        pin_memory: Copy tensors to page-locked memory if there is an accelerator.
        others: Other arguments of torch's `DataLoader`; they raise, with what to use instead.

    Raises:
        ConfigError: There is no batch size, or it differs from the data set's; or an argument of torch's
            `DataLoader` is not supported.

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
            raise ConfigError(f"`{name}` is torch's own: {INSTEAD[name]}")
        num_workers = whole("num_workers", num_workers)
        if isinstance(dataset, PackedDataset):
            raise ConfigError("a `PackedDataset` has rows and no samples: give it to `PackedDataLoader`")
        if batch_size is not None:
            dataset.set_batch_size(batch_size)
        dataset.plan  # noqa: B018 - raises here if there is no batch size
        self.dataset = dataset
        """The data set."""
        self._num_workers = num_workers
        self._collate = _BatchCollator(dataset, collate_fn)
        self._is_pinning = switch("pin_memory", pin_memory) and torch.accelerator.is_available()
        self._worker_options: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout_s,
        }

    @property
    def data_parallel(self) -> tuple[int, int]:
        """This process's data-parallel (rank, number of ranks)."""
        return self.dataset.data_parallel

    def follow_ranks(self, rank: int, num_ranks: int) -> None:
        """Serve these data-parallel ranks; see `StreamingDataset.follow_ranks`."""
        self.dataset.follow_ranks(rank, num_ranks)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which is the same on every rank."""
        return self.dataset.num_batches

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.dataset!r}: {self._num_workers} workers>"

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch.

        The first iteration is of epoch 0. Each further one starts the following epoch from its beginning,
        whether or not the one before was read to its end; an iteration that yielded nothing does not count.
        After `load_state_dict` it continues from the loaded position. After the last batch the state is
        `(epoch, num_batches)`; after the iteration's end it is `(epoch + 1, 0)`.

        Raises:
            ShardNotFoundError: A shard is neither in the cache nor in the remote.
            ShardCorruptError: A shard has wrong bytes after all fetches.
            StoreError: The object store failed.
        """
        cursor = self.dataset.cursor
        is_whole = False
        while not is_whole:
            token, weights = self.dataset.begin_pass(), self.dataset.weights
            for number, local, total, batch in self._read(cursor.epoch, cursor.batch):
                cursor.move(token, number + 1, share=(local, total))
                yield batch
                if self.dataset.weights is not weights:
                    break  # what was read ahead has the weights from before
            else:
                is_whole = True
        cursor.end_epoch(token)

    def batch_share(self) -> tuple[int, int]:
        """Return how many samples of the last yielded batch count on this rank, and over all ranks.

        A rank without a share of a short last batch gets one sample, and its share is 0.
        """
        return self.dataset.batch_share()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch; see `StreamingDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position from a saved state; see `StreamingDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)

    def end_epoch(self) -> None:
        """Move to the start of the next epoch, for a caller that reads only a part of each epoch."""
        self.dataset.cursor.go(self.dataset.cursor.epoch + 1, 0)

    def metrics(self) -> dict[str, float]:
        """Return counters of this process; see `StreamingDataset.metrics`."""
        return self.dataset.metrics()

    def _read(self, epoch: int, first: int) -> Iterator[tuple[int, int, int, Any]]:
        if first >= self.dataset.num_batches:
            return
        if self._num_workers == 0:
            for batch in map(self._collate, self.dataset.read_batches(epoch=epoch, first=first)):
                yield pin(batch) if self._is_pinning else batch
            return
        inbox = WorkerInbox()
        seed = _hash(torch.initial_seed(), self.data_parallel[0], epoch)
        source = _WorkerBatches(
            self.dataset, self._collate, inbox.number, epoch=epoch, first=first, seed=seed
        )
        batches = DataLoader(
            source,
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            pin_memory=self._is_pinning,
            # The seed of the workers is drawn from it, the same where an epoch is continued.
            generator=torch.Generator().manual_seed(seed),
            **self._worker_options,
        )
        waiting: dict[int, tuple[int, int, int, Any]] = {}
        for message in batches:
            waiting |= {batch[0]: batch for batch in self._collate.unpack(message)}
            while first in waiting:
                yield waiting.pop(first)
                first += 1


class _WorkerBatches(IterableDataset[Any]):
    """Messages with the batches `first + w`, `first + w + n`, … in worker `w` of `n`."""

    def __init__(
        self,
        dataset: StreamingDataset,
        collate: _BatchCollator,
        inbox: int,
        *,
        epoch: int,
        first: int,
        seed: int,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._inbox = inbox
        self._epoch = epoch
        self._first = first
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, count = (0, 1) if info is None else (info.id, info.num_workers)
        batches = self._dataset.read_batches(
            epoch=self._epoch, start=self._first, first=self._first + worker, stride=count
        )
        return self._collate.pack(batches, WorkerOutbox(self._inbox, worker), seed=self._seed)


class _BatchCollator:
    """A function that makes the loop's batch from columns and returns it with its number and shares."""

    def __init__(self, dataset: StreamingDataset, collate_fn: CollateFn | None) -> None:
        self._items = dataset.samples
        self._collate_fn = default_collate if collate_fn is None and dataset.makes_samples else collate_fn

    def pack(self, batches: Iterator[RankBatch], outbox: WorkerOutbox, *, seed: int) -> Iterator[Any]:
        """Make a worker's messages to the parent, in a form that is cheap to send.

        Args:
            batches: The worker's batches.
            outbox: The sending side.
            seed: Seed of the epoch for the random numbers of `collate_fn`.
        """
        if self._collate_fn is not None:
            return (self._seeded(batch, seed) for batch in batches)
        return map(outbox.pack, small_together(batches))

    def _seeded(self, batch: RankBatch, seed: int) -> tuple[int, int, int, Any]:
        batch_seed = _hash(seed, batch.number)
        random.seed(batch_seed)
        torch.manual_seed(batch_seed)
        np.random.seed(batch_seed % 2**32)
        return self(batch)

    def unpack(self, message: Any) -> Iterable[tuple[int, int, int, Any]]:
        """Return the batches of a message in the form that the loop receives."""
        return message.unpack() if isinstance(message, ReceivedBatches) else [message]

    def __call__(self, batch: RankBatch) -> tuple[int, int, int, Any]:
        if self._collate_fn is None:
            collated: Any = {name: _to_tensor(column) for name, column in batch.columns.items()}
        else:
            collated = self._collate_fn(self._items(batch))
        return batch.number, batch.local, batch.total, collated


def _hash(*numbers: int) -> int:
    """Return a number from 0 to below 2**63 that is a hash of some numbers."""
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _to_tensor(column: Column) -> torch.Tensor | list[Any]:
    return torch.from_numpy(column) if isinstance(column, np.ndarray) else to_list(column)


def pin(data: Any) -> Any:
    """Copy the tensors of a batch, and other objects with `pin_memory`, to page-locked memory."""
    if isinstance(data, (list, tuple)):
        items = [pin(item) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, dict):
        return {name: pin(value) for name, value in data.items()}
    return data.pin_memory() if hasattr(data, "pin_memory") else data


def _as_it_is(batch: Any) -> Any:
    return batch
