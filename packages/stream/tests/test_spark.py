"""`hocket.stream.spark` writes a Spark DataFrame as `hocket-stream convert` writes the same rows."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.native import Store
from hocket.stream import StreamingDataset
from hocket.stream.convert import from_parquet
from hocket.stream.errors import ConfigError, DatasetExistsError
from hocket.stream.spark import write_mds
from support.s3d import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

COUNT = 40
TYPES = (
    "id long, small short, text string, raw binary, half float, flag boolean, exact decimal(10,3), day date, "
    "pair array<int>, words array<string>, nested struct<a:int,b:string>, `dotted.name` double, some int"
)


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = [
        (
            *(number, -number, f"row {number}", bytes([number]), number / 4, number % 3 == 0),
            *(Decimal(number) / 8, dt.date(2026, 1, 1) + dt.timedelta(number), [number, -number]),
            *(["a", "b"][: number % 3], (number, "b"), number / 3, number if number % 5 else None),
        )
        for number in range(COUNT)
    ]
    return spark.createDataFrame(rows, TYPES).repartitionByRange(4, "id")


def read(folder: object, cache: Path) -> list[dict[str, Any]]:
    return list(StreamingDataset(remote=str(folder), local=cache, batch_size=8))


def same(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    return len(first) == len(second) and all(
        one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
        for one, other in zip(first, second, strict=True)
    )


def test_rows_and_encodings_are_those_of_convert(frame: Any, tmp_path: Path) -> None:
    report = write_mds(frame, tmp_path / "spark", compression="zstd", size_limit="1kb")
    frame.write.parquet(str(tmp_path / "files"))
    converted = from_parquet(tmp_path / "files", tmp_path / "same", compression="zstd", size_limit="1kb")
    assert report == converted
    assert report.columns["some"] == "json"
    assert report.columns["pair"] == "ndarray:int32"
    samples = read(tmp_path / "spark", tmp_path / "cache")
    assert [sample["id"] for sample in samples] == list(range(COUNT))
    assert same(samples, read(tmp_path / "same", tmp_path / "other"))
    index = json.loads((tmp_path / "spark" / "index.json").read_text())
    assert len({shard["zip_data"]["basename"].split("/")[0] for shard in index["shards"]}) == 4
    assert len(index["shards"]) > 4
    with pytest.raises(DatasetExistsError, match="exist_ok"):
        write_mds(frame, tmp_path / "spark")
    given = {name: "json" if name == "id" else kind for name, kind in report.columns.items()}
    again = write_mds(frame.coalesce(1), tmp_path / "spark", columns=given, exist_ok=True)
    assert again.columns == given
    assert len(list((tmp_path / "spark").iterdir())) == 2


def test_attempts_that_fail_leave_nothing(
    spark: Any, tmp_path: Path, s3d: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    marks = str(tmp_path)

    def disturbed(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        number, attempt = task.partitionId(), task.attemptNumber()
        with open(f"{marks}/attempts", "a") as file:
            print(number, attempt, file=file, flush=True)
        for batch in batches:
            yield batch
            if number == 1 and attempt < 2:
                raise OSError("the disk of this machine is broken")

    out = s3d.uri("spark")
    rows = spark.range(0, 4000, 1, 4).mapInArrow(disturbed, "id long")
    report = write_mds(rows, out, columns={"id": "int64"}, size_limit=2000)
    assert (report.num_samples, report.columns) == (4000, {"id": "int64"})
    assert [sample["id"] for sample in read(out, tmp_path / "cache")] == list(range(4000))
    attempts = [line.split() for line in (tmp_path / "attempts").read_text().splitlines()]
    assert sorted(attempts) == [["0", "0"], ["1", "0"], ["1", "1"], ["1", "2"], ["2", "0"], ["3", "0"]]
    index = json.loads(Store(out).get("index.json"))
    files = {shard["raw_data"]["basename"] for shard in index["shards"]}
    assert {meta.key for meta in Store(out).list()} == {"index.json", *files}


def test_a_job_that_fails_leaves_nothing(spark: Any, frame: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Exception, match=r"sample \d+ of part \d: .*`some`"):
        write_mds(frame, out, columns={"some": "int32"})
    assert list(out.iterdir()) == []
    with pytest.raises(Exception, match=r"`flag`: (True|False) is a bool: expected bytes"):
        write_mds(frame.select("id", "flag"), out, columns={"id": "int64", "flag": "bytes"})
    with pytest.raises(ConfigError, match="no samples"):
        write_mds(frame.filter("id < 0"), out)
    with pytest.raises(ConfigError, match="no rows to write"):
        write_mds(frame.filter("id < 0").select("id"), out, columns={"id": "int64"})
    with pytest.raises(ConfigError, match=r"`columns` names \['ident'\]"):
        write_mds(frame, out, columns={"ident": "int64"})
    with pytest.raises(ConfigError, match="expected each name once"):
        write_mds(frame.select("id", "id"), out)
    with pytest.raises(ConfigError, match="column `wait` is of type duration"):
        write_mds(spark.sql("select interval '1' day as wait"), out)
    with pytest.raises(TypeError, match="did you mean `compression`"):
        write_mds(frame, out, compresion="zstd")
    assert list(out.iterdir()) == []
    # Partitions without rows have no part.
    report = write_mds(frame.filter("id in (3, 35)").select("id", "text"), out)
    assert report.num_samples == 2
    assert len(list(out.iterdir())) == 3
    assert [sample["text"] for sample in read(out, tmp_path / "cache")] == ["row 3", "row 35"]


def test_the_snippet_of_the_page_runs(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "ray_spark.md").read_text()
    _, snippet = re.findall(r"```python\n(.*?)```", page, re.S)
    (printed,) = re.findall(r"```text\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    exec(snippet, {"__name__": "__main__"})
    assert capsys.readouterr().out == printed
