"""Smaller microbatches after a restart that an out-of-memory error caused.

A launcher with `--max-restarts` starts all ranks again after a failure. The rank that ran out of memory
writes half its microbatch size as a note, and the next attempt trains with that size on all ranks. Gradients
do not change, since microbatches are weighted by their share in the loss of the global batch. For
`device_train_microbatch_size="auto"`, `AutoMicrobatchStep` does this instead.
"""

from __future__ import annotations

import os

from hocket.trainer.process.devices import is_out_of_memory
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.state import State
from hocket.trainer.step.microbatch_note import read_note, write_note


def record_out_of_memory(error: BaseException, state: State, *, num_samples: int) -> None:
    """Write half the microbatch size for the next attempt if memory ran out; ignore other errors.

    Args:
        error: The error that ended the training.
        state: The state of the run, with the microbatch size.
        num_samples: Samples in this rank's batch, used in place of the size if batches are not split.
    """
    size = min(state.device_train_microbatch_size or num_samples, num_samples)
    if is_out_of_memory(error) and size > 1 and write_note(size // 2):
        error.add_note(
            f"the next attempt of this job, if the launcher makes one, trains with "
            f"`device_train_microbatch_size` {size // 2} (it was {size})"
        )


def find_microbatch_limit(sync: StepSync) -> int | None:
    """Return the most samples that a microbatch may have after earlier attempts; None for no limit.

    Collective under a launcher, because a note is readable only on the node of the rank that wrote it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    # 0 means no limit.
    return min((int(size) for size in sync.gather(read_note() or 0) if size), default=None)


def limit_microbatch(state: State, limit: int | None) -> str | None:
    """Limit the microbatch size to `limit`; return a sentence for the user if the size changes."""
    size = state.device_train_microbatch_size
    if limit is None or (size is not None and size <= limit):
        return None
    state.device_train_microbatch_size = limit
    old_size = "the whole batch" if size is None else size
    return (
        f"`device_train_microbatch_size` is {limit} in place of {old_size}: an earlier attempt of this job "
        "ran out of memory"
    )
