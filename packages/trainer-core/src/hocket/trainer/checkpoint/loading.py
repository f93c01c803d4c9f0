"""Loading the checkpoint to continue from, or its weights alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from glob import escape
from typing import Any

from hocket.trainer.checkpoint.checkpoint_state import CheckpointState
from hocket.trainer.checkpoint.foreign_weights import load_foreign
from hocket.trainer.checkpoint.registry import check_required, has_tensors
from hocket.trainer.checkpoint.tree_filter import check_ignore_keys, ignored_names, split_rng, without
from hocket.trainer.errors import ResumeError
from hocket.trainer.protocols import CheckpointStore
from hocket.trainer.ranks.step_sync import StepSync
from hocket.trainer.time import Time, TimeUnit

_WEIGHTS_ALONE = "`load_path` and `load_weights_only=True`, or `load_ignore_keys=['optimizers']`"


def load(
    store: CheckpointStore,
    source: str,
    run_state: CheckpointState,
    sync: StepSync,
    *,
    weights_only: bool = False,
    strict: bool = True,
    ignore_keys: Any = None,
    exclude_algorithms: Sequence[str] = (),
) -> list[str]:
    """Load a checkpoint into the run. Collective.

    Args:
        store: Reads the checkpoint.
        source: The checkpoint's name in the store, or its path or URI.
        run_state: Receives the loaded state.
        sync: The exchange between the ranks.
        weights_only: Load only the model; the run starts at 0.
        strict: Refuse parameters that only the model or only the checkpoint has.
        ignore_keys: Parts of the run to leave as they are, as `tree_filter.without` takes them, and `rng`
            for the random generators; the checkpoint may have them or not.
        exclude_algorithms: Names of algorithms whose state is left alone.

    Returns:
        Sentences for the user.

    Raises:
        ResumeError: If ranks loaded different steps.
    """
    run_tree = run_state.tree_to_fill()
    check_ignore_keys(ignore_keys)
    ignore_keys, keeps_rng = split_rng(ignore_keys)
    elsewhere = run_state.elsewhere
    ignored = ignored_names(run_tree, ignore_keys, elsewhere=elsewhere)
    model = without(run_tree, ignore_keys, elsewhere=elsewhere).get("model", {})
    foreign_notice = load_foreign(
        store, source, model, strict=strict, ignore=ignored, ties=run_state.ties, elsewhere=elsewhere
    )
    if foreign_notice is not None:
        run_state.take_weights({"model": model})
        return [foreign_notice]
    target = {"model": run_tree["model"]} if weights_only else run_tree
    excluded = [name for name in exclude_algorithms if name in target.get("algorithms", {})]
    for name in excluded:
        # Loaded into a copy that is dropped, so that the rest of the checkpoint is matched strictly.
        target["algorithms"][name] = copy.deepcopy(target["algorithms"][name])
    target = without(target, ignore_keys, elsewhere=elsewhere)
    options = run_state.store_options | ({"include": ["model"]} if weights_only else {})
    if not weights_only:
        ignored = ignored + [f"algorithms.{escape(name)}" for name in exclude_algorithms]
    if ignored:
        options["ignore"] = ignored
    try:
        loaded = _load_tree(store, source, target, excluded, strict=strict, **options)
    except Exception as error:
        _name_arguments(error)
        try:
            user = store.load(source, {}, strict=False).user
        except Exception:  # noqa: BLE001 - the first error is the one to raise
            user = None
        check_required(run_state.state, user, exclude_algorithms, error)
        raise
    check_required(run_state.state, loaded.user, exclude_algorithms)
    if weights_only:
        run_state.take_weights(loaded.state, loaded.user)
        return [f"weights from `{loaded.name}`; the run starts at 0"]
    notices = run_state.take(
        loaded, exclude_algorithms=exclude_algorithms, ignore_keys=ignore_keys, keeps_rng=keeps_rng
    )
    batch = run_state.num_batches
    steps = sync.gather(batch)
    if len(set(steps)) > 1:
        steps_by_rank = ", ".join(f"rank {rank}: {int(step)}" for rank, step in enumerate(steps))
        raise ResumeError(
            f"the ranks loaded checkpoints of different steps ({steps_by_rank}) from `{source}`"
        )
    return [f"going on from `{loaded.name}`, after {Time(batch, TimeUnit.BATCH).describe()}", *notices]


def _load_tree(
    store: CheckpointStore, source: str, target: dict[str, Any], excluded: Sequence[str], **options: Any
) -> Any:
    """Load a checkpoint into a tree, of which it need not have the algorithms in `excluded`."""
    try:
        return store.load(source, target, **options)
    except Exception as error:
        if not any(f"`algorithms.{name}." in str(error) for name in excluded):
            raise
        # The checkpoint has no state of an excluded algorithm, or one of another model.
        algorithms = {name: one for name, one in target["algorithms"].items() if name not in excluded}
        target = {**target, "algorithms": algorithms if has_tensors(algorithms) else {}}
        return store.load(source, target, **options)


def _name_arguments(error: Exception) -> None:
    """Name the trainer's arguments in a store's message about names that only one side has."""
    names = sorted(set(re.findall(r"`algorithms\.([\w-]+)", str(error))))
    excluding = f"`load_exclude_algorithms={names}`, " if names else ""
    arguments = f"`load_strict_model_weights=False`, or with `load_path` {excluding}`load_ignore_keys=[...]`"
    error.args = tuple(
        one.replace("`strict=False` or `include=`", arguments).replace(
            "load the weights alone with `include=`", f"load the weights alone with {_WEIGHTS_ALONE}"
        )
        if isinstance(one, str)
        else one
        for one in error.args
    )
