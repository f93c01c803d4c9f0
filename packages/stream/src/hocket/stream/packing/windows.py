"""The rows of a window of samples, and the arrays of a batch of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.stream.encodings import Column
from hocket.stream.errors import ConfigError
from hocket.stream.packing.best_fit import SequencePiece, cut_sequences, pack_pieces, permutation
from hocket.stream.settings.validation import whole

#: The label of positions that a loss leaves out; torch's default.
IGNORED_LABEL = -100

_MOST = np.iinfo(np.int64).max

#: Values of `long`.
LONG = ("refuse", "split")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingSettings:
    """All settings that the division of samples into rows depends on.

    Raises:
        ConfigError: A setting is not valid.
    """

    length: int
    """Number of tokens in a row."""

    column: str
    """Name of the column of tokens."""

    label_column: str | None
    """Name of the column of labels, if it is another."""

    window: int
    """Number of samples that are packed together."""

    long: str
    """Policy for samples that are longer than a row: `refuse` or `split`."""

    def __post_init__(self) -> None:
        for name in ("length", "window"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=1))
        if self.long not in LONG:
            raise ConfigError(f"`long` is {self.long!r}: expected one of {LONG}")


@dataclass(frozen=True, slots=True)
class PackedWindow:
    """The rows of a window."""

    number: int
    """Number of the window in its epoch."""

    rows: list[list[SequencePiece]]

    tokens: list[NDArray[Any]]
    """The tokens of each sample."""

    labels: list[NDArray[Any]]
    """The labels of each sample."""

    def num_tokens(self, row: int) -> int:
        """Return the number of tokens in a row."""
        return sum(piece.stop - piece.start for piece in self.rows[row])


def pack_window(
    columns: Mapping[str, Column],
    settings: PackingSettings,
    *,
    epoch: int,
    number: int,
    seed: int | None,
    describe: Callable[[int], str],
) -> PackedWindow:
    """Return the rows of a window.

    Args:
        columns: The samples of the window.
        settings: The settings.
        epoch: The epoch.
        number: Number of the window in the epoch.
        seed: Seed of the permutation of the rows; None leaves them in the order of the samples.
        describe: Function that names a sample of the window, for messages.

    Raises:
        ConfigError: A sample has no tokens of whole numbers, or as many labels; or it is longer than a row,
            and `long` is `refuse`.
    """
    tokens = _sequences(columns, settings.column, describe)
    lengths = [len(sequence) for sequence in tokens]
    if settings.long == "refuse" and lengths and (most := max(lengths)) > settings.length:
        raise ConfigError(
            f"{describe(lengths.index(most))} has {most} tokens, and a row {settings.length}: expected no "
            "more; give a larger `length`, or `long='split'`"
        )
    labels = tokens
    if settings.label_column is not None:
        labels = _sequences(columns, settings.label_column, describe)
        for sample, (length, own) in enumerate(zip(lengths, labels, strict=True)):
            if len(own) != length:
                raise ConfigError(
                    f"{describe(sample)} has {len(own)} labels in `{settings.label_column}` and {length} "
                    f"tokens in `{settings.column}`: expected one for each"
                )
    rows = pack_pieces(cut_sequences(lengths, settings.length), settings.length)
    if seed is not None:
        rows = [rows[row] for row in permutation(len(rows), seed, epoch, number)]
    return PackedWindow(number, rows, tokens, labels)


def _sequences(
    columns: Mapping[str, Column], name: str, describe: Callable[[int], str]
) -> list[NDArray[Any]]:
    values = list(columns[name])
    for sample, value in enumerate(values):
        if not (isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"):
            kind = f"{value.ndim} dims of {value.dtype}" if isinstance(value, np.ndarray) else type(value)
            raise ConfigError(
                f"column `{name}` of {describe(sample)} has {kind}: expected an array of whole numbers with "
                "one dim, such as the encoding `ndarray:uint16`"
            )
        if value.dtype == np.uint64 and value.size and (most := int(value.max())) > _MOST:
            raise ConfigError(
                f"column `{name}` of {describe(sample)} has the number {most}: expected at most {_MOST}, the "
                "largest one of int64, in which batches are made"
            )
    return values


def join_rows(
    rows: Sequence[tuple[PackedWindow, int]], length: int, *, pad_token_id: int
) -> dict[str, NDArray[Any]]:
    """Return the arrays of rows; see `PackedDataset`.

    Args:
        rows: Windows, each with the number of a row.
        length: Number of tokens in a row.
        pad_token_id: Token of positions that are empty.
    """
    tokens: list[NDArray[Any]] = []
    labels: list[NDArray[Any]] = []
    lengths: list[int] = []
    numbers: list[int] = []
    for window, row in rows:
        free = length
        for number, (sample, start, stop) in enumerate(window.rows[row], 1):
            tokens.append(window.tokens[sample][start:stop])
            labels.append(window.labels[sample][start:stop])
            lengths.append(stop - start)
            numbers.append(number)
            free -= stop - start
        if free:
            tokens.append(np.full(free, pad_token_id, np.int64))
            labels.append(np.full(free, IGNORED_LABEL, np.int64))
            lengths.append(free)
            numbers.append(0)
    shape = (len(rows), length)
    starts = np.cumsum([0, *lengths[:-1]])
    joined = np.concatenate(labels, dtype=np.int64)
    joined[starts] = IGNORED_LABEL
    sequence_ids = np.repeat(numbers, lengths)
    position_ids = np.arange(len(rows) * length) - np.repeat(starts, lengths)
    position_ids[sequence_ids == 0] = 0
    return {
        "input_ids": np.concatenate(tokens, dtype=np.int64).reshape(shape),
        "labels": joined.reshape(shape),
        "position_ids": position_ids.reshape(shape),
        "sequence_ids": sequence_ids.reshape(shape),
    }


def sequence_offsets(sequence_ids: Any) -> tuple[NDArray[np.int32], int]:
    """Return the offsets of sequences, as attention over sequences of different lengths takes them.

    Attention then takes the rows as one sequence of all their positions. The padding of a row is a sequence
    of its own.

    Args:
        sequence_ids: `(rows, length)`, of a batch or microbatch; a tensor is copied to the host.

    Returns:
        `cu_seqlens`, `(sequences + 1,)` int32, and the length of the longest sequence.

    Example:
        >>> sequence_offsets(np.array([[1, 1, 2, 0], [1, 1, 1, 1]]))
        (array([0, 2, 3, 4, 8], dtype=int32), 4)
    """
    ids = np.asarray(sequence_ids.cpu() if hasattr(sequence_ids, "cpu") else sequence_ids)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"`sequence_ids` has {ids.ndim} dims of {ids.dtype}: expected two of integers, (rows, length)"
        )
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    offsets = np.append(np.flatnonzero(begins), ids.size).astype(np.int32)
    return offsets, int(np.diff(offsets).max(initial=0))


def count_tokens(batch: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of tokens of a batch without padding; `get_num_tokens_in_batch` of a `DataSpec`.

    Args:
        batch: A batch of packed rows, of arrays or tensors.

    Returns:
        `total`: tokens. `loss_generating`: those with a label.
    """
    return {
        "total": int((batch["sequence_ids"] > 0).sum()),
        "loss_generating": int((batch["labels"] != IGNORED_LABEL).sum()),
    }
