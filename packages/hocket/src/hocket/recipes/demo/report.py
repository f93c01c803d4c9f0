"""The demo's table and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from hocket.recipes.demo.evidence import TOLERANCE, Evidence, Verdict


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a table with a row for each job that was compared with the uninterrupted run."""
    table = Table(title="Compared with the uninterrupted run", title_justify="left")
    for heading in ("job", "ranks", "steps", "global batches", "losses", ""):
        table.add_column(heading)
    for verdict in verdicts:
        batches = (
            f"differ at step {verdict.wrong_batches[0]}"
            if verdict.wrong_batches
            else "same samples, same order"
        )
        if not verdict.is_complete:
            batches = "steps are missing"
        table.add_row(
            verdict.name,
            str(verdict.ranks),
            f"{verdict.first}–{verdict.last}",
            batches,
            _losses(verdict),
            "[green]holds[/]" if verdict.passed else "[red]FAILS[/]",
        )
    return table


def _losses(verdict: Verdict) -> str:
    if verdict.largest_difference == 0.0:
        return "identical in every bit"
    allowed = "0 allowed" if verdict.must_be_identical else f"{TOLERANCE:.0e} allowed"
    return f"within {verdict.largest_difference:.1e} ({allowed})"


def draw_curves(path: Path, reference: Evidence, jobs: Mapping[str, Evidence], *, killed_at: int) -> None:
    """Draw the loss curves in one plot, and below it their differences from the uninterrupted run.

    Args:
        path: The PNG to write.
        reference: The uninterrupted run, drawn as a wide line under the others.
        jobs: The other jobs by name.
        killed_at: The last step that the killed job finished.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (loss_axes, difference_axes) = plt.subplots(
        2, 1, figsize=(9, 7), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    loss_axes.plot(
        list(reference.losses),
        list(reference.losses.values()),
        color="#d9d9d9",
        linewidth=9,
        label="uninterrupted",
    )
    for (name, job), style in zip(jobs.items(), ("-", "--", ":", "-.") * len(jobs), strict=False):
        steps = [step for step in job.losses if step in reference.losses]
        loss_axes.plot(
            steps,
            [job.losses[step] for step in steps],
            style,
            linewidth=2,
            label=f"{name} ({job.ranks} rank{'s' * (job.ranks > 1)})",
        )
        gaps = [abs(job.losses[s] - reference.losses[s]) / reference.losses[s] for s in steps]
        difference_axes.plot(steps, gaps, style, linewidth=2)
    for axes in (loss_axes, difference_axes):
        axes.axvline(killed_at, color="crimson", linewidth=1)
    loss_axes.annotate(
        " killed in a save",
        (killed_at, 0.98),
        xycoords=("data", "axes fraction"),
        color="crimson",
        va="top",
        rotation=90,
    )
    loss_axes.set_ylabel("loss, nats a byte")
    loss_axes.legend()
    difference_axes.axhline(TOLERANCE, color="grey", linewidth=1, linestyle="--")
    difference_axes.set_yscale("symlog", linthresh=1e-8)
    difference_axes.set_ylabel("relative difference")
    difference_axes.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
