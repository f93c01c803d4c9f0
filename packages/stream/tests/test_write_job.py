"""A data set that several tasks write: attempts, commits, and jobs that fail, are killed, or meet."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.native import Store
from hocket.stream import MDSWriter, StreamingDataset, merge_index
from hocket.stream.convert.arrow_columns import SchemaFacts
from hocket.stream.convert.arrow_parts import look_at, open_job, write_part
from hocket.stream.errors import ConfigError, DatasetExistsError, IndexNotFoundError, SampleError
from hocket.stream.write.write_job import JOB_NAME, PartWriter, WriteJob, WrittenPart
from support.s3d import Server

pa = pytest.importorskip("pyarrow", reason="needs `uv sync --group datasets`")

COLUMNS = {"id": "int64", "text": "str"}


def rows(*numbers: int) -> Any:
    return pa.RecordBatch.from_pydict({"id": list(numbers), "text": [f"row {n}" for n in numbers]})


def write(job: WriteJob, number: int, *batches: Any, **options: Any) -> WrittenPart | None:
    """Write a part as a task does, with a job that was pickled."""
    return write_part(
        pickle.loads(pickle.dumps(job)), number, batches, options.pop("columns", COLUMNS), **options
    )


def names(uri: str) -> list[str]:
    return [meta.key for meta in Store(uri).list()]


def ids(uri: str, cache: Path) -> list[int]:
    return [sample["id"] for sample in StreamingDataset(remote=uri, local=cache, batch_size=2)]


@pytest.fixture(params=["folder", "store"])
def out(request: Any, tmp_path: Path, s3d: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(tmp_path / "out")
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    return s3d.uri(f"jobs/{tmp_path.name}")


def test_only_the_parts_that_are_committed_stay(out: str, tmp_path: Path) -> None:
    job = open_job(out, COLUMNS, {"size_limit": 200})
    job.start()
    lost = write(job, 1, rows(7, 8))
    parts = [write(job, 2, rows(5)), write(job, 0, rows(0, 1), rows(2)), write(job, 1, rows(3, 4))]
    assert write(job, 3, rows()) is None
    assert lost is not None
    assert any(lost.folder in name for name in names(out))
    with pytest.raises(IndexNotFoundError):
        StreamingDataset(remote=out, local=tmp_path / "early", batch_size=1)
    assert job.commit([part for part in parts if part]) == 6
    assert ids(out, tmp_path / "cache") == list(range(6))
    index = json.loads(Store(out).get("index.json"))
    files = {shard["raw_data"]["basename"] for shard in index["shards"]}
    assert {*names(out)} == {"index.json", *files}
    # An attempt that goes on after the commit, as one that was run twice may, leaves nothing.
    with pytest.raises(DatasetExistsError, match="no longer writes"):
        write(job, 1, rows(3, 4))
    assert {*names(out)} == {"index.json", *files}
    with pytest.raises(DatasetExistsError, match="exist_ok"):
        open_job(out, COLUMNS, {})


def test_attempts_that_end_while_the_job_ends_leave_nothing(
    out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt may end after the commit, or the abort, has listed the parts to delete."""
    remove = WriteJob._remove

    def late(self: WriteJob, *arguments: Any) -> None:
        remove(self, *arguments)
        monkeypatch.setattr(WriteJob, "_remove", remove)
        with contextlib.suppress(DatasetExistsError):
            write(self, 1, rows(7))

    job = open_job(out, COLUMNS, {})
    job.start()
    part = write(job, 0, rows(0))
    assert part is not None
    monkeypatch.setattr(WriteJob, "_remove", late)
    job.commit([part])
    assert {name.split("/")[0] for name in names(out)} == {"index.json", part.folder}
    job = open_job(out, COLUMNS, {"exist_ok": True})
    job.start()
    monkeypatch.setattr(WriteJob, "_remove", late)
    job.abort()
    assert names(out) == []


def test_a_part_that_fails_leaves_nothing(out: str) -> None:
    job = open_job(out, COLUMNS, {"size_limit": 100})
    job.start()
    with pytest.raises(SampleError, match=r"sample 3 of part 4: .*`text`"):
        write(job, 4, rows(0, 1, 2), pa.RecordBatch.from_pydict({"id": [3], "text": [None]}))
    assert names(out) == [JOB_NAME]
    job.abort()
    assert names(out) == []


def test_a_job_that_raises_is_aborted_and_leaves_nothing(out: str, tmp_path: Path) -> None:
    job = open_job(out, COLUMNS, {})
    with pytest.raises(ConfigError, match="no rows to write"), job.running():
        job.commit([])
    null = pa.RecordBatch.from_pydict({"id": [3], "text": [None]})
    with pytest.raises(SampleError), job.running():
        job.commit([part for part in (write(job, 0, rows(1)), write(job, 1, null)) if part])
    assert names(out) == []
    if "://" not in out:
        assert list(Path(out).iterdir()) == []
    with job.running():
        job.commit([part for part in [write(job, 0, rows(1))] if part])
    assert ids(out, tmp_path / "cache") == [1]


def test_a_job_that_is_run_again_and_fails_keeps_what_it_has_committed(out: str, tmp_path: Path) -> None:
    """As where a sink is given to Ray twice; Ray tells a sink of each failure, also without a start."""
    job = open_job(out, COLUMNS, {})
    with job.running():
        job.commit([part for part in [write(job, 0, rows(1))] if part])
    with pytest.raises(ConfigError, match="no rows"):
        job.commit([])
    job.abort()
    with pytest.raises(DatasetExistsError):
        job.start()
    job.abort()
    assert ids(out, tmp_path / "cache") == [1]


def test_a_killed_job_has_no_index_and_is_replaced_as_asked(out: str, tmp_path: Path) -> None:
    killed = open_job(out, COLUMNS, {})
    killed.start()
    old = write(killed, 0, rows(1))
    with pytest.raises(DatasetExistsError, match=r"exist_ok=True"):
        open_job(out, COLUMNS, {})
    second = WriteJob(out, {})
    with pytest.raises(DatasetExistsError, match=r"another job is writing .* or was killed"):
        second.start()
    second.abort()
    assert old is not None
    assert any(old.folder in name for name in names(out))

    third = open_job(out, COLUMNS, {"exist_ok": True})
    third.start()
    assert names(out) == [JOB_NAME]
    # The first one lives after all: it is told so, and changes nothing.
    with pytest.raises(DatasetExistsError, match="no longer writes"):
        write(killed, 1, rows(2))
    with pytest.raises(DatasetExistsError, match="no longer writes"):
        killed.commit([old])
    killed.abort()
    part = write(third, 0, rows(3))
    assert part is not None
    third.commit([part])
    assert ids(out, tmp_path / "cache") == [3]
    replaced = open_job(out, COLUMNS, {"exist_ok": True})
    replaced.start()
    part = write(replaced, 0, rows(4))
    assert part is not None
    replaced.commit([part])
    assert ids(out, tmp_path / "cache") == [4]
    assert len({name.split("/")[0] for name in names(out)}) == 2


def test_a_job_that_is_replaced_while_it_commits_takes_its_index_back(
    out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_job(out, COLUMNS, {})
    first.start()
    part = write(first, 0, rows(1))
    assert part is not None
    second = WriteJob(out, {"exist_ok": True})
    check = WriteJob._check_files

    def replace(self: WriteJob, *arguments: Any) -> None:
        check(self, *arguments)
        second.start()

    monkeypatch.setattr(WriteJob, "_check_files", replace)
    with pytest.raises(DatasetExistsError, match="no longer writes"):
        first.commit([part])
    assert names(out) == [JOB_NAME]


def test_a_job_that_fails_after_its_index_is_written_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = (str(tmp_path / "local"), str(tmp_path / "remote"))
    job = open_job(sides, COLUMNS, {"keep_local": True})
    written: list[bool] = []

    def fail(self: WriteJob, *_: Any) -> None:
        written.extend(Path(side, "index.json").is_file() for side in sides)
        raise OSError("the network is gone")

    monkeypatch.setattr(WriteJob, "_end", fail)
    with pytest.raises(OSError, match="network"), job.running():
        job.commit([part for part in [write(job, 0, rows(1))] if part])
    assert written == [True, True]
    assert names(sides[0]) == names(sides[1]) == []


def test_wrong_parts_are_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    job = open_job(out, COLUMNS, {})
    job.start()
    first, again = write(job, 0, rows(1)), write(job, 0, rows(1))
    other = write(job, 1, pa.RecordBatch.from_pydict({"id": [1]}), columns={"id": "int64"})
    assert first is not None
    assert again is not None
    assert other is not None
    with pytest.raises(ConfigError, match="part 0 was returned by two tasks"):
        job.commit([first, again])
    with pytest.raises(ConfigError, match=r"`text` is missing in part 1 and str in another"):
        job.commit([first, other])
    job.remove_part(first.folder)
    with pytest.raises(
        ConfigError, match=r"does not have its file .* expected a folder that all machines share"
    ):
        job.commit([first])
    with pytest.raises(ConfigError, match="`append` is given"):
        open_job(out, COLUMNS, {"append": True})
    with pytest.raises(TypeError, match="did you mean `compression`"):
        open_job(tmp_path / "new", COLUMNS, {"compresion": "zstd"})
    with pytest.raises(ConfigError, match="`id` is new in this part and missing in another"):
        write(job, 2, rows(1), columns={"text": "str"})


def test_columns_by_type_are_the_same_in_all_parts(out: str) -> None:
    job = open_job(out, None, {})
    job.start()
    assert write(job, 0, rows(1), columns={}, by_type=True)
    wrong = {
        "`id` is float64 in this part and int64 in another": {"id": [1.5], "text": ["a"]},
        "`text` is missing in this part": {"id": [1]},
        "`more` is str in this part and missing in another": {"id": [1], "text": ["a"], "more": ["b"]},
        "`text` has nulls, and is `str` by its type": {"id": [1, 2], "text": ["a", None]},
        "`text` is of type null, whose encoding depends": {"id": [1], "text": [None]},
        "`text` is of type struct<bytes: binary, path: string>, whose": {
            "id": [1],
            "text": pa.array([{"bytes": b"a", "path": "b"}]),
        },
    }
    for message, columns in wrong.items():
        with pytest.raises(ConfigError, match=message):
            write(job, 1, pa.RecordBatch.from_pydict(columns), columns={}, by_type=True)
    # Also within a part, where the first batch fits.
    floats = pa.RecordBatch.from_pydict({"id": [1.5], "text": ["a"]})
    with pytest.raises(ConfigError, match="`id` is float64 in this part"):
        write(job, 1, rows(1), floats, columns={}, by_type=True)
    null = pa.RecordBatch.from_pydict({"id": [1], "text": [None]})
    with pytest.raises(ConfigError, match="`text` is json in this part and str in another"):
        write(job, 1, null, columns={"text": "json"}, by_type=True)
    job.abort()
    assert names(out) == []


def test_facts_of_parts_are_merged() -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray

    def facts(*tables: dict[str, Any]) -> dict[str, str]:
        merged = SchemaFacts()
        for columns in tables:
            merged.merge(pickle.loads(pickle.dumps(look_at([pa.table(columns)]))))
        return merged.encodings(given=())

    assert facts() == {}
    assert facts({"a": pa.array([], pa.int8())}, {"a": pa.array([1], pa.int8())}) == {"a": "int8"}
    assert facts({"a": [None]}, {"a": [1]}) == {"a": "json"} == facts({"a": [1]}, {"a": [None]})
    assert facts({"a": [1]}, {"a": [2, None]}, {"a": [3]}) == {"a": "json"}
    wide = {"a": tensors(np.zeros((2, 3), np.float32))}
    assert facts(wide, wide) == {"a": "ndarray:float32:3"}
    assert facts(wide, {"a": tensors(np.zeros((2, 4), np.float32))}) == {"a": "ndarray:float32"}
    assert facts(wide, {"a": pa.array([[1.0]], pa.list_(pa.float32()))}) == {"a": "ndarray:float32"}
    for other in ({"a": ["text"]}, {"b": [1]}, {"a": [1], "b": [1]}, {"a": pa.array([1], pa.int8())}):
        with pytest.raises(ConfigError, match="in one part of the source and"):
            facts({"a": [1]}, other)
    with pytest.raises(ConfigError, match="in one part"):
        facts(wide, {"a": tensors(np.zeros((2, 3, 1), np.float32))})


def test_parts_may_have_an_index_each(tmp_path: Path) -> None:
    job = open_job(tmp_path / "out", COLUMNS, {"compression": "zstd"})
    job.start()
    parts = [write(job, number, rows(number)) for number in (1, 0)]
    job.commit([part for part in parts if part], one_index=False)
    assert not (tmp_path / "out" / "index.json").exists()
    merge_index(str(tmp_path / "out"))
    assert ids(str(tmp_path / "out"), tmp_path / "cache") == [0, 1]


def test_parts_with_an_index_each_stay_when_another_job_writes_beside_them(
    s3d: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    out = s3d.uri(f"beside/{tmp_path.name}")
    for number in (0, 1):
        job = open_job(out, COLUMNS, {})
        with job.running():
            job.commit([part for part in [write(job, 0, rows(number))] if part], one_index=False)
    assert len({name.split("/")[0] for name in names(out)}) == 2
    merge_index(out)
    assert sorted(ids(out, tmp_path / "cache")) == [0, 1]


def test_a_relative_place_is_that_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = open_job("out", COLUMNS, {})
    job.start()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    part = write(job, 0, rows(1))
    assert part is not None
    job.commit([part])
    assert ids(str(tmp_path / "out"), tmp_path / "cache") == [1]


def test_both_sides_of_a_place_are_written_and_cleared(tmp_path: Path) -> None:
    sides = (str(tmp_path / "local"), str(tmp_path / "remote"))
    job = open_job(sides, COLUMNS, {"keep_local": True})
    job.start()
    write(job, 0, rows(1))
    part = write(job, 0, rows(2))
    assert part is not None
    job.commit([part])
    for side in sides:
        assert [path.name for path in sorted(Path(side).iterdir())] == ["index.json", part.folder]


def test_a_part_is_the_data_set_of_a_writer(tmp_path: Path) -> None:
    job = open_job(tmp_path / "out", COLUMNS, {"compression": "zstd:3", "hashes": ["sha1"], "size_limit": 90})
    job.start()
    with PartWriter(job, 0, COLUMNS) as writer:
        for number in range(9):
            writer.write({"id": number, "text": "x" * number})
    with MDSWriter(
        columns=COLUMNS, out=tmp_path / "same", compression="zstd:3", hashes=["sha1"], size_limit=90
    ) as plain:
        for number in range(9):
            plain.write({"id": number, "text": "x" * number})
    assert writer.part.shards == json.loads((tmp_path / "same" / "index.json").read_text())["shards"]
    assert writer.part.num_samples == 9
    assert not list((tmp_path / "out").glob("**/index.json"))
