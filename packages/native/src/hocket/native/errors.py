"""The errors of object stores, and the base class of the errors of `hocket.ckpt` and `hocket.stream`.

There is one class for each way of handling a failure. Most also derive from the matching built-in exception,
so `except FileNotFoundError` works for a store as it does for a file.
"""

from typing import ClassVar


class HocketError(Exception):
    """Root of every error that Hocket's packages raise themselves.

    Attributes:
        code: The code of the class. It is the first note of an error, below the message in a traceback, and
            `hocket explain` prints its section of `errors.md`.
    """

    code: ClassVar[str] = "HKT-NA01"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"[{self.code}]")


class StoreError(HocketError):
    """Root of the store's errors."""

    code = "HKT-NA02"


class StoreNotFoundError(StoreError, FileNotFoundError):
    """An object or bucket that does not exist."""

    code = "HKT-NA03"


class StoreExistsError(StoreError, FileExistsError):
    """An existing object under a key that was to be created only if absent."""

    code = "HKT-NA04"


class StoreChangedError(StoreError):
    """An object that was replaced since it was first read; read it again from the start."""

    code = "HKT-NA05"


class StorePermissionError(StoreError, PermissionError):
    """Credentials that are missing or that the store refuses; the message names the variables to set."""

    code = "HKT-NA06"


class StoreConfigError(StoreError, ValueError):
    """An invalid URI, key or option, for which a retry is useless."""

    code = "HKT-NA07"


class StoreTransientError(StoreError, ConnectionError):
    """A store that could not be reached, or that kept failing until the deadline.

    After a conditional `put` it can also mean that the response was lost; read the object to find out whether
    it was written.
    """

    code = "HKT-NA08"


class StoreIOError(StoreError, OSError):
    """Any other failure of the store or the file system; the message gives its reason."""

    code = "HKT-NA09"
