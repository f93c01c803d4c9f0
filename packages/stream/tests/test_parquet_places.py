"""Where Parquet files of a data set are: folders, splits and stores, and how the command finds them."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.native.errors import StoreChangedError, StoreTransientError
from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.convert import from_parquet
from hocket.stream.errors import ConfigError, IndexNotFoundError
from support.parquet_files import comparable, make_table, write_columns, write_folder

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a folder of 3 files with 103 rows in 16 row groups of up to 7."""
    return write_folder(tmp_path / "parquet")


def test_folders_named_as_columns_are_columns(tmp_path: Path) -> None:
    for name, number in [("day=1/kind=a", 0), ("day=2/kind=b", 50)]:
        (tmp_path / "in" / name).mkdir(parents=True)
        pq.write_table(make_table(number, 3), tmp_path / "in" / name / "x.parquet")
    from_parquet(tmp_path / "in", tmp_path / "out")
    actual = list(StreamingDataset(local=tmp_path / "in", batch_size=2))
    expected = list(StreamingDataset(local=tmp_path / "out", batch_size=2))
    plain = [{name: comparable(value) for name, value in sample.items()} for sample in actual]
    assert plain == [{name: comparable(value) for name, value in sample.items()} for sample in expected]
    assert [(sample["day"], sample["kind"]) for sample in actual[2:4]] == [(1, "a"), (2, "b")]


def test_a_column_beside_a_folder_of_its_name_can_be_left_out(tmp_path: Path) -> None:
    write_columns(tmp_path / "day=1", "a.parquet", day=[1], x=[2])
    with pytest.raises(ConfigError, match=r"column `day` is in .* leave it out by `columns`"):
        StreamingDataset(local=tmp_path)
    assert list(StreamingDataset(local=tmp_path, batch_size=1, columns=["x"])) == [{"x": 2}]


def test_files_whose_columns_differ_are_refused_with_both(tmp_path: Path) -> None:
    write_columns(tmp_path, "a.parquet", x=pa.array([1], pa.int32()), y=["a"])
    write_columns(tmp_path, "b.parquet", x=pa.array([1], pa.int64()), y=["a"])
    with pytest.raises(ConfigError, match=r"a\.parquet.*b\.parquet.*'int32'.*'int64'"):
        StreamingDataset(local=tmp_path)
    assert StreamingDataset(local=tmp_path, batch_size=2, columns=["y"])[1] == {"y": "a"}


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["x", "x", "y"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"`a\.parquet` has several columns named `x`"):
        StreamingDataset(local=tmp_path)
    assert list(StreamingDataset(local=tmp_path, batch_size=1, columns=["y"])) == [{"y": 3}]


def test_a_folder_without_data_and_columns_of_an_index_are_refused(
    tmp_path: Path, write: Callable[..., str]
) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(IndexNotFoundError):
        StreamingDataset(local=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"ends with \.parquet"):
        StreamingDataset(local=tmp_path / "none", format="parquet")
    with pytest.raises(ConfigError, match="`columns` is given"):
        StreamingDataset(local=write(3), columns=["id"])


def test_files_of_several_splits_are_refused(tmp_path: Path) -> None:
    write_columns(tmp_path, "train-0.parquet", x=[1])
    write_columns(tmp_path, "test-0.parquet", x=[2])
    with pytest.raises(ConfigError, match=r"\['test', 'train'\]"):
        StreamingDataset(local=tmp_path)


@pytest.mark.parametrize("kind", [None, "parquet"])
def test_a_split_is_chosen_by_the_names_of_files_as_on_a_hub(tmp_path: Path, kind: str | None) -> None:
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    for name, first in (("train-00000-of-00002", 0), ("train-00001-of-00002", 10), ("validation-00000", 20)):
        write_columns(hub, f"data/{name}.parquet", x=list(range(first, first + 10)))

    def make(split: str, **options: Any) -> StreamingDataset:
        return StreamingDataset(**({"local": hub} | options), split=split, format=kind, batch_size=4)

    def read(dataset: StreamingDataset) -> list[int]:
        return [sample["x"] for sample in dataset]

    assert read(make("train")) == list(range(20))
    assert read(make("dev")) == list(range(20, 30))
    assert read(make("all")) == list(range(30))
    with pytest.raises(ConfigError, match=r"`split` is `test`: .*\['train', 'validation'\], or `all`"):
        make("test")
    cached = make("train", remote=hub, local=tmp_path / "cache")
    assert read(cached) == list(range(20))
    assert [path.parent.name for path in (tmp_path / "cache").rglob("parquet.json")] == ["train"]
    started = make("train")
    next(started.batches())
    resumed = pickle.loads(pickle.dumps(make("train", remote=hub, local=tmp_path / "cache")))
    resumed.load_state_dict(started.state_dict())
    assert read(resumed) == list(range(4, 20))
    # A name with more words is that of its own files, and not of all that have one of the words.
    (tmp_path / "chat" / "data").mkdir(parents=True)
    for number, name in enumerate(["train_gen", "train_sft", "test_sft"]):
        write_columns(tmp_path / "chat", f"data/{name}-00000-of-00001-1a2b.parquet", x=[number])
    assert read(make("train_sft", local=tmp_path / "chat")) == [1]
    assert read(make("train", local=tmp_path / "chat")) == [0, 1]
    with pytest.raises(ConfigError, match=r"`split` is `train_large`: .*\['test', 'train'\]"):
        make("train_large", local=tmp_path / "chat")
    # A folder of the split's name comes first, and other data have splits by folders only.
    (hub / "train").mkdir()
    write_columns(hub, "train/part.parquet", x=[77])
    assert read(make("train")) == [77]
    with MDSWriter(columns={"x": "int"}, out=tmp_path / "mds" / "train") as writer:
        writer.write({"x": 5})
    with pytest.raises(IndexNotFoundError):
        StreamingDataset(local=tmp_path / "mds", split="trian")
    assert read(StreamingDataset(local=tmp_path / "mds", split="train", batch_size=1)) == [5]


def test_the_tools_of_the_command_choose_a_split_as_a_data_set_does(
    tmp_path: Path, call: Callable[..., tuple[object, str, str]]
) -> None:
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    for name, numbers in (("train-0", range(20)), ("validation-0", range(20, 23)), ("test-0", range(30, 35))):
        write_columns(hub, f"data/{name}.parquet", x=list(numbers))
    for verb in ("inspect", "verify", "stats", "simulate", "bench"):
        exit_code, _, said = call(verb, hub)
        assert exit_code == 2
        assert "give `--split`, as `validation`, or `all`" in " ".join(said.split())
        assert call(verb, hub, "--split", "trian")[0] == 3
        assert call(verb, hub, "--split", "all")[0] == 0
    found = json.loads(call("inspect", hub, "--split", "dev", "--sample", "2", "--json")[1])
    dataset = StreamingDataset(local=hub, split="dev", batch_size=1)
    assert (found["samples"], found["fingerprint"]) == (3, dataset._reader.fingerprint)
    assert found["sample"]["values"]["x"] == 22
    assert json.loads(call("verify", hub, "--split", "train", "--json")[1])["shards"] == 1
    assert json.loads(call("stats", hub, "--split", "train", "--json")[1])["columns"][0]["num_values"] == 20
    few = ("--batch-size", "1", "--json")
    assert json.loads(call("simulate", hub, "--split", "test", *few)[1])["num_samples"] == 5
    assert json.loads(call("bench", hub, "--split", "test", *few)[1])["samples"] == 5
    (hub / "test").mkdir()
    write_columns(hub, "test/part.parquet", x=[77])
    for verb, name in (("simulate", "num_samples"), ("bench", "samples"), ("inspect", "samples")):
        assert json.loads(call(verb, hub, "--split", "test", *few[2 * (verb == "inspect") :])[1])[name] == 1


def test_footers_of_an_object_store_are_read_once(
    folder: str,
    s3d: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    call: Callable[..., tuple[object, str, str]],
) -> None:
    from hocket.native import Store

    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    store = Store(s3d.uri(tmp_path.name))
    for path in sorted(Path(folder).iterdir()):
        store.put(path.name, path.read_bytes())
    options: dict[str, Any] = {"remote": store.uri, "local": tmp_path / "cache", "batch_size": 8}
    s3d.reset()
    assert [sample["id"] for sample in StreamingDataset(**options)] == list(range(103))
    s3d.reset()
    dataset = StreamingDataset(**options, format="parquet")
    assert [sample["id"] for sample in dataset] == list(range(103))
    assert set(s3d.stats()["requests"]) == {"ListObjectsV2"}
    exit_code, out, _ = call("inspect", store.uri, "--json", "--sample", "40")
    assert (exit_code, json.loads(out)["sample"]["values"]["id"]) == (0, 40)
    assert call("verify", store.uri)[0] == 0
    behind = StreamingDataset(remote=store.uri, local=tmp_path / "other", batch_size=8)
    changed = Path(folder, "part-1.parquet").read_bytes()
    store.put("part-1.parquet", changed[:-8] + bytes(4) + changed[-4:])
    with pytest.raises(StoreChangedError, match=r"part-1\.parquet"):
        list(behind)


def test_a_complete_cache_is_read_without_its_store(
    folder: str, s3d_faults: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hocket.native import Store

    server = s3d_faults()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    store = Store(server.uri("data"))
    for path in sorted(Path(folder).iterdir()):
        store.put(path.name, path.read_bytes())
    options: dict[str, Any] = {"remote": store.uri, "local": tmp_path / "cache", "batch_size": 8}
    assert [sample["id"] for sample in StreamingDataset(**options)] == list(range(103))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for chosen in ("parquet", None):
        dataset = StreamingDataset(**options, format=chosen, download_timeout=1)
        assert [sample["id"] for sample in dataset] == list(range(103))
    with pytest.raises(StoreTransientError, match=r"index\.json"):
        StreamingDataset(**options | {"local": tmp_path / "other"}, download_timeout=1)


def test_the_tools_of_the_command_open_parquet(
    folder: str, call: Callable[..., tuple[object, str, str]], tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    dataset = StreamingDataset(local=folder, batch_size=8)
    exit_code, out, _ = call("inspect", folder, "--json", "--sample", "21")
    found = json.loads(out)
    assert (exit_code, found["samples"]) == (0, dataset.size)
    assert found["fingerprint"] == dataset._reader.fingerprint
    assert found["sample"]["values"]["id"] == dataset[21]["id"]
    assert all(".parquet, row group " in shard["name"] for shard in found["shards"])
    sizes = sum(path.stat().st_size for path in before)
    assert 0 < sum(shard["stored_bytes"] for shard in found["shards"]) < sizes
    exit_code, out, _ = call("verify", folder, "--json")
    assert (exit_code, json.loads(out)["sound"], json.loads(out)["shards"]) == (0, True, len(found["shards"]))
    exit_code, out, _ = call("simulate", folder, "--batch-size", "8", "--nodes", "2", "--json")
    nodes = json.loads(out)["nodes"]
    assert sum(node["num_samples"] for node in nodes) == dataset.size
    assert all(node["fetched_bytes"] > 0 for node in nodes)
    assert call("stats", folder)[0] == 0
    exit_code, out, _ = call("bench", folder, "--batch-size", "8", "--json")
    assert (exit_code, json.loads(out)["samples"]) == (0, dataset.size)
    assert {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()} == before

    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    victim = sorted(damaged.rglob("*.parquet"))[0]
    data = bytearray(victim.read_bytes())
    data[8:40] = bytes(32)
    victim.write_bytes(data)
    exit_code, out, _ = call("verify", damaged, "--json")
    bad = json.loads(out)["bad"]
    assert exit_code == 1
    assert [shard["name"] for shard in bad] == [f"{victim.name}, row group 0"]
    (tmp_path / "empty").mkdir()
    exit_code, _, said = call("inspect", tmp_path / "empty")
    assert exit_code == 3
    assert "or one of Parquet files" in said
