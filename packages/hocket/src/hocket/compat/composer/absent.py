"""Placeholders for Composer's names without a counterpart; their use raises and names a replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hocket.compat.composer.absent_names import ABSENT
from hocket.trainer.errors import MissingExtraError, TrainerError


class AbsentNameError(TrainerError, NotImplementedError):
    """A script uses a name of Composer that Hocket does not have; the message says what replaces it."""

    code = "HKT-HO05"


class Absent:
    """A placeholder for a name that can be imported but not used: a call, a subclass or an attribute raises.

    No object is an instance of the placeholder.

    Args:
        name: Full name in Composer.
        instead: The replacement, as the rest of a sentence.
    """

    def __init__(self, name: str, instead: str) -> None:
        self.__name__ = name.rpartition(".")[2]
        self.__doc__ = f"Raises `AbsentNameError`: {instead}."
        self._sentence = f"Hocket has no `{name}`; {instead}"

    def _refuse(self) -> NoReturn:
        raise AbsentNameError(self._sentence)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `AbsentNameError`."""
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        """Raise `AbsentNameError`: a subclass needs the class."""
        self._refuse()

    def __getitem__(self, key: Any) -> NoReturn:
        """Raise `AbsentNameError`."""
        self._refuse()

    def __instancecheck__(self, instance: Any) -> bool:
        """Return False: there are no instances."""
        return False

    def __getattr__(self, name: str) -> Any:
        # Introspection looks up names of this form, and expects an `AttributeError`.
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        """Return the error message."""
        return f"<{self._sentence}>"


class NotInstalled(Absent):
    """A placeholder for a name whose library is not installed: its use raises `MissingExtraError`.

    Args:
        name: The name, for `__name__`.
        error: The error that the import of the library raised; its message says what to install.
    """

    def __init__(self, name: str, error: MissingExtraError) -> None:
        super().__init__(name, str(error))
        self.__doc__ = f"Raises `MissingExtraError`: {error}."
        self._sentence = str(error)

    def _refuse(self) -> NoReturn:
        raise MissingExtraError(self._sentence)


def absent_from(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of this package.

    Args:
        module: The module's name in Composer, such as `composer.callbacks`.
    """

    def get(name: str) -> Any:
        instead = ABSENT.get(module, {}).get(name)
        if instead is None:
            raise AttributeError(f"`{module}` of the compatibility layer has no `{name}`", name=name)
        return Absent(f"{module}.{name}", instead)

    return get
