"""What can go wrong with a checkpoint, named by what a handler would do about it."""

from hocket.native.errors import HocketError

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointIncompatibleError",
    "CheckpointNotFoundError",
    "CheckpointPartialError",
    "CheckpointStateError",
    "CheckpointTimeoutError",
    "CheckpointUnfencedError",
    "CheckpointUnsafeError",
]


class CheckpointError(HocketError):
    """The root of this package's errors."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint, tensor or data file."""


class CheckpointPartialError(CheckpointNotFoundError):
    """Data files are there but no manifest: the save never finished. Take an earlier checkpoint."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Another save's checkpoint or file is there; nothing of it was touched. Take another name."""


class CheckpointCorruptError(CheckpointError):
    """Bytes are not those that were written, or a manifest breaks the format's rules.

    Attributes:
        file: The data file inside the checkpoint, or None where it is the manifest.
        offset: Where the bad block begins in that file's data, in bytes, or None where it is the whole file.
    """

    def __init__(self, message: str, file: str | None = None, offset: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset


class CheckpointIncompatibleError(CheckpointError, ValueError):
    """The checkpoint is sound but not for this reader or this model: format, keys, shapes, dtypes."""


class CheckpointStateError(CheckpointError, TypeError):
    """The state holds what no checkpoint can hold, or ranks hold different states; the place is named."""


class CheckpointUnfencedError(CheckpointError):
    """The store lets a conditional write replace what is there, so a commit cannot be trusted."""


class CheckpointUnsafeError(CheckpointError):
    """A foreign file asks for more than data, such as to call a function. It was not carried out."""


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """Ranks did not report in time; they are named."""
