"""`CheckpointSaver` with Composer's arguments and defaults."""

from __future__ import annotations

import os
from typing import Any

from hocket.compat.composer.ignore_keys import as_lenient
from hocket.trainer.checkpoint.checkpoint_saver import CheckpointSaver as _CheckpointSaver
from hocket.trainer.interval import IsTime
from hocket.trainer.time import TimeInput


class CheckpointSaver(_CheckpointSaver):
    """`hocket.trainer.CheckpointSaver`, which also takes arguments that have no effect here.

    Args:
        folder: As `Trainer(save_folder=…)`; a URI is written to directly.
        filename: As `save_filename`.
        remote_file_name: Accepted for Composer's users.
        latest_filename: Accepted for Composer's users: a folder lists its newest checkpoint.
        latest_remote_file_name: Accepted for Composer's users.
        save_interval: As `save_interval`.
        num_concurrent_uploads: Accepted for Composer's users.
        upload_timeout_in_seconds: Accepted for Composer's users.
        **settings: `overwrite`, `num_checkpoints_to_keep`, `weights_only` and `ignore_keys`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/checkpoints",
        filename: str | os.PathLike[str] = "ep{epoch}-ba{batch}-rank{rank}.pt",
        remote_file_name: str | os.PathLike[str] | None = None,
        latest_filename: str | os.PathLike[str] | None = "latest-rank{rank}.pt",
        latest_remote_file_name: str | os.PathLike[str] | None = None,
        save_interval: TimeInput | IsTime = "1ep",
        *,
        num_concurrent_uploads: int = 1,
        upload_timeout_in_seconds: int = 3600,
        **settings: Any,
    ) -> None:
        del remote_file_name, latest_filename, latest_remote_file_name
        del num_concurrent_uploads, upload_timeout_in_seconds
        settings["ignore_keys"] = as_lenient(settings.get("ignore_keys"), "ignore_keys")
        super().__init__(folder, os.fspath(filename), save_interval, **settings)
