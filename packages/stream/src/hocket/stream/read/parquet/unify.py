"""The columns of several Parquet files as those of one data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.stream.errors import ConfigError
from hocket.stream.read.parquet.files import ParquetFile

#: Names of columns that errors list.
MOST_NAMES = 20
#: Encodings that hold all values of several types of numbers.
_WIDE = ("int64", "float64")


def columns_of(file: ParquetFile) -> dict[str, dict[str, Any]]:
    """Return the columns of a file by name; see `_native.parquet_footers`."""
    return {column["name"]: column for column in file.summary["columns"]}


def with_different_columns(files: Sequence[ParquetFile]) -> list[ParquetFile]:
    """Return the first file of each list of columns that files share."""
    first = {id(file.summary["columns"]): file for file in reversed(files)}
    return [file for file in files if first[id(file.summary["columns"])] is file]


def unify(
    files: Sequence[ParquetFile], names: Sequence[str], *, schema: str, given: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the columns of these names, each as in a footer, with the encodings that all files have for it.

    A column that a file lacks, or has without a type, has that file's name as `missing`.

    Args:
        files: The files, of which only those with different columns matter.
        names: Names of the columns.
        schema: `equal` if all files have the same columns. `union`: a column may be missing in a file.
            `permissive`: numbers may differ in type, too.
        given: Encodings by column name. Types may differ in a column whose encoding holds them all.

    Raises:
        ConfigError: A file has two columns of one name, or the columns of two files differ otherwise.
    """
    for file in files:
        found = Counter(column["name"] for column in file.summary["columns"])
        if twice := [name for name in names if found[name] > 1]:
            raise ConfigError(
                f"`{file.key}` has several columns named `{twice[0]}`: expected each name once; leave it "
                "out by `columns`, or write the file again"
            )
    by_file = [(file.key, columns_of(file)) for file in files]
    if schema == "equal":
        _check_equal(by_file, names)
        return {name: by_file[0][1][name] for name in names}
    return {
        name: _unify(
            name,
            [(key, columns.get(name)) for key, columns in by_file],
            is_permissive=schema == "permissive",
            given=given.get(name),
        )
        for name in names
    }


def _type(column: Mapping[str, Any]) -> str:
    """Return a column's type in words: its usual encoding, or why it has none."""
    return str(column["unsupported"] or column["encodings"][0])


def _check_equal(by_file: Sequence[tuple[str, dict[str, dict[str, Any]]]], names: Sequence[str]) -> None:
    """Refuse files whose columns differ from those of the first one."""

    def types(columns: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        return {name: _type(columns[name]) for name in names if name in columns}

    first = by_file[0][0]
    expected = types(by_file[0][1])
    for key, columns in by_file:
        actual = types(columns)
        if actual == expected:
            continue
        differing = [name for name in names if actual.get(name) != expected.get(name)][:MOST_NAMES]
        raise ConfigError(
            f"the columns of `{first}` and of `{key}` differ: "
            f"{ {name: expected.get(name) for name in differing} } and "
            f"{ {name: actual.get(name) for name in differing} }: expected the same in all files; read those "
            "that are the same by `columns`, give `schema='union'` or 'permissive', or write the files again"
        )


def _unify(
    name: str,
    found: Sequence[tuple[str, dict[str, Any] | None]],
    *,
    is_permissive: bool,
    given: str | None,
) -> dict[str, Any]:
    """Return one column of several files, by the files' names; it is None where a file lacks it."""
    missing = next((key for key, column in found if column is None or column["is_null"]), None)
    there = [(key, column) for key, column in found if column is not None and not column["is_null"]]
    if not there:
        return next(column for _, column in found if column is not None) | {"missing": None}
    first, column = there[0]
    other = next((key for key, one in there if _type(one) != _type(column)), None)
    if other is None:
        return column | {"missing": missing}
    # Encodings hold the values of each type exactly, so one that all files have holds all of them.
    common = [kind for kind in column["encodings"] if all(kind in one["encodings"] for _, one in there)]
    wide = next((kind for kind in _WIDE if kind in common), None) if is_permissive else None
    if given in common or wide is not None:
        ordered = dict.fromkeys([wide, *common] if wide is not None else common)
        return column | {"encodings": list(ordered), "missing": missing, "unsupported": None}
    types = (_type(column), _type(dict(there)[other]))
    remedy = "" if is_permissive or not set(_WIDE) & set(common) else "give `schema='permissive'`, or "
    raise ConfigError(
        f"column `{name}` is `{types[0]}` in `{first}` and `{types[1]}` in `{other}`: expected one type; "
        f"{remedy}give an encoding that holds both by `encodings`, one of {common}, or leave it out by "
        "`columns`"
    )
