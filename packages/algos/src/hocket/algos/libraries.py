"""Imports of the optional libraries that training methods build on."""

import importlib
import importlib.metadata
import re
import warnings
from typing import Any

from hocket.algos.errors import MissingLibraryError

# The oldest version that each extra of this package installs.
OLDEST = {"bitsandbytes": (0, 50), "peft": (0, 18), "torchao": (0, 18)}


def import_library(module: str, *, needed_by: str) -> Any:
    """Import a module of an optional library; call it where the module is first used.

    Args:
        module: Such as `peft` or `torchao.float8`; the library is its first part, and the extra of
            `hocket-algos` has the library's name.
        needed_by: The class or function that needs it, for the message.

    Raises:
        MissingLibraryError: The library is not installed, or too old.
    """
    library = module.partition(".")[0]
    oldest = OLDEST[library]
    remedy = f"pip install --upgrade 'hocket-algos[{library}]'"
    try:
        with warnings.catch_warnings():
            # Users cannot fix the deprecations in a library's own source, which its first import reports.
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            imported = importlib.import_module(module)
    except ImportError as error:
        raise MissingLibraryError(
            f"`{needed_by}` needs `{library}`, which cannot be imported ({error}): {remedy}"
        ) from error
    version = importlib.metadata.version(library)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < oldest:
        min_version = ".".join(map(str, oldest))
        raise MissingLibraryError(
            f"`{needed_by}` needs `{library}` {min_version} or newer, but {version} is installed: {remedy}"
        )
    return imported
