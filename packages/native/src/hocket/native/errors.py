"""The root of Hocket's errors, and those of an object store or a disk."""

__all__ = [
    "HocketError",
    "StoreChangedError",
    "StoreConfigError",
    "StoreError",
    "StoreExistsError",
    "StoreIOError",
    "StoreNotFoundError",
    "StorePermissionError",
    "StoreTransientError",
]


class HocketError(Exception):
    """The root of every error that Hocket raises itself."""


class StoreError(HocketError):
    """The root of what an object store or a disk answers."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no such object."""


class StoreExistsError(StoreError, FileExistsError):
    """The object is there already, and it was not to be replaced."""


class StoreChangedError(StoreError):
    """The object is not the one that was read before."""


class StorePermissionError(StoreError, PermissionError):
    """Credentials are missing or do not allow this."""


class StoreConfigError(StoreError, ValueError):
    """A URI or an option makes no sense."""


class StoreTransientError(StoreError, ConnectionError):
    """The store did not answer well within the deadline; trying again later may help."""


class StoreIOError(StoreError, OSError):
    """The disk failed, or is full."""
