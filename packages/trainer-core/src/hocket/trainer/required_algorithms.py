"""Algorithms that changed the model before it was saved, and without which it cannot be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket.trainer.errors import ResumeError
from hocket.trainer.state import State

REQUIRED = "required_algorithms"
"""The entry of a checkpoint's `user` that names the algorithms without which its model cannot be loaded."""


def required_algorithms(state: State) -> list[str]:
    """Return the names of the algorithms that changed the model, and must have when it is loaded."""
    return [
        type(one).__name__
        for one in state.algorithms
        if callable(required := getattr(one, "required_on_load", None)) and required()
    ]


def check_required(state: State, user: Any, excluded: Sequence[str], error: Exception | None = None) -> None:
    """Refuse to load a model without the algorithms that changed it before it was saved.

    Args:
        state: Of the run that loads.
        user: Of the checkpoint.
        excluded: The names of algorithms that may be missing.
        error: What the load raised.

    Raises:
        ResumeError: If one is missing.
    """
    saved = user.get(REQUIRED, []) if isinstance(user, Mapping) else []
    missing = sorted(set(saved) - set(required_algorithms(state)) - set(excluded))
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise ResumeError(
            f"the checkpoint is of a model that {names} changed; add it to `algorithms` with the same "
            f"settings, or leave it out with `load_exclude_algorithms={missing}`"
        ) from error
