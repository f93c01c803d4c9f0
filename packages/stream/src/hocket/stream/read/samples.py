"""Iteration over single samples, in this process or in the workers of a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hocket.stream.errors import ConfigError
from hocket.stream.read.cursor import Cursor
from hocket.stream.read.dataset_reader import RankBatch
from hocket.stream.settings.topology import LoaderWorker

_VERSION = 1


class _BatchSource(Protocol):
    def __call__(self, *, epoch: int, start: int, first: int, stride: int) -> Iterator[RankBatch]: ...


@dataclass(slots=True)
class _SamplePlace:
    """The next sample: number `sample` of batch `batch`, in an iteration from batch `start` on."""

    epoch: int
    start: int
    batch: int
    sample: int = 0


class SampleIterator:
    """An iterator over the samples of an epoch from the cursor on, with a state for stateful loaders.

    Worker `w` of `n` yields the samples of batches `w`, `w + n`, … counted from the cursor. Without workers
    the cursor moves after each whole batch; with workers it stays, because the parent does not know which
    samples its loop has received. A position within a batch belongs to one rank and worker, so it is part
    of the iterator's state and not of the data set's state, which fits any number of them.

    Deleting the iterator stops its threads: the generator that reads batches holds no reference to it.
    """

    def __init__(
        self,
        read: _BatchSource,
        samples: Callable[[RankBatch], list[dict[str, Any]]],
        cursor: Cursor,
        worker: LoaderWorker | None,
        *,
        token: int,
    ) -> None:
        self._read = read
        self._samples = samples
        self._cursor = cursor
        self._token = token
        self._is_worker = worker is not None
        self._worker = (0, 1) if worker is None else (worker.number, worker.num_workers)
        self._place = _SamplePlace(cursor.epoch, cursor.batch, cursor.batch + self._worker[0])
        self._source: Generator[dict[str, Any], None, None] | None = None

    def __iter__(self) -> SampleIterator:
        """Return itself."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next sample.

        Raises:
            StopIteration: The epoch is over.
            ConfigError: Another iteration was started, or a state loaded, since.
        """
        if self._source is None:
            place, stride = self._place, self._worker[1]
            batches = self._read(epoch=place.epoch, start=place.start, first=place.batch, stride=stride)
            self._source = _walk(
                batches, self._samples, place, stride, self._cursor, self._token, self._is_worker
            )
        return next(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded sample. It complements the state of the data set."""
        place = self._place
        return {
            "version": _VERSION,
            "epoch": place.epoch,
            "start": place.start,
            "batch": place.batch,
            "sample": place.sample,
            "worker": list(self._worker),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, in the same worker of the same number of workers.

        Raises:
            ConfigError: It is not a state of this iterator, or it belongs to another worker.
        """
        expected = set(self.state_dict())
        if set(state) != expected or state["version"] != _VERSION:
            raise ConfigError(f"the iterator's state is {state!r:.200}: expected the keys {sorted(expected)}")
        if list(state["worker"]) != list(self._worker):
            raise ConfigError(
                f"the iterator's state is of worker {state['worker']} (number, count), and this one is "
                f"{list(self._worker)}: expected the same; a state of `StreamingDataLoader` fits any "
                "number of workers"
            )
        self.close()
        # A worker's reader joins the epoch where the others did; only a single reader moves the cursor.
        position = state["start"] if self._is_worker else state["batch"]
        self._cursor.resume(self._token, state["epoch"], position)
        self._place = _SamplePlace(state["epoch"], state["start"], state["batch"], state["sample"])

    def close(self) -> None:
        """Stop the threads that read ahead."""
        source, self._source = self._source, None
        if source is not None:
            source.close()


def _walk(
    batches: Iterator[RankBatch],
    split: Callable[[RankBatch], list[dict[str, Any]]],
    place: _SamplePlace,
    stride: int,
    cursor: Cursor,
    token: int,
    is_worker: bool,
) -> Generator[dict[str, Any], None, None]:
    for batch in batches:
        samples = split(batch)[: batch.local]
        cursor.start(token)
        for number in range(place.sample, len(samples)):
            is_last = number + 1 == len(samples)
            place.batch, place.sample = (batch.number + stride, 0) if is_last else (batch.number, number + 1)
            if is_last and not is_worker:
                cursor.move(token, batch.number + 1, share=(batch.local, batch.total))
            yield samples[number]
    cursor.end_epoch(token)
