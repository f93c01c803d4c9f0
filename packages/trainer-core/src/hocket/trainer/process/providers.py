"""Lookup of optional packages by entry point, so that the trainer does not import them itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import entry_points
from typing import Any

from hocket.trainer.errors import MissingProviderError, TrainerConfigError

GROUP = "hocket.providers"

_PACKAGE_OF = {"parallelism": "hocket-dist", "deepspeed": "hocket-dist", "checkpoints": "hocket-ckpt"}
_ARGUMENT_OF = {
    "parallelism": "parallelism=",
    "deepspeed": "parallelism=",
    "checkpoints": "checkpointing={'store': …}",
}


def find_provider(name: str, *, asked_by: str) -> Callable[..., Any]:
    """Return the function that an installed package provides under `name` in the group `hocket.providers`.

    Args:
        name: `"parallelism"`, `"deepspeed"` or `"checkpoints"`.
        asked_by: The argument that needs the provider, such as `save_folder`, for the error message.

    Raises:
        MissingProviderError: If no installed package provides the function, or its import fails.
        TrainerConfigError: If several packages provide the function.
    """
    found = entry_points(group=GROUP, name=name)
    package, argument = _PACKAGE_OF[name], _ARGUMENT_OF[name]
    if not found:
        raise MissingProviderError(
            f"{asked_by} needs a package that provides `{name}`, and none is installed: "
            f"`pip install {package}`, or pass an object as `{argument}`"
        )
    if len(found) > 1:
        places = ", ".join(f"`{entry.value}`" for entry in found)
        raise TrainerConfigError(
            f"{asked_by} needs one package that provides `{name}`, and several do: {places}; "
            f"uninstall all but one, or pass an object as `{argument}`"
        )
    (entry,) = found
    try:
        provide: Callable[..., Any] = entry.load()
    except ImportError as error:
        raise MissingProviderError(
            f"{asked_by} needs `{entry.value}`, which is installed and cannot be imported ({error}): "
            f"`pip install {package}` with what it needs, or pass an object as `{argument}`"
        ) from error
    return provide


def own(part: Any, made: ExitStack) -> None:
    """Register the `close` method of a part, if it has one, with `made`."""
    if hasattr(part, "close"):
        made.callback(part.close)
