"""The standard streams of a launcher: what cannot be shown does not decide how a job ends."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

__all__ = ["forgive_streams"]


def forgive_streams(*, stdout: type[OSError] = OSError) -> None:
    """Open closed standard streams on the null device, and let text be lost that the others do not take.

    A socket or a pipe of the launcher would have the number of a closed stream otherwise, and the ranks would
    write to it. Ranks that are started afterwards have the null device in place of a closed stream.

    Args:
        stdout: The errors of standard output that are ignored; those of standard error are ignored all.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _forgiving(sys.stdout, sys.__stdout__, 1, stdout)
    sys.stderr = _forgiving(sys.stderr, sys.__stderr__, 2, OSError)


class _ForgivingFile(io.FileIO):
    """The file of a standard stream, which takes what it cannot write as written."""

    def __init__(self, number: int, forgiven: type[OSError]) -> None:
        super().__init__(number, "w", closefd=False)
        self._forgiven = forgiven

    def write(self, data: Any, /) -> int:
        """Write to the file, and ignore the errors to be forgiven."""
        try:
            return super().write(data)
        except self._forgiven:
            return len(data)


def _forgiving(stream: TextIO | None, own: TextIO | None, number: int, forgiven: type[OSError]) -> TextIO:
    if stream is not None and (stream is not own or not isinstance(stream, io.TextIOWrapper)):
        return stream  # replaced by the caller
    file = io.BufferedWriter(_ForgivingFile(number, forgiven))
    if stream is None:
        return io.TextIOWrapper(file, errors="backslashreplace", write_through=True)
    return io.TextIOWrapper(
        file,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
