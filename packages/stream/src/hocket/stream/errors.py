"""Errors of data sets, named by how a handler reacts. Errors of the store are in `hocket.native.errors`."""

from hocket.native.errors import HocketError


class StreamError(HocketError):
    """Base class of this package's errors."""


class IndexNotFoundError(StreamError, FileNotFoundError):
    """A missing `index.json` in the folder of the data set."""


class IndexCorruptError(StreamError, ValueError):
    """An invalid index."""


class ShardNotFoundError(StreamError, FileNotFoundError):
    """A shard of the index that is neither in the cache nor in the remote."""


class ShardCorruptError(StreamError, ValueError):
    """A shard whose bytes do not match the index after all fetches."""


class SampleCorruptError(ShardCorruptError):
    """A sample that cannot be decoded although its shard matches the index."""


class SourceNotFoundError(StreamError, FileNotFoundError):
    """A missing source of a conversion."""


class ConfigError(StreamError, ValueError):
    """An unsupported argument or feature of the data set. Retrying does not help."""


class SampleError(StreamError, ValueError):
    """A sample that does not fit the columns of its writer."""


class StateMismatchError(StreamError, ValueError):
    """A state that was saved with another data set, seed or batch size."""


class DatasetExistsError(StreamError, FileExistsError):
    """An existing data set at the output location."""


class StreamIOError(StreamError, OSError):
    """A failure of a local file operation."""
