"""Conversion of a source whose format is detected from file names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hocket.stream.convert import arrow, images, jsonl, separated, webdataset
from hocket.stream.convert.sample_writer import ConvertReport, check_output
from hocket.stream.convert.sources import source_path, walk
from hocket.stream.errors import ConfigError
from hocket.stream.write.output import Place

#: Converters by format.
FORMATS: dict[str, Callable[..., ConvertReport]] = {
    "jsonl": jsonl.from_jsonl,
    "csv": separated.from_csv,
    "tsv": separated.from_tsv,
    "parquet": arrow.from_parquet,
    "arrow": arrow.from_arrow,
    "webdataset": webdataset.from_webdataset,
    "images": images.from_image_folder,
    "datasets": arrow.from_hugging_face,
}

_SUFFIXES = {
    "jsonl": jsonl.SUFFIXES,
    "csv": separated.CSV_SUFFIXES,
    "tsv": separated.TSV_SUFFIXES,
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
    format: str | None = None,  # noqa: A002 - the usual name
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert a source to a data set; the functions of `hocket.stream.convert` describe the types by format.

    Args:
        source: A file or a folder.
        out: Output location: a path, a URI, or both as `(local, remote)`.
        format: `jsonl`, `csv`, `tsv`, `parquet`, `arrow`, `webdataset`, `images` or `datasets`; by default
            detected from file names.
        columns: Encodings by column name, instead of the inferred ones.
        split: The split to read if the source has several: `train`, `validation` or `test`; `all` to merge
            them.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SourceNotFoundError: The source does not exist.
        ConfigError: The format is unknown or cannot be detected, or has no such setting.
        SampleError: A sample does not fit its columns.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    if format is None:
        check_output(out, columns, _writer_settings(settings))
        format = detect(source_path(source))  # noqa: A001 - the usual name
    elif format not in FORMATS:
        raise ConfigError(f"`format` is `{format}`: expected one of {', '.join(FORMATS)}")
    converter = FORMATS[format]
    known = inspect.signature(converter).parameters
    for name in settings.keys() - _writer_settings(settings).keys() - known.keys():
        raise ConfigError(f"`{name}` does not apply to a source of format `{format}`; leave it out")
    return converter(source, out, columns=columns, split=split, **settings)


def _writer_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of a converter alone, such as `empty_as_nan`."""
    own = {name for converter in FORMATS.values() for name in inspect.signature(converter).parameters}
    return {name: given for name, given in settings.items() if name not in own}


def detect(path: Path) -> str:
    """Return the format of a source, detected from file names.

    Raises:
        ConfigError: No format is found, or more than one.
    """
    if path.is_dir() and any((path / name).is_file() for name in _SAVED):
        return "datasets"
    names = [file.name.lower() for file in ([path] if path.is_file() else walk(path))]
    found = [kind for kind, suffixes in _SUFFIXES.items() if any(name.endswith(suffixes) for name in names)]
    # Files of all formats often have metadata in JSON beside them.
    if not found and any(name.endswith(jsonl.JSON_SUFFIXES) for name in names):
        found = ["jsonl"]
    if len(found) != 1:
        problem = f"has files of {', '.join(found)}" if found else "has no file with a known suffix"
        raise ConfigError(f"`{path}` {problem}: expected one format; name it, one of {', '.join(FORMATS)}")
    return found[0]
