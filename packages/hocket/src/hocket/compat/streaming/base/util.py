"""The functions of `streaming.base.util` that scripts use."""

from __future__ import annotations

from typing import Any

from hocket.stream import merge_index as _merge_index

__all__ = ["clean_stale_shared_memory", "merge_index"]


def clean_stale_shared_memory() -> None:
    """Do nothing, because no named shared memory is used."""


def merge_index(*index_file_urls: Any, keep_local: bool = True, download_timeout: int = 60) -> None:
    """Write one index over several data sets: `merge_index(list, out)`, or `merge_index(root)`.

    Raises:
        TypeError: There are neither one nor two positional arguments.
        ConfigError: As in `hocket.stream.merge_index`, whose other errors are raised too.
    """
    if not 1 <= len(index_file_urls) <= 2:
        raise TypeError(
            f"`merge_index` got {len(index_file_urls)} places: expected `(list, out)` or `(root)`"
        )
    source, *out = index_file_urls
    _merge_index(source, *out, keep_local=keep_local, download_timeout=download_timeout)
