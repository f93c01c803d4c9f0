"""Batches for evaluation and prediction, with the same number of steps on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data as torch_data

from hocket.trainer.data.batch_tree import to_device
from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.errors import DataError
from hocket.trainer.protocols import Parallelism
from hocket.trainer.ranks.rank_gather import GatheredRows, gather_async, gather_objects

_END = object()


@dataclass(slots=True)
class RankBatch:
    """A batch on this rank's device, with the counts of the batches of all ranks."""

    batch: Any
    num_samples: int
    """Rows of `batch`."""
    is_counted: bool
    """Whether the batch has new samples; False if it only keeps this rank in step with the other ranks."""
    global_samples: int
    """Number of new samples of all ranks."""
    global_tokens: int
    most_samples: int
    """Rows of the largest batch of any rank, which set the number of microbatches on every rank."""

    def microbatches(self, spec: DataSpec, size: int | None) -> Iterator[tuple[Any, bool]]:
        """Yield the microbatches of the batch, each with a flag: True if its samples count.

        Every rank makes as many microbatches as the rank with the largest batch, since the forward pass of a
        sharded model is collective. A rank with fewer samples repeats its last sample, uncounted.

        Args:
            spec: The data specification, which splits batches.
            size: Samples in a microbatch; None for all of them.
        """
        num = 1 if size is None else -(-self.most_samples // size)
        if num == 1 or size is None:
            yield spec.transform_microbatch(self.batch), self.is_counted
            return
        total = self.num_samples
        for start in range(0, num * size, size):
            if start < total:
                stop = min(start + size, total)
                part, is_counted = spec.split(self.batch, start, stop, num_samples=total), self.is_counted
            else:
                part, is_counted = spec.split(self.batch, total - 1, total, num_samples=total), False
            yield spec.transform_microbatch(part), is_counted


class RankBatches:
    """A loader's batches, with as many steps on every rank as the rank with the most batches needs.

    The ranks exchange the sizes of their batches in one asynchronous all-reduce per step, which starts when a
    batch is fetched, one step before its use. A rank without further batches repeats a sample, uncounted. A
    rank that never had a batch gets a sample from another rank. Two kinds of rows are left out: samples that
    torch's `DistributedSampler` repeats to give every rank as many, and rows beyond the share that a loader
    states in `batch_share()`.

    Args:
        spec: The loader, with the functions that count its batches.
        device: The device of the batches.
        parallelism: The parallelism, which sums the sizes.
        max_batches: Number of batches of this rank; -1 for all.
    """

    def __init__(
        self, spec: DataSpec, *, device: torch.device, parallelism: Parallelism, max_batches: int = -1
    ) -> None:
        self._spec = spec
        self._device = device
        self._parallelism = parallelism
        self._rank, self._size = parallelism.data_parallel
        self._max_batches = max_batches
        self._share = getattr(spec.dataloader, "batch_share", None)
        self._num_new = num_new_samples(spec.dataloader)
        self._last_batch: Any = None

    def __iter__(self) -> Iterator[RankBatch]:
        """Yield the batches. Collective with several ranks."""
        iterator = iter(self._spec.dataloader)
        num_left, num_seen, is_first = self._max_batches, 0, True
        fetched = self._fetch(iterator, num_left, num_seen)
        while True:
            sizes = fetched.sizes()
            if not any(rows for rows, _, _ in sizes):
                return
            if is_first and not all(rows for rows, _, _ in sizes):
                self._borrow(fetched.batch)
            is_first = False
            num_seen += fetched.fetched_rows
            num_left -= 1
            next_fetched = self._fetch(iterator, num_left, num_seen)
            yield self._on_device(fetched, sizes)
            fetched = next_fetched

    def _fetch(self, iterator: Iterator[Any], num_left: int, num_seen: int) -> _FetchedBatch:
        batch = _END if num_left == 0 else next(iterator, _END)
        if batch is _END:
            return self._announce(_FetchedBatch(None, 0, 0, 0))
        spec = self._spec
        batch = spec.transform(batch)
        rows = spec.count_samples(batch)
        if rows < 1:
            raise DataError(
                "the data loader yielded a batch without samples; expected at least 1 in each batch"
            )
        counted = rows if self._share is None else self._share()[0]
        if self._num_new is not None:
            counted = min(counted, max(0, self._num_new - num_seen))
        counted_batch = batch if counted == rows else spec.split(batch, 0, max(counted, 1), num_samples=rows)
        tokens = spec.count_tokens(counted_batch) if counted else 0
        return self._announce(_FetchedBatch(counted_batch, rows, counted, tokens))

    def _announce(self, fetched: _FetchedBatch) -> _FetchedBatch:
        if self._size > 1:
            sizes = (fetched.rows, fetched.counted, fetched.tokens)
            fetched.exchange = gather_async(sizes, self._parallelism)
        return fetched

    def _on_device(self, fetched: _FetchedBatch, sizes: list[tuple[int, int, int]]) -> RankBatch:
        batch = fetched.batch
        if batch is None:
            batch = self._spec.split(self._last_batch, 0, 1)
        else:
            batch = to_device(batch, self._device) if self._device.type != "cpu" else batch
            if self._size > 1:
                self._last_batch = batch
        return RankBatch(
            batch=batch,
            num_samples=max(fetched.counted, 1),
            is_counted=fetched.counted > 0,
            global_samples=sum(counted for _, counted, _ in sizes),
            global_tokens=sum(tokens for _, _, tokens in sizes),
            most_samples=max(rows for rows, _, _ in sizes),
        )

    def _borrow(self, batch: Any) -> None:
        """Send a sample of one rank's batch to the ranks without a batch. Collective over all processes."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise DataError(
                f"data-parallel rank {self._rank} of {self._size} has no batch while others have; give every "
                "rank at least one"
            )
        has_batch = gather_objects(batch is not None)
        box = [None if batch is None else self._spec.split(batch, 0, 1)]
        torch.distributed.broadcast_object_list(box, src=has_batch.index(True))
        if batch is None:
            self._last_batch = to_device(box[0], self._device)


@dataclass(slots=True)
class _FetchedBatch:
    """A batch on the host, while the ranks exchange its size."""

    batch: Any
    fetched_rows: int
    """Rows of the batch as the loader yielded it, including repeated samples."""
    counted: int
    tokens: int
    exchange: GatheredRows | None = None

    @property
    def rows(self) -> int:
        """Number of rows that go through the model; 0 without a batch."""
        return 0 if self.batch is None else max(self.counted, 1)

    def sizes(self) -> list[tuple[int, int, int]]:
        """Return (rows, counted samples, tokens) of each rank's batch; blocks if a rank is a step late."""
        if self.exchange is None:
            return [(self.rows, self.counted, self.tokens)]
        return [(int(rows), int(counted), int(tokens)) for rows, counted, tokens in self.exchange.read()]


def num_new_samples(loader: Any) -> int | None:
    """Return the number of samples that torch's `DistributedSampler` gives this rank before it repeats any.

    The sampler yields `indices[rank::num_replicas]` of a list that is padded with repeated indices, so the
    repeated indices come last on each rank. The result is None if nothing is repeated, or if the loader does
    not yield its batches in the sampler's order.
    """
    if not isinstance(loader, torch_data.DataLoader) or not getattr(loader, "in_order", True):
        return None
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, torch_data.distributed.DistributedSampler) and not sampler.drop_last:
            num = len(sampler.dataset)  # type: ignore[arg-type]  # it has a length, or there were no sampler
            return max(0, -(-(num - sampler.rank) // sampler.num_replicas))
    return None
