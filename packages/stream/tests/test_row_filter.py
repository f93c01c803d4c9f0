"""Filters on the rows of Parquet files: forms of the argument, decimals, and columns that are not read."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.stream import StreamingDataset
from hocket.stream.errors import ConfigError
from hocket.stream.settings.row_filter import RowFilter
from support.parquet_files import write_columns

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def read_ids(folder: Path, **options: Any) -> list[int]:
    dataset = StreamingDataset(local=folder, batch_size=8, columns=["id"], **options)
    return [sample["id"] for sample in dataset]


def test_conditions_are_tuples_or_lists() -> None:
    conditions = [("lang", "==", "en"), ("length", "<", 512)]
    expected = RowFilter.parse(conditions)
    for same in (
        [list(condition) for condition in conditions],
        tuple(conditions),
        [conditions],
        [[list(condition) for condition in conditions]],
    ):
        assert RowFilter.parse(same) == expected
    for wrong in (
        [[]],
        [None],
        [["lang"]],
        [["lang", "=="], "en"],
        [conditions, conditions[0]],
        [[["lang"]]],
    ):
        with pytest.raises(ConfigError, match="expected a list of conditions"):
            RowFilter.parse(wrong)


def test_lists_of_values_are_any_collections_in_any_order() -> None:
    expected = RowFilter.parse([("id", "in", [1, 2])])
    assert RowFilter.parse([("id", "in", np.array([1, 2]))]) == expected
    assert RowFilter.parse([("id", "in", range(1, 3))]) == expected
    # Sets of equal elements may differ in order, as one of text does from process to process.
    assert str(RowFilter.parse([("id", "in", {0, 8})])) == str(RowFilter.parse([("id", "in", {8, 0})]))
    with pytest.raises(ConfigError, match="expected a list"):
        RowFilter.parse([("id", "in", np.array([]))])


@pytest.mark.parametrize("last", [None, Decimal("10.25")])
def test_decimals_are_compared_as_numbers(tmp_path: Path, last: Decimal | None) -> None:
    values = [Decimal("9.50"), Decimal("10.00"), last]
    write_columns(tmp_path, "a.parquet", id=[0, 1, 2], price=pa.array(values, pa.decimal128(9, 2)))
    assert read_ids(tmp_path, filters=[("price", "<", 10)]) == [0]
    assert read_ids(tmp_path, filters=[("price", "==", Decimal(10))]) == [1]
    assert read_ids(tmp_path, filters=[("price", "<", 10)], encodings={"price": "json"}) == [0]
    with pytest.raises(ConfigError, match=r"compares text with Decimal\('9\.50'\).*expected a number"):
        read_ids(tmp_path, filters=[("price", "<", "10")])


def test_encodings_may_be_those_of_columns_that_are_only_compared(tmp_path: Path) -> None:
    for day in (2, 10):
        part = tmp_path / f"day={day}"
        part.mkdir()
        table = pa.table({"id": [day, day + 1], "x": [None, day]})
        pq.write_table(table, part / "a.parquet", write_statistics=False)
    with pytest.raises(
        ConfigError, match=r'row 0 has no value in column `x`.*give `encodings=\{"x": "json"\}`'
    ):
        read_ids(tmp_path, filters=[("x", ">", 1)])
    assert read_ids(tmp_path, filters=[("x", ">", 1)], encodings={"x": "json"}) == [11, 3]
    assert read_ids(tmp_path, filters=[("day", "==", "10")], encodings={"day": "str"}) == [10, 11]
    with pytest.raises(ConfigError, match=r"`encodings` names \['x'\]"):
        read_ids(tmp_path, encodings={"x": "json"})


def test_a_column_of_a_filter_that_the_first_file_lacks_is_named(tmp_path: Path) -> None:
    write_columns(tmp_path, "a.parquet", id=[0])
    write_columns(tmp_path, "b.parquet", id=[1], score=[4])
    with pytest.raises(ConfigError, match=r"`filters` names `score`, which is not in `a\.parquet`.*'union'"):
        read_ids(tmp_path, filters=[("score", ">", 1)])
    assert read_ids(tmp_path, filters=[("score", ">", 1)], schema="union") == [1]
