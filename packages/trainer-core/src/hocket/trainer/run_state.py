"""What a checkpoint of a run holds, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hocket.trainer.errors import ResumeError
from hocket.trainer.feeding import Feed
from hocket.trainer.generators import capture_generators, reseed, restore_generators
from hocket.trainer.optimizer_state import (
    model_state,
    optimizer_state,
    take_model_state,
    take_optimizer_state,
)
from hocket.trainer.precision import Precision
from hocket.trainer.protocols import Loaded, StateTree
from hocket.trainer.state import State
from hocket.trainer.timestamp import Timestamp

_PARTS = ("schedulers", "callbacks", "algorithms")


class RunState:
    """Collects the state of a run for a checkpoint, and puts it back.

    What is the same on every rank goes into the tree: the model, optimizers, time, and the loader's position
    when the loader has a plan for the whole job (an attribute `data_parallel`) or the job is one process.
    What differs goes into `per_rank`: the generators, and the position of any other loader.

    Args:
        state: Of the run.
        precision: Its gradient scale is part of it.
    """

    def __init__(self, state: State, precision: Precision) -> None:
        self._state = state
        self._precision = precision
        self.feed: Feed | None = None
        self._loaded_feed: _FeedPosition | None = None

    def tree(self) -> StateTree:
        """The tree to save, or to load into: tensors are those in use, not copies."""
        state = self._state
        return {
            "model": model_state(state.model),
            "optimizers": [optimizer_state(optimizer, state.model) for optimizer in state.optimizers],
            "schedulers": _states_of(state.schedulers),
            "callbacks": _states_of(state.callbacks),
            "algorithms": _states_of(state.algorithms),
            "precision": self._precision.state_dict(),
            "timestamp": state.timestamp.state_dict(),
            "loader": self._loader_state() if self._is_loader_shared() else None,
            "run_name": state.run_name,
            "seed": state.seed,
            "device_train_microbatch_size": state.device_train_microbatch_size,
        }

    def tree_to_fill(self) -> StateTree:
        """The tree to load into: `tree`, in which the parts of a run that hold no tensors take what is there.

        A callback may be new in this run, or have other entries than when the checkpoint was saved; so may
        the loader be another one.
        """
        tree = self.tree()
        for kind in (*_PARTS, "loader"):
            if not _has_tensors(tree[kind]):
                tree[kind] = {}
        return tree

    def per_rank(self) -> dict[str, Any]:
        """What only this rank has."""
        mine: dict[str, Any] = {"generators": capture_generators(self._state.device)}
        if self.feed is not None:
            if not self._is_loader_shared():
                mine["loader"] = self._loader_state()
            if self.feed.epoch_generators is not None:
                mine["epoch_generators"] = self.feed.epoch_generators
        return mine

    def take(self, loaded: Loaded) -> list[str]:
        """Go on from what was loaded into `tree()`.

        Returns:
            Sentences for the user about what could not be as it was.

        Raises:
            ResumeError: If the optimizers differ.
        """
        state, tree, said = self._state, loaded.state, list[str]()
        take_model_state(state.model, tree["model"])
        if len(tree["optimizers"]) != len(state.optimizers):
            raise ResumeError(
                f"the checkpoint `{loaded.name}` has {len(tree['optimizers'])} optimizers and this run "
                f"{len(state.optimizers)}; make the same ones"
            )
        for optimizer, saved in zip(state.optimizers, tree["optimizers"], strict=True):
            take_optimizer_state(optimizer, state.model, saved)
        for kind in _PARTS:
            _give_states(getattr(state, kind), tree[kind])
        self._precision.load_state_dict(dict(tree["precision"]))
        state.timestamp = state.previous_timestamp = Timestamp.from_state_dict(tree["timestamp"])
        state.run_name, state.seed = tree["run_name"], tree["seed"]
        per_rank = loaded.per_rank
        rank = state.parallelism.data_parallel[0]
        if per_rank is None:
            reseed(state.seed, step=state.timestamp.counts.batch, rank=rank)
            said.append(
                "the checkpoint is of another number of ranks, so random generators start anew from the seed "
                f"({state.seed}), the step and the rank"
            )
        else:
            restore_generators(per_rank["generators"], state.device)
        per_rank = per_rank or {}
        self._loaded_feed = _FeedPosition(
            loader_state=tree["loader"] if tree["loader"] is not None else per_rank.get("loader"),
            epoch_generators=per_rank.get("epoch_generators"),
            is_of_other_ranks=loaded.per_rank is None,
        )
        return said

    def resume_feed(self) -> list[str]:
        """Bring `feed` to the loaded position; call it once, when the loader is there.

        Returns:
            Sentences for the user.
        """
        position, self._loaded_feed = self._loaded_feed, None
        if position is None or self.feed is None:
            return []
        num_batches = self._state.timestamp.counts.batch_in_epoch
        # A position in one rank's share, or in all of the data, is none in another share.
        is_elsewhere = position.is_of_other_ranks and not self._is_loader_shared()
        loader_state = None if is_elsewhere else position.loader_state
        if not self.feed.resume(loader_state, num_batches=num_batches):
            return []
        # The shuffle of the epoch is drawn again as it was, then the generators go on from where they were.
        now = capture_generators(self._state.device)
        if position.epoch_generators is not None:
            restore_generators(position.epoch_generators, self._state.device)
        self.feed.skip()
        restore_generators(now, self._state.device)
        why = "has no state in the checkpoint" if self.feed.is_stateful else "keeps no state"
        proviso = ""
        if position.is_of_other_ranks:
            why += " of another number of ranks" if self.feed.is_stateful else ""
            proviso = " (the same samples, where the global batch and its order are as before)"
        notice = (
            f"the data loader {why}: the {num_batches} batches of this epoch that were trained on{proviso} "
            "were fetched again and discarded"
        )
        return [notice]

    def _loader_state(self) -> Mapping[str, Any] | None:
        return None if self.feed is None else self.feed.state_dict()

    def _is_loader_shared(self) -> bool:
        is_alone = self._state.parallelism.data_parallel[1] == 1
        return is_alone or (self.feed is not None and hasattr(self.feed.loader, "data_parallel"))


class _FeedPosition:
    def __init__(
        self,
        *,
        loader_state: Mapping[str, Any] | None,
        epoch_generators: Mapping[str, Any] | None,
        is_of_other_ranks: bool,
    ) -> None:
        self.loader_state = loader_state
        self.epoch_generators = epoch_generators
        self.is_of_other_ranks = is_of_other_ranks


def _named(parts: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Parts by the names of their classes; the second of a class is `Name-1`, and so on."""
    counts: dict[str, int] = {}
    for part in parts:
        name = getattr(part, "__name__", type(part).__name__)
        number = counts[name] = counts.get(name, -1) + 1
        yield (f"{name}-{number}" if number else name), part


def _states_of(parts: Iterable[Any]) -> dict[str, Any]:
    states = {name: part.state_dict() for name, part in _named(parts) if hasattr(part, "state_dict")}
    return {name: dict(state) for name, state in states.items() if state}


def _has_tensors(node: object) -> bool:
    if isinstance(node, torch.Tensor):
        return True
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    return any(map(_has_tensors, children))


def _give_states(parts: Iterable[Any], states: Mapping[str, Any]) -> None:
    for name, part in _named(parts):
        if states and name in states and hasattr(part, "load_state_dict"):
            part.load_state_dict(states[name])
