"""Appending to a data set, and merging several data sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.native.errors import StoreChangedError
from hocket.stream import MDSWriter, StreamingDataset, errors, merge_index


def ids(folder: str | Path) -> list[int]:
    return [sample["id"] for sample in StreamingDataset(local=folder, batch_size=4)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


def append(folder: Path, first: int, count: int, **settings: Any) -> None:
    with MDSWriter(columns={"id": "int"}, out=folder, size_limit=300, append=True, **settings) as writer:
        for number in range(first, first + count):
            writer.write({"id": number})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "data", size_limit=300) as writer:
        for number in range(25):
            writer.write({"id": number})
    return tmp_path / "data"


def test_shards_are_added_with_settings_of_their_own(folder: Path) -> None:
    before = index(folder)["shards"]
    append(folder, 25, 30, compression="gz", hashes=["sha1"])
    append(folder, 55, 1)
    shards = index(folder)["shards"]
    assert shards[: len(before)] == before
    numbers = [int(shard["raw_data"]["basename"].split(".")[1]) for shard in shards]
    assert numbers == list(range(len(shards)))
    assert ids(folder) == list(range(56))


def test_an_unfinished_append_leaves_the_data_set_unchanged(folder: Path) -> None:
    before = index(folder)
    writer = MDSWriter(columns={"id": "int"}, out=folder, size_limit=300, append=True)
    for number in range(100):
        writer.write({"id": number})
    assert index(folder) == before
    with pytest.raises(KeyError), writer:
        raise KeyError
    assert index(folder) == before
    assert ids(folder) == list(range(25))
    # The next append neither uses nor replaces the shards of the failed one.
    orphans = {name: (folder / name).read_bytes() for name in names(folder)}
    append(folder, 25, 3)
    assert ids(folder) == list(range(28))
    assert all((folder / name).read_bytes() == data for name, data in orphans.items() if name != "index.json")


def test_one_of_two_concurrent_appends_fails_and_nothing_is_lost(folder: Path) -> None:
    one = MDSWriter(columns={"id": "int"}, out=folder, append=True)
    two = MDSWriter(columns={"id": "int"}, out=folder, append=True)
    one.write({"id": 25})
    two.write({"id": 26})
    one.finish()
    with pytest.raises((errors.DatasetExistsError, StoreChangedError)):
        two.finish()
    assert ids(folder) == list(range(26))


def test_an_index_that_changed_during_the_append_is_not_replaced(folder: Path) -> None:
    writer = MDSWriter(columns={"id": "int"}, out=folder, append=True)
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text + " ")
    with pytest.raises(StoreChangedError):
        writer.finish()
    assert (folder / "index.json").read_text() == text + " "


def test_appending_other_columns_raises(folder: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"has the columns \{'id': 'int'\}.*\{'id': 'str'\}"):
        MDSWriter(columns={"id": "str"}, out=folder, append=True)


def test_appending_to_a_missing_data_set_raises(tmp_path: Path) -> None:
    with pytest.raises(errors.IndexNotFoundError, match="leave `append` out"):
        MDSWriter(columns={"id": "int"}, out=tmp_path / "none", append=True)


def test_merging_a_folder_and_a_list(write: Callable[..., str], tmp_path: Path) -> None:
    for name, count in (("all/b", 20), ("all/a/deep", 15), ("all/c", 0)):
        write(count, name)
    root = tmp_path / "all"
    merge_index(root)
    assert ids(root) == [*range(15), *range(20)]
    assert {shard["raw_data"]["basename"].rpartition("/")[0] for shard in index(root)["shards"]} == {
        "a/deep",
        "b",
    }
    # Merge again over the merged index; then merge a list, of which one item is an index file.
    merge_index(root)
    merge_index([str(root / "b"), str(root / "a" / "deep" / "index.json")], str(root))
    assert ids(root) == [*range(20), *range(15)]


def test_a_merged_data_set_can_be_appended_to(write: Callable[..., str], tmp_path: Path) -> None:
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "all" / "a") as writer:
        writer.write({"id": 0})
    merge_index(tmp_path / "all")
    append(tmp_path / "all", 1, 2)
    assert ids(tmp_path / "all") == [0, 1, 2]
    # Replacing the merged data set leaves the merged folders alone.
    with MDSWriter(columns={"id": "int"}, out=tmp_path / "all", exist_ok=True) as writer:
        writer.write({"id": 9})
    assert ids(tmp_path / "all") == [9]
    assert ids(tmp_path / "all" / "a") == [0]


def test_merging_to_two_places(write: Callable[..., str], tmp_path: Path) -> None:
    write(5, "far/a")
    merge_index([str(tmp_path / "far" / "a")], (str(tmp_path / "near"), str(tmp_path / "far")))
    assert index(tmp_path / "near") == index(tmp_path / "far")
    merge_index(
        [str(tmp_path / "far" / "a")], (str(tmp_path / "none"), str(tmp_path / "far")), keep_local=False
    )
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("empty",), errors.ConfigError, "no data set"),
        ((["one/a"],), errors.ConfigError, "`out` is not given"),
        ((["one/a", "two/a"], "three"), errors.ConfigError, "`a/shard.00000.mds`.*different names"),
        ((["one/a", "one/z"], "one"), errors.IndexNotFoundError, "one/z"),
        ((["one/a"], "one/a"), errors.ConfigError, "into itself"),
        (
            (["one/a", "one/.b"], "one"),
            errors.ConfigError,
            r"one/\.b`.*`\.b/shard.00000.mds`.*rename the folder",
        ),
        (("one",), errors.ConfigError, r"one/\.b`.*rename the folder"),
    ],
)
def test_invalid_merges_raise(
    write: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[Any, ...],
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(3, "one/a")
    write(3, "one/.b")
    write(3, "two/a")
    before = index(tmp_path / "one" / "a")
    with pytest.raises(kind, match=message):
        merge_index(*arguments)
    assert index(tmp_path / "one" / "a") == before
    assert not (tmp_path / "one" / "index.json").exists()
