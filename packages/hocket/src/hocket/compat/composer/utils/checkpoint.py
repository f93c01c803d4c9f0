"""Functions that save and load a state without a trainer, as `composer.utils`."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hocket.ckpt.torch.functions import provide
from hocket.compat.composer.ignore_keys import as_lenient
from hocket.compat.composer.load_paths import find_checkpoint
from hocket.trainer import Logger, State
from hocket.trainer.checkpoint.checkpoint_state import CheckpointState
from hocket.trainer.checkpoint.checkpointing import Checkpointer
from hocket.trainer.checkpoint.loading import load
from hocket.trainer.precision import Precision
from hocket.trainer.ranks.step_sync import StepSync


def safe_torch_load(
    composer_states_filepath: str | os.PathLike[str],
    map_location: str = "cpu",
    load_monolith_rank0_only: bool = False,  # noqa: ARG001 - Composer's signature
) -> dict[str, Any]:
    """Read a file of `torch.save` that holds tensors and plain values; nothing in it is executed."""
    loaded: dict[str, Any] = torch.load(
        composer_states_filepath, map_location=map_location, weights_only=True
    )
    return loaded


def glob_filter(exclude_globs: list[str]) -> Callable[[dict[str, Any]], None]:
    """Return a function that deletes the parts of a tree of dicts and lists that globs name, in place.

    Args:
        exclude_globs: Globs over keys and indices joined with `/`, such as `state/model/head.*`. A warning
            names a glob that matches nothing.
    """

    def delete(tree: dict[str, Any]) -> None:
        matched = set(_delete(tree, exclude_globs, ""))
        for glob in exclude_globs:
            if glob not in matched:
                warnings.warn(f"the key `{glob}` to ignore matches nothing", stacklevel=2)

    return delete


def _delete(node: Any, globs: list[str], path: str) -> Iterator[str]:
    """Delete the matching entries below a node, and yield the globs that matched."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
    # In reverse, so that a deletion does not change the indices of the entries that follow.
    for key, value in reversed(items):
        entry_path = f"{path}{key}"
        if matching := [glob for glob in globs if fnmatch.fnmatchcase(entry_path, glob)]:
            del node[key]
            yield from matching
        elif isinstance(value, (dict, list)):
            yield from _delete(value, globs, f"{entry_path}/")


def save_checkpoint(
    state: State,
    filename: str = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: Any = None,
) -> str:
    """Save a state as a checkpoint folder; return its path or URI. Collective.

    Args:
        state: The state to save.
        filename: The folder's path or URI, with fields; a rank's part is left out.
        weights_only: Save the model and the time alone.
        ignore_keys: Parts to leave out.
    """
    folder, _, name = filename.rpartition("/")
    with contextlib.closing(provide(folder or ".")) as store:
        checkpoint_store: Any = store
        saver = Checkpointer(
            checkpoint_store,
            _run_state(state),
            state,
            save_filename=name,
            weights_only=weights_only,
            ignore_keys=as_lenient(ignore_keys, "ignore_keys"),
        )
        saved = saver.save()
        return f"{folder}/{saved.name.rpartition('/')[2]}" if folder else saved.name


def load_checkpoint(
    path: str,
    state: State,
    logger: Logger | None = None,  # noqa: ARG001 - Composer's signature
    object_store: Any = None,  # noqa: ARG001 - the path or URI says which store
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,  # noqa: ARG001
    ignore_keys: Any = None,
    exclude_algorithms: list[str] | None = None,
    algorithm_passes: Any = None,  # noqa: ARG001 - the state's algorithms are in their order
) -> None:
    """Load a checkpoint into a state. Collective.

    Args:
        path: As `Trainer(load_path=…)`.
        state: The state to load into.
        logger: Accepted for Composer's users.
        object_store: Accepted for Composer's users: the path or URI says which store.
        load_weights_only: Load the model alone.
        strict_model_weights: Refuse names that only the model or only the checkpoint has.
        progress_bar: Accepted for Composer's users.
        ignore_keys: Parts of the run that are not loaded.
        exclude_algorithms: Class names of algorithms whose state is not loaded.
        algorithm_passes: Accepted for Composer's users: loading applies no algorithm.
    """
    source = find_checkpoint(path)
    assert source is not None
    folder = source.rstrip("/").rpartition("/")[0]
    with contextlib.closing(provide(folder or ".")) as store:
        checkpoint_store: Any = store
        load(
            checkpoint_store,
            source,
            _run_state(state),
            StepSync(state.parallelism),
            weights_only=load_weights_only,
            strict=strict_model_weights,
            ignore_keys=as_lenient(ignore_keys, "ignore_keys"),
            exclude_algorithms=exclude_algorithms or (),
        )


def _run_state(state: State) -> CheckpointState:
    return CheckpointState(state, Precision(state.precision, state.device))
