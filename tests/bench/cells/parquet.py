"""One cell of `tests/bench/stream_parquet.py`: one system reads Parquet files, in a process of its own.

Runs in that system's own environment, so it imports nothing of this repository but the system itself. Prints
one JSON object. Every reader sums one byte a page of each column of each batch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 4096
COLUMNS = ["id", "tokens", "text"]


def write(folder: Path, files: int, rows: int, group: int) -> None:
    """Write files of `rows` rows: a number, 64 to 192 tokens, about 200 letters, and a score."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    rng = np.random.default_rng(7)
    letters = "".join(map(chr, rng.integers(97, 123, 1 << 20)))
    for number in range(files):
        lengths = rng.integers(64, 193, rows)
        edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = pa.array(rng.integers(0, 50_257, edges[-1], dtype=np.int32))
        places, sizes = rng.integers(0, 1 << 19, rows), rng.integers(100, 300, rows)
        table = pa.table(
            {
                "id": pa.array(np.arange(rows) + number * rows),
                "tokens": pa.ListArray.from_arrays(pa.array(edges), tokens),
                "text": [letters[at : at + size] for at, size in zip(places, sizes, strict=True)],
                "score": rng.random(rows),
            }
        )
        pq.write_table(table, folder / f"part-{number:05}.parquet", row_group_size=group)


def touch(value: Any) -> int:
    """Sum one byte a page of an array, a tensor, text, an Arrow column, or a list or dict of these."""
    if isinstance(value, dict):
        return sum(map(touch, value.values()))
    if isinstance(value, (list, tuple)):
        # A value for each row, whose bytes cost less to touch than a call does.
        if set(map(type, value)) == {str}:
            return sum(map(len, value))
        if set(map(type, value)) == {np.ndarray} and all(
            one.nbytes <= PAGE and one.dtype.kind in "iu" for one in value
        ):
            return sum(one.item(0) & 255 for one in value if one.size)
        return sum(map(touch, value))
    if isinstance(value, str):
        return len(value)
    if hasattr(value, "to_pandas"):  # Arrow
        columns = value.columns if hasattr(value, "columns") else [value]
        chunks = [chunk for column in columns for chunk in getattr(column, "chunks", [column])]
        return sum(touch(np.frombuffer(part, np.uint8)) for one in chunks for part in one.buffers() if part)
    if isinstance(value, (int, float, np.generic)):
        return int(value)
    if hasattr(value, "numpy"):
        value = value.numpy()
    if value.dtype == object:
        return sum(map(touch, value.tolist()))
    if value.size and value.nbytes <= PAGE and value.dtype.kind in "iu":
        return int(value.item(0)) & 255  # the same byte, without NumPy's 3 µs for the sum of one
    return int(np.ascontiguousarray(value).reshape(-1).view(np.uint8)[::PAGE].sum(dtype=np.int64))


#: Modules that a system's user has imported before the measurement starts.
IMPORTS = {
    "hocket": ["hocket.stream"],
    "hocket_cached": ["hocket.stream"],
    "litdata": ["litdata", "litdata.streaming.item_loader"],
    "datasets": ["datasets"],
    "pyarrow": ["pyarrow.dataset"],
}


def read_hocket(place: str, cache: Path, batch: int) -> Iterator[tuple[int, Any]]:
    """Read with Hocket: a local folder in place, a store through an empty cache."""
    from hocket.stream import StreamingDataset

    where: dict[str, Any] = {"remote": place, "local": cache} if "://" in place else {"local": place}
    dataset = StreamingDataset(**where, columns=COLUMNS, format="parquet", shuffle=True, batch_size=batch)
    for columns in dataset.batches():
        yield len(columns["id"]), columns


def read_hocket_cached(place: str, cache: Path, batch: int) -> Iterator[tuple[int, Any]]:
    """Read with Hocket through the cache of an epoch before."""
    from hocket.stream import StreamingDataset

    dataset = StreamingDataset(
        remote=place, local=cache, columns=COLUMNS, format="parquet", shuffle=True, batch_size=batch
    )
    for columns in dataset.batches():
        yield len(columns["id"]), columns


def read_litdata(place: str, cache: Path, batch: int) -> Iterator[tuple[int, Any]]:
    import litdata
    from litdata.streaming.item_loader import ParquetLoader

    options: dict[str, Any] = {}
    if "://" in place:
        endpoint = os.environ["S3_ENDPOINT_URL"]
        options = {"storage_options": {"endpoint_url": endpoint}, "cache_dir": str(cache)}
    dataset = litdata.StreamingDataset(
        place, item_loader=ParquetLoader(columns=COLUMNS), shuffle=True, **options
    )
    loader = litdata.StreamingDataLoader(dataset, batch_size=batch, collate_fn=_as_columns, num_workers=0)
    for columns in loader:
        yield len(columns["id"]), columns


def _as_columns(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [sample[name] for sample in samples] for name in COLUMNS}


def read_datasets(place: str, cache: Path, batch: int) -> Iterator[tuple[int, Any]]:
    import datasets

    options: dict[str, Any] = {}
    if "://" in place:
        options = {"storage_options": {"client_kwargs": {"endpoint_url": os.environ["S3_ENDPOINT_URL"]}}}
    dataset = datasets.load_dataset(
        "parquet", data_files=f"{place}/*.parquet", columns=COLUMNS, split="train", streaming=True, **options
    )
    dataset = dataset.shuffle(seed=1, buffer_size=1000).with_format("numpy")
    for columns in dataset.iter(batch_size=batch):
        yield len(columns["id"]), columns


def read_pyarrow(place: str, cache: Path, batch: int) -> Iterator[tuple[int, Any]]:
    """Read the same columns as Arrow batches, in the order of the files: the limit."""
    import pyarrow.dataset

    options: dict[str, Any] = {}
    source: Any = place
    if "://" not in place:
        source = sorted(str(path) for path in Path(place).glob("*.parquet"))  # LitData leaves its index there
    else:
        from pyarrow.fs import S3FileSystem

        endpoint = os.environ["S3_ENDPOINT_URL"].removeprefix("http://")
        options = {"filesystem": S3FileSystem(endpoint_override=endpoint, scheme="http")}
        source = place.removeprefix("s3://")
    dataset = pyarrow.dataset.dataset(source, format="parquet", **options)
    for columns in dataset.to_batches(columns=COLUMNS, batch_size=batch):
        yield columns.num_rows, columns


def main() -> None:
    """Run one cell and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=[*IMPORTS, "write"])
    parser.add_argument("place")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--shape", type=int, nargs=3, default=(16, 25_000, 5_000))
    parser.add_argument("--first", action="store_true", help="end after the first batch")
    options = parser.parse_args()
    if options.system == "write":
        write(Path(options.place), *options.shape)
        print(json.dumps({}), flush=True)
        return
    for module in IMPORTS[options.system]:
        importlib.import_module(module)
    start = time.perf_counter()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    number, first, checksum, taken = 0, 0.0, 0, 0
    for count, batch in globals()[f"read_{options.system}"](options.place, options.cache, options.batch):
        checksum += touch(batch)
        number += count
        if not first:
            first, taken = time.perf_counter() - start, number
            if options.first:
                break
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime
    figures = {
        "rows": number,
        "rows_s": (number - taken) / max(seconds - first, 1e-9),
        "epoch_rows_s": number / seconds,
        "first_batch_s": first,
        "epoch_s": seconds,
        "cpu_us_row": cpu / number * 1e6,
        "peak_rss_mib": used.ru_maxrss / 1024,
        "checksum": checksum,
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)  # some systems wait for their threads at exit


if __name__ == "__main__":
    main()
