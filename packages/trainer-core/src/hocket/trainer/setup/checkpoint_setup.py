"""The setup of a run's checkpoints: its stores, its checkpointers, and the first state to load."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import Any

from hocket.trainer.checkpoint.checkpoint_source import folder_of_latest, from_object_store, newest_of
from hocket.trainer.checkpoint.checkpoint_state import CheckpointState
from hocket.trainer.checkpoint.checkpointing import Checkpointer
from hocket.trainer.checkpoint.ephemeral import (
    CopyCheckpointer,
    MemoryCopies,
    UnusableCopyError,
    memory_folders,
)
from hocket.trainer.checkpoint.loading import load
from hocket.trainer.checks import as_list, check_uri, number_to_keep
from hocket.trainer.data.sampling import follow_seed
from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.event import Event
from hocket.trainer.log.notices import print_notices
from hocket.trainer.loop.run import Run
from hocket.trainer.process.providers import find_provider, own
from hocket.trainer.protocols import CheckpointStore, Parallelism
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.setup.config import TrainerConfig
from hocket.trainer.state import State


def find_store(
    config: TrainerConfig, run_name: str, made: ExitStack, *, parallelism: Parallelism
) -> CheckpointStore | None:
    """Open the store of `save_folder`, else that of the folder of `load_path`; None without either."""
    load_path = config.load_path
    if config.checkpointing.store is not None:
        return config.checkpointing.store
    if config.save_folder is not None:
        folder, asked_by = os.fspath(config.save_folder).replace("{run_name}", run_name), "`save_folder`"
    elif load_path is not None:
        # The folder that the checkpoint is in.
        folder, asked_by = os.fspath(load_path).rstrip("/").rpartition("/")[0] or ".", "`load_path`"
    else:
        return None
    store = open_store(
        folder,
        config,
        made,
        parallelism=parallelism,
        asked_by=asked_by,
        keep_last=config.keep_last,
        retention=config.retention,
        for_saving=config.save_folder is not None and config.is_saving,
    )
    if config.save_folder is not None:
        # A folder that cannot be reached is reported now, not when the first checkpoint is due.
        store.list()
    return store


def find_copies(
    config: TrainerConfig,
    store: CheckpointStore | None,
    sync: StepSync,
    made: ExitStack,
    *,
    parallelism: Parallelism,
) -> MemoryCopies | None:
    """Return the store of the copies in memory, with what an earlier attempt left there. Collective.

    None where the run makes no copies.
    """
    if config.checkpointing.ephemeral is None or store is None or not config.is_saving:
        return None
    folders = memory_folders()
    if not all(sync.gather(float(bool(folders)))):
        return None

    # The first save opens the store, when the trainer has taken over what is in `made`.
    opened = made.enter_context(ExitStack())

    def open_copies(folder: str) -> CheckpointStore:
        return open_store(
            folder,
            config,
            opened,
            parallelism=parallelism,
            asked_by="`ephemeral`",
            per_host=True,
            for_saving=True,
        )

    uri = str(getattr(store, "uri", type(store).__name__))
    copies = MemoryCopies(folders, uri, open_store=open_copies, sync=sync)
    copies.find()
    return copies


def resumed_run_name(
    config: TrainerConfig, store: CheckpointStore | None, copies: MemoryCopies | None, sync: StepSync
) -> str | None:
    """Return the name of the run that `autoresume` continues, if this run gets its name. Collective.

    The name is read ahead of the other state, because loggers open their files under it at `INIT`.
    """
    if store is None or not config.autoresume or config.run_name is not None:
        return None
    newest = newest_of(store, sync)
    if newest is None and copies is not None and copies.newest is not None:
        # A damaged copy names no run; this one keeps its own name.
        with suppress(UnusableCopyError):
            return _read_run_name(copies, copies.newest.name)
    return None if newest is None else _read_run_name(store, newest.name)


def _read_run_name(store: CheckpointStore, checkpoint: str) -> str | None:
    loaded = store.load(checkpoint, {"run_name": ""}, strict=False, include=["run_name"])
    name: str | None = loaded.state.get("run_name")
    return name


def open_store(
    folder: str,
    config: TrainerConfig,
    made: ExitStack,
    *,
    parallelism: Parallelism,
    asked_by: str,
    **options: Any,
) -> CheckpointStore:
    """Open the checkpoint store at a folder or URI, which `made` closes; empty options are left out.

    Its ranks wait for each other as long as those of the parallelism do, which may have a deadline of its
    own.
    """
    provide = find_provider("checkpoints", asked_by=asked_by)
    given = {name: value for name, value in options.items() if value}
    timeout_s = getattr(parallelism, "timeout_s", config.dist_timeout)
    store: CheckpointStore = provide(folder, timeout_s=timeout_s, **given)
    own(store, made)
    return store


def make_checkpointers(
    config: TrainerConfig,
    store: CheckpointStore | None,
    run_state: CheckpointState,
    state: State,
    made: ExitStack,
    *,
    copies: MemoryCopies | None,
) -> Checkpointer | None:
    """Make the checkpointer of `save_folder`, with those of further savers after it; None if none saves."""
    if store is None or not config.is_saving:
        return None
    others: list[Checkpointer] = []
    ephemeral, ignored = config.checkpointing.ephemeral, config.save_ignore_keys
    if copies is not None and ephemeral is not None:
        others.append(CopyCheckpointer(copies, run_state, state, interval=ephemeral, ignore_keys=ignored))
    for saver in config.savers:
        retention = tuple(as_list(saver.retention))
        saver_store = open_store(
            os.fspath(saver.folder).replace("{run_name}", state.run_name),
            config,
            made,
            parallelism=state.parallelism,
            asked_by="`CheckpointSaver`",
            keep_last=number_to_keep(saver.num_checkpoints_to_keep),
            retention=retention,
            for_saving=True,
        )
        others.append(
            Checkpointer(
                saver_store,
                run_state,
                state,
                save_interval=saver.save_interval,
                save_filename=saver.filename,
                mode="async" if saver.save_async else "sync",
                weights_only=saver.weights_only,
                ignore_keys=saver.ignore_keys,
                has_metrics=config.save_metrics or bool(retention),
                overwrite=saver.overwrite,
            )
        )
    checkpointer = Checkpointer(
        store,
        run_state,
        state,
        save_interval=config.save_interval,
        save_filename=config.save_filename,
        mode="async" if config.checkpointing.asynchronous else "sync",
        weights_only=config.save_weights_only,
        ignore_keys=config.save_ignore_keys,
        has_metrics=config.save_metrics or bool(config.retention),
        overwrite=config.save_overwrite,
        others=others,
    )
    if ephemeral is not None and copies is None:
        checkpointer.notices.append(
            "no `ephemeral` copies are made: they serve a job whose ranks `hocket-launch --max-restarts` "
            "starts again, and this run was not started so on all of its machines"
        )
    made.callback(checkpointer.close)
    return checkpointer


def _resolve(load_path: str, run: Run, config: TrainerConfig, made: ExitStack) -> str:
    """Return the path or URI of the checkpoint that `load_path` refers to. Collective."""
    if config.load_object_store is not None:
        return from_object_store(load_path, config.load_object_store, made)
    if (folder := folder_of_latest(load_path)) is None:
        # A store takes a name without `/` as the name of one of its own checkpoints.
        return os.path.abspath(load_path) if os.path.exists(load_path) else load_path
    store = open_store(folder, config, made, parallelism=run.state.parallelism, asked_by="`load_path`")
    newest = newest_of(store, run.sync, notices=run.notices)
    if newest is None:
        raise ResumeError(f"`load_path` is `{load_path}`, and `{folder}` has no committed checkpoint")
    return f"{folder}/{newest.name}"


def load_checkpoint(run: Run, config: TrainerConfig, made: ExitStack) -> None:
    """Load the checkpoint to start from, if any, between `BEFORE_LOAD` and `AFTER_LOAD`. Collective.

    Raises:
        ResumeError: A copy in memory cannot be used, and there is no checkpoint.
    """
    state, store = run.state, run.store
    if run.copies is not None:
        run.notices += run.copies.notices
        run.copies.notices = []
    path = None if config.load_path is None else os.fspath(config.load_path)
    newest = None
    if config.replay is not None:
        newest = config.replay.start
    elif config.autoresume and store is not None:
        newest = newest_of(store, run.sync, notices=run.notices)
    source = path if newest is None else newest.name
    copy = None if run.copies is None else run.copies.newest
    has_copy = copy is not None and (newest is None or (copy.step or 0) >= (newest.step or 0))
    is_own = newest is not None
    if source is not None and not is_own and not has_copy:
        source = _resolve(source, run, config, made)
    run.is_own_checkpoint = is_own or has_copy
    run.engine.fire(Event.BEFORE_LOAD)
    if has_copy and _load_copy(run, config, has_checkpoint=is_own):
        pass
    elif source is not None and store is not None:
        if config.load_progress_bar:
            print_notices(state, [f"loading the checkpoint `{source}`"])
        # Autoresume loads the whole run; the arguments that select parts apply to `load_path` alone.
        run.notices += load(
            store,
            source,
            run.run_state,
            run.sync,
            weights_only=config.load_weights_only and not is_own,
            strict=config.load_strict_model_weights,
            ignore_keys=None if is_own else config.load_ignore_keys,
            exclude_algorithms=() if is_own else as_list(config.load_exclude_algorithms),
        )
        resume_loader(run, config)
        if run.checkpointer is not None and (is_own or not config.load_weights_only):
            run.checkpointer.start_from_loaded()
    run.engine.fire(Event.AFTER_LOAD)


def _load_copy(run: Run, config: TrainerConfig, *, has_checkpoint: bool) -> bool:
    """Load the newest copy in memory; return False if it cannot be used. Collective.

    Raises:
        ResumeError: It cannot be used, and there is no checkpoint. The tensors' contents are undefined.
    """
    copies, checkpointer = run.copies, run.checkpointer
    assert copies is not None
    assert copies.newest is not None
    assert checkpointer is not None
    name = copies.newest.name
    try:
        notices = load(copies, name, run.run_state, run.sync, strict=config.load_strict_model_weights)
    except UnusableCopyError as error:
        copies.discard()
        told = f"the copy `{name}` in memory cannot be used, and is removed: {error}"
        if not has_checkpoint:
            raise ResumeError(f"{told}. There is no checkpoint yet: start the run again") from error
        run.notices.append(told)
        return False
    run.notices += [*notices, f"`{name}` is a copy in memory"]
    resume_loader(run, config)
    checkpointer.start_from_copy(run.sync)
    return True


def resume_loader(run: Run, config: TrainerConfig) -> None:
    """Move the training's loader to the loaded position, if there are both."""
    follow_seed(run.state.train_dataloader, run.state.seed)
    run.notices += run.run_state.resume_loader(spins=config.spin_dataloaders)


def save_once(run: Run, config: TrainerConfig, name: str | os.PathLike[str], *, weights_only: bool) -> None:
    """Save one checkpoint at a path, or under a name in the store, and wait for it. Collective.

    Raises:
        TrainerConfigError: If a batch was fetched ahead that the checkpoint cannot restore, or `name` is a
            URI that has lost a slash.
    """
    check_uri("name", name)
    if not weights_only and not run.run_state.can_save():
        raise TrainerConfigError(
            "a batch was fetched ahead, which a checkpoint could not give back; save after `fit`, use "
            "`save_checkpoint_to_save_folder`, or `weights_only=True`"
        )
    folder, _, stem = os.fspath(name).rpartition("/")
    with ExitStack() as exit_stack:
        store = run.store
        if folder or store is None:
            store = open_store(
                folder or ".",
                config,
                exit_stack,
                parallelism=run.state.parallelism,
                asked_by="`save_checkpoint`",
            )
        Checkpointer(store, run.run_state, run.state, save_filename=stem, weights_only=weights_only).save()


def save_soon(run: Run, config: TrainerConfig) -> None:
    """Save in `save_folder`, now or at the next step boundary of a fit. Collective.

    Raises:
        TrainerConfigError: If there is no `save_folder`.
    """
    checkpointer = run.checkpointer
    if checkpointer is None and config.trial.num_batches is not None:
        return  # a `fast_dev_run` saves nothing
    if checkpointer is None:
        raise TrainerConfigError(
            "there is no `save_folder` to save in; set it, or use `save_checkpoint(path)`"
        )
    if run.run_state.can_save():
        checkpointer.save()
    else:
        checkpointer.request_save()
