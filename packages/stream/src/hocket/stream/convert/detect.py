"""Whatever a source is, converted."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hocket.stream.convert import arrow, images, jsonl, webdataset
from hocket.stream.convert.writing import Converted, source_path
from hocket.stream.errors import ConfigError
from hocket.stream.output import Place

#: The function for each source, by its name.
FORMATS: dict[str, Callable[..., Converted]] = {
    "jsonl": jsonl.from_jsonl,
    "parquet": arrow.from_parquet,
    "arrow": arrow.from_arrow,
    "webdataset": webdataset.from_webdataset,
    "images": images.from_image_folder,
    "datasets": arrow.from_hugging_face,
}

_SUFFIXES = {
    "jsonl": jsonl.SUFFIXES,
    "parquet": arrow.PARQUET_SUFFIXES,
    "arrow": arrow.ARROW_SUFFIXES,
    "webdataset": webdataset.SUFFIXES,
    "images": images.SUFFIXES,
}
_SAVED = ("dataset_dict.json", "dataset_info.json")


def convert(
    source: str | os.PathLike[str],
    out: Place,
    *,
    format: str | None = None,  # noqa: A002 - what everybody calls it
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> Converted:
    """Write a source as a data set; see the functions of `hocket.stream.convert` for each format's types.

    Args:
        source: A file or a folder.
        out: Where to write: a path, a URI, or both as `(local, remote)`.
        format: `jsonl`, `parquet`, `arrow`, `webdataset`, `images` or `datasets`; by default what the names
            of its files say.
        columns: Encodings by name, in place of the inferred ones.
        **settings: Of `MDSWriter`.

    Raises:
        SourceNotFoundError: There is no source.
        ConfigError: The format is unknown, or does not show.
        SampleError: A sample is not of its columns.
        DatasetExistsError: And the others of `MDSWriter`.
    """
    kind = detect(source_path(source)) if format is None else format
    if kind not in FORMATS:
        raise ConfigError(f"`format` is `{kind}`: expected one of {', '.join(FORMATS)}")
    return FORMATS[kind](source, out, columns=columns, **settings)


def detect(path: Path) -> str:
    """Return the format that the names of a source's files say.

    Raises:
        ConfigError: None, or more than one.
    """
    if path.is_dir() and any((path / name).is_file() for name in _SAVED):
        return "datasets"
    names = [path.name] if path.is_file() else [file.name for file in path.rglob("*") if file.is_file()]
    found = [
        kind for kind, suffixes in _SUFFIXES.items() if any(name.lower().endswith(suffixes) for name in names)
    ]
    if len(found) != 1:
        said = f"has files of {', '.join(found)}" if found else "has no file of a known name"
        raise ConfigError(f"`{path}` {said}: expected one format; name it, one of {', '.join(FORMATS)}")
    return found[0]
