"""`PackedDataset`: batches of rows that hold several token sequences each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from numpy.typing import NDArray

from hocket.native.arguments import nearest_name
from hocket.stream.dataset import StreamingDataset
from hocket.stream.errors import ConfigError, StateMismatchError
from hocket.stream.packing.windows import PackedWindow, PackingSettings, join_rows, pack_window
from hocket.stream.read.dataset_reader import digest
from hocket.stream.read.sample_order import MixedSampleOrder, NativeSampleOrder
from hocket.stream.settings.batch_size import resolve_global_batch_size
from hocket.stream.settings.mix_schedule import find_batch
from hocket.stream.settings.topology import LoaderWorker, resolve_data_parallel
from hocket.stream.settings.validation import whole

logger = logging.getLogger("hocket.stream")

_VERSION = 1

#: Number of samples that are packed together.
WINDOW = 1024


class _SampleWindows(StreamingDataset):
    """The windows of samples: batches that each rank reads whole."""

    is_first_rank = True

    def begin_pass(self, worker: LoaderWorker | None = None) -> int:
        """Move the cursor; see `StreamingDataset.begin_pass`. Logs notices on the data, on one rank."""
        if not self._is_tail_reported and self.is_first_rank:
            for notice in self._reader.notices:
                logger.warning("%s", notice)
        self._is_tail_reported = True
        return super().begin_pass(worker)

    def check_column(self, name: str) -> None:
        """Check that the samples have a column.

        Raises:
            ConfigError: They have none of this name.
        """
        if (known := self._reader.encodings) and name not in known:
            near = nearest_name(name, list(known))
            hint = f"did you mean `{near}`?" if near else f"expected one of {list(known)}"
            raise ConfigError(f"the samples of `{self._reader.origin}` have no column `{name}`: {hint}")


@dataclass(frozen=True, slots=True)
class _RowBatch:
    """A batch of this rank's rows, and the position after it."""

    columns: dict[str, NDArray[Any]]

    share: tuple[int, int]
    """Number of rows that count on this rank, and over all ranks."""

    tokens: tuple[int, int]
    """Number of their tokens."""

    window: int
    """The window of the next row."""

    row: int
    """Number of rows of that window before the next row."""


class PackedDataset:
    """Token sequences of one or several data sets, packed into rows of one length, in a global order.

    The samples come in the order of a `StreamingDataset`. Each `window` consecutive ones are packed together,
    by best fit, whatever the number of ranks: global batch `k` is the same list of rows on any number of
    them, and a state continues on any other number, and with another batch size. Every rank reads all
    samples, because where a row begins depends on the lengths of those before; it makes arrays of its own
    rows only. Packing runs in the loop, while native threads read ahead; there are no worker processes.

    A batch is a mapping of `(rows, length)` int64 arrays: `input_ids`; `labels`, the tokens, or those of
    `label_column`, with -100 for the first token of each sequence and for padding; `position_ids`, which
    begin at 0 in each sequence; and `sequence_ids`, which count the sequences of a row from 1 and are 0 for
    padding. With torch, `PackedDataLoader` yields tensors.

    Args:
        length: Number of tokens in a row.
        column: Name of the column of tokens: arrays of whole numbers with one dim.
        label_column: Name of a column with a label for each token.
        window: Number of samples that are packed together. More means less padding, and more samples to
            read again after a state was loaded.
        long: Policy for a sample that is longer than a row: `refuse`, or `split` it into sequences that are
            packed each by itself.
        pad_token_id: Token of positions that are empty.
        batch_size: Number of rows in a batch on each rank. Give this or `global_batch_size`.
        global_batch_size: Number of rows in a batch over all ranks.
        tail: Policy for the last batch of an epoch: keep it `short`, or `drop` it.
        rank: Data-parallel rank, as in `StreamingDataset`.
        world_size: Number of data-parallel ranks.
        replication: Number of consecutive processes that read the same rows.
        samples: Arguments of `StreamingDataset` for the samples: their places, `shuffle`, `epoch_size`,
            `weights`, `cache_limit`, and so on. `order` is the native one, and phases of `weights` begin at
            samples, not at batches.

    Raises:
        ConfigError: An argument is not valid.
        IndexNotFoundError: There is no index; with the other errors of `StreamingDataset`.

    Example:
        >>> dataset = PackedDataset(remote="s3://bucket/train", length=2048, batch_size=8, shuffle=True)
        >>> for batch in dataset.batches():
        ...     batch["input_ids"]  # (8, 2048) int64
    """

    def __init__(
        self,
        *,
        length: int,
        column: str = "tokens",
        label_column: str | None = None,
        window: int = WINDOW,
        long: str = "refuse",
        pad_token_id: int = 0,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        tail: str = "short",
        rank: int | None = None,
        world_size: int | None = None,
        replication: int | None = None,
        **samples: Any,
    ) -> None:
        self.settings = PackingSettings(
            length=length, column=column, label_column=label_column, window=window, long=long
        )
        """What the division of samples into rows depends on."""
        if tail not in ("short", "drop"):
            raise ConfigError(f"`tail` is {tail!r}: expected 'short' or 'drop'")
        self._pad_token_id, self._tail = whole("pad_token_id", pad_token_id), tail
        self.data_parallel = resolve_data_parallel(rank, world_size, replication=replication)
        """This process's data-parallel (rank, number of ranks)."""
        self._follows_ranks = rank is None and replication is None
        self._is_batch_of_rank = batch_size is not None
        self.global_batch_size = resolve_global_batch_size(
            batch_size, global_batch_size, num_ranks=self.data_parallel[1]
        )
        """Number of rows in a batch over all ranks."""
        self._windows = _SampleWindows(
            rank=0, world_size=1, global_batch_size=self.settings.window, **samples
        )
        self._windows.is_first_rank = self.data_parallel[0] == 0
        plan = self._windows.plan
        if not isinstance(plan, NativeSampleOrder) or plan.settings.batching_method != "random":
            raise ConfigError(
                "packing reads windows of samples in the native order, with `batching_method='random'`: "
                "leave out `order` and the other method"
            )
        self._order = plan
        for start, _ in samples.get("weights") or ():
            _check_start("weights", start)
        for name in (column, label_column):
            if name is not None:
                self._windows.check_column(name)
        self.num_tokens = 0
        """Number of tokens of all batches that were yielded, over all ranks; a state has it."""
        self.batch = 0
        """Number of batches of the epoch that were yielded."""
        self._row = 0
        self._resumed: tuple[tuple[int, int], int, int] | None = None
        self._token_share = (0, 0)

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._windows.cursor.epoch

    @property
    def epoch_size(self) -> int:
        """Number of samples in an epoch."""
        return self._windows.epoch_size

    def __repr__(self) -> str:
        rank, world_size = self.data_parallel
        return (
            f"<{type(self).__name__} of {self._windows.epoch_size} samples an epoch, rows of "
            f"{self.settings.length} tokens, {self.global_batch_size} a global batch, at batch {self.batch} "
            f"of epoch {self.epoch}, rank {rank} of {world_size}>"
        )

    def follow_ranks(self, rank: int, num_ranks: int) -> None:
        """Serve these data-parallel ranks; see `StreamingDataset.follow_ranks`.

        Raises:
            ConfigError: The global batch has fewer rows than there are ranks.
        """
        if not self._follows_ranks or (rank, num_ranks) == self.data_parallel:
            return
        size, before = self.global_batch_size, self.data_parallel[1]
        size = size // before * num_ranks if self._is_batch_of_rank else size
        self.global_batch_size = resolve_global_batch_size(None, size, num_ranks=num_ranks)
        self.data_parallel = resolve_data_parallel(rank, num_ranks)
        self._windows.is_first_rank = rank == 0

    def batches(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield this rank's batches of an epoch.

        Epochs follow each other as in `StreamingDataset.batches`. A rank without a share of a short last
        batch gets one row, with a share of 0.

        Raises:
            ConfigError: A sample cannot be packed; or another iteration was started, or a state loaded, while
                this one is in use.
            ShardNotFoundError: As `StreamingDataset.read_batches`, with its other errors.
        """
        cursor = self._windows.cursor
        is_whole = False
        while not is_whole:
            token, weights = self._begin(), self._windows.weights
            is_new = cursor.batch == 0 and self._row == 0
            for batch in self._cut(self._read(cursor.epoch, cursor.batch), self._row):
                cursor.move(token, batch.window, share=batch.share)
                self._row, self.batch, is_new = batch.row, self.batch + 1, False
                self._token_share, self.num_tokens = batch.tokens, self.num_tokens + batch.tokens[1]
                yield batch.columns
                if self._windows.weights is not weights:
                    break  # later windows that were read ahead have the weights from before
            else:
                is_whole = True
                if is_new:
                    raise ConfigError(
                        f"an epoch of {self._windows.epoch_size} samples has no batch of "
                        f"{self.global_batch_size} rows with `tail='{self._tail}'`: expected samples with "
                        "tokens, and for 'drop' as many rows"
                    )
        cursor.end_epoch(token)
        self._row = self.batch = 0

    def _begin(self) -> int:
        """Move to the start of a new iteration and return its token."""
        token = self._windows.begin_pass()
        cursor = self._windows.cursor
        self._row = self.batch = 0
        if self._resumed is not None and self._resumed[0] == (cursor.epoch, cursor.batch):
            _, self._row, self.batch = self._resumed
        return token

    def _read(self, epoch: int, first: int) -> Iterator[PackedWindow]:
        """Yield the windows of an epoch from one on."""
        seed = self._order.settings.shuffle_seed if self._order.settings.shuffle else None
        for batch in self._windows.read_batches(epoch=epoch, first=first):
            number = batch.number

            def describe(sample: int, number: int = number) -> str:
                ids = self._windows.sample_ids(number, epoch=epoch)
                (place,) = self._windows.places([ids[sample]])
                return f"sample {place.number} (row {place.row} of `{place.shard}` in `{place.origin}`)"

            yield pack_window(
                batch.columns, self.settings, epoch=epoch, number=number, seed=seed, describe=describe
            )

    def _cut(self, windows: Iterable[PackedWindow], skipped: int) -> Iterator[_RowBatch]:
        """Yield batches of the rows of windows, without the first `skipped` rows."""
        waiting: list[tuple[PackedWindow, int]] = []
        window = None
        for window in windows:
            for row in range(skipped, len(window.rows)):
                waiting.append((window, row))
                if len(waiting) == self.global_batch_size:
                    yield self._join(waiting)
                    waiting = []
            skipped = 0
        if waiting and window is not None and self._tail == "short":
            yield self._join(waiting)

    def _join(self, rows: list[tuple[PackedWindow, int]]) -> _RowBatch:
        rank, world_size = self.data_parallel
        first, stop = (len(rows) * number // world_size for number in (rank, rank + 1))
        counts = [window.num_tokens(row) for window, row in rows]
        window, row = rows[-1]
        is_end = row + 1 == len(window.rows)
        return _RowBatch(
            # A row that does not count lets a rank without a share run the step.
            join_rows(rows[first:stop] or rows[:1], self.settings.length, pad_token_id=self._pad_token_id),
            (stop - first, len(rows)),
            (sum(counts[first:stop]), sum(counts)),
            window.number + is_end,
            0 if is_end else row + 1,
        )

    def batch_share(self) -> tuple[int, int]:
        """Return how many rows of the last yielded batch count on this rank, and over all ranks."""
        return self._windows.batch_share()

    def token_share(self) -> tuple[int, int]:
        """Return how many tokens, without padding, these rows have on this rank, and over all ranks."""
        return self._token_share

    def metrics(self) -> dict[str, float]:
        """Return counters for loggers: those of `StreamingDataset.metrics`, and `stream/tokens`."""
        return self._windows.metrics() | {"stream/tokens": self.num_tokens}

    def order_digest(self) -> int:
        """Return a digest of the rows and their batches, the same on all ranks of a run, below 2^52."""
        rows = [self._windows.order_digest(), asdict(self.settings), self.global_batch_size, self._tail]
        return int(digest(rows)[:13], 16) or 1

    def set_weights(self, weights: Mapping[str, float], *, at: int | None = None) -> None:
        """Change the weights of the streams, from the first window on that is not begun, or from `at` on.

        Args:
            weights: Weight by stream name; see `StreamingDataset.set_weights`.
            at: Number of the first sample, over all ranks and epochs.

        Raises:
            ConfigError: As `StreamingDataset.set_weights`; or `at` is in a window that is begun, or counts
                batches.
        """
        _check_start("at", at)
        if isinstance(self._order, MixedSampleOrder):
            cursor = self._windows.cursor
            least = self._order.position(cursor.epoch, cursor.batch + (self._row > 0))
            at = least if at is None else whole("at", at, least=least)
        self._windows.set_weights(weights, at=at)
        self._mark()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which starts at its beginning.

        Raises:
            ConfigError: `epoch` is not an integer from 0.
        """
        self._windows.set_epoch(epoch)
        self._resumed, self._row, self.batch = None, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, for any number of ranks: JSON values below 1 KB.

        `samples` is the state of the samples' data set, at the window of the next row.
        """
        return {
            "version": _VERSION,
            "batch": self.batch,
            "row": self._row,
            "num_tokens": self.num_tokens,
            "packing": asdict(self.settings),
            "samples": self._windows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position from a saved state; the next iteration continues from it.

        The state may be of another number of ranks and another batch size.

        Raises:
            StateMismatchError: It was saved with other data, another order or other rows; the message names
                the field.
            ConfigError: It is not a state of packed rows.
        """
        expected = {"version", "batch", "row", "num_tokens", "packing", "samples"}
        if not isinstance(state, Mapping) or set(state) != expected or state["version"] != _VERSION:
            raise ConfigError(
                f"the state is {state!r:.200}: expected the keys {sorted(expected)} with version {_VERSION}, "
                "as `state_dict()` of a `PackedDataset` returns it"
            )
        saved = state["packing"]
        for name, here in asdict(self.settings).items():
            if not isinstance(saved, Mapping) or name not in saved or saved[name] != here:
                was = saved.get(name) if isinstance(saved, Mapping) else saved
                raise StateMismatchError(
                    f"`{name}` is {was!r} in the state and {here!r} here: expected equal values, because the "
                    f"rows depend on them; give `{name}={was!r}`, or start without this state"
                )
        numbers = {name: whole(name, state[name]) for name in ("batch", "row", "num_tokens")}
        self._windows.load_state_dict(state["samples"])
        self.num_tokens, self._row, self.batch = numbers["num_tokens"], numbers["row"], numbers["batch"]
        self._mark()

    def end_epoch(self) -> None:
        """Move to the start of the next epoch, for a caller that reads only a part of each epoch."""
        self.set_epoch(self.epoch + 1)

    def _mark(self) -> None:
        """Let the next iteration go on at the present row, if it starts at the present window."""
        cursor = self._windows.cursor
        self._resumed = ((cursor.epoch, cursor.batch), self._row, self.batch)


def _check_start(name: str, start: object) -> None:
    """Refuse a phase of weights that begins at a batch, which would count windows."""
    if find_batch(start) is not None:
        raise ConfigError(
            f"`{name}` has {start!r}, which counts batches, and the sample at which a batch of rows begins "
            "is known only when it was read: expected a number of samples"
        )
