"""Algorithms that change the model and are required to load its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket.trainer.errors import ResumeError
from hocket.trainer.state import State

REQUIRED = "required_algorithms"
"""The entry of a checkpoint's `user` with the names of the algorithms that loading its model requires."""


def required_algorithms(state: State) -> list[str]:
    """Return the names of the algorithms that changed the model and are required to load it."""
    return [
        type(algorithm).__name__
        for algorithm in state.algorithms
        if callable(required := getattr(algorithm, "required_on_load", None)) and required()
    ]


def check_required(state: State, user: Any, excluded: Sequence[str], error: Exception | None = None) -> None:
    """Raise if an algorithm is missing that changed the model before it was saved.

    Args:
        state: The state of the run that loads the model.
        user: The `user` value of the checkpoint.
        excluded: The names of algorithms that may be missing.
        error: The error of the load, which becomes the cause.

    Raises:
        ResumeError: If an algorithm is missing.
    """
    saved = user.get(REQUIRED, []) if isinstance(user, Mapping) else []
    missing = sorted(set(saved) - set(required_algorithms(state)) - set(excluded))
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise ResumeError(
            f"the checkpoint is of a model that {names} changed; add it to `algorithms` with the same "
            f"settings, or leave it out with `load_exclude_algorithms={missing}`"
        ) from error
