"""The report on a replayed step: its loss beside the recorded one, its first bad tensor, norms by layer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from hocket.native.cli.text import OutputConsole, columns, console, count, print_json
from hocket.recipes.replay.script import run_within
from hocket.trainer.errors import ReplayError
from hocket.trainer.log.loss_journal import same_bits
from hocket.trainer.replay import Replay, StepRecord, TensorRecord

Verdict = Literal["same", "different", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorms:
    """The 2-norms of a module's output and of its own parameters; None where there is none."""

    layer: str
    activation: float | None = None
    activation_gradient: float | None = None
    gradient: float | None = None
    parameter: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What the replay of a step has found."""

    step: int
    location: str
    """The folder or URI of the run's checkpoints."""
    checkpoint: str | None
    """The checkpoint that the replay started from; None for the start of the script."""
    checkpoint_step: int
    num_ranks: int
    """Number of data-parallel ranks of the replay."""
    loss: float | None
    """The mean loss of the global batch; None if the step has none."""
    recorded: float | None
    """The loss that the run recorded; None if no checkpoint has it."""
    recorded_in: str | None
    """The checkpoint that has it."""
    verdict: Verdict
    """Whether the loss has the bits of the recorded one; `unknown` if they cannot be compared."""
    reason: str
    """The reason for `unknown`, or the first step whose loss differs, in words; else empty."""
    nonfinite: TensorRecord | None
    """The first tensor that is not finite."""
    nonfinite_rank: int | None
    """The rank that has it."""
    layers: list[LayerNorms] = field(default_factory=list)
    """The norms by layer, of rank 0's activations and of whole parameters and gradients."""
    notices: list[str] = field(default_factory=list)


def replay_step(
    script: str | os.PathLike[str],
    step: int,
    arguments: Sequence[str] = (),
    *,
    run: str | os.PathLike[str] | None = None,
    from_start: bool = False,
    is_module: bool = False,
) -> StepReport:
    """Run a step of a training again from the nearest checkpoint before it, and report on its tensors.

    The script runs in this process, up to the end of the step; its trainer saves and logs nothing. On several
    ranks, each rank calls this function. Every rank returns the same report.

    Args:
        script: A Python file, the YAML file of `hocket train`, or the name of a module.
        step: The step, from 1 on, as loggers count.
        arguments: The script's arguments, as the run had them.
        run: The folder or URI of the run's checkpoints; None for the `save_folder` of the script's trainer.
        from_start: Whether to run the script from its beginning, without a checkpoint.
        is_module: Whether `script` is the name of a module.

    Raises:
        ReplayError: No checkpoint is before the step, the script ends before it, or the run had other ranks
            whose samples this process cannot join.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ReplayError(f"`step` is {step!r}: expected an integer from 1 on")
    place = None if run is None else os.fspath(run)
    asked = Replay(step=step, run=place, from_start=from_start)
    run_within(asked, os.fspath(script), arguments, is_module=is_module)
    return _report(asked)


def _report(asked: Replay) -> StepReport:
    verdict, reason = _compare(asked)
    rank, bad = first_nonfinite(asked.last)
    return StepReport(
        step=asked.step,
        location=asked.location,
        checkpoint=None if asked.start is None else asked.start.name,
        checkpoint_step=asked.start_step,
        num_ranks=asked.num_ranks,
        loss=asked.last[0].loss,
        recorded=asked.recorded.get(asked.step),
        recorded_in=asked.recorded_in,
        verdict=verdict,
        reason=reason,
        nonfinite=bad,
        nonfinite_rank=rank,
        layers=_layers(asked.last[0]),
        notices=asked.last[0].notices,
    )


def _compare(asked: Replay) -> tuple[Verdict, str]:
    """Compare the replayed losses with the recorded ones."""
    losses = asked.losses.losses()
    if asked.step not in losses:
        return "unknown", "the step has no loss, as one of `steps_to_skip` has none"
    if asked.step not in asked.recorded:
        return "unknown", "no checkpoint from this step on recorded its loss"
    if asked.is_other_ranks:
        return "unknown", "the run had another number of ranks, which add up in another order"
    compared = [step for step in sorted(losses) if asked.start_step < step <= asked.step]
    first = next(
        (step for step in compared if step in asked.recorded and not _is_same(asked, losses, step)), None
    )
    if first is None:
        return "same", ""
    if first == asked.step:
        return "different", "the losses of the steps before it, from the checkpoint on, have the same bits"
    told = f"the loss of step {first} differs already: {losses[first]!r}, recorded {asked.recorded[first]!r}"
    return "different", told


def _is_same(asked: Replay, losses: dict[int, float], step: int) -> bool:
    return same_bits(losses[step], asked.recorded[step])


def first_nonfinite(records: Sequence[StepRecord]) -> tuple[int | None, TensorRecord | None]:
    """Return the first tensor that is not finite over all ranks, after its rank; None for both if none is."""
    found = [(*first, one.rank) for one in records if (first := one.first_nonfinite()) is not None]
    if not found:
        return None, None
    _, tensor, rank = min(found, key=lambda one: (one[0], one[2]))
    return rank, tensor


def _layers(record: StepRecord) -> list[LayerNorms]:
    """Return the norms of the modules that have parameters of their own, or an output."""
    norms: dict[str, dict[str, float]] = {one.name: {} for one in record.tensors if one.kind == "activation"}
    columns_of = {"activation": "activation", "gradient of activation": "activation_gradient"}
    for one in record.tensors:
        if one.kind in columns_of:
            # Of several microbatches or calls, the first.
            norms.setdefault(one.name, {}).setdefault(columns_of[one.kind], one.norm)
        elif one.kind in ("gradient", "parameter"):
            layer = norms.setdefault(one.name.rpartition(".")[0], {})
            layer[one.kind] = (layer.get(one.kind, 0.0) ** 2 + one.norm**2) ** 0.5
    return [LayerNorms(layer=name, **found) for name, found in norms.items()]


def show(report: StepReport, *, limit: int, as_json: bool) -> None:
    """Print a report."""
    if as_json:
        print_json(as_plain(report))
        return
    out = console()
    start = (
        f"`{report.checkpoint}` (step {report.checkpoint_step})"
        if report.checkpoint is not None
        else "the start of the script"
    )
    out.print(
        f"step {report.step} of `{report.location}`, from {start}, on {count(report.num_ranks, 'rank')}"
    )
    out.print(_loss_line(report))
    if report.nonfinite is None:
        out.print("all tensors are finite")
    else:
        bad = report.nonfinite
        where = "" if report.num_ranks == 1 else f" on rank {report.nonfinite_rank}"
        out.print(
            f"the first tensor that is not finite: {bad}{where}, with {bad.num_nan} NaN and {bad.num_inf} "
            f"infinite of {count(bad.num, 'element')}"
        )
    for notice in report.notices:
        out.print(f"note: {notice}")
    _show_layers(out, report, limit)


def _loss_line(report: StepReport) -> str:
    if report.loss is None:
        return f"no loss: {report.reason}"
    loss = f"loss {report.loss!r}"
    if report.verdict == "same":
        return f"{loss}: the same bits as `{report.recorded_in}` recorded"
    if report.verdict == "different":
        return f"{loss}: not what `{report.recorded_in}` recorded, {report.recorded!r}; {report.reason}"
    recorded = "" if report.recorded is None else f" (recorded: {report.recorded!r})"
    return f"{loss}{recorded}, not compared: {report.reason}"


def _show_layers(out: OutputConsole, report: StepReport, limit: int) -> None:
    shown = report.layers[: limit or None]
    rows = [["norms by layer", "activation", "its gradient", "gradient", "parameter"]]
    for one in shown:
        numbers = (one.activation, one.activation_gradient, one.gradient, one.parameter)
        rows.append([one.layer or "(the whole model)", *("" if n is None else f"{n:.6g}" for n in numbers)])
    for line in columns(rows):
        out.print(line)
    if len(shown) < len(report.layers):
        out.print(f"… {len(report.layers) - len(shown)} more (`--limit 0` shows all)")


def as_plain(found: object) -> dict[str, Any]:
    """Return what a replay has found as JSON has it: numbers that JSON lacks as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        if is_dataclass(value):
            return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
        return value

    plain_fields: dict[str, Any] = plain(found)
    return plain_fields
