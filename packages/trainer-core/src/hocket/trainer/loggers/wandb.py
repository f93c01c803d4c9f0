"""A logger for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logged_images import ImageBatch
from hocket.trainer.loggers.tracker import TrackerLogger, clean_name
from hocket.trainer.process.extras import import_extra, require_extra

STEP = "trainer/batch"
"""The x-axis of every chart.

W&B's own step never goes back, so W&B would drop the steps that a resumed run repeats.
"""


class WandBLogger(TrackerLogger):
    """Logs metrics, images, tables and files to Weights & Biases.

    Log in beforehand (`wandb login`, or the variable `WANDB_API_KEY`), or set `WANDB_MODE=offline`. Charts
    use `trainer/batch` as their x-axis. The run's id is kept in checkpoints: a preempted training continues
    the same run. Needs the extra `wandb`.

    Args:
        project: The project.
        group: The group of the run; with `rank_zero_only=False`, the run's name by default.
        name: The run's name; the trainer's run name by default.
        entity: The user or team.
        tags: Tags of the run.
        log_artifacts: Whether `upload_file` stores files as artifacts.
        rank_zero_only: Whether only rank 0 logs. When False every rank has a run of its own.
        init_kwargs: Further arguments of `wandb.init`; they override the ones above.

    Raises:
        MissingExtraError: If `wandb` is not installed.

    Example:
        >>> WandBLogger(project="digits", init_kwargs={"mode": "offline"})  # doctest: +SKIP
    """

    reads_outputs = False

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        tags: Sequence[str] | None = None,
        log_artifacts: bool = False,
        rank_zero_only: bool = True,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(rank_zero_only=rank_zero_only)
        require_extra("wandb", "wandb", needed_by="WandBLogger")
        self.name = name
        self.log_artifacts = log_artifacts
        given = {
            "project": project,
            "group": group,
            "entity": entity,
            "tags": None if tags is None else [*tags],
        }
        self._init_kwargs = {
            **{key: value for key, value in given.items() if value is not None},
            **(init_kwargs or {}),
        }
        self._wandb: Any = None
        self._run: Any = None

    def _open(self, run_name: str) -> None:
        # Here, on the logger's thread: W&B takes seconds to import and to start its process.
        self._wandb = import_extra("wandb", "wandb", needed_by="WandBLogger")
        name = self.name or run_name
        defaults: dict[str, Any] = {
            "name": name,
            "id": self._key,
            "resume": "allow",
        }
        if not self.rank_zero_only:
            defaults["group"] = name.rpartition("-rank")[0] or name
        self._run = self._wandb.init(**{**defaults, **self._init_kwargs})
        self.run_id = self._key = self._run.id
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Log the numbers; nested lists become histograms."""
        self._when_open(partial(self._log_metrics, metrics, step))

    def _log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        row = {
            name: self._wandb.Histogram(number) if isinstance(number, list) else number
            for name, number in metrics.items()
        }
        self._run.log({**row, STEP: step})

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Add the settings to the run's config."""
        self._when_open(lambda: self._run.config.update(parameters, allow_val_change=True))

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int = 0
    ) -> None:
        """Log a `wandb.Table`."""
        self._when_open(partial(self._log_table, list(columns), [list(row) for row in rows], name, step))

    def _log_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int) -> None:
        self._run.log({name: self._wandb.Table(columns=columns, data=rows), STEP: step})

    def log_images(self, images: ImageBatch, name: str = "Images", step: int = 0) -> None:
        """Log the images with their masks, as a table with one row per image if `use_table` is set."""
        self._when_open(partial(self._log_images, images, name, step))

    def _log_images(self, images: ImageBatch, name: str, step: int) -> None:
        labels = images.mask_class_labels
        wandb_images = []
        for index, image in enumerate(images.images):
            masks = {
                mask: {"mask_data": parts[index].numpy(), **({"class_labels": labels} if labels else {})}
                for mask, parts in images.masks.items()
            }
            wandb_images.append(self._wandb.Image(image.numpy(), masks=masks or None))
        if images.use_table:
            self._log_table(["Image"], [[image] for image in wandb_images], name, step)
        else:
            self._run.log({name: wandb_images, STEP: step})

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Add the reports to the run's config, under `traces`."""
        trace_texts = {name: str(trace) for name, trace in traces.items()}
        self._when_open(lambda: self._run.config.update({"traces": trace_texts}, allow_val_change=True))

    def can_upload_files(self) -> bool:
        """Return whether `log_artifacts` is set."""
        return self.log_artifacts

    def upload_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Store the file as an artifact; W&B keeps versions, so nothing is overwritten."""
        self._when_open(partial(self._upload, remote_file_name, file_path))

    def _upload(self, remote_file_name: str, file_path: Path) -> None:
        name = clean_name(remote_file_name, allowed=r"\w.-")
        artifact = self._wandb.Artifact(name=name, type=file_path.suffix.lstrip(".") or "file")
        artifact.add_file(str(file_path), name=file_path.name)
        self._run.log_artifact(artifact)

    def _finish(self, outcome: BaseException | None) -> None:
        self._run.finish(exit_code=0 if outcome is None else 1)
