"""Writers with mosaicml-streaming's defaults."""

from __future__ import annotations

import inspect
from typing import Any

from hocket.compat.streaming.errors import worded
from hocket.stream.errors import ConfigError
from hocket.stream.write import text_writers as _text
from hocket.stream.write import writer as _writer

_ARGUMENTS = {*inspect.signature(_writer.Writer).parameters, "newline", "separator"}


class _Configured(_writer.Writer):
    def __init__(self, **settings: Any) -> None:
        if unknown := sorted(set(settings) - _ARGUMENTS):
            raise ConfigError(f"Invalid Writer arguments {unknown}: expected those of {sorted(_ARGUMENTS)}")
        with worded():
            super().__init__(**settings)

    def get_config(self) -> dict[str, Any]:
        """Return the settings that the index stores for each shard."""
        return dict(self._config)


class MDSWriter(_Configured, _writer.MDSWriter):
    """A writer of MDS shards; see `hocket.stream.MDSWriter`. `hashes` is None by default."""

    def __init__(self, *, hashes: list[str] | None = None, **settings: Any) -> None:
        super().__init__(hashes=hashes, **settings)


class JSONWriter(_Configured, _text.JSONWriter):
    """A writer of JSON-lines shards; see `hocket.stream.JSONWriter`. `hashes` is None by default."""

    def __init__(self, *, hashes: list[str] | None = None, **settings: Any) -> None:
        super().__init__(hashes=hashes, **settings)


class XSVWriter(_Configured, _text.XSVWriter):
    """A writer of separated-value shards; see `hocket.stream.XSVWriter`. `hashes` is None by default."""

    def __init__(self, *, hashes: list[str] | None = None, **settings: Any) -> None:
        super().__init__(hashes=hashes, **settings)


class CSVWriter(_Configured, _text.CSVWriter):
    """A writer of CSV shards; see `hocket.stream.CSVWriter`. `hashes` is None by default."""

    def __init__(self, *, hashes: list[str] | None = None, **settings: Any) -> None:
        super().__init__(hashes=hashes, **settings)


class TSVWriter(_Configured, _text.TSVWriter):
    """A writer of TSV shards; see `hocket.stream.TSVWriter`. `hashes` is None by default."""

    def __init__(self, *, hashes: list[str] | None = None, **settings: Any) -> None:
        super().__init__(hashes=hashes, **settings)
