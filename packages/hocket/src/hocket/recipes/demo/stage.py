"""The stages of the demo with their progress: a bar on a terminal, a line elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hocket.recipes.demo.gap import wait_for_gap
from hocket.recipes.demo.jobs import Job, JobSpec, Launchers


class Shown:
    """A title with a progress bar, shown while the `with` block runs."""

    def __init__(self, console: Console, title: str, total: int | None) -> None:
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task(title, total=total)
        self._console, self._title, self._began = console, title, time.monotonic()

    def at(self, step: int) -> None:
        """Move the bar to a step."""
        self._progress.update(self._task, completed=step)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        if not self._console.is_terminal:
            self._console.print(f"  {self._title}: {time.monotonic() - self._began:.0f} s")


def run_job(
    spec: JobSpec, launchers: Launchers, *, console: Console, kill_in_gap: bool = False
) -> str | None:
    """Run a job to its end, or kill it in a save.

    Args:
        spec: The settings of the job.
        launchers: The start of its launcher.
        console: The console for its progress.
        kill_in_gap: Whether to kill the whole job when one of its saves, but the first, has its data files
            in the store and not its manifest.

    Returns:
        The name of the checkpoint in whose save the job was killed, None when the job ran to its end.

    Raises:
        JobFailedError: The job ended with an error, or not in time.
    """
    job = Job(spec, launchers)
    title = f"{spec.name}: {spec.ranks} rank{'s' * (spec.ranks > 1)}"
    try:
        with Shown(console, title, spec.steps) as shown:

            def is_running() -> bool:
                shown.at(job.steps_done())
                return job.is_running()

            if kill_in_gap and (name := wait_for_gap(spec.save_folder, spec.ranks, keep_waiting=is_running)):
                return name
            while is_running():
                time.sleep(0.2)
            shown.at(job.steps_done())
            return None
    finally:
        job.kill()
