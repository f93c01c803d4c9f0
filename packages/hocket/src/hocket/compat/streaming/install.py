"""Replacement of mosaicml-streaming by this package in `import streaming`."""

from __future__ import annotations

import importlib
import sys

from hocket.stream.errors import ConfigError

#: Modules of mosaicml-streaming and their replacements.
MODULES = {
    "streaming": "hocket.compat.streaming",
    "streaming.base": "hocket.compat.streaming.base",
    "streaming.base.converters": "hocket.compat.streaming.base.converters",
    "streaming.base.dataloader": "hocket.compat.streaming.dataloader",
    "streaming.base.dataset": "hocket.compat.streaming.dataset",
    "streaming.base.format": "hocket.compat.streaming.base",
    "streaming.base.format.json": "hocket.compat.streaming.base",
    "streaming.base.format.mds": "hocket.compat.streaming.base",
    "streaming.base.format.mds.encodings": "hocket.compat.streaming.base.encodings",
    "streaming.base.format.xsv": "hocket.compat.streaming.base",
    "streaming.base.local": "hocket.compat.streaming.local",
    "streaming.base.stream": "hocket.compat.streaming.stream",
    "streaming.base.util": "hocket.compat.streaming.base.util",
}


def install() -> None:
    """Make `import streaming` load `hocket.compat.streaming` in this process and its forked children.

    Call it before anything imports `streaming`. A second call changes nothing.

    Raises:
        ConfigError: mosaicml-streaming itself was imported already.
    """
    present = sys.modules.get("streaming")
    if present is not None and present.__name__ != MODULES["streaming"]:
        raise ConfigError(
            "`streaming` was imported already: expected `hocket.compat.streaming.install()` before anything "
            "imports it; call it first"
        )
    for name, hocket_name in MODULES.items():
        module = sys.modules[name] = importlib.import_module(hocket_name)
        parent, _, last = name.rpartition(".")
        if parent:
            # `import a.b as m` and `from a import b` look up this attribute.
            setattr(sys.modules[parent], last, module)
