"""`dataframe_to_mds` converts a Spark DataFrame to a data set, partition by partition."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.compat.streaming import StreamingDataset, install
from hocket.compat.streaming.base.converters import dataframe_to_mds
from hocket.stream.errors import ConfigError, DatasetExistsError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

COUNT = 40


@pytest.fixture
def frame(spark: Any) -> Any:
    rows = [
        (number, f"row {number}", bytes([number]), number / 4, [number, -number], Decimal(number) / 8)
        for number in range(COUNT)
    ]
    kinds = "id long, text string, raw binary, half float, pair array<int>, exact decimal(10,3)"
    return spark.createDataFrame(rows, kinds).repartitionByRange(4, "id")


def read(folder: Path) -> list[dict[str, Any]]:
    return list(StreamingDataset(local=str(folder), batch_size=8))


def test_partitions_are_merged_in_their_order(frame: Any, tmp_path: Path) -> None:
    out, failures = dataframe_to_mds(frame, mds_kwargs={"out": str(tmp_path / "out"), "hashes": ["sha1"]})
    assert (out, failures) == (str(tmp_path / "out"), 0)
    assert len(list((tmp_path / "out").glob("*/shard.00000.mds.zstd"))) == 4
    samples = read(tmp_path / "out")
    assert [sample["id"] for sample in samples] == list(range(COUNT))
    for number, sample in enumerate(samples):
        assert (sample["text"], sample["raw"]) == (f"row {number}", bytes([number]))
        assert sample["half"] == np.float32(number / 4)
        assert sample["pair"].tolist() == [number, -number]
        assert sample["pair"].dtype == np.int32
        assert sample["exact"] == Decimal(number) / 8
    with pytest.raises(DatasetExistsError, match="exist_ok=True"):
        dataframe_to_mds(frame, mds_kwargs={"out": str(tmp_path / "out")})
    dataframe_to_mds(frame.limit(5), mds_kwargs={"out": str(tmp_path / "out"), "exist_ok": True})
    assert [sample["id"] for sample in read(tmp_path / "out")] == list(range(5))


def test_rows_are_converted_to_samples_by_the_users_function(
    frame: Any, tmp_path: Path, s3d: Any, monkeypatch: Any
) -> None:
    def halves(rows: Any, sign: int) -> Iterator[dict[str, Any]]:
        for row in rows.to_dict("records"):
            for part in row["text"].split():
                yield {"part": part, "number": sign * row["id"]}

    settings = {"out": str(tmp_path), "columns": {"part": "str", "number": "int"}, "compression": None}
    dataframe_to_mds(frame, True, settings, halves, {"sign": -1})
    expected = [(part, -number) for number in range(COUNT) for part in ("row", str(number))]
    assert [(sample["part"], sample["number"]) for sample in read(tmp_path)] == expected


def test_invalid_arguments_and_columns_raise_before_anything_is_written(
    spark: Any, frame: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(ConfigError, match="`mds_kwargs` has no `out`"):
        dataframe_to_mds(frame)
    with pytest.raises(ConfigError, match="`mds_kwargs` has no `columns`"):
        dataframe_to_mds(frame, mds_kwargs={"out": str(tmp_path)}, udf_iterable=iter)
    shorts = spark.createDataFrame([(-1,)], "n short")
    with pytest.raises(Exception, match="a number that uint16 holds"):
        # Workers may still write after the error is raised, so they get a folder of their own.
        dataframe_to_mds(shorts, mds_kwargs={"out": str(tmp_path_factory.mktemp("shorts"))})
    truths = spark.createDataFrame([(True,)], "flag boolean")
    with pytest.raises(ConfigError, match="column `flag` is of type boolean: expected numbers"):
        dataframe_to_mds(truths, mds_kwargs={"out": str(tmp_path)})
    assert os.listdir(tmp_path) == []


def test_the_old_module_name_works_after_install() -> None:
    before = set(sys.modules)
    install()
    try:
        from streaming.base.converters import dataframe_to_mds as same
        from streaming.base.converters import dataframeToMDS

        assert same is dataframeToMDS is dataframe_to_mds
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
