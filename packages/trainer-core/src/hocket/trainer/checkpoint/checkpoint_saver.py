"""`CheckpointSaver`: the settings of one series of checkpoints, beside or in place of `save_folder`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hocket.trainer.checks import Described, as_list, number_to_keep, refuse_class, refuse_classes
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.interval import every


@dataclass(frozen=True, repr=False)
class CheckpointSaver(Described):
    """The settings of one series of checkpoints; pass several as `callbacks` for several series.

    The trainer's `save_*` arguments describe the first series, from which `autoresume` continues. Where
    `save_folder` is not set, the first saver that saves whole checkpoints describes it.

    Args:
        folder: A path or URI, in which `{run_name}` is filled in.
        filename: The name of a checkpoint in the folder, as `save_filename`.
        save_interval: Interval between checkpoints; one is also saved at the end of training.
        overwrite: As `save_overwrite`.
        num_checkpoints_to_keep: As `save_num_checkpoints_to_keep`.
        retention: As `retention` of `checkpointing`.
        weights_only: Whether to save only the model and the time.
        ignore_keys: As `save_ignore_keys`.
        save_async: Whether training goes on while a checkpoint is written.

    Example:
        >>> savers = [
        ...     CheckpointSaver("run/whole", save_interval="5ep"),
        ...     CheckpointSaver("run/weights", save_interval="1ep", weights_only=True),
        ... ]
        >>> Trainer(model=model, callbacks=savers, ...)
    """

    folder: str | os.PathLike[str] = "{run_name}/checkpoints"
    filename: str = "ep{epoch}-ba{batch}"
    save_interval: Any = "1ep"
    overwrite: bool = False
    num_checkpoints_to_keep: int = -1
    retention: Any = ()
    weights_only: bool = False
    ignore_keys: Any = None
    save_async: bool = False

    def __post_init__(self) -> None:
        number_to_keep(self.num_checkpoints_to_keep)
        refuse_classes("retention", self.retention)
        refuse_class("save_interval", self.save_interval)
        every(self.save_interval)


_ARGUMENT_OF = {
    "folder": "save_folder",
    "filename": "save_filename",
    "save_interval": "save_interval",
    "overwrite": "save_overwrite",
    "num_checkpoints_to_keep": "save_num_checkpoints_to_keep",
    "weights_only": "save_weights_only",
    "ignore_keys": "save_ignore_keys",
}


def take_savers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Take the savers out of the callbacks; without a `save_folder`, one becomes the `save_*` arguments.

    Args:
        arguments: The arguments of `Trainer`.

    Returns:
        The arguments, with the other savers as `savers`.

    Raises:
        TrainerConfigError: If two series have one folder.
    """
    callbacks = as_list(arguments["callbacks"])
    savers = [one for one in callbacks if isinstance(one, CheckpointSaver)]
    changed = {**arguments, "savers": tuple(savers)}
    if not savers:
        return changed
    changed["callbacks"] = [one for one in callbacks if not isinstance(one, CheckpointSaver)]
    checkpointing = arguments["checkpointing"]
    if arguments["save_folder"] is None and checkpointing.store is None:
        first = next((one for one in savers if not one.weights_only), savers[0])
        changed |= {argument: getattr(first, field) for field, argument in _ARGUMENT_OF.items()}
        changed["checkpointing"] = replace(
            checkpointing, asynchronous=first.save_async, retention=first.retention
        )
        changed["savers"] = tuple(one for one in savers if one is not first)
    _check_apart([changed["save_folder"], *(one.folder for one in changed["savers"])])
    return changed


def _check_apart(folders: Iterable[Any]) -> None:
    seen: set[str] = set()
    for folder in folders:
        name = os.fspath(folder or "").rstrip("/")
        if name and name in seen:
            raise TrainerConfigError(
                f"two series of checkpoints go to `{name}`, where the retention of one would delete those of "
                "the other; give each `CheckpointSaver` a folder of its own"
            )
        seen.add(name)
