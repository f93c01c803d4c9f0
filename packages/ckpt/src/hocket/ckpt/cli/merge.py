"""`hocket-ckpt merge`."""

import dataclasses
import time
from collections.abc import Sequence
from typing import cast

from hocket.ckpt.cli.convert import parse_size, parse_user, print_report
from hocket.ckpt.formats.table import Format
from hocket.ckpt.verbs.merge import BUFFERS, MergeMethod, merge
from hocket.native.cli.progress import progress
from hocket.native.cli.text import count, print_json

__all__ = ["show"]


def show(
    places: Sequence[str],
    *,
    method: str,
    weights: Sequence[float],
    decay: float | None,
    t: float | None,
    base: str | None,
    to: str | None,
    dtype: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
    copied: Sequence[str],
    max_shard_size: str,
    memory: str,
    compression: str | None,
    unfenced: bool,
    step: int | None,
    user: str | None,
    as_json: bool,
) -> None:
    """Merge the checkpoints at all places but the last into that, and print what was written."""
    start_s = time.monotonic()
    *sources, destination = places
    with progress("merging", quiet=as_json) as on_progress:
        merged = merge(
            sources,
            destination,
            method=cast("MergeMethod", method),
            weights=weights or None,
            decay=decay,
            t=t,
            base=base,
            to=cast("Format | None", to),
            dtype=dtype,
            include=include,
            exclude=exclude,
            copied=[glob for glob in copied if glob] if copied else BUFFERS,
            max_shard_bytes=parse_size(max_shard_size),
            memory_bytes=parse_size(memory),
            compression=compression,
            unfenced=unfenced,
            step=step,
            user=parse_user(user),
            on_progress=on_progress,
        )
    if as_json:
        print_json(dataclasses.asdict(merged))
        return
    print_report(merged, count(len(sources), "checkpoint"), time.monotonic() - start_s)
