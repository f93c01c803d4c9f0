"""The parts of a run that a checkpoint stores, with their placement, and the algorithms that it requires."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from hocket.trainer.errors import ResumeError
from hocket.trainer.optim import load_torch_scheduler_state, torch_scheduler_state
from hocket.trainer.state import State

Placement = Literal["shared", "per_rank", "rank_zero"]
REQUIRED = "required_algorithms"
"""The entry of a checkpoint's `user` with the names of the algorithms that loading its model requires."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One entry of a checkpoint."""

    name: str
    save: Callable[[], Any]
    """A function that returns the entry's state."""
    load: Callable[[Any], object]
    """A function that loads the return value of `save`; called only if a checkpoint has the entry."""
    placement: Placement = "shared"
    """`"shared"`: equal on all ranks, or sharded tensors; loaded on any number of ranks. `"per_rank"`: the
    state of this rank; loaded on the same number of ranks only. `"rank_zero"`: rank 0's state; loaded on
    every rank."""
    may_change: bool = False
    """Whether the entries may differ from those of the checkpoint, as those of callbacks may."""
    to_fill: Callable[[], Any] | None = None
    """A function that returns the tree to load into, if that is not the return value of `save`."""


class StateRegistry:
    """The entries that a checkpoint stores, in the order in which they are loaded."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, Placement], CheckpointEntry] = {}

    def add(self, entry: CheckpointEntry) -> None:
        """Register an entry; its name is unique among the entries of its placement."""
        key = entry.name, entry.placement
        assert key not in self._entries, key
        self._entries[key] = entry

    def collect(self, placement: Placement) -> dict[str, Any]:
        """Return the states of all entries of a placement by name."""
        return {entry.name: entry.save() for entry in self._of(placement)}

    def to_fill(self) -> dict[str, Any]:
        """Return the shared states to load into.

        An entry without tensors whose keys may change has an empty dict, which takes any saved keys.
        """
        tree = {entry.name: (entry.to_fill or entry.save)() for entry in self._of("shared")}
        for entry in self._of("shared"):
            if entry.may_change and not has_tensors(tree[entry.name]):
                tree[entry.name] = {}
        return tree

    def load(self, states: Mapping[str, Any], placement: Placement) -> None:
        """Load the states of a placement into its entries; an entry without a state is left as it is."""
        for entry in self._of(placement):
            if entry.name in states:
                entry.load(states[entry.name])

    def _of(self, placement: Placement) -> list[CheckpointEntry]:
        return [entry for entry in self._entries.values() if entry.placement == placement]


def named(parts: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield parts with the names of their classes; the second of a class is `Name-1`, and so on."""
    counts: dict[str, int] = {}
    for part in parts:
        name = getattr(part, "__name__", type(part).__name__)
        number = counts[name] = counts.get(name, -1) + 1
        yield (f"{name}-{number}" if number else name), part


def states_of(
    parts: Iterable[Any], *, of_rank_zero: bool | None = None, to_fill: bool = False
) -> dict[str, Any]:
    """Return the states of parts by name; parts without a state are left out.

    Args:
        parts: The schedulers, callbacks, algorithms or loggers.
        of_rank_zero: True for only the parts that save rank 0's state, False for only the others; None for
            all.
        to_fill: Whether to return the trees that states of a checkpoint are loaded into.
    """
    states = {
        name: torch_scheduler_state(part) if isinstance(part, LRScheduler) else _state_of(part, to_fill)
        for name, part in named(parts)
        if hasattr(part, "state_dict")
        and of_rank_zero in (None, getattr(part, "saves_rank_zero_state", False))
    }
    return {name: dict(state) for name, state in states.items() if state}


def _state_of(part: Any, to_fill: bool) -> Mapping[str, Any]:
    method = getattr(part, "state_to_fill", None) if to_fill else None
    state: Mapping[str, Any] = (method or part.state_dict)()
    return state


def give_states(parts: Iterable[Any], states: Mapping[str, Any]) -> None:
    """Load the states that `states_of` returned into schedulers, callbacks, algorithms or loggers."""
    for name, part in named(parts):
        if states and name in states and hasattr(part, "load_state_dict"):
            if isinstance(part, LRScheduler):
                load_torch_scheduler_state(part, states[name])
            else:
                part.load_state_dict(states[name])


def has_tensors(node: object) -> bool:
    """Return whether a tree has tensors, or a place for tensors, among its leaves.

    Only dicts and lists are nodes of a state, as in checkpoints; tuples are values.
    """
    if isinstance(node, torch.Tensor) or hasattr(node, "slots_like"):
        return True
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    return any(map(has_tensors, children))


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
