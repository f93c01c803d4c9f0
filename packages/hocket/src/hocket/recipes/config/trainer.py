"""A `Trainer` from a run's configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.ckpt.document.values import canonical
from hocket.ckpt.errors import CheckpointStateError
from hocket.dist.config.parallelism import CONFIG_KEYS
from hocket.recipes.config.building import (
    build_loaders,
    build_model,
    build_optimizer,
    build_part,
    build_profiler,
)
from hocket.recipes.config.reading import file_of, read_config, with_overrides
from hocket.recipes.config.resolving import TRAINER_SECTIONS, resolve, trainer_argument
from hocket.trainer import Callback, Trainer
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.process.rng import seed_rng


class RunConfig(Callback):
    """A callback that saves the run's configuration in its checkpoints, for `hocket train --resume`.

    Args:
        config: The configuration, as `resolve` returns it.
        folder: The folder of the run's file, whose modules the configuration names; None without a file.
    """

    saves_rank_zero_state = True

    def __init__(self, config: Mapping[str, Any], folder: str | None = None) -> None:
        self.config = dict(config)
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration, and the folder of its file."""
        return (
            {"config": self.config} if self.folder is None else {"config": self.config, "folder": self.folder}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the current configuration: the checkpoint's belongs to the earlier run."""


def trainer_from(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    folder: str | None = None,
) -> Trainer:
    """Make a trainer from a run's configuration.

    Args:
        source: A YAML file's path, or a dict; `hocket.recipes.config` lists the sections.
        overrides: Settings such as `"optimizer.lr=3e-4"`, applied in order.
        folder: The folder of the run's file. Modules that the configuration names are looked for there first,
            as Python does for a script. None for the folder of `source`, if that is a path.

    Raises:
        TrainerConfigError: If a name is unknown (the message names the nearest), parts do not fit, or the run
            is saved and the checkpoints cannot store a value of the configuration.

    Example:
        >>> trainer = trainer_from("run.yaml", ["training.max_duration=10ba"])  # doctest: +SKIP
    """
    if folder is None and not isinstance(source, Mapping):
        folder = str(file_of(source).resolve().parent)
    config = resolve(with_overrides(read_config(source), overrides))
    if folder is not None and folder not in sys.path and os.path.isdir(folder):
        sys.path.insert(0, folder)  # stays, since workers of loaders import the modules again
    for section in ("model", "data"):
        if section not in config:
            raise TrainerConfigError(f"the configuration has no `{section}`; add the section")
    arguments = {name: value for section in TRAINER_SECTIONS for name, value in config[section].items()}
    if arguments["save_folder"] is not None:
        for section, value in config.items():
            _check_storable(value, section)
    if arguments["seed"] is not None:
        # The model draws its weights before `Trainer` is made, which seeds later draws.
        seed_rng(arguments["seed"])
    model = build_model(config["model"])
    arguments |= build_loaders(config["data"])
    arguments |= _parallelism(config.get("parallelism"))
    arguments["optimizers"] = build_optimizer(config["optimizer"], model) if "optimizer" in config else None
    for section, argument in (
        ("scheduler", "schedulers"),
        ("algorithms", "algorithms"),
        ("callbacks", "callbacks"),
        ("loggers", "loggers"),
    ):
        arguments[argument] = [build_part(part, section) for part in config.get(section, [])]
    arguments["callbacks"].append(RunConfig(config, folder))
    if "profiler" in config:
        arguments["profiler"] = build_profiler(config["profiler"])
    return Trainer(model=model, **arguments)


def _parallelism(section: Mapping[str, Any] | None) -> dict[str, Any]:
    if section is None:
        return {}
    if not section:
        return {"fsdp_config": {}}
    keys = dict(section)
    arguments = {}
    if "dist_timeout" in keys:
        arguments["dist_timeout"] = trainer_argument("dist_timeout", keys.pop("dist_timeout"), "parallelism")
    if not keys:
        return arguments
    is_by_axis = not CONFIG_KEYS.isdisjoint(keys)
    return arguments | {"parallelism_config" if is_by_axis else "fsdp_config": keys}


def _check_storable(value: Any, where: str) -> None:
    """Refuse a value that a checkpoint cannot store, because `RunConfig` saves the configuration."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        _check_storable(part, f"{where}.{name}")
    try:
        canonical(value, where)
    except CheckpointStateError as error:
        kind = type(value).__name__
        raise TrainerConfigError(
            f"`{where}` is a `{kind}` that the checkpoints of `save_folder` cannot store with the "
            "configuration; expected text, a number, true, false, null, or lists and mappings of these"
        ) from error
