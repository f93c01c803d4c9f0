"""The changes that a replay makes to the arguments of `Trainer`, and the losses that the run recorded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.utils.data import DistributedSampler

from hocket.trainer.checkpoint.checkpoint_source import newest_of
from hocket.trainer.checks import as_list
from hocket.trainer.data.data_spec import DataSpec
from hocket.trainer.data.global_batches import GlobalBatchLoader
from hocket.trainer.data.sampling import joined_loader
from hocket.trainer.errors import ReplayError
from hocket.trainer.log.loss_journal import LossJournal
from hocket.trainer.loggers.logger_destination import LoggerDestination
from hocket.trainer.loop.run import Run
from hocket.trainer.protocols import CheckpointStore, Entry, Loaded
from hocket.trainer.replay import Replay, ReplayFinished, current_replay
from hocket.trainer.state import State

LOSSES = "losses"
"""The entry of a checkpoint's `user` with the losses of the last steps."""


def with_replay(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Trainer`; within a replay, those of a run that only measures its last step.

    Raises:
        ReplayError: The script has no checkpoints to start from.
    """
    changed = dict(arguments)
    if (asked := current_replay()) is None:
        return changed
    # Imported here, because no ordinary run needs it.
    from hocket.trainer.replay.recorder import StepRecorder

    loop, checkpointing = arguments["loop"], arguments["checkpointing"]
    if asked.run is None and arguments["save_folder"] is None and checkpointing.store is None:
        raise ReplayError(
            "the script's trainer has no `save_folder`, so there are no checkpoints to replay a step from; "
            "name the folder of the run with `--run`"
        )
    callbacks = [one for one in as_list(arguments["callbacks"]) if not isinstance(one, LoggerDestination)]
    return changed | {
        "callbacks": [StepRecorder(asked), *callbacks],
        "loggers": None,
        "progress_bar": False,
        "log_to_console": False,
        "save_folder": asked.run or arguments["save_folder"],
        "savers": (),
        "autoresume": False,
        "load_path": arguments["load_path"] if asked.from_start else None,
        "checkpointing": replace(
            checkpointing,
            ephemeral=None,
            retention=(),
            store=None if asked.run else checkpointing.store,
        ),
        "save_num_checkpoints_to_keep": -1,
        "loop": replace(
            loop,
            # As in the run: one that saves fetches one batch ahead. The step after the last is not awaited.
            prefetch_depth=min(loop.prefetch_depth, 1),
            nonfinite_loss="ignore" if loop.nonfinite_loss == "raise" else loop.nonfinite_loss,
            num_sanity_val_steps=0,
        ),
        "replay": asked,
    }


def find_start(run: Run, asked: Replay) -> None:
    """Find the checkpoint that a replay starts from, and the losses that the run recorded. Collective.

    Raises:
        ReplayError: No checkpoint is before the step.
    """
    store = run.store
    assert store is not None
    asked.location = str(getattr(store, "uri", type(store).__name__))
    if asked.surveys:
        _survey(store, asked)
        raise ReplayFinished
    start = None if asked.from_start else newest_of(store, run.sync, before=asked.limit)
    entries = _committed(store)
    if start is None and not asked.from_start:
        steps = ", ".join(str(one.step) for one in entries[:5])
        there = f"the first ones there are of steps {steps}" if entries else "there is none at all"
        raise ReplayError(
            f"`{asked.location}` has no whole checkpoint before step {asked.limit}: {there}. Replay a later "
            "step, or pass `--from-start`, which runs the script from its beginning: that is the same run "
            "if the script sets its seed"
        )
    for entry in entries:
        if (entry.step or 0) >= asked.step and asked.step in (found := _journal_of(_open(store, entry))[0]):
            asked.recorded, asked.recorded_in = found, entry.name
            break
    if start is not None:
        asked.start, loaded = start, _open(store, start)
        asked.is_other_ranks = loaded.per_rank is None
        asked.saved_ranks = _journal_of(loaded)[1]
        counts = loaded.state.get("timestamp", {})
        num_samples, num_batches = counts.get("sample", 0), counts.get("batch", 0)
        if num_batches and num_samples % num_batches == 0:
            asked.saved_samples = num_samples // num_batches


def _committed(store: CheckpointStore) -> list[Entry]:
    """Return the committed checkpoints, the earliest first."""
    entries = [one for one in store.list() if one.status == "committed" and one.step is not None]
    return sorted(entries, key=lambda one: one.step or 0)


def _survey(store: CheckpointStore, asked: Replay) -> None:
    """Find the steps of the checkpoints that a replay can start from, and all losses in them. Collective."""
    entries = _committed(store)
    asked.steps = [one.step or 0 for one in entries if not getattr(one, "is_thinned", False)]
    for entry in reversed(entries):
        first = min(asked.recorded, default=None)
        if first is None or (entry.step or 0) < first:
            asked.recorded = _journal_of(_open(store, entry))[0] | asked.recorded
        elif first == 1:
            break


def _open(store: CheckpointStore, entry: Entry) -> Loaded:
    """Return the plain values of a checkpoint, without its tensors. Collective."""
    return store.load(entry.name, {"timestamp": {}}, strict=False)


def _journal_of(loaded: Loaded) -> tuple[dict[int, float], int | None]:
    """Return the losses by step that a checkpoint recorded, and the run's ranks; none if it has none."""
    journal = LossJournal()
    saved = loaded.user.get(LOSSES) if isinstance(loaded.user, Mapping) else None
    if not isinstance(saved, Mapping):
        return {}, None
    with suppress(ValueError, KeyError, TypeError):  # of another version
        journal.load_state_dict(saved)
    return journal.losses(), saved.get("num_ranks")


def join_ranks(spec: DataSpec, asked: Replay, state: State, *, auto_shard: bool) -> DataSpec:
    """Return the training data with the samples of all ranks of the run, where one process replays them.

    A loader over indices, which each rank of the run took a part of, yields the parts of all ranks in one
    batch. A loader that divides the data of the whole job itself is returned unchanged.

    Args:
        spec: The training data.
        asked: The replay.
        state: The state of the run.
        auto_shard: Whether the trainer divides a loader that does not do so itself.

    Raises:
        ReplayError: The samples of the ranks cannot be joined.
    """
    loader, ranks = spec.dataloader, state.parallelism.data_parallel[1]
    if not asked.is_other_ranks or asked.saved_ranks == ranks or divides_itself(loader):
        return spec
    is_divided = auto_shard or isinstance(getattr(loader, "sampler", None), DistributedSampler)
    is_stated = spec.is_sharded or spec.is_replicated
    if ranks == 1 and asked.saved_ranks is not None and is_divided and not is_stated:
        joined = joined_loader(loader, asked.saved_ranks, seed=state.seed)
        if joined is not None:
            return replace(spec, dataloader=joined)
    before = "another number of" if asked.saved_ranks is None else str(asked.saved_ranks)
    raise ReplayError(
        f"the run had {before} data-parallel ranks, and the replay has {ranks}, which cannot join the "
        f"samples that `{type(loader).__name__}` gave to each. Replay on as many ranks, with `-n`"
    )


def divides_itself(loader: Any) -> bool:
    """Return whether a loader yields the same global batches on any number of ranks."""
    return hasattr(loader, "data_parallel") or isinstance(loader, GlobalBatchLoader)
