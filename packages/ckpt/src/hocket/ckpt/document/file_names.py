"""Names, order and metadata of data files and their entries. The extension has the rules."""

import base64
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = [
    "Compression",
    "data_path",
    "entry_name",
    "file_metadata",
    "in_entry_order",
    "is_data_path",
    "parse_compression",
    "stored_bytes",
]

_LEVELS = range(1, 23)

_Entry = TypeVar("_Entry")


class Compression(NamedTuple):
    """The encoding of compressed data files."""

    level: int
    """The zstd level."""
    planes: bool = False
    """Whether the bytes of floating dtypes are ordered as planes before zstd."""


def parse_compression(compression: str | None) -> Compression | None:
    """Return the encoding of `zstd:N` or `planes+zstd:N`; None for None, which means plain files.

    Raises:
        ValueError: The text has another form.
    """
    if compression is None:
        return None
    found = re.fullmatch(r"(planes\+)?zstd:(\d{1,2})", compression)
    if found is None or int(found[2]) not in _LEVELS:
        raise ValueError(
            f"`compression` is {compression!r}; expected None, 'zstd:N' or 'planes+zstd:N' with N from "
            f"{_LEVELS[0]} to {_LEVELS[-1]}"
        )
    return Compression(int(found[2]), planes=found[1] is not None)


def data_path(save_id: str, rank: int, number: int = 0, *, is_compressed: bool = False) -> str:
    """Return the path of a data file inside its checkpoint."""
    return _native.ckpt_data_path(save_id, rank, number, compressed=is_compressed)


def is_data_path(path: str) -> bool:
    """Return whether a path inside a checkpoint has the form of `data_path`, for any save."""
    return _native.ckpt_is_data_path(path)


def entry_name(name: str, start: tuple[int, ...], *, is_whole: bool) -> str:
    """Return a chunk's name in the data file: the tensor's name, plus the offsets unless it is whole."""
    return _native.ckpt_entry_name(name, start, is_whole=is_whole)


def in_entry_order(
    entries: Iterable[_Entry], dtype_and_name: Callable[[_Entry], tuple[str, str]]
) -> list[_Entry]:
    """Return entries in their order in a data file, given what returns an entry's dtype and name."""
    entries = list(entries)
    return [entries[number] for number in _native.ckpt_entry_order(list(map(dtype_and_name, entries)))]


def file_metadata(save_id: str) -> dict[str, str]:
    """Return the `__metadata__` of a data file."""
    return {"format": "hocket-ckpt/1", "version": _native.__version__, "save_id": save_id}


def stored_bytes(file: "CkptFile") -> int:
    """Return the stored size of a file; `size` is the decompressed size of a compressed one."""
    if "frames" not in file:
        return file["size"]
    lengths = base64.b64decode(file["frames"])
    return sum(int.from_bytes(lengths[at : at + 4], "little") for at in range(0, len(lengths), 4))
