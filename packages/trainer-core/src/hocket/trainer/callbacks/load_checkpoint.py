"""A callback that loads a further checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hocket.trainer.callback import Callback
from hocket.trainer.checkpoint.checkpoint_source import folder_of_latest, newest_of
from hocket.trainer.checkpoint.foreign_weights import load_foreign
from hocket.trainer.checkpoint.model_state import RESHAPED, model_state_to_fill, take_model_state, tied_names
from hocket.trainer.checkpoint.optimizer_state import optimizer_state_to_fill, take_optimizer_state
from hocket.trainer.checkpoint.tree_filter import check_ignore_keys, ignored_names, without
from hocket.trainer.checks import check_uri
from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.log.logger import Logger
from hocket.trainer.log.notices import print_notices
from hocket.trainer.process.providers import find_provider
from hocket.trainer.protocols import CheckpointStore, Pipelined
from hocket.trainer.ranks.step_sync import StepSync

if TYPE_CHECKING:
    from hocket.trainer.state import State

_EVENTS = (Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START)


class LoadCheckpoint(Callback):
    """Loads the model and, by default, the optimizers of a checkpoint at an event.

    For starting from several checkpoints, such as a backbone and then a head. Time, data position and random
    generators are not touched; `Trainer(load_path=…)` and `autoresume` restore those. Collective.

    Args:
        load_path: The checkpoint's path or URI, as `Trainer(load_path=…)` takes it: a name such as
            `run/latest` means the newest committed checkpoint, and a checkpoint of another program gives the
            model alone.
        load_weights_only: Load the model alone.
        strict: Refuse parameters that only the model or only the checkpoint has.
        ignore_keys: Names to leave as they are: globs such as `"model/head.*"`, or a function that deletes
            entries of the tree.
        event: `BEFORE_LOAD`, after which the trainer's own load may replace what was loaded; `AFTER_LOAD` or
            `FIT_START`.
        checkpoint_store: The store to read from; by default that of the installed package.

    Raises:
        TrainerConfigError: If `event` is another event, or the model is in stages (`pp`).
        ResumeError: If the checkpoint has another number of optimizers, or there is no checkpoint.
    """

    needs_whole_model = True
    reads_outputs = False

    def __init__(
        self,
        load_path: str | os.PathLike[str],
        load_weights_only: bool = False,
        strict: bool = True,
        ignore_keys: list[str] | Callable[[dict[str, Any]], object] | None = None,
        event: Event | str = Event.BEFORE_LOAD,
        checkpoint_store: CheckpointStore | None = None,
    ) -> None:
        self.event = Event(str(event).lower())
        if self.event not in _EVENTS:
            event_names = ", ".join(f"`{one.name}`" for one in _EVENTS)
            raise TrainerConfigError(f"`event` is `{self.event.name}`; expected one of {event_names}")
        check_uri("load_path", load_path)
        self.load_path = os.fspath(load_path)
        self.load_weights_only = load_weights_only
        self.strict = strict
        check_ignore_keys(ignore_keys)
        self.ignore_keys = ignore_keys
        self.checkpoint_store = checkpoint_store

    def before_load(self, state: State, logger: Logger) -> None:
        """Load, if this is the event."""
        self._load_at(Event.BEFORE_LOAD, state)

    def after_load(self, state: State, logger: Logger) -> None:
        """Load, if this is the event."""
        self._load_at(Event.AFTER_LOAD, state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Load, if this is the event."""
        self._load_at(Event.FIT_START, state)

    def _load_at(self, event: Event, state: State) -> None:
        if event is not self.event:
            return
        if isinstance(state.parallelism, Pipelined):
            raise TrainerConfigError(
                "`LoadCheckpoint` loads the whole model, and with `pp` each rank has one stage of it. Pass "
                "the trainer `load_path`, or leave `pp` out of `parallelism_config`"
            )
        store: Any = self.checkpoint_store
        if store is not None:
            self._load(store, self.load_path, state)
            return
        latest_in = folder_of_latest(self.load_path)
        folder = latest_in or self.load_path.rstrip("/").rpartition("/")[0] or "."
        store = find_provider("checkpoints", asked_by="`LoadCheckpoint`")(folder)
        try:
            source = self.load_path if latest_in is None else self._newest(store, folder, state)
            self._load(store, source, state)
        finally:
            if hasattr(store, "close"):
                store.close()

    def _newest(self, store: CheckpointStore, folder: str, state: State) -> str:
        notices: list[str] = []
        newest = newest_of(store, StepSync(state.parallelism), notices=notices)
        print_notices(state, notices)
        if newest is None:
            raise ResumeError(
                f"`load_path` is `{self.load_path}`, and `{folder}` has no committed checkpoint"
            )
        return newest.name

    def _load(self, store: CheckpointStore, source: str, state: State) -> None:
        tree: dict[str, Any] = {"model": model_state_to_fill(state.model)}
        if not self.load_weights_only:
            tree["optimizers"] = [optimizer_state_to_fill(one, state.model) for one in state.optimizers]
        wanted_tree = without(tree, self.ignore_keys)
        ignored = ignored_names(tree, self.ignore_keys)
        ties = tied_names(state.model)
        model = wanted_tree.get("model", {})
        if load_foreign(store, source, model, strict=self.strict, ignore=ignored, ties=ties) is not None:
            take_model_state(state.model, model)
            return
        options: dict[str, Any] = {"ignore": ignored} if ignored else {}
        loaded = store.load(source, wanted_tree, strict=self.strict, include=list(wanted_tree), **options)
        reshaped = loaded.user.get(RESHAPED, ()) if isinstance(loaded.user, Mapping) else ()
        take_model_state(state.model, loaded.state.get("model", {}), reshaped=reshaped)
        saved = loaded.state.get("optimizers")
        if saved is None:
            return
        if len(saved) != len(state.optimizers):
            raise ResumeError(
                f"the checkpoint `{self.load_path}` has {len(saved)} optimizers and this run "
                f"{len(state.optimizers)}; make the same ones, or pass `load_weights_only=True`"
            )
        for optimizer, states in zip(state.optimizers, saved, strict=True):
            take_optimizer_state(optimizer, state.model, states)
