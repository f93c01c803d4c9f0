"""A drill: the run without a fault, a run for each fault, and the table of how the job took them."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.dist.drill.faults import Fault
from hocket.dist.drill.job import RUN, Outcome, Plan, Start, read_steps, run_job, start_launcher
from hocket.dist.errors import ConfigError, DistError

_START_S = 300.0
"""Seconds for the run without a fault, beside its steps; imports and downloads of the script count."""
_PREFLIGHT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one fault did to the job.

    Attributes:
        fault: The fault.
        next_step_s: Seconds from the fault to the next trained step; None if the job did not go on.
        end_s: Seconds from the fault to the end of the last launcher.
        is_survived: Whether all launchers ended with exit code 0.
        steps_again: Steps that were trained a second time; None if the job did not go on.
        is_equal: Whether the parameters after each step are those of the run without the fault, in every bit;
            None if the job did not go on.
        verdicts: The paragraph of each launcher.
        problem: The reason why the fault could not be injected; empty if it was.
    """

    fault: Fault
    next_step_s: float | None = None
    end_s: float = 0.0
    is_survived: bool = False
    steps_again: int | None = None
    is_equal: bool | None = None
    verdicts: tuple[str, ...] = ()
    problem: str = ""


def run_drill(
    script: Sequence[str],
    faults: Sequence[Fault],
    *,
    ranks: int = 2,
    steps: int = 20,
    timeout_s: float = 15.0,
    restarts: int = 1,
    folder: Path | None = None,
    tell: Callable[[str], None] = print,
    start: Start = start_launcher,
) -> list[Row]:
    """Run a job once without a fault and once with each fault, and print a table.

    Args:
        script: A training script and its arguments; `{run}` stands for a folder of each run's own.
        faults: The faults to inject.
        ranks: The number of ranks, on one machine; faults of hosts divide them between two launchers.
        steps: The optimizer steps after which a run is ended.
        timeout_s: The deadline of collectives.
        restarts: The restarts of the job.
        folder: The folder for logs and for `{run}`; a temporary one by default, which stays.
        tell: Prints a line.
        start: Starts a launcher.

    Raises:
        ConfigError: A number cannot be honoured.
        DistError: The job fails without a fault, or its runs do not begin alike.
    """
    if ranks < 2 or ranks % 2:
        raise ConfigError(f"`ranks` is {ranks}, expected an even number from 2: two hosts share them")
    if steps < 3:
        raise ConfigError(f"`steps` is {steps}, expected at least 3")
    folder = Path(tempfile.mkdtemp(prefix="hocket-drill-")) if folder is None else folder
    plan = Plan(
        script=list(script),
        folder=folder,
        ranks=ranks,
        restarts=restarts,
        steps=steps,
        timeout_s=timeout_s,
        start=start,
    )
    reference = run_job(plan, None, limit_s=_START_S + steps)
    if reference.codes != [0] or len(reference.steps) < 3:
        raise DistError(
            f"the job fails without a fault, with exit code {reference.codes[0]} after "
            f"{len(reference.steps)} optimizer steps:\n{reference.logs[0][-3000:].rstrip()}"
        )
    for rank in range(ranks):
        digest = read_steps(folder / "reference", rank)[-1][1]
        (folder / "reference" / f"last-{rank}").write_text(digest)
    step = max(2, len(reference.steps) * 2 // 3)
    took_s = reference.steps[-1][0] - reference.began_at
    tell(f"{len(reference.steps)} steps without a fault; each fault comes after step {step}. Logs: {folder}")
    rows = []
    for fault in faults:
        rows.append(_drill(plan, fault, reference, step=step, took_s=took_s))
        tell(_line(rows[-1]))
    for line in table(rows):
        tell(line)
    return rows


def _drill(plan: Plan, fault: Fault, reference: Outcome, *, step: int, took_s: float) -> Row:
    limit_s = 2 * took_s + plan.timeout_s + 60 + (_PREFLIGHT_S if fault.place == "launch" else 0)
    try:
        outcome = run_job(plan, fault, step=step, limit_s=limit_s)
    except OSError as error:
        return Row(fault=fault, problem=str(error))
    digests = [digest for _, digest, _ in reference.steps]
    if outcome.steps and fault.place == "rank" and outcome.steps[0][1] != digests[0]:
        raise DistError(
            f"the run with the fault `{fault.name}` began with other values than the run without a fault. "
            f"Either it has found the checkpoints of an earlier run: put `{RUN}` into the arguments of the "
            f"script, such as `--save_folder {RUN}`, which gives each run a folder of its own. Or the script "
            "sets no seed"
        )
    first_process = outcome.steps[0][2] if outcome.steps else None
    before = [digest for _, digest, process in outcome.steps if process == first_process]
    after = [digest for _, digest, process in outcome.steps if process != first_process]
    begins_at = digests.index(after[0]) if after and after[0] in digests else None
    return Row(
        fault=fault,
        next_step_s=outcome.next_step_s(),
        end_s=max(outcome.ended_s),
        is_survived=all(code == 0 for code in outcome.codes),
        steps_again=None if begins_at is None else len(before) - begins_at,
        is_equal=None if not after else begins_at is not None and after == digests[begins_at:],
        verdicts=tuple(outcome.verdicts()),
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table, in Markdown."""
    lines = [
        "| fault | next step after | ended after | trained again | parameters |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row.problem:
            lines.append(f"| {row.fault.title} | not injected: {row.problem} | | | |")
            continue
        next_step = "–" if row.next_step_s is None else f"{row.next_step_s:.1f} s"
        end = f"{row.end_s:.1f} s" + ("" if row.is_survived else ", failed")
        again = "–" if row.steps_again is None else f"{row.steps_again} steps"
        equal = {None: "–", True: "equal", False: "differ"}[row.is_equal]
        lines.append(f"| {row.fault.title} | {next_step} | {end} | {again} | {equal} |")
    return lines


def _line(row: Row) -> str:
    verdict = next(filter(None, row.verdicts), row.problem or "no verdict was printed")
    return f"{row.fault.name}: {verdict.removeprefix('hocket-launch: ')}"
