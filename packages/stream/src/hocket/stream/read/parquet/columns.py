"""Encodings of the columns of Parquet files, from their footers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.stream.encodings.arrays import SCALARS
from hocket.stream.errors import ConfigError
from hocket.stream.read.parquet.files import ParquetFile
from hocket.stream.read.parquet.unify import MOST_NAMES, columns_of, unify, with_different_columns

#: Encodings of single values that JSON has no place for.
_NEVER_NULL = ("bytes", "str_decimal", "jpeg", "png")


def choose_columns(
    files: Sequence[ParquetFile],
    partitions: Mapping[str, str],
    *,
    wanted: Sequence[str] | None,
    given: Mapping[str, str],
    schema: str = "equal",
) -> dict[str, str]:
    """Return the encoding of each column to read.

    Args:
        files: The files; at least one.
        partitions: Encodings of the columns that the names of folders hold.
        wanted: Names of the columns to read; None for all.
        given: Encodings by column name, instead of the usual ones.
        schema: Policy for files whose columns differ: `equal`, `union` or `permissive`.

    Raises:
        ConfigError: A name is unknown, the files' columns differ, or no encoding holds a column.
    """
    different = with_different_columns(files)
    sources = files[:1] if schema == "equal" else different
    inside = {name: file.key for file in reversed(sources) for name in reversed(columns_of(file))}
    known = list(dict.fromkeys([*partitions, *(name for file in sources for name in columns_of(file))]))
    names = known if wanted is None else list(wanted)
    both = [name for name in names if name in partitions and name in inside]
    if both:
        raise ConfigError(
            f"column `{both[0]}` is in `{inside[both[0]]}` and in the name of its folder: expected one of "
            "them; rename the column or the folder, or leave it out by `columns`"
        )
    for argument, asked in (("columns", names), ("encodings", list(given))):
        unknown = [name for name in asked if name not in (known if argument == "columns" else names)]
        if unknown:
            raise ConfigError(
                f"`{argument}` names {unknown[:MOST_NAMES]}: expected columns of the files that are read, "
                f"{known[:MOST_NAMES]}"
            )
    if not names:
        raise ConfigError("`columns` is empty: expected the name of at least one column")
    if len(set(names)) < len(names):
        raise ConfigError(f"`columns` is {names}: expected each name once")
    columns = unify(different, [name for name in names if name not in partitions], schema=schema, given=given)
    features = _features(files[0])
    chosen: dict[str, str] = {}
    for name in names:
        if name in partitions:
            chosen[name] = given.get(name, partitions[name])
            continue
        column, origin = columns[name], inside[name]
        if column["unsupported"] is not None:
            raise ConfigError(
                f"column `{name}` of `{origin}` is or has a {column['unsupported']}, which no encoding "
                "supports: leave it out by `columns`, or cast it"
            )
        wanted_kind = given.get(name)
        chosen[name] = _usual(name, column, features.get(name), files) if wanted_kind is None else wanted_kind
        if not _is_among(chosen[name], column["encodings"]):
            raise ConfigError(
                f"column `{name}` of `{origin}` cannot be read as `{chosen[name]}`: expected one of "
                f"{column['encodings']} (`*` is a shape, such as `2,3`)"
            )
        missing = column.get("missing")
        if missing is not None and chosen[name] != "json":
            raise ConfigError(
                f"column `{name}` is not in `{missing}`, so that it is null there, and is read as "
                f"`{chosen[name]}`: expected a value in every row; leave it out by `columns`, or give "
                f'`encodings={{"{name}": "json"}}`'
            )
    return chosen


def _is_among(kind: str, kinds: Sequence[str]) -> bool:
    """Return whether an encoding is one of several, in which `*` at the end stands for a shape."""
    return any(kind == known or (known[-1] == "*" and kind.startswith(known[:-1])) for known in kinds)


def _usual(name: str, column: Mapping[str, Any], feature: object, files: Sequence[ParquetFile]) -> str:
    """Return the encoding of a column whose encoding is not given, as `convert` chooses it."""
    kinds: list[str] = column["encodings"]
    usual = _encoding_of(feature, kinds) or kinds[0]
    is_flat = column["leaves"][1] - column["leaves"][0] == 1 and not column["is_list"]
    is_null = column.get("missing") is not None
    if not is_flat or usual.startswith("ndarray") or not (is_null or _has_nulls(name, files)):
        return usual
    if is_null and usual in _NEVER_NULL:
        return usual
    if usual in _NEVER_NULL:
        raise ConfigError(
            f"column `{name}` has nulls, by the files' footers, and is read as `{usual}`: expected a value "
            f'in every row; leave it out by `columns`, or give `encodings={{"{name}": "json"}}`'
        )
    return "json"


def _has_nulls(name: str, files: Sequence[ParquetFile]) -> bool:
    """Return whether a footer counts nulls in a column; one that counts none is taken to have none."""
    leaves: dict[int, int | None] = {}
    for file in with_different_columns(files):
        column = columns_of(file).get(name)
        leaves[id(file.summary["columns"])] = None if column is None else column["leaves"][0]
    for file in files:
        leaf = leaves[id(file.summary["columns"])]
        if leaf is not None and any(group["leaves"][leaf][3] for group in file.summary["row_groups"]):
            return True
    return False


def _features(file: ParquetFile) -> dict[str, Any]:
    """Return the features of the columns, if `datasets` wrote the file."""
    metadata = dict(file.summary["metadata"])
    try:
        features = json.loads(metadata["huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _encoding_of(feature: object, kinds: Sequence[str]) -> str | None:
    """Return the encoding of a feature of `datasets`; None if the column's type tells as much."""
    inner = feature[0] if isinstance(feature, list) and feature else None
    if isinstance(feature, dict) and feature.get("_type") in ("List", "LargeList", "Sequence"):
        inner = feature.get("feature")
    if isinstance(inner, dict) and inner.get("_type") == "Image" and "list[jpeg]" in kinds:
        return "list[jpeg]"
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "Image" and "jpeg" in kinds:
        return "jpeg"
    shape, dtype = feature.get("shape"), feature.get("dtype")
    if isinstance(inner, dict) and isinstance(length := feature.get("length"), int) and length > 0:
        shape, dtype = [length], inner.get("dtype")
    if dtype in SCALARS and isinstance(shape, list) and all(isinstance(dim, int) for dim in shape):
        kind = f"ndarray:{dtype}:{','.join(map(str, shape))}"
        if _is_among(kind, kinds):
            return kind
    return None
