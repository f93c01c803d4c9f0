"""Errors of data sets, by what a handler can do. Errors of the store are in `hocket.native.errors`."""

from hocket.native.errors import HocketError


class StreamError(HocketError):
    """Base class of this package's errors."""


class IndexNotFoundError(StreamError, FileNotFoundError):
    """There is no `index.json` in the folder of the data set."""


class IndexCorruptError(StreamError, ValueError):
    """The index is not valid."""


class ShardNotFoundError(StreamError, FileNotFoundError):
    """A shard in the index is neither in the cache nor in the remote."""


class ShardCorruptError(StreamError, ValueError):
    """A shard's bytes do not match the index after all fetches."""


class SampleCorruptError(ShardCorruptError):
    """A sample cannot be decoded although its shard matches the index."""


class SourceNotFoundError(StreamError, FileNotFoundError):
    """The source of a conversion does not exist."""


class ConfigError(StreamError, ValueError):
    """An argument, or a feature of the data set, is not supported. Retrying does not help."""


class SampleError(StreamError, ValueError):
    """A sample does not fit the columns of its writer."""


class StateMismatchError(StreamError, ValueError):
    """A state was saved with another data set, seed or batch size."""


class DatasetExistsError(StreamError, FileExistsError):
    """A data set exists already at the output location."""


class StreamIOError(StreamError, OSError):
    """A local file operation failed."""
