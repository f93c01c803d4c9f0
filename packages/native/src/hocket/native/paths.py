"""Paths as the native layer takes them: text, which is UTF-8 there whatever the locale's encoding is."""

from __future__ import annotations

import os
import sys

__all__ = ["is_uri", "path_problem", "read_only_problem", "undecoded"]

_READ_ONLY = {
    "http://": "plain HTTP only supports reading objects by name",
    "https://": "plain HTTP only supports reading objects by name",
    "hf://": "a repository of a hub is read here, and is written with `hf upload`",
}


def is_uri(place: str) -> bool:
    """Say whether a place is a URI, such as `s3://bucket/run` or `file:///run`, and not a path."""
    return "://" in place


def path_problem(path: str) -> str | None:
    """Return the reason why a path or URI cannot be passed on, with the remedy; None if it can.

    Args:
        path: A path with bytes that Python could not decode, marked by surrogates, or any other text.
    """
    try:
        path.encode()
        if not is_uri(path):
            os.fsencode(path)  # as Python's own calls with this path do
    except UnicodeEncodeError:
        return undecoded(path)
    return None


def read_only_problem(uri: str) -> str | None:
    """Return the reason why nothing is written at a URI, with the remedy; None if its store takes writes.

    A store gives the same reason, but at the first write only.
    """
    for scheme, reason in _READ_ONLY.items():
        if uri.startswith(scheme):
            return (
                f"`{uri}` cannot be written to: {reason}; use an `s3://`, `gs://` or `az://` URI, or a local "
                "folder"
            )
    return None


def undecoded(text: str) -> str:
    """Return the message for a path with bytes or characters that the locale's encoding does not have.

    Python marks such bytes by surrogates.
    """
    data = text.encode("utf-8", "surrogateescape")
    try:
        return (
            f"`{data.decode()}` has characters beyond `{sys.getfilesystemencoding()}`, the encoding of this "
            "environment: set `PYTHONUTF8=1` or `LC_ALL=C.UTF-8`"
        )
    except UnicodeDecodeError:
        return f"`{data.decode(errors='backslashreplace')}` is not UTF-8, which paths have to be: rename it"
