"""What a store's failure means to a handler. The roots of `hocket.ckpt` and `hocket.stream` derive from here.

A class is caught for what can be done about it, so most are also the built-in exception that code without
Hocket would catch: `except FileNotFoundError` works on a store as it does on a file.
"""


class HocketError(Exception):
    """Root of every error that Hocket's packages raise themselves."""


class StoreError(HocketError):
    """Root of the store's errors."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """No such object, or no such bucket."""


class StoreExistsError(StoreError, FileExistsError):
    """The key is taken, and the object was to be created only if absent."""


class StoreChangedError(StoreError):
    """The object is not the one seen before: read it again from the start."""


class StorePermissionError(StoreError, PermissionError):
    """The store refuses these credentials, or there are none; the message names the variables to set."""


class StoreConfigError(StoreError, ValueError):
    """A URI, key or option that no retry makes right."""


class StoreTransientError(StoreError, ConnectionError):
    """The store could not be reached, or kept failing until its deadline.

    For a conditional `put` it can also mean that the answer was lost; read the object back to know.
    """


class StoreIOError(StoreError, OSError):
    """The store or the file system refused for a reason of its own, which the message gives."""
