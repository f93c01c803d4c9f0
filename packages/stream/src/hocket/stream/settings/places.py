"""Places of data: paths of this machine, and URIs of stores."""

from __future__ import annotations

import os
from pathlib import Path

from hocket.native import Store
from hocket.stream.errors import ConfigError


def find_folder(place: str | os.PathLike[str]) -> Path | None:
    """Return the path of a local place; None for the URI of a store.

    `~` is expanded. `file://` URIs are local, and are percent-decoded.

    Raises:
        ConfigError: The path is not UTF-8.
        StoreConfigError: A `file://` URI does not name a local folder, or the path is a URI that has lost a
            slash, as in `Path("s3://bucket/data")`.
    """
    name = os.fspath(place)
    is_file_uri = name.startswith("file://")
    if "://" in name and not is_file_uri:
        return None
    absolute = Store(check_path(name)).uri
    return Path(absolute if is_file_uri or name.startswith("~") else name)


def check_path(path: str) -> str:
    """Return a path that the native layer can take.

    A relative one may become another once it is absolute: the working directory's name counts then.

    Raises:
        ConfigError: The path is not UTF-8.
    """
    data = os.fsencode(path)
    try:
        data.decode()
    except UnicodeDecodeError:
        shown = data.decode(errors="backslashreplace")
        raise ConfigError(f"`{shown}` is not UTF-8, which paths have to be: rename it") from None
    return path
