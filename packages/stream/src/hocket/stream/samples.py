"""A rank's samples one by one, in this process or over a DataLoader's workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hocket.stream.engine import RankBatch
from hocket.stream.errors import ConfigError
from hocket.stream.position import Cursor

_VERSION = 1


class _Batches(Protocol):
    def __call__(self, *, epoch: int, start: int, first: int, stride: int) -> Iterator[RankBatch]: ...


@dataclass(slots=True)
class _Place:
    """What comes next: sample `sample` of batch `batch`, in an iteration from `start` on."""

    epoch: int
    start: int
    batch: int
    sample: int = 0


class SampleIterator:
    """The samples of an epoch from the cursor on, with a place that a stateful loader saves and restores.

    Worker `w` of `n` gives the samples of batches `w`, `w + n`, … from the cursor on; outside of workers all
    of them. The cursor moves on with whole batches where there are no workers (one cannot know which of its
    samples the loop was given), and to the next epoch at the end. A place within a batch is this rank's and
    this worker's own: it stands in the iterator's state and not in the data set's, which goes on anywhere.

    Who drops the iterator ends its threads at once: what walks the batches knows the place, and not it.
    """

    def __init__(
        self,
        read: _Batches,
        samples: Callable[[RankBatch], list[dict[str, Any]]],
        cursor: Cursor,
        worker: tuple[int, int] | None,
    ) -> None:
        self._read = read
        self._samples = samples
        self._cursor = cursor
        self._token = cursor.begin()
        self._is_worker = worker is not None
        self._worker = worker or (0, 1)
        self._place = _Place(cursor.epoch, cursor.batch, cursor.batch + self._worker[0])
        self._source: Generator[dict[str, Any], None, None] | None = None

    def __iter__(self) -> SampleIterator:
        """Return itself."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next sample.

        Raises:
            StopIteration: The epoch is over.
            ConfigError: Another iteration or a loaded state has taken over since.
        """
        if self._source is None:
            place, stride = self._place, self._worker[1]
            batches = self._read(epoch=place.epoch, start=place.start, first=place.batch, stride=stride)
            self._source = _walk(
                batches, self._samples, place, stride, self._cursor, self._token, self._is_worker
            )
        return next(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the sample just given; it belongs to a state of the data set."""
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
        """Go on where `state` was taken, in the same worker of as many.

        Raises:
            ConfigError: It is no state of this kind, or of another worker.
        """
        expected = set(self.state_dict())
        if set(state) != expected or state["version"] != _VERSION:
            raise ConfigError(f"the iterator's state is {state!r:.200}: expected the keys {sorted(expected)}")
        if list(state["worker"]) != list(self._worker):
            raise ConfigError(
                f"the iterator's state is of worker {state['worker']} (number, count), and this one is "
                f"{list(self._worker)}: expected the same; a state of `StreamingDataLoader` goes on with "
                "any number"
            )
        self.close()
        self._place = _Place(state["epoch"], state["start"], state["batch"], state["sample"])

    def close(self) -> None:
        """End the threads that read ahead."""
        source, self._source = self._source, None
        if source is not None:
            source.close()


def _walk(
    batches: Iterator[RankBatch],
    split: Callable[[RankBatch], list[dict[str, Any]]],
    place: _Place,
    stride: int,
    cursor: Cursor,
    token: int,
    is_worker: bool,
) -> Generator[dict[str, Any], None, None]:
    for batch in batches:
        samples = split(batch)[: batch.local]
        for number in range(place.sample, len(samples)):
            is_last = number + 1 == len(samples)
            place.batch, place.sample = (batch.number + stride, 0) if is_last else (batch.number, number + 1)
            if is_last and not is_worker:
                cursor.move(token, batch.number + 1, share=(batch.local, batch.total))
            yield samples[number]
    cursor.check(token)
    cursor.go(place.epoch + 1, 0)
