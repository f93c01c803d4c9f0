"""What a data set's failure means to a handler. Failures of the store itself are `hocket.native.errors`."""

from hocket.native.errors import HocketError


class StreamError(HocketError):
    """Root of this package's errors."""


class IndexNotFoundError(StreamError, FileNotFoundError):
    """There is no `index.json` where the data set should be."""


class IndexCorruptError(StreamError, ValueError):
    """The index is there and cannot be trusted."""


class ShardNotFoundError(StreamError, FileNotFoundError):
    """The index names a shard that is neither in the cache nor in the remote."""


class ShardCorruptError(StreamError, ValueError):
    """A shard's bytes are not what the index promises, however often it was fetched."""


class SampleCorruptError(ShardCorruptError):
    """A sample's bytes are not of its columns, although its shard is what the index promises."""


class SourceNotFoundError(StreamError, FileNotFoundError):
    """What is to be converted into a data set is not there."""


class ConfigError(StreamError, ValueError):
    """An argument, or a feature of the data set, that does not work; another try cannot help."""


class SampleError(StreamError, ValueError):
    """A sample that does not fit the columns it is written to."""


class StateMismatchError(StreamError, ValueError):
    """A saved position of another data set, seed or batch: resuming from it would silently differ."""


class DatasetExistsError(StreamError, FileExistsError):
    """A data set is to be written where there is one."""


class StreamIOError(StreamError, OSError):
    """The local file system refused."""
