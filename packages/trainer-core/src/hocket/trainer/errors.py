"""The errors of `hocket.trainer`; each name says what the one who catches it should do."""

from __future__ import annotations


class TrainerError(Exception):
    """Root of every error that `hocket.trainer` raises on purpose."""


class TimeValueError(TrainerError, ValueError, TypeError):
    """A text or number is no time in the unit asked for; correct the value.

    It is a `ValueError` for whoever parses text, and a `TypeError`, as in Composer, for a fraction of a whole
    unit.
    """


class TimeUnitError(TrainerError, RuntimeError, ValueError):
    """Two times of different units met, or a unit means nothing here; state the time in another unit.

    In Composer, arithmetic raises a `RuntimeError` for this, and a schedule a `ValueError`; this is both.
    """


class LoggerError(TrainerError):
    """A logger destination failed, which does not harm the training; its cause says how."""


class AbsentLoggerError(TrainerError, NotImplementedError):
    """A logger of Composer that Hocket does not have; the message names what to use."""


class MissingExtraError(TrainerError, ImportError):
    """An optional package is missing; the message has the command that installs it."""


class TrainerConfigError(TrainerError, ValueError):
    """An argument, or a combination of arguments, cannot be what was meant; correct it."""


class FolderInUseError(TrainerConfigError, FileExistsError):
    """The folder for checkpoints has some that this run would replace; choose another, or allow it."""


class MissingProviderError(TrainerError, ImportError):
    """An argument asks for a package that is not installed; install it, or pass an object of your own."""


class DurationReachedError(TrainerError, ValueError):
    """The training is already as long as asked for; ask for more, or train no more."""


class DataError(TrainerError, ValueError):
    """A batch, a data loader or its ranks do not fit the training; correct the loader or describe it."""


class ResumeError(TrainerError, RuntimeError):
    """A checkpoint was read, and the run cannot go on from it; the message says which part differs."""


class DivergedError(TrainerError, RuntimeError):
    """The loss or the gradients are not finite, or have jumped; resume from an earlier checkpoint."""


class MemoryExhaustedError(TrainerError, MemoryError):
    """One sample alone does not fit the device; shard the model, recompute activations, or use less of it."""


class CallbackReuseError(TrainerError, RuntimeError):
    """A callback still belongs to a trainer that is open; close that one, or make a new callback."""


class RankFailedError(TrainerError, RuntimeError):
    """Another rank failed and all ranks end at the same step; that rank's error says why."""


class NonFiniteLossError(DivergedError, FloatingPointError):
    """The loss is NaN or infinite; lower the learning rate, look at the batch, or choose another policy."""
