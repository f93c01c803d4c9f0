"""Places of data: paths of this machine, and URIs of stores."""

from __future__ import annotations

import os
from pathlib import Path

from hocket.native import Store


def find_folder(place: str | os.PathLike[str]) -> Path | None:
    """Return the path of a local place; None for the URI of a store.

    `~` is expanded. `file://` URIs are local, and are percent-decoded.

    Raises:
        StoreConfigError: A `file://` URI does not name a local folder.
    """
    name = os.fspath(place)
    if name.startswith("file://"):
        return Path(Store(name).uri)
    return None if "://" in name else Path(name).expanduser()
