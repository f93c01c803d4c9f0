"""Data files as writers name them, plain or compressed."""

import base64
import re
from typing import TYPE_CHECKING

from hocket.native import _native

if TYPE_CHECKING:
    from hocket.native._native import CkptFile

__all__ = ["compression_level", "data_path", "entry_name", "file_metadata", "is_data_path", "stored_bytes"]

_LEVELS = range(1, 23)


def compression_level(compression: str | None) -> int | None:
    """The level in `zstd:N`; None stays None, for plain files.

    Raises:
        ValueError: It is something else.
    """
    if compression is None:
        return None
    found = re.fullmatch(r"zstd:(\d{1,2})", compression)
    if found is None or int(found[1]) not in _LEVELS:
        raise ValueError(
            f"`compression` is {compression!r}; expected None or 'zstd:N' with N from {_LEVELS[0]} to "
            f"{_LEVELS[-1]}"
        )
    return int(found[1])


def data_path(save_id: str, rank: int, number: int = 0, *, level: int | None = None) -> str:
    """The path of a data file inside its checkpoint."""
    suffix = "safetensors" if level is None else "blocks"
    return f"data/{save_id[:8]}-r{rank:05d}-{number:03d}.{suffix}"


def is_data_path(path: str) -> bool:
    """Whether a path inside a checkpoint is what `data_path` gives, whatever the save."""
    return re.fullmatch(r"data/[0-9a-f]{8}-r[0-9].*\.(safetensors|blocks)", path) is not None


def entry_name(name: str, start: tuple[int, ...], *, is_whole: bool) -> str:
    """What a file calls a chunk: its tensor's name, with the chunk's offsets where it is not all of it."""
    return name if is_whole else f"{name}@{','.join(map(str, start))}"


def file_metadata(save_id: str) -> dict[str, str]:
    """`__metadata__` of a data file."""
    return {"format": "hocket-ckpt/1", "version": _native.__version__, "save_id": save_id}


def stored_bytes(file: "CkptFile") -> int:
    """Bytes of a file as it is stored; `size` is what a compressed one has when it is decompressed."""
    if "frames" not in file:
        return file["size"]
    lengths = base64.b64decode(file["frames"])
    return sum(int.from_bytes(lengths[at : at + 4], "little") for at in range(0, len(lengths), 4))
