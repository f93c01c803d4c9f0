"""`hocket-stream bench`."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.native.cli.text import console, count, print_json, size
from hocket.stream.cli.page import Band, Chart, check_page, write_page
from hocket.stream.dataset import StreamingDataset
from hocket.stream.read.dataset_index import DatasetIndex, temporary_folder
from hocket.stream.settings.places import find_folder

__all__ = ["show"]

#: Parts of the time in a picture.
_PARTS = 80


def show(
    uri: str,
    *,
    split: str | None = None,
    config: str | None = None,
    local: str | None,
    batch_size: int,
    shuffle: bool,
    seconds: float | None,
    html: str | None = None,
    as_json: bool,
) -> None:
    """Read an epoch, or for a limited time, and print the throughput.

    Args:
        uri: Path or URI of the data set. A local folder is read in place.
        local: Cache folder; by default a temporary one.
        split: A split of the data set; None for the whole.
        config: Name of the configuration of a data set on a hub.
        batch_size: Number of samples in a batch.
        shuffle: Read in shuffled order.
        seconds: Time limit; by default the whole epoch is read.
        html: File to write a page with pictures to.
        as_json: Print only JSON.

    Raises:
        ValueError: `seconds` is not positive.
        ConfigError: The page cannot be written there.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"`--seconds {seconds}`: expected more than 0")
    page = None if html is None else check_page(html)
    dataset_index = DatasetIndex(uri, split=split, config=config)
    with _cache_folder(dataset_index, local) as folder:
        start_s = time.perf_counter()
        dataset = StreamingDataset(
            remote=dataset_index.uri,
            local=folder,
            split=dataset_index.split_by_name,
            config=config,
            batch_size=batch_size,
            shuffle=shuffle,
            rank=0,
            world_size=1,
        )
        num_samples, first_s, batches = 0, 0.0, dataset.batches()
        points: list[_ReadPoint] = []
        try:
            for _ in batches:
                num_samples += dataset.batch_share()[0]
                elapsed = time.perf_counter() - start_s
                first_s = first_s or elapsed
                if page is not None:
                    points.append(_ReadPoint.now(elapsed, num_samples, dataset.metrics()))
                if seconds is not None and elapsed >= seconds:
                    break
        finally:
            batches.close()  # type: ignore[attr-defined]
        elapsed = time.perf_counter() - start_s
    raw = dataset_index.raw_bytes * num_samples / max(dataset.size, 1)
    if page is not None:
        facts = [("data", f"{dataset_index.uri}: {count(num_samples, 'sample')} in {elapsed:.2f} s")]
        facts += [("rate", f"{num_samples / elapsed:,.0f} samples/s, {raw / elapsed / 1e6:,.1f} MB/s raw")]
        facts += [("first batch", f"after {first_s * 1000:,.1f} ms, batches of {batch_size:,}")]
        write_page(page, "hocket-stream bench", facts=facts, charts=_charts(points))
    if as_json:
        print_json(
            {
                "uri": dataset_index.uri,
                "samples": num_samples,
                "whole_epoch": num_samples == dataset.size,
                "seconds": elapsed,
                "first_batch_s": first_s,
                "samples_per_s": num_samples / elapsed,
                "raw_bytes_per_s": raw / elapsed,
            }
        )
        return
    out = console()
    coverage = (
        "the whole epoch" if num_samples == dataset.size else f"{100 * num_samples / dataset.size:.1f}% of it"
    )
    out.print(f"{count(num_samples, 'sample')} ({coverage}) in {elapsed:.2f} s, batches of {batch_size:,}")
    out.print(f"{num_samples / elapsed:,.0f} samples/s, {raw / elapsed / 1e6:,.1f} MB/s ({size(raw)} raw)")
    out.print(f"first batch after {first_s * 1000:,.1f} ms, from opening the index on")
    if page is not None:
        out.print(f"pictures: {page}")


@dataclass(frozen=True, slots=True)
class _ReadPoint:
    """The counters after a batch."""

    elapsed_s: float
    num_samples: int
    wait_s: float
    fetched_bytes: float
    cache_hits: float
    fetches: float
    queue_depth: float

    @classmethod
    def now(cls, elapsed_s: float, num_samples: int, counters: dict[str, float]) -> _ReadPoint:
        """Return the point of these counters of a data set."""
        names = ("wait_s", "fetched_bytes", "cache_hits", "fetches", "queue_depth")
        return cls(elapsed_s, num_samples, *(counters[f"stream/{name}"] for name in names))


def _charts(points: list[_ReadPoint]) -> list[Chart]:
    """Return the pictures, each with the same equal parts of the time."""
    if not points:
        return []
    ends = np.linspace(0, points[-1].elapsed_s, _PARTS + 1)
    times = [0.0, *(point.elapsed_s for point in points)]

    def counted(name: str) -> NDArray[np.float64]:
        # A counter is taken to have grown evenly between two batches.
        grown: NDArray[np.float64] = np.interp(
            ends, times, [0.0, *(getattr(point, name) for point in points)]
        )
        return grown

    def rate(name: str, scale: float) -> list[float]:
        grown = np.diff(counted(name)) / np.diff(ends) / scale
        return [float(value) for value in grown]

    places = np.searchsorted(times[1:], ends[1:]).clip(max=len(points) - 1)
    ready = [points[place].queue_depth for place in places]
    axis: Any = {"edges": ends[1:].tolist(), "axis": "seconds since the index was opened"}
    return [
        Chart(
            title="Samples",
            note="Samples per second that the loop received.",
            unit="/s",
            bands=[Band(name="samples", values=rate("num_samples", 1))],
            **axis,
        ),
        Chart(
            title="Waits",
            note="Share of the time in which the loop waited for a batch.",
            unit="%",
            bands=[Band(name="waiting", values=rate("wait_s", 0.01))],
            **axis,
        ),
        Chart(
            title="Batches that were ready",
            note="Finished batches in the queue at the last request; 0 where the loop had to wait.",
            unit="",
            bands=[Band(name="batches", values=ready)],
            is_stacked=False,
            **axis,
        ),
        Chart(
            title="Downloads",
            note="Bytes per second fetched from the remote; none for data that is read in place.",
            unit="MB/s",
            bands=[Band(name="fetched", values=rate("fetched_bytes", 1e6))],
            **axis,
        ),
        Chart(
            title="Cache",
            note="Shards that were opened: found in the cache, and fetched.",
            unit="",
            bands=[
                Band(name="in the cache", values=counted("cache_hits")[1:].tolist()),
                Band(name="fetched", values=counted("fetches")[1:].tolist()),
            ],
            **axis,
        ),
    ]


def _cache_folder(
    dataset_index: DatasetIndex, local: str | None
) -> contextlib.AbstractContextManager[str | None]:
    """Return the cache folder: `local`, a temporary one, or None for a data set that is read in place."""
    # Compressed shards in a local folder would be decompressed into it.
    is_packed = any(shard.entry.get("zip_data") for shard in dataset_index.shards)
    if local or not (is_packed or find_folder(dataset_index.uri) is None):
        return contextlib.nullcontext(local or None)
    return temporary_folder(f"the data set at `{dataset_index.uri}`")
