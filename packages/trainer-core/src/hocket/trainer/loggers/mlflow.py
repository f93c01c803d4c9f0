"""A logger for MLflow."""

from __future__ import annotations

import fnmatch
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.trainer.checks import check_count, check_number
from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logged_images import ImageBatch
from hocket.trainer.log.logger import Logger
from hocket.trainer.loggers.tracker import TrackerLogger, clean_name
from hocket.trainer.process.extras import import_extra, require_extra

if TYPE_CHECKING:
    from hocket.trainer.state import State

_log = logging.getLogger(__name__)

# Limits of MLflow's `log_batch`.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_CHARS = 1000, 100, 6000
_KEY_TAG = "hocket.run_key"
# Metrics kept while the server does not answer; older ones are dropped.
_MAX_WAITING = 20_000
_NAME = r"\w\-./ "


class MLFlowLogger(TrackerLogger):
    """Logs metrics, images, tables and files to an MLflow server, or to a local SQLite file.

    Metrics are sent in batches. The run's id is kept in checkpoints: a preempted training continues the same
    run. The run ends as `FINISHED`, `FAILED` or, after Ctrl-C, `KILLED`. Needs the extra `mlflow`. For CPU
    and GPU load use the callback `SystemMetricsMonitor`.

    Args:
        experiment_name: The experiment; `MLFLOW_EXPERIMENT_NAME` or `hocket` by default.
        run_name: The run's name; the trainer's run name by default.
        tags: Tags of the run.
        tracking_uri: The URI of the server or file, such as `http://host:5000` or `sqlite:///mlflow.db`;
            MLflow's own default if None.
        rank_zero_only: Whether only rank 0 logs. When False every rank has a run of its own.
        flush_interval: Seconds that metrics may wait before they are sent together.
        rename_metrics: New names by old names.
        ignore_metrics: Glob patterns of metrics to leave out.
        ignore_hyperparameters: Glob patterns of settings to leave out.
        run_group: The value of the tag `run_group`.
        resume: Without an id from a checkpoint, continue the experiment's newest run of this name.
        log_duplicated_metric_every_n_steps: Steps after which a metric is logged again although its value has
            not changed. 1 logs every value.

    Raises:
        MissingExtraError: If `mlflow` is not installed.

    Example:
        >>> MLFlowLogger("digits", tracking_uri="sqlite:///mlflow.db")  # doctest: +SKIP
    """

    reads_outputs = False

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        tracking_uri: str | os.PathLike[str] | None = None,
        rank_zero_only: bool = True,
        flush_interval: float = 10.0,
        rename_metrics: Mapping[str, str] | None = None,
        ignore_metrics: Iterable[str] = (),
        ignore_hyperparameters: Iterable[str] = (),
        run_group: str | None = None,
        resume: bool = False,
        log_duplicated_metric_every_n_steps: int = 100,
    ) -> None:
        check_number("flush_interval", flush_interval, least=0)
        check_count("log_duplicated_metric_every_n_steps", log_duplicated_metric_every_n_steps, least=0)
        super().__init__(rank_zero_only=rank_zero_only)
        require_extra("mlflow", "mlflow", needed_by="MLFlowLogger")
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.tags = {str(key): str(value) for key, value in (tags or {}).items()}
        if run_group is not None:
            self.tags["run_group"] = run_group
        self.tracking_uri = None if tracking_uri is None else os.fspath(tracking_uri)
        self.flush_interval = flush_interval
        self.rename_metrics = dict(rename_metrics or {})
        self.ignore_metrics = list(ignore_metrics)
        self.ignore_hyperparameters = list(ignore_hyperparameters)
        self.resume = resume
        self.log_duplicated_metric_every_n_steps = log_duplicated_metric_every_n_steps
        self._mlflow: Any = None
        self._client: Any = None
        self._params: dict[str, str] = {}
        self._waiting: list[tuple[str, float, int, int]] = []
        self._last_flush_s = time.monotonic()
        self._last_logged: dict[str, tuple[Number, int]] = {}

    def _open(self, run_name: str) -> None:
        name = self.run_name or run_name
        # Here, on the logger's thread: MLflow takes seconds to import.
        self._mlflow = import_extra("mlflow", "mlflow", needed_by="MLFlowLogger")
        self._client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is None:
            experiment_id = self._find_or_create_experiment()
            run_id = None
            if self._is_resumed:
                run_id = self._newest_run(experiment_id, f"tags.`{_KEY_TAG}` = '{self._key}'")
            elif self.resume:
                run_id = self._newest_run(experiment_id, f"attributes.run_name = '{name}'")
            self.run_id = run_id or self._create_run(experiment_id, name)
        self._client.update_run(self.run_id, status="RUNNING")
        self._params = dict(self._client.get_run(self.run_id).data.params)

    def _find_or_create_experiment(self) -> str:
        name = self.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME", "hocket")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id: str = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        return experiment_id

    def _newest_run(self, experiment_id: str, condition: str) -> str | None:
        runs = self._client.search_runs(
            [experiment_id], condition, order_by=["start_time DESC"], max_results=1
        )
        return runs[0].info.run_id if runs else None

    def _create_run(self, experiment_id: str, name: str) -> str:
        tags = {**self.tags, _KEY_TAG: self._key}
        run_id: str = self._client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
        return run_id

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Keep the numbers for the next batch; text and lists, which MLflow does not take, are left out."""
        now_ms = int(time.time() * 1000)
        for name, number in metrics.items():
            if isinstance(number, str | list) or _matches(name, self.ignore_metrics):
                continue
            if self._is_repeated(name, number, step):
                continue
            key = clean_name(self.rename_metrics.get(name, name), allowed=_NAME)
            self._waiting.append((key, float(number), now_ms, step))
        if len(self._waiting) >= _MAX_METRICS or time.monotonic() - self._last_flush_s >= self.flush_interval:
            self._flush()

    def _is_repeated(self, name: str, number: Number, step: int) -> bool:
        value, last_step = self._last_logged.get(name, (None, 0))
        if value == number and step < last_step + self.log_duplicated_metric_every_n_steps:
            return True
        self._last_logged[name] = number, step
        return False

    def _flush(self) -> None:
        self._last_flush_s = time.monotonic()
        if self._is_open:
            self._send()
        del self._waiting[:-_MAX_WAITING]

    def _send(self) -> None:
        while self._waiting:
            metrics = [self._mlflow.entities.Metric(*point) for point in self._waiting[:_MAX_METRICS]]
            self._client.log_batch(self.run_id, metrics=metrics)
            # Deleted only after the call: metrics that could not be sent are sent again with the next batch.
            del self._waiting[:_MAX_METRICS]

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Log the settings as params; nested ones under `outer/inner`. Params never change in MLflow."""
        self._when_open(partial(self._log_params, dict(_flatten(parameters))))

    def _log_params(self, parameters: dict[str, str]) -> None:
        new_params, changed = {}, []
        for raw_name, value in parameters.items():
            name, text = clean_name(raw_name, allowed=_NAME), value[:_MAX_PARAM_CHARS]
            if _matches(raw_name, self.ignore_hyperparameters):
                continue
            if self._params.get(name, text) != text:
                changed.append(name)
            elif name not in self._params:
                new_params[name] = text
        if changed:
            _log.warning(
                "MLflow keeps the first value of a param; changed since the run began: %s", ", ".join(changed)
            )
        self._params |= new_params
        params = [self._mlflow.entities.Param(name, text) for name, text in new_params.items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[start : start + _MAX_PARAMS])

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int = 0
    ) -> None:
        """Store the table as the artifact `<name>/step<step>.json`, with `columns` and `data`."""
        table = {"columns": list(columns), "data": [[_plain(value) for value in row] for row in rows]}
        file = f"{clean_name(name, allowed=_NAME)}/step{step}.json"
        self._when_open(lambda: self._client.log_dict(self.run_id, table, file))

    def log_images(self, images: ImageBatch, name: str = "Images", step: int = 0) -> None:
        """Log each image under `<name>-<index>`; MLflow shows no masks."""
        for index, image in enumerate(images.images):
            key = f"{clean_name(name, allowed=_NAME)}-{index}"
            pixels = image.squeeze(-1).numpy()
            self._when_open(partial(self._log_image, pixels, key, step))

    def _log_image(self, pixels: Any, key: str, step: int) -> None:
        self._client.log_image(self.run_id, pixels, key=key, step=step)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Set the reports as tags."""
        for name, trace in traces.items():
            tag = f"trace/{clean_name(name, allowed=_NAME)}"
            self._when_open(partial(self._set_tag, tag, str(trace)))

    def _set_tag(self, tag: str, text: str) -> None:
        self._client.set_tag(self.run_id, tag, text)

    def can_upload_files(self) -> bool:
        """Return True: MLflow keeps files as artifacts."""
        return True

    def upload_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Store the file as an artifact; one of the same name is replaced."""
        self._when_open(partial(self._upload, remote_file_name, file_path))

    def _upload(self, remote_file_name: str, file_path: Path) -> None:
        folder, _, name = remote_file_name.rpartition("/")
        if name == file_path.name:
            self._client.log_artifact(self.run_id, str(file_path), folder or None)
            return
        # An artifact is named after the local file.
        with tempfile.TemporaryDirectory() as scratch:
            copy = shutil.copy(file_path, Path(scratch, name))
            self._client.log_artifact(self.run_id, str(copy), folder or None)

    def download_file(self, remote_file_name: str, destination: str, *, overwrite: bool = False) -> None:
        """Fetch an artifact of this run.

        Raises:
            FileExistsError: If `destination` exists and `overwrite` is False.
        """
        if os.path.exists(destination) and not overwrite:
            raise FileExistsError(f"`{destination}` exists; pass `overwrite=True` to replace it")
        with tempfile.TemporaryDirectory() as scratch:
            downloaded_path = self._client.download_artifacts(self.run_id, remote_file_name, scratch)
            shutil.move(downloaded_path, destination)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Send the waiting metrics."""
        logger.call(self, self._flush)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Send the waiting metrics."""
        logger.call(self, self._flush)

    def _finish(self, outcome: BaseException | None) -> None:
        self._flush()
        status = "FINISHED" if outcome is None else "FAILED"
        if isinstance(outcome, KeyboardInterrupt):
            status = "KILLED"
        self._client.set_terminated(self.run_id, status=status)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _flatten(parameters: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", str(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
