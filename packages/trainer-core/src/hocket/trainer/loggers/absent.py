"""Loggers of Composer that Hocket does not have; each raises an error that names a replacement."""

from __future__ import annotations

from typing import Any, NoReturn

from hocket.trainer.errors import AbsentLoggerError

_OWN = "or subclass `LoggerDestination`, whose methods run on a thread of their own"


class _AbsentLogger:
    """A logger that raises `AbsentLoggerError` when it is constructed."""

    instead: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AbsentLoggerError(f"Hocket has no `{type(self).__name__}`; use {self.instead}")


class CometMLLogger(_AbsentLogger):
    """Raises `AbsentLoggerError`: use another tracker."""

    instead = f"`WandBLogger`, `MLFlowLogger` or `TensorboardLogger`, {_OWN}"


class NeptuneLogger(_AbsentLogger):
    """Raises `AbsentLoggerError`: use another tracker."""

    instead = f"`WandBLogger`, `MLFlowLogger` or `TensorboardLogger`, {_OWN}"


class SlackLogger(_AbsentLogger):
    """Raises `AbsentLoggerError`: use a tracker's own alerts."""

    instead = f"the alerts of `WandBLogger` or `MLFlowLogger` (both post to Slack), {_OWN}"


class MosaicMLLogger(_AbsentLogger):
    """Raises `AbsentLoggerError`: use another tracker."""

    instead = f"`WandBLogger`, `MLFlowLogger` or `FileLogger`, {_OWN}"


class RemoteUploaderDownloader(_AbsentLogger):
    """Raises `AbsentLoggerError`: checkpoints go straight to storage."""

    instead = (
        "`Trainer(save_folder='s3://bucket/folder')`, which writes checkpoints straight to storage "
        "(`pip install hocket-ckpt`); other files go with `logger.upload_file` to a logger that keeps files, "
        "such as `MLFlowLogger` or `WandBLogger(log_artifacts=True)`"
    )
