"""The loggers of tracking services, which open their run when the trainer is made, as in Composer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.trainer import Logger, State
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.loggers import MLFlowLogger as _MLFlowLogger
from hocket.trainer.loggers import WandBLogger as _WandBLogger
from hocket.trainer.process.extras import import_extra
from hocket.trainer.process.world import global_rank


class WandBLogger(_WandBLogger):
    """`hocket.trainer.loggers.WandBLogger`, which opens its run, and waits for W&B, when the trainer is made.

    Attributes:
        run_dir: The folder of the run's files; None before there is a trainer.
        run_url: The page of the run; None before there is a trainer, and offline.
    """

    run_dir: str | None = None
    run_url: str | None = None

    def after_load(self, state: State, logger: Logger) -> None:
        """Open the run: scripts use `wandb.run` from here on."""
        super().after_load(state, logger)
        logger.flush(to=self)
        if self._run is not None:
            self.run_dir, self.run_url = self._run.dir, self._run.url


class MLFlowLogger(_MLFlowLogger):
    """`hocket.trainer.loggers.MLFlowLogger` with Composer's arguments in Composer's order.

    When the trainer is made, the logger opens its run, waits for the server, and makes the run MLflow's
    active run.

    Args:
        experiment_name: As in `hocket.trainer.loggers.MLFlowLogger`; `my-mlflow-experiment` by default.
        run_name: As there.
        tags: As there.
        tracking_uri: As there.
        rank_zero_only: As there.
        flush_interval: As there.
        model_registry_prefix: Prefix of the names of registered models, followed by a dot.
        model_registry_uri: The registry of models; that of the server by default.
        synchronous: Accepted for Composer's users: a separate thread logs, and `close` waits for it.
        log_system_metrics: Accepted for Composer's users: `SystemMetricsMonitor` logs them.
        rename_metrics: As there.
        ignore_metrics: As there.
        ignore_hyperparameters: As there.
        run_group: As there.
        resume: As there.
        logging_buffer_seconds: The past name of `flush_interval`; the shorter of the two is used.
        log_duplicated_metric_every_n_steps: As there.
    """

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        tracking_uri: str | os.PathLike[str] | None = None,
        rank_zero_only: bool = True,
        flush_interval: float = 10,
        model_registry_prefix: str = "",
        model_registry_uri: str | None = None,
        synchronous: bool = False,
        log_system_metrics: bool = True,
        rename_metrics: Mapping[str, str] | None = None,
        ignore_metrics: Iterable[str] | None = None,
        ignore_hyperparameters: Iterable[str] | None = None,
        run_group: str | None = None,
        resume: bool = False,
        logging_buffer_seconds: float | None = 10,
        log_duplicated_metric_every_n_steps: int = 100,
    ) -> None:
        del synchronous, log_system_metrics
        super().__init__(
            experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME", "my-mlflow-experiment"),
            run_name,
            tags,
            tracking_uri,
            rank_zero_only,
            flush_interval if logging_buffer_seconds is None else min(flush_interval, logging_buffer_seconds),
            rename_metrics,
            ignore_metrics or (),
            ignore_hyperparameters or (),
            run_group,
            resume,
            log_duplicated_metric_every_n_steps,
        )
        self.model_registry_prefix = model_registry_prefix
        self.model_registry_uri = model_registry_uri
        self._is_active = False

    def after_load(self, state: State, logger: Logger) -> None:
        """Open the run and make it the active one: scripts call `mlflow.log_param` and similar functions."""
        if not self._is_asked_to_open:
            self.run_id = self.run_id or os.environ.get("MLFLOW_RUN_ID")
            self.run_name = self.run_name or state.run_name
            if not self.rank_zero_only:
                self.run_name += f"-rank{global_rank()}"
            self.tags["run_name"] = os.environ.get("RUN_NAME", state.run_name)
        super().after_load(state, logger)
        logger.flush(to=self)
        if not self._is_open:
            return
        mlflow = self._import()
        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        if self.model_registry_uri is not None:
            mlflow.set_registry_uri(self.model_registry_uri)
        if mlflow.active_run() is None:
            mlflow.start_run(run_id=self.run_id)
            self._is_active = True

    def close(self, state: State, logger: Logger) -> None:
        """Leave MLflow without an active run, if this one was made active."""
        super().close(state, logger)
        if self._is_active:
            self._is_active = False
            self._import().end_run()

    def log_model(self, flavor: str, **arguments: Any) -> Any:
        """Log a model by `mlflow.transformers.log_model`, with its arguments.

        Raises:
            TrainerConfigError: If `flavor` is not `transformers`.
        """
        return self._flavor(flavor).log_model(**arguments)

    def save_model(self, flavor: str, **arguments: Any) -> Any:
        """Save a model to a folder by `mlflow.transformers.save_model`, with its arguments.

        Raises:
            TrainerConfigError: If `flavor` is not `transformers`.
        """
        return self._flavor(flavor).save_model(**arguments)

    def register_model(
        self,
        model_uri: str,
        name: str,
        await_registration_for: int = 300,
        tags: Mapping[str, Any] | None = None,
    ) -> Any:
        """Register a model that was logged or saved; waits for the registry.

        Args:
            model_uri: URI of the model, such as `runs:/<id>/model`.
            name: Its name in the registry, after `model_registry_prefix`.
            await_registration_for: Seconds to wait until the version is ready.
            tags: Tags of the version.

        Returns:
            MLflow's description of the version.
        """
        return self._import().register_model(
            model_uri=model_uri,
            name=f"{self.model_registry_prefix}.{name}" if self.model_registry_prefix else name,
            await_registration_for=await_registration_for,
            tags=None if tags is None else dict(tags),
        )

    def _flavor(self, flavor: str) -> Any:
        if flavor != "transformers":
            raise TrainerConfigError(
                f"`flavor` is `{flavor}`; expected `transformers`, or a call of MLflow's own functions"
            )
        return self._import().transformers

    def _import(self) -> Any:
        return import_extra("mlflow", "mlflow", needed_by="MLFlowLogger")


__all__ = ["MLFlowLogger", "WandBLogger"]
