"""Conversion of WebDataset tar files. The files of a sample have the same name before the first dot."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hocket.stream.convert.sample_writer import ConvertReport, check_output, choose_columns, write_samples
from hocket.stream.convert.sources import SourceFiles, find_files
from hocket.stream.encodings.arrays import SCALARS
from hocket.stream.errors import SampleError
from hocket.stream.write.output import Place

SUFFIXES = (".tar", ".tar.gz", ".tgz")

#: Column of the sample names.
KEY = "__key__"

_ENCODINGS = {
    "jpg": "jpeg", "jpeg": "jpeg", "png": "png", "txt": "str", "text": "str", "cls": "int", "index": "int",
    "json": "json", "npy": "ndarray",
}  # fmt: skip
_MOST_BYTES = 1 << 32


def from_webdataset(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert WebDataset tar files to a data set.

    There is a column for each extension, and `__key__` for the names of samples. `jpg`, `jpeg` and `png` stay
    unchanged files; `txt` becomes `str`, `cls` and `index` become `int`, `json` `json`, `npy` `ndarray`;
    all others, including pickles, become `bytes`. No code from the source is run. Links within a tar file
    are read as the files that they name. Folders of tar files named `date=2020-01-01` become columns, as in
    `from_parquet`.

    Args:
        source: A file, or a folder: its `.tar`, `.tar.gz` and `.tgz` files, by name, also behind links to
            folders, without hidden ones.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones, such as `{"npy":
            "ndarray:uint16:1024"}`.
        split: The split to read if the folder has files of several: `train`, `validation` or `test`; `all` to
            merge them.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SampleError: A file does not match its extension, a sample lacks an extension or has it twice, a link
            names no file of the tar file, or the tar file is damaged.
        SourceNotFoundError: The source does not exist.
        ConfigError: The source has no samples, or no files with a known name; files belong to several splits.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    check_output(out, columns, settings)
    found = find_files(source, SUFFIXES, split=split, columns=columns)
    names = {name for path in found.files for _, sample in _read(path, with_data=False) for name in sample}
    inferred = {name: _ENCODINGS.get(name.rpartition(".")[2].lower(), "bytes") for name in sorted(names)}
    partitions = found.partition_columns()
    kinds = choose_columns({**partitions, KEY: "str", **inferred} if inferred else {}, columns)
    return write_samples(_samples(found, kinds), kinds, out, settings)


def _samples(source: SourceFiles, kinds: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for path in source.files:
        for key, data in _read(path, with_data=True):
            values = {name: _value(key, name, kinds[name], value) for name, value in data.items()}
            sample = source.add_partition({KEY: key, **values}, path)
            missing = sorted(set(kinds) - set(sample))
            if missing:
                raise SampleError(
                    f"sample `{key}` has no {missing}: expected the fields of all samples, {sorted(kinds)}"
                )
            yield sample


def _read(path: Path, *, with_data: bool) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield each sample's name, and its files by extension; empty ones unless `with_data`."""
    key, sample = "", dict[str, bytes]()
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                folder, _, file = member.name.rpartition("/")
                base, _, name = file.partition(".")
                is_file = member.isreg() or member.islnk() or member.issym()
                if not is_file or not base or not name:
                    continue
                member_key = f"{folder}/{base}" if folder else base
                if member_key != key and sample:
                    yield key, sample
                    sample = {}
                if name in sample:
                    raise SampleError(
                        f"sample `{member_key}` in `{path}` has `{name}` twice: expected it once"
                    )
                key = member_key
                sample[name] = _content(tar, member, path) if with_data else b""
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise SampleError(f"`{path}` is not a tar file, or is damaged: {error}") from None
    if sample:
        yield key, sample


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    """Return the bytes of a file in a tar file, also if it is a link to another one there."""
    if member.issparse() or member.size >= _MOST_BYTES:
        raise SampleError(
            f"`{member.name}` in `{path}` is sparse or has 4 GiB or more: "
            "expected a smaller file that is not sparse"
        )
    try:
        content = tar.extractfile(member)
    except (KeyError, RecursionError):
        content = None
    if content is None:
        raise SampleError(
            f"`{member.name}` in `{path}` is a link to `{member.linkname}`: expected a file in the same tar "
            "file"
        )
    return content.read()


def _value(key: str, name: str, kind: str, data: bytes) -> Any:
    """Return the content of a file as a value for its column's encoding."""
    try:
        if kind == "str":
            return data.decode()
        if kind == "json":
            return json.loads(data)
        if kind in ("int", "str_int") or ("int" in kind and kind in SCALARS):
            return int(data)
        if kind in SCALARS:
            return float(data)
        if kind.startswith("ndarray"):
            return np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, RecursionError) as error:
        raise SampleError(f"`{name}` of sample `{key}`: {error}; expected `{kind}`") from None
    return data
