"""Exceptions of the checkpoint package, named by how a handler reacts to them."""

from collections.abc import Sequence
from typing import Self

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
    "CheckpointUnwritableError",
]


class CheckpointError(HocketError):
    """The base class of all exceptions of this package."""

    code = "HKT-CK01"


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A missing checkpoint, tensor or data file."""

    code = "HKT-CK02"


class CheckpointPartialError(CheckpointNotFoundError):
    """Data files without a manifest: the save never finished. Use an earlier checkpoint."""

    code = "HKT-CK03"


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A conflict with a checkpoint or file of another save, which was not changed. Use another name."""

    code = "HKT-CK04"


class CheckpointCorruptError(CheckpointError):
    """Bytes that do not match their digest, or a manifest that breaks the format's rules.

    Attributes:
        file: The data file inside the checkpoint; None if the manifest is corrupt.
        offset: Start of the bad block in that file's data, in bytes; None for the whole file.
    """

    code = "HKT-CK05"

    def __init__(self, message: str, file: str | None = None, offset: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset


class CheckpointIncompatibleError(CheckpointError, ValueError):
    """A valid checkpoint that does not fit this reader or model: format, keys, shapes or dtypes."""

    code = "HKT-CK06"


class CheckpointStateError(CheckpointError, TypeError):
    """A state that cannot be saved or that differs between ranks; the message names the place."""

    code = "HKT-CK07"


class CheckpointUnfencedError(CheckpointError):
    """A store that ignores conditional writes, so that a commit is not safe against other savers."""

    code = "HKT-CK08"


class CheckpointUnsafeError(CheckpointError):
    """A foreign pickle that refers to anything but data, such as a function. It was not executed."""

    code = "HKT-CK09"


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """A timeout while waiting for ranks; the message names them.

    Attributes:
        hocket_diagnosis: For `hocket-launch`, the ranks that were awaited (`late`) and for how many seconds
            (`waited_s`); None if no rank was.
    """

    code = "HKT-CK10"
    hocket_diagnosis: dict[str, object] | None = None

    @classmethod
    def of_ranks(cls, message: str, late: Sequence[int], waited_s: float) -> Self:
        """Return the error for ranks that were awaited."""
        error = cls(message)
        error.hocket_diagnosis = {"late": list(late), "waited_s": waited_s}
        return error


class CheckpointUnwritableError(CheckpointError, OSError):
    """A local folder that cannot be created or written to; no checkpoint can be saved there.

    `errno` is that of the failed call, or None if no call failed.
    """

    code = "HKT-CK11"
