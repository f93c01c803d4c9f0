"""The checks of the batch size and the epoch size against the number of ranks."""

from __future__ import annotations

from hocket.stream.errors import ConfigError
from hocket.stream.settings.validation import whole


def check_epoch_size(epoch_size: int, *, num_ranks: int, origin: str) -> None:
    """Check that an epoch of the data set at `origin` has a sample for each rank.

    Raises:
        ConfigError: It has fewer.
    """
    if epoch_size < num_ranks:
        raise ConfigError(
            f"an epoch of the data set at `{origin}` has {epoch_size} samples for "
            f"{num_ranks} data-parallel ranks: expected at least one for each; use fewer ranks or "
            "more data"
        )


def resolve_global_batch_size(
    batch_size: int | None, global_batch_size: int | None, *, num_ranks: int
) -> int:
    """Return the number of samples in a batch over all ranks.

    Args:
        batch_size: Number of samples on each rank.
        global_batch_size: Number of samples over all ranks.
        num_ranks: Number of data-parallel ranks.

    Raises:
        ConfigError: Both or neither are given, or the batch is smaller than the number of ranks.
    """
    if (batch_size is None) == (global_batch_size is None):
        raise ConfigError(
            f"`batch_size` is {batch_size} and `global_batch_size` {global_batch_size}: expected one of them"
        )
    if batch_size is not None:
        size = whole("batch_size", batch_size) * num_ranks
    else:
        size = whole("global_batch_size", global_batch_size)
    if size < max(num_ranks, 1):
        raise ConfigError(
            f"the global batch is {size} samples for {num_ranks} data-parallel ranks: expected at least "
            "one for each; make it larger or use fewer ranks"
        )
    return size


def check_one_size(global_batch_size: int, *, before: int | None) -> None:
    """Check that the batch size is the one that was set before, if one was.

    Raises:
        ConfigError: It is another.
    """
    if before not in (None, global_batch_size):
        raise ConfigError(
            f"the global batch is {global_batch_size} samples, and was set to {before} "
            "before: expected one size; give it to the data set or to the loader, not to both"
        )
