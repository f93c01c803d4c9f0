"""`hocket-stream bench`."""

import tempfile
import time

from hocket.stream.cli.text import console, count, print_json, size
from hocket.stream.dataset import StreamingDataset
from hocket.stream.inventory import Inventory

__all__ = ["show"]


def show(
    uri: str, *, local: str | None, batch_size: int, shuffle: bool, seconds: float | None, as_json: bool
) -> None:
    """Reads an epoch, or for so long, and prints how fast it was.

    Args:
        uri: The data set. A folder of this machine is read in place.
        local: The cache folder; by default one that is empty, and goes afterwards.
        batch_size: Samples of a batch.
        shuffle: Read in shuffled order.
        seconds: Stop after so long; by default the epoch is read to its end.
        as_json: Print JSON and nothing else.

    Raises:
        ValueError: `seconds` is not above 0.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"`--seconds {seconds}`: expected more than 0")
    inventory = Inventory(uri)
    with tempfile.TemporaryDirectory(prefix="hocket-stream-") as empty:
        is_packed = any(shard.entry.get("zip_data") for shard in inventory.shards)
        # Compressed shards of a folder would be unpacked beside themselves.
        folder = local or (empty if is_packed or "://" in inventory.uri else None)
        began = time.perf_counter()
        dataset = StreamingDataset(
            remote=inventory.uri, local=folder, batch_size=batch_size, shuffle=shuffle, rank=0, world_size=1
        )
        num_samples, first_s, batches = 0, 0.0, dataset.batches()
        try:
            for _ in batches:
                num_samples += dataset.batch_share()[0]
                elapsed = time.perf_counter() - began
                first_s = first_s or elapsed
                if seconds is not None and elapsed >= seconds:
                    break
        finally:
            batches.close()  # type: ignore[attr-defined]
        elapsed = time.perf_counter() - began
    raw = inventory.raw_bytes * num_samples / max(dataset.size, 1)
    if as_json:
        print_json(
            {
                "uri": inventory.uri,
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
    how = (
        "the whole epoch" if num_samples == dataset.size else f"{100 * num_samples / dataset.size:.1f}% of it"
    )
    out.print(f"{count(num_samples, 'sample')} ({how}) in {elapsed:.2f} s, batches of {batch_size:,}")
    out.print(f"{num_samples / elapsed:,.0f} samples/s, {raw / elapsed / 1e6:,.1f} MB/s ({size(raw)} raw)")
    out.print(f"first batch after {first_s * 1000:,.1f} ms, from opening the index on")
