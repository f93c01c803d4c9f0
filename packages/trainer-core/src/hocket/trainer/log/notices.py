"""Lines for the user. What is only shown does not decide a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from hocket.trainer.process.world import global_rank

if TYPE_CHECKING:
    from hocket.trainer.state import State


def print_notices(state: State, notices: Iterable[str]) -> None:
    """Print sentences for the user on the standard error stream, on rank 0 alone."""
    if global_rank() == 0 and state.parallelism.data_parallel[0] == 0:
        for notice in notices:
            print_line(f"note: {notice}", sys.stderr)


def print_line(line: str, stream: TextIO | None) -> None:
    """Print a line to a stream; do nothing without one, or where it is full, closed or its reader is gone."""
    if stream is None:  # in a process without a console
        return
    with contextlib.suppress(OSError, ValueError):
        print(line, file=stream, flush=True)
