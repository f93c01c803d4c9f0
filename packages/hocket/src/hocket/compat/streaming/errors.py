"""Errors of `hocket.stream` with the types and words that mosaicml-streaming raises for the same mistakes.

Programs catch those types and match those words. A message starts with the words of mosaicml-streaming,
followed by those of `hocket.stream`. The classes also extend the types that mosaicml-streaming raises, so
that handlers for either library work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hocket.stream.errors import (
    ConfigError,
    DatasetExistsError,
    IndexCorruptError,
    IndexNotFoundError,
    StreamError,
)


class EmptyStreamError(ConfigError, RuntimeError):
    """A data set has no samples."""

    code = "HKT-HO01"


class LocalIndexNotFoundError(IndexNotFoundError, RuntimeError):
    """A data set without a remote has no index."""

    code = "HKT-HO02"


class IndexDecodeError(IndexCorruptError, json.JSONDecodeError):
    """An index is not JSON."""

    code = "HKT-HO03"

    def __init__(self, message: str) -> None:
        ValueError.__init__(self, message)
        self.add_note(f"[{self.code}]")
        self.msg, self.doc, self.pos, self.lineno, self.colno = message, "", 0, 1, 1

    def __reduce__(self) -> tuple[type[IndexDecodeError], tuple[str]]:
        return type(self), (self.msg,)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The conversion of one error of `hocket.stream`."""

    raised: type[StreamError]
    """The error of `hocket.stream`."""

    pattern: str
    """A regular expression to find in the error's message; its groups fill `words`."""

    words: str
    """The words to put before the message."""

    becomes: type[StreamError] | None = None
    """The type to raise, which extends that of mosaicml-streaming; None if `raised` extends it already."""


_RULES = (
    _Rule(DatasetExistsError, "is not empty", "Directory is not empty"),
    _Rule(IndexCorruptError, r"`(.*)` is not valid: (EOF while parsing|expected value|key must be)",
          "Index file at {0} is empty or corrupted", IndexDecodeError),
    _Rule(IndexNotFoundError, "", "No such file or directory"),
    _Rule(ConfigError, "an epoch of the data set at `(.*)` has 0 samples",
          "Stream contains no samples: {0}", EmptyStreamError),
    _Rule(ConfigError, "encoding `pkl` runs code", "A column contains an unsafe type"),
    _Rule(ConfigError, "`sampling_method` is", "Invalid sampling method"),
    _Rule(ConfigError, "`batching_method` is '.*expected one of", "Invalid batching method"),
    _Rule(ConfigError, "no batch size is set", "Please pass `batch_size` to StreamingDataset"),
    _Rule(ConfigError, "stream ([0-9]+) has a share of",
          "Number of samples for stream {0} is 0 in a global batch"),
)  # fmt: skip


@contextmanager
def worded(*, is_local: bool = False) -> Iterator[None]:
    """Raise errors of `hocket.stream` with the words of mosaicml-streaming first.

    Args:
        is_local: Whether the data has no remote.
    """
    try:
        yield
    except StreamError as error:
        reworded = _reword(error, is_local=is_local)
        if reworded is None:
            raise
        raise reworded from error


def _reword(error: StreamError, *, is_local: bool) -> StreamError | None:
    if is_local and type(error) is IndexNotFoundError:
        return LocalIndexNotFoundError(f"No `remote` provided, but local file is missing: {error}")
    for rule in _RULES:
        match = re.search(rule.pattern, str(error)) if type(error) is rule.raised else None
        if match is not None:
            return (rule.becomes or rule.raised)(f"{rule.words.format(*match.groups())}: {error}")
    return None
