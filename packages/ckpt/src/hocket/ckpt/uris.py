"""Operations on the locations of checkpoints: local paths and URIs.

Keys of `s3://`, `gs://`, `az://`, `abfss://`, `oci://` and `memory://` URIs are taken as they are. Only `file://`
and `http(s)://` URIs are percent-encoded, so a name cannot be appended to these as text.
"""

from urllib.parse import quote

from hocket.native import Store

__all__ = ["child_uri", "local_path"]


def local_path(uri: str) -> str:
    """Return the path of a `file://` URI, percent-decoded; return a path and any other URI unchanged.

    Raises:
        StoreConfigError: A `file://` URI does not name a local folder.
    """
    return Store(uri).uri if uri.startswith("file://") else uri


def child_uri(prefix: str, name: str) -> str:
    """Return the location of a child of a prefix; `name` is one path component, not percent-encoded."""
    if prefix.startswith(("http://", "https://")):
        name = quote(name, safe="")
    return f"{local_path(prefix).rstrip('/')}/{name}"
