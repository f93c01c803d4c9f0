"""The demo from beginning to end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex

from rich.console import Console

from hocket.ckpt import ListedCheckpoint, list_checkpoints
from hocket.ckpt.uris import local_path
from hocket.native import Store
from hocket.native.errors import StoreConfigError
from hocket.native.paths import is_uri
from hocket.recipes.corpus import CONTEXT, GLOBAL_BATCH, write_corpus
from hocket.recipes.demo.evidence import Evidence, Verdict, compare, read_evidence
from hocket.recipes.demo.jobs import JobFailedError, JobSpec, Launchers
from hocket.recipes.demo.report import draw_curves, verdict_table
from hocket.recipes.demo.stage import Shown, run_job

MARKER = ".hocket-demo"
KILL_ATTEMPTS = 8


class DemoError(ValueError):
    """The demo cannot be run with the given options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """The options of `hocket demo`.

    Attributes:
        out: Folder for logs, journals, the picture and, without `store`, the data and the checkpoints. A
            folder of an earlier demo is replaced, any other must be empty.
        store: URI under which the data and the checkpoints go, in a folder named after the run; None for
            `out`.
        steps: Batches to train.
        ranks: Processes of the uninterrupted and the killed run, then of each resumption.
        save_every: Batches between checkpoints.
    """

    out: Path
    store: str | None = None
    steps: int = 24
    ranks: tuple[int, ...] = (2, 2, 1, 4)
    save_every: int = 6

    def __post_init__(self) -> None:
        """Refuse options with which the demo could show nothing.

        Raises:
            DemoError: Too few steps, numbers of ranks that the batch cannot be divided into, or `out` a URI.
        """
        try:
            out = local_path(self.out)
        except StoreConfigError as error:
            raise DemoError(f"`--out` expects a local folder, and `--store` a URI: {error}") from None
        if is_uri(out):
            raise DemoError(f"`--out {out}` is a URI: expected a local folder; `--store` takes a URI")
        object.__setattr__(self, "out", Path(out))
        if self.steps < 3 * self.save_every:
            raise DemoError(
                f"`--steps {self.steps}` leaves no save to be killed in after a committed one: "
                f"give at least {3 * self.save_every}"
            )
        if len(self.ranks) < 2 or not all(1 <= ranks <= GLOBAL_BATCH for ranks in self.ranks):
            raise DemoError(
                f"`--ranks {','.join(map(str, self.ranks))}`: give at least two numbers from 1 to "
                f"{GLOBAL_BATCH} (samples in a batch), first that of the run to be killed, "
                f"then those to resume on"
            )


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the demo.

    Args:
        options: The options of the demo.
        console: The console for its output.

    Returns:
        Whether every job passed the comparison with the uninterrupted run.

    Raises:
        DemoError: `out` cannot be written to, or is not empty and not the folder of an earlier demo.
        JobFailedError: A job failed that should not have.
    """
    _prepare(options.out)
    base = _base(options)
    # Raises within seconds for an unreachable store, before any rank is started.
    Store(base, max_retries=4).list()
    console.print(
        f"[bold]Hocket demo[/]: a GPT learns Python's library source\n"
        f"data and checkpoints in [cyan]{base}[/]\n"
        f"{len(options.ranks) + 1} jobs on {'/'.join(map(str, options.ranks))} ranks, {options.steps} steps, "
        f"a checkpoint every {options.save_every}; logs in [cyan]{options.out}[/]"
    )
    with Launchers() as launchers:
        return _run(options, base, launchers=launchers, console=console)


def _run(options: DemoOptions, base: str, *, launchers: Launchers, console: Console) -> bool:
    start = time.monotonic()
    data = f"{base}/data"
    with Shown(console, "corpus → zstd MDS shards", None):
        count = write_corpus(data, CONTEXT + 1)
    console.print(f"  {count:,} samples of {CONTEXT} bytes")

    first = options.ranks[0]
    spec = JobSpec(
        name="uninterrupted",
        ranks=first,
        steps=options.steps,
        save_every=options.save_every,
        data=data,
        save_folder=f"{base}/uninterrupted",
        folder=options.out / "uninterrupted",
    )
    run_job(spec, launchers, console=console)
    killed, partial = _kill_in_a_save(spec, base, launchers=launchers, console=console)
    killed_at = max(read_evidence(killed.journal, first).batches, default=0)
    console.print(f"  SIGKILL to the whole job after step {killed_at}, in the save of [bold]{partial}[/]:")
    show_command(console, "ls", killed.save_folder)

    resumed = _resume(killed, base, options=options, launchers=launchers, console=console)
    reference = read_evidence(spec.journal, first)
    evidence = {job.name: read_evidence(job.journal, job.ranks) for job, _ in resumed}
    verdicts = [_compare_killed(killed, reference)]
    verdicts += [
        compare(job.name, evidence[job.name], reference, start=s, last=options.steps) for job, s in resumed
    ]
    picture = options.out / "losses.png"
    draw_curves(picture, reference, evidence, killed_at=killed_at)
    last = list_checkpoints(resumed[-1][0].save_folder)[-1]
    show_command(console, "inspect", f"{resumed[-1][0].save_folder}/{last.name}")
    console.print(f"Loss curves: [cyan]{picture}[/]")
    passed = all(verdict.passed for verdict in verdicts)
    console.print(
        f"{'[green]Everything held[/]' if passed else '[red]Not everything held[/]'} "
        f"({time.monotonic() - start:.0f} s)"
    )
    console.print(verdict_table(verdicts))
    return passed


def _prepare(out: Path) -> None:
    """Make `out` an empty folder; the folder of an earlier demo is emptied, any other is refused."""
    try:
        if out.exists() and any(out.iterdir()):
            if not (out / MARKER).exists():
                raise DemoError(f"`--out {out}` is not empty and not an earlier demo's: name another folder")
            # `rmtree` refuses a link as well, but its error says nothing on Python 3.13.
            if out.is_symlink():
                raise DemoError(
                    f"`--out {out}` is a symbolic link to an earlier demo's folder, which is not emptied "
                    "through a link: name the folder itself"
                )
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).touch()
    except OSError as error:
        raise DemoError(
            f"`--out {out}` is no folder that can be written to ({error.strerror or error}): name another one"
        ) from error


def _base(options: DemoOptions) -> str:
    if options.store is None:
        return str(options.out.resolve() / "store")
    return f"{options.store.rstrip('/')}/hocket-demo-{time.strftime('%Y%m%d-%H%M%S')}-{token_hex(2)}"


def _kill_in_a_save(
    spec: JobSpec, base: str, *, launchers: Launchers, console: Console
) -> tuple[JobSpec, str]:
    """Run the job again until it is killed in a save that stays uncommitted.

    If the manifest is written before the signal arrives, the job resumes from that checkpoint and the next
    save is tried. If that was the last save, or the job ended before a save was caught, the job starts again
    in another folder.
    """
    killed = _in_folder(spec, base, "killed")
    for attempt in range(1, KILL_ATTEMPTS + 1):
        name = run_job(killed, launchers, console=console, kill_in_gap=True)
        saves = list_checkpoints(killed.save_folder)
        if any(save.name == name and save.status == "partial" for save in saves):
            return killed, str(name)
        if name is not None:
            console.print(f"  the manifest of {name} was quicker than the signal: again with the next save")
        if is_finished(saves, spec.steps):
            killed = _in_folder(spec, base, f"killed-{attempt + 1}")
    raise JobFailedError(
        f"no save was caught between its data files and its manifest in {KILL_ATTEMPTS} tries"
    )


def is_finished(saves: list[ListedCheckpoint], steps: int) -> bool:
    """Return whether a checkpoint is committed at the run's last step, so that nothing is left to train."""
    return any(save.status == "committed" and (save.step or 0) >= steps for save in saves)


def _in_folder(spec: JobSpec, base: str, folder: str) -> JobSpec:
    return replace(spec, name="killed", save_folder=f"{base}/{folder}", folder=spec.folder.with_name(folder))


def _resume(
    killed: JobSpec, base: str, *, options: DemoOptions, launchers: Launchers, console: Console
) -> list[tuple[JobSpec, int]]:
    """Resume from the newest committed checkpoint, once for each number of ranks.

    The first job resumes in the save folder of the killed job, by `autoresume`; the others start from the
    same checkpoint and have save folders of their own.

    Returns:
        Each job with the step that it started from.
    """
    newest = [entry for entry in list_checkpoints(killed.save_folder) if entry.status == "committed"][-1]
    jobs = []
    for number, ranks in enumerate(options.ranks[1:], start=1):
        name = f"resumed-{number}"
        job = replace(killed, name=name, ranks=ranks, folder=options.out / name)
        if number > 1:
            job = replace(job, save_folder=f"{base}/{name}", load_path=f"{killed.save_folder}/{newest.name}")
        run_job(job, launchers, console=console)
        jobs.append((job, newest.step or 0))
    return jobs


def _compare_killed(killed: JobSpec, reference: Evidence) -> Verdict:
    """Compare the steps of the killed job before its end with the uninterrupted run."""
    evidence = read_evidence(killed.journal, killed.ranks)
    last = min(max(evidence.batches, default=0), max(evidence.losses, default=0))
    start = min(evidence.batches, default=1) - 1
    return compare(killed.name, evidence, reference, start=start, last=last)


def show_command(console: Console, verb: str, uri: str) -> None:
    """Run `hocket-ckpt VERB URI`, and print the command and its output."""
    # The command's own file need not be beside Python: pip puts it elsewhere with `--user`, and on Debian.
    completed = subprocess.run(
        [sys.executable, "-P", "-m", "hocket.ckpt", verb, uri],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": str(console.width)},
    )
    console.print(f"[dim]$ hocket-ckpt {verb} {uri}[/]")
    console.print((completed.stdout + completed.stderr).rstrip(), markup=False, highlight=False)
