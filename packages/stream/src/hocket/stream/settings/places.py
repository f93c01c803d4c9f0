"""Places of data: paths of this machine, and URIs of stores."""

from __future__ import annotations

import os
from pathlib import Path

from hocket.native import Store
from hocket.native.paths import is_uri, path_problem
from hocket.stream.errors import ConfigError


def find_folder(place: str | os.PathLike[str]) -> Path | None:
    """Return the path of a local place; None for the URI of a store.

    `~` is expanded. `file://` URIs are local, and are percent-decoded.

    Raises:
        ConfigError: The place is not UTF-8.
        StoreConfigError: A `file://` URI does not name a local folder, or the path is a URI that has lost a
            slash, as in `Path("s3://bucket/data")`.
    """
    name = check_path(os.fspath(place))
    is_file_uri = name.startswith("file://")
    if is_uri(name) and not is_file_uri:
        return None
    absolute = Store(name).uri
    return Path(absolute if is_file_uri or name.startswith("~") else name)


def check_path(path: str) -> str:
    """Return a path or URI that the native layer can take.

    A relative one may become another once it is absolute: the working directory's name counts then.

    Raises:
        ConfigError: The path is not UTF-8.
    """
    if (problem := path_problem(path)) is not None:
        raise ConfigError(problem)
    return path
