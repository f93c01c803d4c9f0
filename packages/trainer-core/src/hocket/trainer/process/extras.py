"""Imports of optional packages, which extras of this package install."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from hocket.trainer.errors import MissingExtraError


def import_extra(module: str, extra: str | None, *, needed_by: str) -> ModuleType:
    """Import an optional module; call it where the module is first used.

    Args:
        module: The module to import, such as `wandb`.
        extra: The extra of `hocket-trainer-core` that installs it; None if it is installed by itself.
        needed_by: The class that needs it, for the message.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(error.name or module, module, extra, needed_by) from error


def require_extra(module: str, extra: str | None, *, needed_by: str) -> None:
    """Check that an optional module is installed, without importing it.

    Args:
        module: A top-level module, such as `mlflow`.
        extra: The extra of `hocket-trainer-core` that installs it; None if it is installed by itself.
        needed_by: The class that needs it, for the message.

    Raises:
        MissingExtraError: If it is not installed.
    """
    if module in sys.modules:
        is_installed = sys.modules[module] is not None
    else:
        is_installed = importlib.util.find_spec(module) is not None
    if not is_installed:
        raise _missing(module, module, extra, needed_by)


def require_compiler(needed_by: str) -> None:
    """Check that setuptools is installed where the compiler of torch imports it.

    torch 2.9 does not declare this before Python 3.12.

    Args:
        needed_by: The argument or class that compiles, for the message.

    Raises:
        MissingExtraError: If it is not installed.
    """
    if torch.__version__ < "2.10" and importlib.util.find_spec("setuptools") is None:
        raise MissingExtraError(
            f"`{needed_by}` needs `setuptools` with torch {torch.__version__}, which is not installed: "
            "pip install setuptools"
        )


def _missing(name: str, module: str, extra: str | None, needed_by: str) -> MissingExtraError:
    """Return the error for a module, or one that it imports, with the package that installs both."""
    package = module if extra is None else f"'hocket-trainer-core[{extra}]'"
    return MissingExtraError(f"`{needed_by}` needs `{name}`, which is not installed: pip install {package}")
