"""Sentences for the user, printed once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

from hocket.trainer.process.world import global_rank
from hocket.trainer.state import State


def print_notices(state: State, notices: Iterable[str]) -> None:
    """Print sentences for the user on the standard error stream, on rank 0 alone."""
    if sys.stderr is None or global_rank() != 0 or state.parallelism.data_parallel[0] != 0:
        return
    with contextlib.suppress(OSError, ValueError):  # what is only shown does not decide a run
        for notice in notices:
            print(f"note: {notice}", file=sys.stderr)
