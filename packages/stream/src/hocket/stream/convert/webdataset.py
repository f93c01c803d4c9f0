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

from hocket.stream.convert.sample_writer import Converted, choose_columns, source_files, write_samples
from hocket.stream.encodings.arrays import SCALARS
from hocket.stream.errors import SampleError
from hocket.stream.output import Place

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
    **settings: Any,
) -> Converted:
    """Convert WebDataset tar files to a data set.

    There is a column for each extension, and `__key__` for the names of samples. `jpg`, `jpeg` and `png` stay
    unchanged files; `txt` becomes `str`, `cls` and `index` become `int`, `json` `json`, `npy` `ndarray`;
    all others, including pickles, become `bytes`. No code from the source is run.

    Args:
        source: A file, or a folder: its `.tar`, `.tar.gz` and `.tgz` files, by name.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones, such as `{"npy":
            "ndarray:uint16:1024"}`.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SampleError: A file does not match its extension, a sample lacks an extension or has it twice, or
            the tar file is damaged.
        SourceNotFoundError: The source does not exist.
        ConfigError: The source has no samples, or no files with a known name.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    files = source_files(source, SUFFIXES)
    names = {name for _, sample in _read(files, with_data=False) for name in sample}
    inferred = {name: _ENCODINGS.get(name.rpartition(".")[2].lower(), "bytes") for name in sorted(names)}
    kinds = choose_columns({KEY: "str", **inferred} if inferred else {}, columns)
    return write_samples(_samples(files, kinds), kinds, out, settings)


def _samples(files: list[Path], kinds: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for key, data in _read(files, with_data=True):
        missing = sorted(set(kinds) - {KEY, *data})
        if missing:
            raise SampleError(
                f"sample `{key}` has no {missing}: expected the fields of the first sample, {sorted(kinds)}"
            )
        yield {KEY: key, **{name: _value(key, name, kinds[name], value) for name, value in data.items()}}


def _read(files: list[Path], *, with_data: bool) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield each sample's name, and its files by extension; empty ones unless `with_data`."""
    for path in files:
        key, sample = "", dict[str, bytes]()
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    folder, _, file = member.name.rpartition("/")
                    base, _, name = file.partition(".")
                    if not member.isreg() or not base or not name:
                        continue
                    if member.issparse() or member.size >= _MOST_BYTES:
                        raise SampleError(
                            f"`{member.name}` in `{path}` is sparse or has 4 GiB or more: "
                            "expected a smaller file that is not sparse"
                        )
                    member_key = f"{folder}/{base}" if folder else base
                    if member_key != key and sample:
                        yield key, sample
                        sample = {}
                    if name in sample:
                        raise SampleError(
                            f"sample `{member_key}` in `{path}` has `{name}` twice: expected it once"
                        )
                    key = member_key
                    content = tar.extractfile(member) if with_data else None
                    sample[name] = content.read() if content else b""
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise SampleError(f"`{path}` is not a tar file, or is damaged: {error}") from None
        if sample:
            yield key, sample


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
