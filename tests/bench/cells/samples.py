"""One cell of `tests/bench/stream.py`: one system writes or reads one data set, in a process of its own.

Runs in that system's own environment, so it imports nothing of this repository but the system itself. Prints
one JSON object. Every reader sums one byte a page of its samples, because some return views, and a view that
is not read costs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 4096
SHARD_BYTES = 1 << 24


def samples(workload: str, count: int) -> Iterator[np.ndarray]:
    """Yield `count` samples: `tokens` `(2048,) uint16` below 50,257, `blobs` `(65536,) uint8` of noise."""
    rng = np.random.default_rng(7)
    for start in range(0, count, 512):
        num = min(512, count - start)
        if workload == "tokens":
            yield from rng.integers(0, 50_257, (num, 2048), dtype=np.uint16)
        else:
            yield from np.frombuffer(rng.bytes(num << 16), np.uint8).reshape(num, 1 << 16)


def touch(array: Any) -> int:
    """Sum one byte a page of an array, a tensor, bytes, or a list of these."""
    if isinstance(array, (list, tuple)):
        return sum(map(touch, array))
    if hasattr(array, "numpy"):
        array = array.numpy()
    if isinstance(array, (bytes, bytearray, memoryview)):
        array = np.frombuffer(array, np.uint8)
    return int(array.reshape(-1).view(np.uint8)[::PAGE].sum(dtype=np.int64))


# --- writing -----------------------------------------------------------------------------------------------


def write_hocket(folder: Path, data: Iterable[np.ndarray], workload: str, compression: str | None) -> None:
    from hocket.stream import MDSWriter

    _write_mds(MDSWriter, folder, data, workload, compression)


def write_mosaicml_streaming(
    folder: Path, data: Iterable[np.ndarray], workload: str, compression: str | None
) -> None:
    from streaming import MDSWriter

    _write_mds(MDSWriter, folder, data, workload, compression)


def _write_mds(
    writer: Any, folder: Path, data: Iterable[np.ndarray], workload: str, compression: str | None
) -> None:
    """Write with either MDS writer; both have the same arguments."""
    encoding = "ndarray:uint16:2048" if workload == "tokens" else "bytes"
    with writer(
        columns={"x": encoding}, out=str(folder), size_limit=SHARD_BYTES, compression=compression
    ) as out:
        for sample in data:
            out.write({"x": sample if workload == "tokens" else sample.tobytes()})


def write_litdata(folder: Path, data: Iterable[np.ndarray], workload: str, compression: str | None) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_bytes=SHARD_BYTES, compression=compression)
    count = 0
    for count, sample in enumerate(data, start=1):
        cache[count - 1] = {"x": sample if workload == "tokens" else sample.tobytes()}
    cache.done()
    cache.merge()


def write_webdataset(
    folder: Path, data: Iterable[np.ndarray], workload: str, compression: str | None
) -> None:
    import webdataset

    folder.mkdir(parents=True)
    with webdataset.ShardWriter(str(folder / "%05d.tar"), maxsize=SHARD_BYTES, verbose=0) as out:
        for number, sample in enumerate(data):
            out.write({"__key__": f"{number:08d}", "x": sample.tobytes()})


def write_memmap(folder: Path, data: Iterable[np.ndarray], workload: str, compression: str | None) -> None:
    folder.mkdir(parents=True)
    with (folder / "data.bin").open("wb") as out:
        for sample in data:
            out.write(sample.data)


def prepare_zstd(folder: Path, data: Iterable[np.ndarray]) -> None:
    """Write the file that `zstd` compresses, before the measurement starts."""
    write_memmap(folder, data, "tokens", None)


def write_zstd(folder: Path, data: Iterable[np.ndarray], workload: str, compression: str | None) -> None:
    """Compress a file with the command `zstd` on all cores: the limit of compressed writing."""
    level = (compression or "zstd:3").partition(":")[2]
    command = ["zstd", f"-{level}", f"-T{os.cpu_count()}", "-q", "-f", str(folder / "data.bin")]
    subprocess.run([*command, "-o", str(folder / "data.bin.zst")], check=True, timeout=600)


# --- reading -----------------------------------------------------------------------------------------------


#: Modules that a system's user has imported before the measurement starts.
IMPORTS = {
    "hocket": ["hocket.stream", "hocket.stream.torch"],
    "hocket_unkept": ["hocket.stream", "hocket.stream.torch"],
    "mosaicml_streaming": ["streaming", "torch.utils.data"],
    "litdata": ["litdata", "litdata.streaming"],
    "webdataset": ["torch.utils.data", "webdataset"],
    "memmap": [],
    "zstd": [],
    "obstore": ["obstore.store"],
    "obstore_kept": ["obstore.store"],
}


def read_hocket(
    folder: Path, workload: str, batch: int, remote: str | None, workers: int, keep_shards: bool = True
) -> Iterator[Any]:
    from hocket.stream import StreamingDataset
    from hocket.stream.torch import StreamingDataLoader

    dataset = StreamingDataset(
        remote=remote, local=str(folder), shuffle=True, batch_size=batch, keep_shards=keep_shards
    )
    for columns in StreamingDataLoader(dataset, num_workers=workers):
        yield columns["x"]


def read_hocket_unkept(
    folder: Path, workload: str, batch: int, remote: str | None, workers: int
) -> Iterator[Any]:
    """Read with Hocket without keeping shards in the cache."""
    return read_hocket(folder, workload, batch, remote, workers, keep_shards=False)


def read_mosaicml_streaming(
    folder: Path, workload: str, batch: int, remote: str | None, workers: int
) -> Iterator[Any]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    dataset = StreamingDataset(remote=remote, local=str(folder), shuffle=True, batch_size=batch)
    collate = None if workload == "tokens" else _as_lists
    for columns in DataLoader(dataset, batch_size=batch, collate_fn=collate, num_workers=workers):
        yield columns["x"]


def read_litdata(folder: Path, workload: str, batch: int, remote: str | None, workers: int) -> Iterator[Any]:
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=True)
    collate = None if workload == "tokens" else _as_lists
    loader = litdata.StreamingDataLoader(dataset, batch_size=batch, collate_fn=collate, num_workers=workers)
    for columns in loader:
        yield columns["x"]


def read_webdataset(
    folder: Path, workload: str, batch: int, remote: str | None, workers: int
) -> Iterator[Any]:
    import torch
    import webdataset
    from torch.utils.data import DataLoader

    def decode(sample: dict[str, Any]) -> Any:
        return (
            torch.frombuffer(bytearray(sample["x"]), dtype=torch.uint16)
            if workload == "tokens"
            else sample["x"]
        )

    urls = sorted(str(path) for path in folder.glob("*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=1).shuffle(1000).map(decode)
    collate = None if workload == "tokens" else list
    yield from DataLoader(dataset, batch_size=batch, collate_fn=collate, num_workers=workers)


def read_memmap(folder: Path, workload: str, batch: int, remote: str | None, workers: int) -> Iterator[Any]:
    """Read whole shuffled batches from one memory map with NumPy: the limit."""
    shape = (2048,) if workload == "tokens" else (1 << 16,)
    mapped = np.memmap(folder / "data.bin", np.uint16 if workload == "tokens" else np.uint8, "r")
    mapped = mapped.reshape(-1, *shape)
    order = np.random.default_rng(1).permutation(len(mapped))
    for start in range(0, len(order), batch):
        yield mapped[order[start : start + batch]]


def read_obstore(folder: Path, workload: str, batch: int, remote: str | None, workers: int) -> Iterator[Any]:
    """Fetch shards into memory, 16 requests of 8 MiB at once, in order: the limit of a cold start."""
    yield from _fetched(workload, remote, None)


def read_obstore_kept(
    folder: Path, workload: str, batch: int, remote: str | None, workers: int
) -> Iterator[Any]:
    """Fetch as `read_obstore`, and write and flush every part to a file, as a cache must."""
    folder.mkdir(parents=True)
    yield from _fetched(workload, remote, folder)


def _fetched(workload: str, remote: str | None, folder: Path | None) -> Iterator[Any]:
    import obstore
    from obstore.store import S3Store

    assert remote is not None
    bucket, _, prefix = remote.removeprefix("s3://").partition("/")
    store = S3Store(
        bucket,
        prefix=prefix,
        endpoint=os.environ["S3_ENDPOINT_URL"],
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )
    index = json.loads(bytes(obstore.get(store, "index.json").bytes()))
    parts = [
        (shard["raw_data"]["basename"], start, min(1 << 23, shard["raw_data"]["bytes"] - start))
        for shard in index["shards"]
        for start in range(0, shard["raw_data"]["bytes"], 1 << 23)
    ]
    size = 4096 if workload == "tokens" else 1 << 16

    def fetch(part: tuple[str, int, int]) -> Any:
        name, start, length = part
        data = obstore.get_range(store, name, start=start, length=length)
        if folder is not None:
            with (folder / f"{name}.{start}").open("wb") as file:
                file.write(data)
                os.fsync(file.fileno())
        return data

    with ThreadPoolExecutor(16) as pool:
        for part in pool.map(fetch, parts):
            data = np.frombuffer(part, np.uint8)
            yield data[: len(data) // size * size].reshape(-1, size)


def _as_lists(batch: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {"x": [sample["x"] for sample in batch]}


def processor_s() -> float:
    """Return the processor time of this process and of its workers that have ended, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Run one cell and print what it measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["write", "read"])
    parser.add_argument("system")
    parser.add_argument("workload", choices=["tokens", "blobs"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--compression")
    parser.add_argument("--remote")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    function: Callable[..., Any] = globals()[f"{options.phase}_{options.system}"]
    for module in IMPORTS[options.system]:
        importlib.import_module(module)
    if options.phase == "write":
        made = list(samples(options.workload, options.samples))
        if prepare := globals().get(f"prepare_{options.system}"):
            prepare(options.folder, made)
            os.sync()
        start = time.perf_counter()
        function(options.folder, made, options.workload, options.compression)
        seconds = time.perf_counter() - start
        os.sync()  # only Hocket flushes its shards itself
        durable = time.perf_counter() - start
        size = sum(one.nbytes for one in made) / 1e6
        figures = {"seconds": seconds, "mb_s": size / seconds, "durable_mb_s": size / durable}
    else:
        # The rate is computed without the first batch.
        start = time.perf_counter()
        cpu = processor_s()
        number, first, checksum, taken = 0, 0.0, 0, 0
        for batch in function(
            options.folder, options.workload, options.batch, options.remote, options.workers
        ):
            checksum += touch(batch)
            number += len(batch)
            if not first:
                first, taken = time.perf_counter() - start, number
        seconds = time.perf_counter() - start
        figures = {
            "samples": number,
            "samples_s": (number - taken) / (seconds - first),
            "first_batch_s": first,
            "epoch_s": seconds,
            "cpu_us_sample": (processor_s() - cpu) / number * 1e6,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "checksum": checksum,
        }
    print(json.dumps(figures), flush=True)
    os._exit(0)  # some systems wait for their threads at exit


if __name__ == "__main__":
    main()
