"""A rank's samples one by one, in this process or over a DataLoader's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from hocket.stream.engine import RankBatch
from hocket.stream.errors import ConfigError
from hocket.stream.position import Cursor

_VERSION = 1


class _Batches(Protocol):
    def __call__(self, *, epoch: int, start: int, first: int, stride: int) -> Iterator[RankBatch]: ...


class SampleIterator:
    """The samples of an epoch from the cursor on, with a place that a stateful loader saves and restores.

    Worker `w` of `n` gives the samples of batches `w`, `w + n`, … from the cursor on; outside of workers all
    of them. The cursor moves on with whole batches where there are no workers, and to the next epoch at the
    end. A place within a batch is this rank's and this worker's own: it stands in the iterator's state and
    not in the data set's, which goes on anywhere.
    """

    def __init__(
        self,
        read: _Batches,
        samples: Callable[[RankBatch], list[dict[str, Any]]],
        cursor: Cursor,
        worker: tuple[int, int],
    ) -> None:
        self._read = read
        self._samples = samples
        self._cursor = cursor
        self._token = cursor.begin()
        self._worker = worker
        self._epoch, self._start = cursor.epoch, cursor.batch
        self._batch = self._start + worker[0]
        self._place = 0
        self._source: Iterator[dict[str, Any]] | None = None

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
            self._source = self._walk()
        return next(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the sample just given; it belongs to a state of the data set."""
        return {
            "version": _VERSION,
            "epoch": self._epoch,
            "start": self._start,
            "batch": self._batch,
            "sample": self._place,
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
        self._epoch, self._start = state["epoch"], state["start"]
        self._batch, self._place = state["batch"], state["sample"]

    def close(self) -> None:
        """End the threads that read ahead."""
        source, self._source = self._source, None
        if source is not None:
            source.close()  # type: ignore[attr-defined]

    def _walk(self) -> Iterator[dict[str, Any]]:
        count = self._worker[1]
        batches = self._read(epoch=self._epoch, start=self._start, first=self._batch, stride=count)
        for batch in batches:
            samples = self._samples(batch)[: batch.local]
            for place in range(self._place, len(samples)):
                is_last = place + 1 == len(samples)
                self._batch, self._place = (batch.number + count, 0) if is_last else (batch.number, place + 1)
                if is_last and count == 1:
                    self._cursor.move(self._token, batch.number + 1, share=(batch.local, batch.total))
                yield samples[place]
        self._cursor.check(self._token)
        self._cursor.go(self._epoch + 1, 0)
