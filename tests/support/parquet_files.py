"""Parquet files that tests read as a data set."""

from pathlib import Path
from typing import Any

import numpy as np


def make_table(start: int, count: int) -> Any:
    """Return rows `start` to `start + count`, each with values that derive from its number."""
    import pyarrow as pa

    numbers = range(start, start + count)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "tokens": pa.array([list(range(n % 5)) for n in numbers], pa.list_(pa.int32())),
            "text": pa.array([f"é{n}" * (n % 4) for n in numbers]),
        }
    )


def write_folder(out: Path) -> str:
    """Write a folder of 3 files with 103 rows in 16 row groups of up to 7; return its path."""
    import pyarrow.parquet as pq

    out.mkdir()
    for number, (start, count) in enumerate([(0, 40), (40, 31), (71, 32)]):
        pq.write_table(make_table(start, count), out / f"part-{number}.parquet", row_group_size=7)
    return str(out)


def write_columns(folder: Path, name: str, **columns: Any) -> None:
    """Write a file of the columns into a folder, which need not exist."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / name)


def comparable(value: Any) -> Any:
    """Return a value with arrays as their type, shape and bytes, and NaN as text."""
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes())
    return "nan" if isinstance(value, float) and value != value else value
