"""Errors of data sets, named by how a handler reacts. Errors of the store are in `hocket.native.errors`."""

from hocket.native.errors import HocketError


class StreamError(HocketError):
    """Base class of this package's errors."""

    code = "HKT-ST01"


class IndexNotFoundError(StreamError, FileNotFoundError):
    """A missing `index.json` in the folder of the data set."""

    code = "HKT-ST02"


class IndexCorruptError(StreamError, ValueError):
    """An invalid index."""

    code = "HKT-ST03"


class ShardNotFoundError(StreamError, FileNotFoundError):
    """A shard of the index that is neither in the cache nor in the remote."""

    code = "HKT-ST04"


class ShardCorruptError(StreamError, ValueError):
    """A shard whose bytes do not match the index after all fetches."""

    code = "HKT-ST05"


class SampleCorruptError(ShardCorruptError):
    """A sample that cannot be decoded although its shard matches the index."""

    code = "HKT-ST06"


class SourceNotFoundError(StreamError, FileNotFoundError):
    """A missing source of a conversion."""

    code = "HKT-ST07"


class ConfigError(StreamError, ValueError):
    """An unsupported argument or feature of the data set. Retrying does not help."""

    code = "HKT-ST08"


class SampleError(StreamError, ValueError):
    """A sample that does not fit the columns of its writer."""

    code = "HKT-ST09"


class StateMismatchError(StreamError, ValueError):
    """A state that was saved with another data set, seed or batch size."""

    code = "HKT-ST10"


class DatasetExistsError(StreamError, FileExistsError):
    """An existing data set at the output location."""

    code = "HKT-ST11"


class StreamIOError(StreamError, OSError):
    """A failure of a local file operation."""

    code = "HKT-ST12"
