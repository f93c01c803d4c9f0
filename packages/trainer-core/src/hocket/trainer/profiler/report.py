"""A report of a profile in words: the time and the memory of the steps by use, and advice."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hocket.trainer.profiler.figures import RankFigures
from hocket.trainer.profiler.memory import MemoryTimeline, show_bytes

# Shares, ratios and numbers a step from which a finding is reported.
_DATA_WAIT, _COMMUNICATION, _GAPS, _LISTENER, _SLOW_RANK = 0.05, 0.10, 0.20, 0.05, 1.10
_SLOW_STEP, _SYNCS_A_STEP, _SPIKE, _GROWTH = 2.0, 2.0, 1.5, 1.02
_LEAST_GROWTH = 1 << 20
"""Bytes by which the peaks of steps grow in a run before the growth is reported."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation about a profile.

    Attributes:
        topic: `"steps"`, `"data"`, `"communication"`, `"gaps"`, `"syncs"`, `"memory"`, `"listeners"` or
            `"ranks"`.
        share: The share of the steps' time that the observation explains; 0 if it is not about a share.
        text: The observation.
        advice: The advice that follows from the observation; empty if there is none.
    """

    topic: str
    share: float
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"- {self.text}" + (f"\n  {self.advice}" if self.advice else "")


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """The report of one window; `str` returns its text.

    Attributes:
        figures: The numbers of each rank that was gathered, rank 0's first.
        findings: The observations, in the order of a step.
    """

    figures: Sequence[RankFigures]
    findings: Sequence[Finding]

    def find(self, topic: str) -> Finding | None:
        """Return the first finding of a topic."""
        return next((finding for finding in self.findings if finding.topic == topic), None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def read_profile(figures: Sequence[RankFigures]) -> ProfileReport:
    """Return the report of a window from the figures of its ranks."""
    if not figures or not figures[0].steps:
        no_steps = Finding(
            "steps", 0.0, "no step was recorded", "Train more batches than `skip_first + wait`."
        )
        return ProfileReport(tuple(figures), (no_steps,))
    first = figures[0]
    findings = [_steps(first)]
    candidates = (_data(first), _communication(first), _gaps(first), _syncs(first), *_listeners(first))
    findings += [finding for finding in candidates if finding is not None]
    findings += [_memory(timeline) for timeline in first.memory]
    findings += _slow_rank(figures)
    return ProfileReport(tuple(figures), tuple(findings))


def _steps(figures: RankFigures) -> Finding:
    median, longest = statistics.median(figures.steps), max(figures.steps)
    parts = ", ".join(
        f"{name} {seconds / figures.total:.0%}"
        for name, seconds in sorted(figures.phases.items(), key=lambda item: -item[1])
        if seconds / figures.total >= 0.01
    )
    text = f"{len(figures.steps)} steps, median {median * 1e3:.1f} ms" + (f": {parts}" if parts else "")
    if len(figures.steps) > 1 and longest > _SLOW_STEP * median:
        return Finding(
            "steps",
            0.0,
            f"{text}; the slowest took {longest * 1e3:.1f} ms",
            "Single slow steps come from garbage collection, checkpoints, recompilation or a loader that "
            "restarts; look at that step in the trace.",
        )
    return Finding("steps", 0.0, text)


def _data(figures: RankFigures) -> Finding | None:
    share = figures.data_wait / figures.total
    if share < _DATA_WAIT:
        return None
    return Finding(
        "data",
        share,
        f"training waited for the data loader during {share:.0%} of the time",
        "Raise `num_workers`, keep workers with `persistent_workers=True`, move transforms out of the "
        "loader, or store the data decoded.",
    )


def _communication(figures: RankFigures) -> Finding | None:
    if not figures.window or figures.communication / figures.window < _COMMUNICATION:
        return None
    share = figures.communication / figures.window
    exposed = figures.exposed_communication / figures.window
    text = f"collectives ran during {share:.0%} of the time, {exposed:.0%} with nothing else running"
    if exposed < _COMMUNICATION:
        return Finding("communication", share, text, "They overlap with computation; no change is needed.")
    return Finding(
        "communication",
        share,
        text,
        "Compute more between collectives: a larger batch for each rank, gradients synchronised on the last "
        "microbatch only, sharding within a host and replicas across hosts, or reductions in bf16.",
    )


def _gaps(figures: RankFigures) -> Finding | None:
    if not figures.window:
        return None
    idle = max(0.0, 1.0 - figures.busy / figures.window)
    # Waits for data and collectives have findings of their own.
    unexplained = idle - figures.data_wait / figures.window - figures.exposed_communication / figures.window
    if unexplained < _GAPS:
        return None
    launches_per_step = figures.num_launches / len(figures.steps)
    mean_us = figures.busy / max(1, figures.num_launches) * 1e6
    if figures.has_device:
        text = (
            f"the device was idle during {idle:.0%} of the time, {unexplained:.0%} between kernels "
            f"({launches_per_step:.0f} kernels a step, {mean_us:.0f} µs each)"
        )
        advice = (
            "Launch fewer and larger kernels: `compile_config={}`, fused optimizers, a larger microbatch."
        )
    else:
        text = (
            f"no operator ran during {unexplained:.0%} of the time "
            f"({launches_per_step:.0f} operator calls a step)"
        )
        advice = (
            "Python between operators takes this time: use a larger microbatch, `compile_config={}` or a "
            "fused optimizer. Recording stacks (`torch_prof_with_stack`) inflates it."
        )
    return Finding("gaps", unexplained, text, advice)


def _syncs(figures: RankFigures) -> Finding | None:
    syncs_per_step = figures.num_syncs / len(figures.steps)
    if not figures.has_device or syncs_per_step < _SYNCS_A_STEP:
        return None
    return Finding(
        "syncs",
        0.0,
        f"the host waited for the device or read a tensor's value {syncs_per_step:.0f} times a step",
        "Log tensors instead of `.item()`, and avoid `.cpu()`, `print` and Python `if`s on tensors "
        "in the step.",
    )


def _listeners(figures: RankFigures) -> list[Finding]:
    findings = []
    for name, seconds in sorted(figures.listeners.items(), key=lambda item: -item[1]):
        share = seconds / figures.total
        if share >= _LISTENER:
            text = (
                f"`{name}` took {share:.0%} of the time ({seconds / len(figures.steps) * 1e3:.1f} ms a step)"
            )
            findings.append(Finding("listeners", share, text, "Run it less often, or outside of the step."))
    return findings


_ADVICE_ON_PEAK = {
    "forward": "Activations dominate: use activation checkpointing or a smaller microbatch.",
    "loss": "The logits dominate: use `hocket.trainer.loss.linear_cross_entropy` or a smaller microbatch.",
    "backward": "Activations and gradients dominate: use activation checkpointing or a smaller microbatch.",
    "optimizer": "The optimizer's state and temporaries dominate: use a fused optimizer, or shard its state.",
}


def _memory(timeline: MemoryTimeline) -> Finding:
    phase = timeline.phase_at(timeline.peak[0])
    text = f"{timeline.device}: memory peaked at {show_bytes(timeline.peak[1])} above the start, in {phase}"
    if timeline.live_at_peak:
        largest = timeline.live_at_peak[0]
        text += (
            f"; the largest part is {show_bytes(largest.num_bytes)} in {largest.count} tensors of "
            f"`{largest.operator}` ({largest.phase})"
        )
    peaks = _peaks_of_steps(timeline)
    is_growing = len(peaks) > 2 and all(b > a * _GROWTH for a, b in pairwise(peaks[1:]))
    if is_growing and peaks[-1] - peaks[1] > _LEAST_GROWTH:
        return Finding(
            "memory",
            0.0,
            f"{text}; each step's peak was higher than the one before ({', '.join(map(show_bytes, peaks))})",
            "Something keeps tensors of earlier steps: losses collected with their graph, outputs kept by a "
            "callback, or growing batches.",
        )
    if len(peaks) > 1 and max(peaks) > _SPIKE * statistics.median(peaks):
        return Finding(
            "memory",
            0.0,
            f"{text}; one step's peak was {max(peaks) / statistics.median(peaks):.1f} times the median",
            "Batches differ in size: bound the length of sequences, or group samples of similar length.",
        )
    return Finding("memory", 0.0, text, _ADVICE_ON_PEAK.get(phase, ""))


def _peaks_of_steps(timeline: MemoryTimeline) -> list[int]:
    """Return the peak of each step; a step starts where a forward pass follows an optimizer's step."""
    starts = [
        phase.start_us
        for previous, phase in zip([None, *timeline.phases], timeline.phases, strict=False)
        if phase.name == "forward" and (previous is None or previous.name != "forward")
    ]
    optimizer_ends = [phase.end_us for phase in timeline.phases if phase.name == "optimizer"]
    bounds: list[float] = []
    for end in optimizer_ends:
        next_start = next((start for start in starts if start >= end), None)
        if next_start is not None:
            bounds.append(next_start)
    edges = [float("-inf"), *bounds, float("inf")]
    peaks = []
    for low, high in pairwise(edges):
        inside = [size for time, size in timeline.points if low <= time < high]
        if inside:
            peaks.append(max(inside))
    return peaks


def _slow_rank(figures: Sequence[RankFigures]) -> list[Finding]:
    """Return a finding on a rank whose own work takes longer, so that the others wait in collectives."""
    if len(figures) < 2:
        return []

    def own(one: RankFigures) -> float:
        return (one.busy + one.data_wait) if one.window else one.total

    by_work = sorted(figures, key=own)
    slowest = by_work[-1]
    median = statistics.median(own(one) for one in by_work[:-1])
    if not median or own(slowest) < _SLOW_RANK * median:
        return []
    finding = Finding(
        "ranks",
        own(slowest) / median - 1.0,
        f"rank {slowest.rank} works {own(slowest) / median - 1.0:.0%} longer than the others, "
        "which wait for it",
        "Look for a slower device, another process on that host, or an uneven share of the data.",
    )
    return [finding]
