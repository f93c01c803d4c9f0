"""Filters on the rows of Parquet files: forms of the argument, decimals, and columns that are not read."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.stream.errors import ConfigError
from hocket.stream.settings.row_filter import RowFilter


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
