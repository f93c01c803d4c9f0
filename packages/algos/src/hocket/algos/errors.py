"""The errors and warnings of training methods.

```
AlgorithmError               catch this for "a training method cannot do what was asked"
├── AlgorithmConfigError     an argument is wrong: correct it (also a ValueError)
├── IncompatibleError        the method and this model, layout or batch do not go together (also a TypeError)
├── MissingLibraryError      an optional library is missing or too old: install it (also an ImportError)
└── SurgeryError             replacing modules went wrong; the model may be changed in part (a RuntimeError)

NoEffectWarning              a method found nothing to change
SurgeryWarning               modules changed after surgery, or a detail of surgery should be checked
```
"""

from typing import ClassVar


class AlgorithmError(Exception):
    """Root of every error that `hocket.algos` raises on purpose.

    Attributes:
        code: The code of the class. It is the first note of an error, below the message in a traceback, and
            `hocket explain` prints its section of `errors.md`.
    """

    code: ClassVar[str] = "HKT-AL01"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"[{self.code}]")


class AlgorithmConfigError(AlgorithmError, ValueError):
    """An argument of a training method is wrong; correct it."""

    code = "HKT-AL02"


class IncompatibleError(AlgorithmError, TypeError):
    """A training method does not fit this model, layout or batch; the message says what would fit."""

    code = "HKT-AL03"


class MissingLibraryError(AlgorithmError, ImportError):
    """An optional library is missing or has an unsupported version; the message has the command."""

    code = "HKT-AL04"


class SurgeryError(AlgorithmError, RuntimeError):
    """Replacing modules went wrong: a policy returned something unusable, or the model cannot be changed now.

    Modules that were replaced before the failing one stay replaced.
    """

    code = "HKT-AL05"


class NoEffectWarning(UserWarning):
    """A method found nothing to change in the model, so training goes on as if it were not there."""


class SurgeryWarning(UserWarning):
    """Modules changed after surgery, or a detail of surgery should be checked."""
