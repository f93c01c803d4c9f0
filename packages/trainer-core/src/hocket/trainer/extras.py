"""Importing what only an extra of this package brings."""

from __future__ import annotations

import importlib
from types import ModuleType

from hocket.trainer.errors import MissingExtraError


def import_extra(module: str, extra: str, *, needed_by: str) -> ModuleType:
    """Import an optional module, when it is first used.

    Args:
        module: What to import, such as `wandb`.
        extra: The extra of `hocket-trainer-core` that brings it.
        needed_by: What asks for it, for the message.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"`{needed_by}` needs `{error.name or module}`, which is not installed: "
            f"pip install 'hocket-trainer-core[{extra}]'"
        ) from error
