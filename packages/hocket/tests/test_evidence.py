"""The demo's verdict fails for each way in which a resumed run can differ."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hocket.recipes.demo.evidence import LOSS, Evidence, compare, read_evidence

STEPS = range(1, 9)
REFERENCE = Evidence(
    ranks=2, batches={s: [10 * s, 10 * s + 1, 10 * s + 2] for s in STEPS}, losses={s: 5.0 / s for s in STEPS}
)


def resumed(ranks: int, start: int = 4) -> Evidence:
    return Evidence(
        ranks=ranks,
        batches={s: list(b) for s, b in REFERENCE.batches.items() if s > start},
        losses={s: loss for s, loss in REFERENCE.losses.items() if s > start},
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_run_passes(ranks: int) -> None:
    assert compare("resumed", resumed(ranks), REFERENCE, start=4, last=8).passed


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_order_of_the_same_samples_fails(ranks: int) -> None:
    job = resumed(ranks)
    job.batches[6].reverse()
    verdict = compare("resumed", job, REFERENCE, start=4, last=8)
    assert verdict.wrong_batches == [6]
    assert not verdict.passed


def test_a_loss_that_differs_in_one_bit_fails_only_on_the_same_number_of_ranks() -> None:
    for ranks, passes in ((2, False), (4, True)):
        job = resumed(ranks)
        job.losses[7] = math.nextafter(job.losses[7], 9.0)
        assert compare("resumed", job, REFERENCE, start=4, last=8).passed is passes


def test_a_loss_beyond_the_tolerance_fails_on_any_number_of_ranks() -> None:
    job = resumed(4)
    job.losses[7] *= 1 + 2e-5
    assert not compare("resumed", job, REFERENCE, start=4, last=8).passed


def test_a_nan_fails() -> None:
    job = resumed(4)
    job.losses[7] = math.nan
    assert not compare("resumed", job, REFERENCE, start=4, last=8).passed


@pytest.mark.parametrize("step", [5, 7, 8])
def test_a_missing_step_fails(step: int) -> None:
    job = resumed(4)
    del job.losses[step]
    assert not compare("resumed", job, REFERENCE, start=4, last=8).passed


def test_nothing_to_compare_fails() -> None:
    nothing = replace(resumed(2), batches={}, losses={})
    assert not compare("resumed", nothing, REFERENCE, start=8, last=8).passed


def test_a_journal_is_read_up_to_its_last_whole_step(tmp_path: Path) -> None:
    def line(**values: object) -> str:
        return json.dumps(values) + "\n"

    (tmp_path / "samples-rank0.jsonl").write_text(line(step=1, ids=[1, 2]) + line(step=2, ids=[5, 6]))
    (tmp_path / "samples-rank1.jsonl").write_text(line(step=1, ids=[3, 4]) + '{"step": 2, "id')
    (tmp_path / "metrics.jsonl").write_text(line(step=1, **{LOSS: 2.5}) + line(step=1, other=1.0))
    assert read_evidence(tmp_path, 2) == Evidence(ranks=2, batches={1: [1, 2, 3, 4]}, losses={1: 2.5})
