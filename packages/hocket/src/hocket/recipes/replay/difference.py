"""The first step and tensor at which two runs part, found by replays of both."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hocket.native.cli.text import console, print_json
from hocket.recipes.replay.child import read_records
from hocket.recipes.replay.report import as_plain
from hocket.trainer.errors import ReplayError
from hocket.trainer.log.loss_journal import same_bits
from hocket.trainer.replay import StepRecord, TensorRecord

_AT_START = ("parameter", "buffer", "optimizer state")
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of two runs: a script with its arguments, and the folder of its checkpoints."""

    script: str
    arguments: Sequence[str]
    run: str | None
    is_module: bool
    num_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first difference between two runs, or the steps within which there is none."""

    start: int
    """The step that both replays started after."""
    until: int
    """The last step that was compared."""
    step: int | None = None
    """The step at which the runs part; None if they do not."""
    rank: int | None = None
    tensors: tuple[TensorRecord | None, TensorRecord | None] = (None, None)
    """The first tensor that differs, in each run; None where a run does not have it."""
    num_equal: int = 0
    """Number of tensors that were computed before it and are equal, on that rank."""
    hint: str = ""
    """A sentence on what the place of the difference means; or, if there is none, on a difference between the
    recorded losses or the checkpoints, which the replays do not repeat."""


@dataclass(slots=True)
class _Survey:
    """What the checkpoints of a run tell."""

    steps: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    location: str = ""


def find_difference(one: Side, other: Side, *, step: int | None = None) -> Difference:
    """Find the first step and tensor at which two runs part.

    The losses in the checkpoints bound the search. Both runs are then replayed in processes of their own from
    the last checkpoint of a common step before it, or from an earlier one if the checkpoints differ.

    Args:
        one: A run.
        other: The run to compare it with.
        step: The last step to compare; None for the first step whose recorded losses differ, or else for the
            last step that both runs recorded.

    Raises:
        ReplayError: A run cannot be replayed, or both have no step in common.
    """
    if step is not None and step < 1:
        raise ReplayError(f"`step` is {step!r}: expected an integer from 1 on")
    with tempfile.TemporaryDirectory(prefix="hocket-replay-") as folder:
        surveys = [
            _survey(side, Path(folder) / f"survey-{number}") for number, side in enumerate((one, other))
        ]
        until = _bound(*surveys) if step is None else step
        starts = sorted((done for done in surveys[0].steps & surveys[1].steps if done < until), reverse=True)
        found = None
        unlike: int | None = None
        for start in [*starts, 0]:
            found = _compare(one, other, start, until, Path(folder))
            if found.step is None or not _is_at_start(found) or not start:
                break
            unlike = start
        assert found is not None
        if found.step is None:
            return replace(found, hint=not_repeated(_first_other_loss(*surveys), until, unlike))
        return found


def not_repeated(parted: int | None, until: int, unlike: int | None) -> str:
    """Return a sentence on a difference that equal replays do not repeat, or an empty text.

    Args:
        parted: The first step whose recorded losses differ.
        until: The last step that was compared.
        unlike: The first step whose checkpoints were found to differ.
    """
    if parted is not None and parted <= until:
        what = f"the recorded losses differ from step {parted} on"
    elif unlike is not None:
        what = f"the checkpoints of step {unlike} differ"
    else:
        return ""
    return (
        f"{what}, which the replays do not repeat: the runs had other arguments, data, code or libraries "
        "than now. `--other-arguments` states those of the other run"
    )


def _bound(one: _Survey, other: _Survey) -> int:
    """Return the first step whose recorded losses differ, else the last step that both runs have."""
    parted = _first_other_loss(one, other)
    last = min(max(survey.steps | survey.losses.keys(), default=0) for survey in (one, other))
    if not last:
        empty = one if not one.steps else other
        raise ReplayError(
            f"`{empty.location}` has no checkpoint, so there is no step to compare; give `--step`"
        )
    return last if parted is None else parted


def _first_other_loss(one: _Survey, other: _Survey) -> int | None:
    """Return the first step whose recorded losses differ."""
    common = sorted(one.losses.keys() & other.losses.keys())
    return next((step for step in common if not same_bits(one.losses[step], other.losses[step])), None)


def _is_at_start(found: Difference) -> bool:
    """Return whether the runs differ already in what their checkpoints hold."""
    kinds = {one.kind for one in found.tensors if one is not None}
    return found.step == found.start + 1 and kinds <= set(_AT_START) and not found.hint


def _survey(side: Side, spec: Path) -> _Survey:
    _run_child(side, spec, step=1, before=2, surveys=True)
    found = json.loads(spec.with_suffix(".found").read_text(encoding="utf-8"))
    return _Survey(set(found["steps"]), dict(found["losses"]), found["location"])


def _compare(one: Side, other: Side, start: int, until: int, folder: Path) -> Difference:
    """Replay both runs from the same step on, and compare their records."""
    specs = []
    for number, side in enumerate((one, other)):
        specs.append(folder / f"from-{start}-{number}")
        _run_child(side, specs[-1], step=until, before=start + 1, surveys=False)
    differences = []
    for rank in range(one.num_ranks):
        ones, others = (read_records(spec, rank) for spec in specs)
        if (found := first_difference(ones, others, rank)) is not None:
            differences.append(found)
    if not differences:
        return Difference(start=start, until=until)
    first = min(differences, key=lambda found: (found.step or 0, found.num_equal, found.rank or 0))
    return replace(first, start=start, until=until)


def first_difference(
    ones: Sequence[StepRecord], others: Sequence[StepRecord], rank: int
) -> Difference | None:
    """Return the first difference between the records of a rank in two runs; None if they are equal."""
    num_equal = 0
    for one, other in zip(ones, others, strict=True):
        pairs = list(_paired(one, other))
        for index, (left, right) in enumerate(pairs):
            if left is not None and right is not None and _is_same(left, right):
                num_equal += 1
                continue
            if left is not None and left.kind in ("gradient of activation", "gradient"):
                # The loss is recorded after the backward pass, and was computed before it.
                left, right = next(
                    (pair for pair in pairs[index:] if pair[0] is not None and _is_other_loss(*pair)),
                    (left, right),
                )
            hint = _hint(pairs, index)
            return Difference(
                start=0,
                until=0,
                step=one.step,
                rank=rank,
                tensors=(left, right),
                num_equal=num_equal,
                hint=hint,
            )
    return None


def _paired(one: StepRecord, other: StepRecord) -> Iterator[tuple[TensorRecord | None, TensorRecord | None]]:
    for index in range(max(len(one.tensors), len(other.tensors))):
        yield (
            one.tensors[index] if index < len(one.tensors) else None,
            other.tensors[index] if index < len(other.tensors) else None,
        )


def _is_same(left: TensorRecord, right: TensorRecord) -> bool:
    return (left.kind, left.name, left.num, left.digest) == (right.kind, right.name, right.num, right.digest)


def _is_other_loss(left: TensorRecord | None, right: TensorRecord | None) -> bool:
    if left is None or right is None:
        return False
    return left.kind == right.kind == "loss" and left.digest != right.digest


def _hint(pairs: Sequence[tuple[TensorRecord | None, TensorRecord | None]], index: int) -> str:
    """Return what the place of a difference means, or an empty text."""
    left, right = pairs[index]
    if left is None or right is None or (left.kind, left.name) != (right.kind, right.name):
        return "the runs compute other tensors: their models or microbatches are not the same"
    before = {one.kind for one, _ in pairs[:index] if one is not None}
    if left.kind == "batch":
        return "the runs train on other samples"
    if left.kind in ("updated parameter", "optimizer state") and "gradient" in before:
        return (
            "the gradients are equal, so the update differs: the optimizer's settings, such as the learning "
            "rate, clipping, or an algorithm"
        )
    if left.kind == "activation" and "parameter" in before:
        return (
            "batch and parameters are equal, so the computation differs: the code, random numbers, or a "
            "kernel"
        )
    return ""


def _run_child(side: Side, spec: Path, *, step: int, before: int, surveys: bool) -> None:
    """Run a replay in a process of its own, or a job of several ranks.

    Raises:
        ReplayError: It failed.
    """
    state: dict[str, Any] = {
        "script": side.script,
        "arguments": list(side.arguments),
        "run": side.run,
        "is_module": side.is_module,
        "step": step,
        "before": before,
        "surveys": surveys,
    }
    spec = spec.with_suffix(".json")
    spec.write_text(json.dumps(state), encoding="utf-8")
    module = "hocket.recipes.replay.child"
    launcher = [] if side.num_ranks == 1 else ["-m", "hocket.dist.launch", "-n", str(side.num_ranks)]
    with spec.with_suffix(".log").open("w+", encoding="utf-8", errors="replace") as log:
        code = subprocess.call(
            [sys.executable, *launcher, "-m", module, str(spec)], stdout=log, stderr=subprocess.STDOUT
        )
        if not code:
            return
        log.seek(0)
        output = log.read()[-_TAIL_CHARACTERS:]
    told = spec.with_suffix(".error")
    reason = told.read_text(encoding="utf-8") if told.exists() else f"its output ends with\n{output}"
    where = side.script if side.run is None else f"{side.script}` with the checkpoints in `{side.run}"
    raise ReplayError(f"the replay of `{where}` failed: {reason}")


def show(found: Difference, *, as_json: bool) -> None:
    """Print the first difference between two runs."""
    if as_json:
        print_json(as_plain(found))
        return
    out = console()
    start = f"step {found.start + 1}" if found.start else "the start of the scripts"
    if found.step is None:
        who = "replays" if found.hint else "runs"
        out.print(
            f"the {who} do not part: from {start} to step {found.until}, every tensor has the same bits"
        )
        if found.hint:
            out.print(found.hint)
        return
    left, right = found.tensors
    named = left if left is not None else right
    out.print(
        f"the runs part in step {found.step}: {named} on rank {found.rank}, the first of its tensors that "
        f"differs ({found.num_equal} before it, from {start} on, are equal)"
    )
    if left is not None and right is not None:
        out.print(f"norms: {left.norm!r} and {right.norm!r}")
    if found.hint:
        out.print(found.hint)
