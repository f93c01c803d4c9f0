"""`hocket-stream bench`."""

import contextlib
import time

from hocket.native.cli.text import console, count, print_json, size
from hocket.stream.dataset import StreamingDataset
from hocket.stream.read.dataset_index import DatasetIndex, temporary_folder
from hocket.stream.settings.places import find_folder

__all__ = ["show"]


def show(
    uri: str, *, local: str | None, batch_size: int, shuffle: bool, seconds: float | None, as_json: bool
) -> None:
    """Read an epoch, or for a limited time, and print the throughput.

    Args:
        uri: Path or URI of the data set. A local folder is read in place.
        local: Cache folder; by default a temporary one.
        batch_size: Number of samples in a batch.
        shuffle: Read in shuffled order.
        seconds: Time limit; by default the whole epoch is read.
        as_json: Print only JSON.

    Raises:
        ValueError: `seconds` is not positive.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"`--seconds {seconds}`: expected more than 0")
    dataset_index = DatasetIndex(uri)
    with _cache_folder(dataset_index, local) as folder:
        start_s = time.perf_counter()
        dataset = StreamingDataset(
            remote=dataset_index.uri,
            local=folder,
            batch_size=batch_size,
            shuffle=shuffle,
            rank=0,
            world_size=1,
        )
        num_samples, first_s, batches = 0, 0.0, dataset.batches()
        try:
            for _ in batches:
                num_samples += dataset.batch_share()[0]
                elapsed = time.perf_counter() - start_s
                first_s = first_s or elapsed
                if seconds is not None and elapsed >= seconds:
                    break
        finally:
            batches.close()  # type: ignore[attr-defined]
        elapsed = time.perf_counter() - start_s
    raw = dataset_index.raw_bytes * num_samples / max(dataset.size, 1)
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


def _cache_folder(
    dataset_index: DatasetIndex, local: str | None
) -> contextlib.AbstractContextManager[str | None]:
    """Return the cache folder: `local`, a temporary one, or None for a data set that is read in place."""
    # Compressed shards in a local folder would be decompressed into it.
    is_packed = any(shard.entry.get("zip_data") for shard in dataset_index.shards)
    if local or not (is_packed or find_folder(dataset_index.uri) is None):
        return contextlib.nullcontext(local or None)
    return temporary_folder(f"the data set at `{dataset_index.uri}`")
