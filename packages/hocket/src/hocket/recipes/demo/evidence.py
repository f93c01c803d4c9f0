"""The journals of the demo's jobs, and their comparison with the uninterrupted run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOSS = "loss/train/total"
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The samples and losses of one job.

    Attributes:
        ranks: Number of processes that the job ran on.
        batches: Step → samples of its global batch, in order.
        losses: Step → loss over the global batch.
    """

    ranks: int
    batches: dict[int, list[int]]
    losses: dict[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One job compared with the uninterrupted run.

    Attributes:
        name: Name of the job.
        ranks: Number of processes that the job ran on.
        first: First step compared.
        last: Last step compared.
        wrong_batches: Steps whose global batch had other samples, or another order.
        largest_difference: Largest relative difference of a loss.
        must_be_identical: Whether the losses had to agree in every bit.
        is_complete: Whether every expected step was run.
    """

    name: str
    ranks: int
    first: int
    last: int
    wrong_batches: list[int]
    largest_difference: float
    must_be_identical: bool
    is_complete: bool

    @property
    def passed(self) -> bool:
        """Whether all steps were run with the same batches, and losses differ by no more than is allowed."""
        limit = 0.0 if self.must_be_identical else TOLERANCE
        return self.is_complete and not self.wrong_batches and self.largest_difference <= limit


def read_evidence(journal: Path, ranks: int) -> Evidence:
    """Read the journals of a job's ranks.

    A step counts when every rank has written its line: in a killed job the last line may be cut short.
    """
    per_rank = [
        {line["step"]: line["ids"] for line in _lines(journal / f"samples-rank{rank}.jsonl")}
        for rank in range(ranks)
    ]
    steps = sorted(set.intersection(*(set(lines) for lines in per_rank)))
    batches = {step: [sample for lines in per_rank for sample in lines[step]] for step in steps}
    losses = {line["step"]: line[LOSS] for line in _lines(journal / "metrics.jsonl") if LOSS in line}
    return Evidence(ranks=ranks, batches=batches, losses=losses)


def compare(name: str, job: Evidence, reference: Evidence, *, start: int, last: int) -> Verdict:
    """Compare a job with the uninterrupted run.

    Args:
        name: Name of the job.
        job: The evidence of the job.
        reference: The evidence of the uninterrupted run.
        start: The step that the job resumed from; it must have run `start + 1` to `last`.
        last: The last step.
    """
    steps = range(start + 1, last + 1)
    present = [
        step for step in steps if step in job.batches and step in job.losses and step in reference.losses
    ]
    differences = [_difference(job.losses[step], reference.losses[step]) for step in present]
    return Verdict(
        name=name,
        ranks=job.ranks,
        first=start + 1,
        last=last,
        wrong_batches=[step for step in present if job.batches[step] != reference.batches.get(step)],
        largest_difference=max(differences, default=0.0),
        must_be_identical=job.ranks == reference.ranks,
        is_complete=bool(present) and list(present) == list(steps),
    )


def _difference(loss: float, reference: float) -> float:
    """Return the relative difference of two losses, infinite if one of them is NaN."""
    difference = abs(loss - reference) / abs(reference)
    return math.inf if math.isnan(difference) else difference


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
