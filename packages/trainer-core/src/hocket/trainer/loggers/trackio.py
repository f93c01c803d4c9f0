"""A logger for Trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hocket.trainer.log.deferred_value import Number
from hocket.trainer.log.logged_images import ImageBatch
from hocket.trainer.loggers.tracker import TrackerLogger, clean_name
from hocket.trainer.process.extras import import_extra, require_extra


class TrackioLogger(TrackerLogger):
    """Logs metrics, images, tables and files to Trackio, which needs no account and no server.

    Runs are kept in a local database, which `trackio show` opens in a browser. The run's name is kept in
    checkpoints: a preempted training continues the same run. Trackio needs `pillow<13`, so no extra of this
    package installs it: `pip install trackio`.

    Args:
        project: The project.
        name: The run's name; the trainer's run name by default. If the local project has such a run, a new
            run's name gets a suffix, because Trackio tells runs apart by name when it continues one. Runs of
            a server (`server_url`, `space_id`) are not looked up.
        group: The group of the run; with `rank_zero_only=False`, the run's name by default.
        log_artifacts: Whether `upload_file` stores files as artifacts.
        rank_zero_only: Whether only rank 0 logs. When False every rank has a run of its own.
        init_kwargs: Further arguments of `trackio.init`, such as `server_url`; they override the ones above.

    Raises:
        MissingExtraError: If `trackio` is not installed.

    Example:
        >>> TrackioLogger("digits")  # doctest: +SKIP
    """

    reads_outputs = False

    def __init__(
        self,
        project: str = "hocket",
        name: str | None = None,
        group: str | None = None,
        log_artifacts: bool = False,
        rank_zero_only: bool = True,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(rank_zero_only=rank_zero_only)
        require_extra("trackio", None, needed_by="TrackioLogger")
        self.name = name
        self.log_artifacts = log_artifacts
        self._init_kwargs = {"project": project, "group": group, "embed": False, **(init_kwargs or {})}
        self._config: dict[str, Any] = {}
        self._last_step: int | None = None
        self._trackio: Any = None
        self._run: Any = None

    def _open(self, run_name: str) -> None:
        # Here, on the logger's thread: Trackio takes seconds to import.
        self._trackio = import_extra("trackio", None, needed_by="TrackioLogger")
        name = self.run_id or self.name or run_name
        if not self._is_resumed:
            name = self._free_name(name)
        # A new training does not continue a run of a server that has the same name.
        own = {"name": name, "resume": "allow" if self._is_resumed else "never", "config": self._config}
        arguments = {**own, **self._init_kwargs}
        if arguments["group"] is None and not self.rank_zero_only:
            arguments["group"] = name.rpartition("-rank")[0] or name
        self._run = self._trackio.init(**arguments)
        self.run_id = self._run.name

    def _free_name(self, name: str) -> str:
        """Return `name`, with a suffix if another run of the local project has it."""
        try:
            taken = {run.name for run in self._trackio.Api().runs(self._init_kwargs["project"])}
        except ValueError:  # the project does not exist yet
            return name
        return f"{name}-{self._key}" if name in taken else name

    def log_metrics(self, metrics: dict[str, Number], step: int) -> None:
        """Log the numbers; nested lists become histograms, and text becomes Markdown."""
        self._when_open(partial(self._log, metrics, step))

    def _log(self, row: dict[str, Any], step: int | None = None) -> None:
        self._last_step = self._last_step if step is None else step
        kinds: dict[type, Any] = {list: self._trackio.Histogram, str: self._trackio.Markdown}
        typed = {key: kinds.get(type(value), lambda same: same)(value) for key, value in row.items()}
        self._run.log(typed, step=self._last_step)

    def log_hyperparameters(self, parameters: dict[str, Any]) -> None:
        """Add the settings to the run's config; those that follow the first metrics become a report."""
        # Keys that begin with an underscore are Trackio's own.
        settings = {name.lstrip("_") or name: _plain(value) for name, value in parameters.items()}
        if self._last_step is not None:
            self.log_traces({"hyperparameters": "  \n".join(f"{key}: {settings[key]}" for key in settings)})
        else:
            (self._config if self._run is None else self._run.config).update(settings)

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int = 0
    ) -> None:
        """Log a `trackio.Table`."""
        cells = [[_plain(value) for value in row] for row in rows]
        self._when_open(partial(self._log_table, list(columns), cells, name, step))

    def _log_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int) -> None:
        self._log({name: self._trackio.Table(columns=columns, data=rows)}, step)

    def log_images(self, images: ImageBatch, name: str = "Images", step: int = 0) -> None:
        """Log a table of the images and their masks, or each under `<name>/<index>` without `use_table`."""
        self._when_open(partial(self._log_images, images, name, step))

    def _log_images(self, images: ImageBatch, name: str, step: int) -> None:
        make = self._trackio.Image
        rows = [[make(image.squeeze(-1).numpy())] for image in images.images]
        for parts in images.masks.values():
            for row, part in zip(rows, parts, strict=True):
                grey = part * (255 // max(1, int(part.max())))
                row.append(make(grey.byte().numpy()))
        if images.use_table:
            self._log_table(["Image", *images.masks], rows, name, step)
            return
        for index, row in enumerate(rows):
            names = [f"{name}/{index}", *(f"{name}/{index}/{mask}" for mask in images.masks)]
            self._log(dict(zip(names, row, strict=True)), step)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Log the reports as Markdown."""
        reports = {f"trace/{name}": str(trace) for name, trace in traces.items()}
        self._when_open(partial(self._log, reports))

    def can_upload_files(self) -> bool:
        """Return whether `log_artifacts` is set."""
        return self.log_artifacts

    def upload_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Store the file as an artifact; Trackio keeps versions, so nothing is overwritten."""
        name = clean_name(remote_file_name, allowed=r"A-Za-z0-9._-")
        kind = file_path.suffix.lstrip(".") or "file"
        self._when_open(lambda: self._run.log_artifact(file_path, name=name, type=kind))

    def _finish(self, outcome: BaseException | None) -> None:
        self._run.finish()


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
