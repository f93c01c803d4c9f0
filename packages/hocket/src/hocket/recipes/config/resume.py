"""The configuration with which `hocket train --resume` continues a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hocket.recipes.config.reading import stored_run


def config_to_resume(uri: str | os.PathLike[str]) -> tuple[dict[str, Any], str | None]:
    """Return the stored configuration of a run, changed so that the run goes on from a checkpoint.

    The second value is the folder of the run's file, where there was one.

    The arguments that selected the start of the stored run, such as `load_weights_only`, get the defaults of
    `Trainer`, because they do not apply to the run's own checkpoints. `autoresume` stays as it was only if
    `uri` is the run's `save_folder`, where it finds the same checkpoint.

    Args:
        uri: URI of a checkpoint, or of a folder of checkpoints, of which the newest committed one is used.

    Raises:
        TrainerConfigError: If the checkpoint was not saved by a run from a file.
    """
    checkpoint, config, folder = stored_run(uri)
    stored = config["checkpoint"]
    # The settings that say what a run starts from. `load_progress_bar` only says what is printed.
    start = {name for name in stored if name.startswith("load_") or name == "autoresume"} - {
        "load_progress_bar"
    }
    kept = {name: value for name, value in stored.items() if name not in start}
    autoresume = stored["autoresume"] and _is_save_folder(uri, config)
    return {**config, "checkpoint": {**kept, "load_path": checkpoint, "autoresume": autoresume}}, folder


def _is_save_folder(uri: str | os.PathLike[str], config: Mapping[str, Any]) -> bool:
    folder = config["checkpoint"]["save_folder"] or ""
    folder = folder.replace("{run_name}", config["logging"]["run_name"] or "")
    # Of a URI, this compares the text.
    return bool(folder) and os.path.abspath(folder) == os.path.abspath(uri)
