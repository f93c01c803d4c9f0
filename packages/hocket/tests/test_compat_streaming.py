"""Scripts for mosaicml-streaming run with one additional line."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hocket.compat.streaming import LocalDataset, MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from hocket.compat.streaming.base.encodings import Encoding, _encodings
from hocket.compat.streaming.base.util import clean_stale_shared_memory, merge_index
from hocket.compat.streaming.stream import streams_registry
from hocket.stream.errors import ConfigError, IndexCorruptError
from hocket.trainer import Trainer
from support.s3d import Server

COUNT = 200


def write(out: Any, first: int = 0, count: int = COUNT) -> str:
    columns = {"id": "int", "x": "ndarray:float32:4"}
    with MDSWriter(columns=columns, out=out, size_limit=1024) as writer:
        for number in range(first, first + count):
            writer.write({"id": number, "x": np.full(4, number / COUNT, np.float32)})
    return str(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("data") / "train")


def ids(batches: Any) -> list[int]:
    return list(itertools.chain.from_iterable(batch["id"].tolist() for batch in batches))


def open_data(folder: str, **options: Any) -> StreamingDataset:
    return StreamingDataset(
        **{"local": folder, "batch_size": 16, "shuffle": True, "shuffle_block_size": 64} | options
    )


@pytest.fixture
def remote(s3d: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    return write(f"s3://{s3d.bucket}/compat/train")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[int] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.seen += batch["id"].tolist()
        return self.layer(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (outputs - batch["x"].sum(1, keepdim=True)).square().mean()


def test_a_remote_data_set_works_in_torchs_loader_and_in_the_trainer(remote: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote=remote, local=str(tmp_path / "cache"), shuffle=True, batch_size=32)
    epochs = [ids(DataLoader(dataset, batch_size=32, num_workers=workers)) for workers in (0, 2, 2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * 3
    assert len(set(map(tuple, epochs))) == 3
    again = StreamingDataset(remote=remote, local=str(tmp_path / "cache"), shuffle=True, batch_size=32)
    trainer = Trainer(
        model=(net := Net()),
        train_dataloader=StreamingDataLoader(again, batch_size=32),
        max_duration="2ep",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    assert net.seen == epochs[0] + epochs[1]


def test_the_index_does_not_count_towards_the_cache_limit(tmp_path: Path) -> None:
    remote = write(tmp_path / "remote")
    limit = 3 * 4096  # room for three shards
    dataset = StreamingDataset(remote=remote, local=str(tmp_path / "cache"), batch_size=16, cache_limit=limit)
    assert sorted(ids(DataLoader(dataset, batch_size=16))) == list(range(COUNT))
    kept = [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".mds"]
    assert len(kept) == 3


def test_every_loader_starts_the_next_epoch(folder: str) -> None:
    expected = [ids(DataLoader(dataset, batch_size=16)) for dataset in [open_data(folder)] for _ in range(3)]
    assert len(set(map(tuple, expected))) == 3
    dataset = open_data(folder)
    assert [ids(DataLoader(dataset, batch_size=16, num_workers=2)) for _ in range(3)] == expected
    assert dataset.next_epoch == 3
    loader = DataLoader(open_data(folder), batch_size=16, num_workers=2, persistent_workers=True)
    assert [ids(loader) for _ in range(3)] == expected
    del loader
    ours = StreamingDataLoader(open_data(folder), batch_size=16, num_workers=2, persistent_workers=True)
    assert [ids(ours) for _ in range(3)] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaders_state_resumes_after_the_last_yielded_batch(folder: str, workers: int) -> None:
    loader = StreamingDataLoader(open_data(folder), batch_size=16, num_workers=workers)
    first = ids(loader)
    batches = iter(loader)
    done = ids(next(batches) for _ in range(5))
    state = loader.state_dict()
    assert state is not None
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 80)
    rest = ids(batches)
    assert sorted(done + rest) == sorted(first)
    other = StreamingDataLoader(open_data(folder), batch_size=16, num_workers=2 - workers)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert ids(other) == rest
    third = ids(other)
    assert third == ids(loader)
    assert third not in (first, done + rest)


class Doubled(StreamingDataset):
    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        assert at == sample["id"]
        return {"id": sample["id"], "y": sample["x"] * 2}


def test_a_subclass_getitem_is_called(folder: str) -> None:
    options: Any = {"local": folder, "batch_size": 16, "shuffle": True}
    plain = ids(DataLoader(StreamingDataset(**options), batch_size=16))
    for workers in (0, 2):
        batches = list(StreamingDataLoader(Doubled(**options), batch_size=16, num_workers=workers))
        assert ids(batches) == plain
        assert all(torch.equal(batch["y"][:, 0], batch["id"] / (COUNT / 2)) for batch in batches)
    assert Doubled(**options)[7]["y"][0] == np.float32(7 / COUNT) * 2


def test_arguments_are_attributes_and_absent_names_raise(folder: str) -> None:
    dataset = open_data(folder, shuffle_seed=7, predownload=100_000)
    assert (dataset.shuffle, dataset.shuffle_seed, dataset.batch_size) == (True, 7, 16)
    assert (dataset.replication, dataset.num_canonical_nodes, dataset.cache_limit) == (None, None, None)
    assert dataset.streams == [Stream(local=folder)]
    assert dataset.num_shards == len(list(Path(folder).glob("*.mds"))) == len(dataset.shards)
    assert sum(shard.samples for shard in dataset.shards) == dataset.num_samples
    assert dataset.shards[0].compression is None
    assert dataset.shards[0].basename == "shard.00000.mds"
    assert dataset._reader.settings.prefetch_batches == 8
    with pytest.raises(AttributeError, match="no `evict_coldest_shard`: `cache_limit` evicts automatically"):
        dataset.evict_coldest_shard()
    assert not hasattr(dataset, "anything_else")


def test_a_local_data_set_may_have_no_samples(tmp_path: Path) -> None:
    empty = LocalDataset(write(tmp_path / "none", count=0))
    assert (len(empty), list(empty), empty[:]) == (0, [], [])


def test_state_dict_takes_a_number_of_samples(folder: str) -> None:
    dataset = open_data(folder)
    assert dataset.state_dict(48, False)["sample_in_epoch"] == 48
    assert dataset.initial_physical_nodes is None
    dataset.load_state_dict(dataset.state_dict(48, False))
    assert dataset.initial_physical_nodes == 1
    assert dataset.state_dict(16, False)["sample_in_epoch"] == 64
    assert dataset.state_dict(16, True)["sample_in_epoch"] == 16


class CountedStream(Stream):
    """A user's stream class with an additional argument."""

    def __init__(self, *, label: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.label = label


class FetchingStream(Stream):
    def prepare_shard(self, shard: Any) -> int:
        return 0


def test_streams_may_be_of_registered_classes(folder: str, tmp_path: Path) -> None:
    streams_registry.register("counted", func=CountedStream)
    options: Any = {"batch_size": 16, "streams": [], "local": folder}
    dataset = StreamingDataset(stream_name="counted", stream_config={"label": "x", "repeat": 2}, **options)
    (stream,) = dataset.streams
    assert isinstance(stream, CountedStream)
    assert (stream.label, stream.choose, stream.repeat, stream.proportion) == ("x", 2 * COUNT, 2.0, 1.0)
    # Weights that the data set filled in do not count as given ones.
    assert StreamingDataset(streams=[stream], batch_size=16).stream_counts == [2 * COUNT]
    remote = StreamingDataset(remote=write(tmp_path / "remote"), batch_size=16)
    assert remote.streams[0].local is not None
    with pytest.raises(ConfigError, match="`FetchingStream` defines `prepare_shard`, which is not called"):
        FetchingStream(local=folder)


class OwnState(StreamingDataset):
    """A data set that wraps `state_dict`, as those of LLM-foundry do."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # type: ignore[override]
        return super().state_dict(num_samples=num_samples, from_beginning=from_beginning) | {"epoch": 7}


def test_the_loader_calls_an_overridden_state_dict(folder: str) -> None:
    loader = StreamingDataLoader(OwnState(local=folder, batch_size=16), batch_size=16)
    next(iter(loader))
    state = loader.state_dict()
    assert state is not None
    assert (state["epoch"], state["sample_in_epoch"]) == (7, 16)


def test_state_dict_with_a_number_of_samples_has_the_current_epoch(folder: str) -> None:
    dataset = open_data(folder)
    for epoch in (0, 1):
        ids(DataLoader(dataset, batch_size=16))
        assert dataset.state_dict(0, False)["epoch"] == epoch
        assert dataset.next_epoch == epoch + 1


def test_samples_have_the_columns_of_their_own_stream(folder: str, tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int", "name": "str"}, out=str(tmp_path / "named")) as writer:
        writer.write({"id": -1, "name": "a"})
    streams = [Stream(local=str(tmp_path / "named")), Stream(local=folder)]
    dataset = StreamingDataset(streams=streams, batch_size=1, batching_method="random")
    samples = {sample["id"]: sample for sample in dataset}
    assert samples[-1] == {"id": -1, "name": "a"}
    assert set(samples[3]) == {"id", "x"}


def test_writers_have_a_config_and_write_no_digests_by_default(tmp_path: Path) -> None:
    writer = MDSWriter(columns={"id": "int"}, out=str(tmp_path / "data"))
    config = writer.get_config()
    writer.finish()
    assert (config["column_names"], config["hashes"], config["version"]) == (["id"], [], 2)
    with pytest.raises(ConfigError, match=r"Invalid Writer arguments \['min_workers'\]"):
        MDSWriter(columns={"id": "int"}, out=str(tmp_path / "other"), min_workers=1)
    assert Stream(remote="s3://bucket/data").local is not None
    assert Stream(remote=str(tmp_path)).local == str(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_limit": "1gigs"}, "`cache_limit` is '1gigs'"),
        ({"stream_name": "mine"}, "`stream_name` is 'mine': expected one of .*'stream'"),
        ({"batching_method": "device"}, "Invalid batching method: `batching_method` is 'device'"),
        ({"predownload": 8, "batch_size": None}, "`predownload` is 8 and `batch_size` None"),
        ({"shuffle_algo": "py1b"}, "`shuffle_algo` is 'py1b'"),
    ],
)
def test_arguments_without_counterpart_raise_with_their_name(
    folder: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_data(folder, **options)


def test_errors_have_the_types_and_messages_of_mosaicml_streaming(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"Directory is not empty: `.*` holds a data set"):
        write(write(tmp_path / "data"))
    with pytest.raises(ValueError, match="`size_limit` must be less than"):
        MDSWriter(columns={"id": "int"}, out=str(tmp_path / "large"), size_limit=1 << 32)
    with pytest.raises(RuntimeError, match="No `remote` provided, but local file") as local:
        StreamingDataset(local=str(tmp_path / "none"))
    assert isinstance(local.value, FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="No such file or directory") as remote:
        StreamingDataset(remote=str(tmp_path / "none"), local=str(tmp_path / "cache"))
    assert not isinstance(remote.value, RuntimeError)
    with MDSWriter(columns={"id": "pkl"}, out=str(tmp_path / "unsafe")) as writer:
        writer.write({"id": 1})
    with pytest.raises(ValueError, match="contains an unsafe type"):
        StreamingDataset(local=str(tmp_path / "unsafe"))
    write(tmp_path / "empty", count=0)
    with pytest.raises(RuntimeError, match="Stream contains no samples"):
        StreamingDataset(local=str(tmp_path / "empty"))
    (tmp_path / "empty" / "index.json").write_bytes(b"")
    with pytest.raises(json.JSONDecodeError, match=r"Index file at .* is empty or corrupted") as damaged:
        StreamingDataset(local=str(tmp_path / "empty"))
    assert str(pickle.loads(pickle.dumps(damaged.value))) == str(damaged.value)
    assert isinstance(damaged.value, IndexCorruptError)


def test_a_missing_or_mismatched_batch_size_raises_at_the_first_iteration(
    folder: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="Please pass `batch_size` to StreamingDataset"):
        list(StreamingDataset(local=folder))
    streams = [Stream(local=folder), Stream(local=write(tmp_path / "one", count=1))]
    dataset = StreamingDataset(streams=streams, batch_size=8, batching_method="stratified")
    assert dataset[3]["id"] == 3
    for _ in range(2):
        with pytest.raises(ValueError, match="Number of samples for stream 1 is 0 in a global batch: stream"):
            list(StreamingDataLoader(dataset, batch_size=8))


def test_a_valid_batch_size_replaces_a_refused_one(folder: str) -> None:
    dataset = StreamingDataset(local=folder, batch_size=-1)
    with pytest.raises(ConfigError, match="`batch_size` is -1"):
        next(iter(dataset))
    dataset.set_batch_size(16)
    assert ids(DataLoader(dataset, batch_size=16)) == list(range(COUNT))


def test_device_batches_have_one_stream(folder: str, tmp_path: Path) -> None:
    streams = [Stream(local=folder), Stream(local=write(tmp_path / "more", COUNT, 60))]
    dataset = StreamingDataset(
        streams=streams, batch_size=4, shuffle=True, batching_method="device_per_stream"
    )
    batches = [ids([batch]) for batch in StreamingDataLoader(dataset, batch_size=4)]
    assert {len({number < COUNT for number in batch}) for batch in batches} == {1}
    assert sorted(flat := [number for batch in batches for number in batch]) == list(range(COUNT + 60))
    assert flat != sorted(flat)


def test_shards_are_fetched_and_evicted_by_number(folder: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    streams = [Stream(local=folder), Stream(remote=write(tmp_path / "more", COUNT, 60), local=str(cache))]
    dataset = StreamingDataset(streams=streams, batch_size=4)
    shards = dataset.samples_per_shard
    assert [shards.sum(), len(shards)] == [COUNT + 60, dataset.num_shards]
    first = int(dataset.shard_offset_per_stream[1])
    assert dataset.stream_per_shard.tolist() == [0] * first + [1] * (len(shards) - first)
    assert dataset.shards_per_stream.tolist() == [first, len(shards) - first]
    assert dataset.sample_offset_per_stream.tolist() == [0, COUNT]
    assert dataset.samples_per_stream.tolist() == [COUNT, 60]
    assert dataset[int(dataset.sample_offset_per_shard[first])]["id"] == COUNT
    for number in range(first, dataset.num_shards):
        dataset.prepare_shard(number)
    full = {path.name for path in cache.iterdir()}
    assert len(full) == 1 + len(shards) - first
    used = dataset.cache_usage
    for number in range(first, dataset.num_shards):
        dataset.evict_shard(number)
    assert {path.name for path in cache.iterdir()} == {"index.json"}
    assert dataset.cache_usage < used
    assert [sample["id"] for sample in dataset[COUNT:]] == list(range(COUNT, COUNT + 60))
    assert {path.name for path in cache.iterdir()} == full
    with pytest.raises(ConfigError, match="which has no remote"):
        dataset.evict_shard(0)
    assert len(list(Path(folder).glob("*.mds"))) == first


def test_a_large_shard_is_fetched_whole(tmp_path: Path) -> None:
    with MDSWriter(columns={"data": "bytes"}, out=str(tmp_path / "remote"), size_limit=2 << 20) as writer:
        for number in range(40):
            writer.write({"data": bytes([number]) * 100_000})
    dataset = StreamingDataset(remote=str(tmp_path / "remote"), local=str(tmp_path / "cache"), batch_size=4)
    assert dataset.num_shards == 2
    assert dataset[0]["data"] == bytes(100_000)
    assert not (tmp_path / "cache" / "shard.00000.mds").exists(), "a single sample must be read by range"
    dataset.prepare_shard(1)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"index.json", "shard.00001.mds"}


def test_streams_are_resampled_by_epoch(folder: str, tmp_path: Path) -> None:
    streams = [
        Stream(local=folder, repeat=0.5),
        Stream(local=write(tmp_path / "more", COUNT, 60), repeat=2.5),
    ]
    dataset = StreamingDataset(streams=streams, batch_size=4, shuffle=True)
    units, numbers = dataset.resample_streams(0)
    assert units.sum() == len(numbers) == COUNT // 2 + 150
    part, own = dataset.resample_streams(0, 1)
    assert part.sum() == len(own) == 150
    assert np.unique(own, return_counts=True)[1].tolist().count(3) == 30
    assert own.min() == COUNT
    again = dataset.resample_streams(0, 1)[1]
    assert own.tolist() == again.tolist() != dataset.resample_streams(1, 1)[1].tolist()


def test_arguments_take_effect(folder: str, tmp_path: Path) -> None:
    write(tmp_path / "a", 0, 30), write(tmp_path / "b", 30, 10)
    (tmp_path / "all").mkdir()
    clean_stale_shared_memory()
    merge_index(str(tmp_path))
    merged = open_data(str(tmp_path), shuffle=False, predownload=40)
    assert ids(DataLoader(merged, batch_size=16)) == list(range(40))
    one = open_data(str(tmp_path / "a"), stream_config={"repeat": 2}, shuffle=False)
    assert one.stream_counts == [60]
    mixed = StreamingDataset(
        streams=[Stream(local=str(tmp_path / name), proportion=1) for name in "ab"],
        epoch_size=20,
        batch_size=4,
    )
    assert mixed.stream_counts == [10, 10]
    local = LocalDataset(str(tmp_path / "a"))
    assert (len(local), local[3]["id"], [s["id"] for s in local]) == (30, 3, list(range(30)))
    assert ids(DataLoader(local, batch_size=8)) == list(range(30))


@pytest.mark.slow
def test_spawned_workers_read_the_epochs_in_turn(folder: str) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver", "timeout": 90}
    expected = [ids(DataLoader(dataset, batch_size=16)) for dataset in [open_data(folder)] for _ in range(2)]
    for kind in (StreamingDataLoader, DataLoader):
        loader = kind(open_data(folder), batch_size=16, **options)
        assert [ids(loader), ids(loader)] == expected


class Varying(Encoding):
    def encode(self, obj: complex) -> bytes:
        return f"{obj.real} {obj.imag}".encode()

    def decode(self, data: bytes) -> complex:
        return complex(*map(float, data.split()))


class OfOneSize(Encoding):
    size = 8

    def encode(self, obj: complex) -> bytes:
        return np.complex64(obj).tobytes()

    def decode(self, data: bytes) -> complex:
        return complex(np.frombuffer(data, np.complex64)[0])


@pytest.mark.parametrize("kind", [Varying, OfOneSize])
def test_an_encoding_of_the_programs_own_is_written_and_read(kind: type[Encoding], tmp_path: Path) -> None:
    values = [complex(number, -number) for number in range(40)]
    with pytest.raises(ConfigError, match="encoding `own` is not supported"):
        MDSWriter(out=str(tmp_path / "a"), columns={"value": "own"})
    _encodings["own"] = kind
    try:
        with MDSWriter(
            out=str(tmp_path / "a"), columns={"id": "int", "value": "own"}, size_limit=300
        ) as writer:
            for number, value in enumerate(values):
                writer.write({"id": number, "value": value})
        dataset = StreamingDataset(local=str(tmp_path / "a"), batch_size=8, shuffle=True)
        loader = StreamingDataLoader(dataset, batch_size=8, collate_fn=list)
        found = {sample["id"]: sample["value"] for batch in loader for sample in batch}
        assert [found[number] for number in range(40)] == values
        assert dataset[7]["value"] == values[7]
    finally:
        del _encodings["own"]
    index = json.loads((tmp_path / "a/index.json").read_text())["shards"][0]
    assert index["column_sizes"] == [8, kind.size]


def test_an_encoding_of_the_format_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match="`int32` is an encoding of the format"):
        _encodings["int32"] = Varying


SCRIPT = """
import hocket.compat.streaming
hocket.compat.streaming.install()
hocket.compat.streaming.install()
import streaming
from streaming import MDSWriter, StreamingDataset, StreamingDataLoader
from streaming.base import Stream
from streaming.base.dataset import StreamingDataset as Same
from streaming.base.util import clean_stale_shared_memory, merge_index
import streaming.base.dataset as module
import streaming.base.dataloader as dl
import streaming.base.stream
from streaming.base import dataset as again
from streaming.base.format.mds import MDSWriter as Writer
from streaming.base.format.mds.encodings import Encoding, _encodings
assert streaming.StreamingDataset is Same is module.StreamingDataset
assert streaming.base.dataset is module
assert again is module and Writer is MDSWriter and dl.StreamingDataLoader is StreamingDataLoader
assert streaming.base.stream.Stream is Stream and streaming.__version__[0].isdigit()
dataset = StreamingDataset(local={folder!r}, batch_size=16, shuffle=True)
print(sum(len(batch["id"]) for batch in StreamingDataLoader(dataset, batch_size=16)))
"""


def test_import_streaming_works_after_install(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(folder=folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode) == (f"{COUNT}\n", 0), done.stderr
