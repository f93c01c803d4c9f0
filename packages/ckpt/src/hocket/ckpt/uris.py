"""Operations on the locations of checkpoints: local paths and URIs.

Keys of `s3://`, `gs://`, `az://`, `abfss://`, `oci://` and `memory://` URIs are taken as they are. Only `file://`
and `http(s)://` URIs are percent-encoded, so a name cannot be appended to these as text.
"""

import os
from pathlib import Path
from urllib.parse import quote

from hocket.native import Store
from hocket.native.errors import StoreConfigError
from hocket.native.paths import is_uri, path_problem

__all__ = ["Place", "absolute", "child_uri", "local_path"]

Place = str | os.PathLike[str]
"""The location of a checkpoint, or of a folder of checkpoints, as a caller may give it."""


def local_path(place: Place) -> str:
    """Return a place as text: the path of a `file://` URI, percent-decoded, and a path with `~` expanded.

    Any other path or URI is returned unchanged.

    Raises:
        StoreConfigError: A `file://` URI does not name a local folder, the path is a URI that has lost a
            slash, as in `Path("s3://bucket/run")`, or it is not UTF-8.
    """
    uri = os.fspath(place)
    if not uri.isascii() and (problem := path_problem(uri)) is not None:
        raise StoreConfigError(problem)
    is_file_uri = uri.startswith("file://")
    if not uri or (is_uri(uri) and not is_file_uri):
        return uri
    expanded = Store(uri).uri
    return expanded if is_file_uri or uri.startswith("~") else uri


def absolute(place: Place) -> str:
    """Return the absolute path of a local path or `file://` URI; return any other URI without trailing slash.

    `chdir` does not affect an absolute path, and names can be appended to it as they are.
    """
    uri = local_path(place)
    return uri.rstrip("/") if is_uri(uri) else local_path(Path(uri).absolute())


def child_uri(prefix: str, name: str) -> str:
    """Return the location of a child of a prefix.

    Args:
        prefix: A place as `local_path` returns it.
        name: One path component, not percent-encoded.
    """
    if prefix.startswith(("http://", "https://")):
        name = quote(name, safe="")
    return f"{prefix.rstrip('/')}/{name}"
