"""The errors of `hocket.trainer`, named by what a handler should do."""

from __future__ import annotations

from typing import ClassVar


class TrainerError(Exception):
    """Root of every error that `hocket.trainer` raises on purpose.

    Attributes:
        code: The code of the class. It is the first note of an error, below the message in a traceback, and
            `hocket explain` prints its section of `errors.md`.
    """

    code: ClassVar[str] = "HKT-TR01"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"[{self.code}]")


class TimeValueError(TrainerError, ValueError, TypeError):
    """A text or number is not a time in the expected unit; correct the value.

    It is a `ValueError` for code that parses text, and a `TypeError`, as in Composer, for a fraction of a
    whole unit.
    """

    code = "HKT-TR02"


class TimeUnitError(TrainerError, RuntimeError, ValueError):
    """Two times have different units, or a unit has no meaning here; state the time in another unit.

    In Composer, arithmetic raises a `RuntimeError` for this, and a schedule a `ValueError`; this is both.
    """

    code = "HKT-TR03"


class LoggerError(TrainerError):
    """A logger destination failed, which does not affect training; `__cause__` is its own error."""

    code = "HKT-TR04"


class AbsentLoggerError(TrainerError, NotImplementedError):
    """A logger of Composer that Hocket does not have; the message names what to use."""

    code = "HKT-TR05"


class MissingExtraError(TrainerError, ImportError):
    """An optional package is missing; the message has the command that installs it."""

    code = "HKT-TR06"


class TrainerConfigError(TrainerError, ValueError):
    """An argument, or a combination of arguments, is invalid; correct it."""

    code = "HKT-TR07"


class UnknownArgumentError(TrainerConfigError, TypeError):
    """There is no argument of that name; the message names the nearest one, or the present place."""

    code = "HKT-TR08"


class FolderInUseError(TrainerConfigError, FileExistsError):
    """The folder has checkpoints that this run would replace; choose another folder, or allow it."""

    code = "HKT-TR09"


class IncompleteCheckpointError(TrainerConfigError):
    """A checkpoint would lack what training changes; save it too, or list it in `save_ignore_keys`."""

    code = "HKT-TR10"


class MissingProviderError(TrainerError, ImportError):
    """An argument asks for a package that is not installed; install it, or pass an object of your own."""

    code = "HKT-TR11"


class DurationReachedError(TrainerError, ValueError):
    """The run has already trained for the requested duration; request a longer one, or stop."""

    code = "HKT-TR12"


class DataError(TrainerError, ValueError):
    """A batch, a data loader or its ranks do not fit the training; correct the loader or describe it."""

    code = "HKT-TR13"


class ResumeError(TrainerError, RuntimeError):
    """A checkpoint was read, but the run cannot continue from it; the message names the part that differs."""

    code = "HKT-TR14"


class DivergedError(TrainerError, RuntimeError):
    """The loss or the gradients are not finite, or have jumped; resume from an earlier checkpoint."""

    code = "HKT-TR15"


class MemoryExhaustedError(TrainerError, MemoryError):
    """A single sample does not fit the device; shard the model, recompute activations, or cut the samples."""

    code = "HKT-TR16"


class TrainerClosedError(TrainerError, RuntimeError):
    """A call came after the trainer was closed, or one on all ranks before it was made."""

    code = "HKT-TR17"


class CallbackReuseError(TrainerError, RuntimeError):
    """A callback still belongs to a trainer that is open; close that one, or make a new callback."""

    code = "HKT-TR18"


class RankFailedError(TrainerError, RuntimeError):
    """Another rank failed, and all ranks end at the same step; the error of that rank has the cause."""

    code = "HKT-TR19"


class NonFiniteLossError(DivergedError, FloatingPointError):
    """The loss is NaN or infinite; lower the learning rate, look at the batch, or choose another policy."""

    code = "HKT-TR20"


class ReplayError(TrainerError, RuntimeError):
    """A step cannot be replayed; the message names the checkpoint, the step or the setting at fault."""

    code = "HKT-TR21"
