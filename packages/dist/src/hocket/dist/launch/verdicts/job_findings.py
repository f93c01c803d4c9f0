"""The findings of all launchers of a job, from which each of them makes the same verdict."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hocket.dist.launch.logs import RankLogs
from hocket.dist.launch.verdicts.findings import (
    Finding,
    find_end,
    find_states,
    has_missed_deadline,
    with_records,
)
from hocket.dist.launch.verdicts.job_board import Entry, JobBoard
from hocket.dist.launch.verdicts.verdict import Verdict, judge, report
from hocket.dist.ranks.preflight import is_held_by_machine_0

_ANSWERS_S = 2.0
"""Seconds to wait for the findings of other machines, where the cause is not on this one."""
_FAREWELL_S = 5.0
"""Seconds for which the launcher with the store stays for the others."""
_OWN_END_S = 2.0
"""Seconds after which a launcher ends, once another machine has told that the job is over."""
_BARRIER_S = 0.1
"""Seconds between two looks at whether the other launchers are done."""
_GONE_S = 0.5
"""Seconds for the last entry of a launcher that ends itself."""
_HANGS = ("stopped", "running", "waiting")
"""The states of a rank that does not end by itself in time."""


class JobFindings:
    """What this launcher and those of the job's other machines have found about a failure.

    Args:
        options: The options of `hocket-launch`.

    Attributes:
        is_over: Whether another machine has told that the job is over.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._logs: RankLogs | None = None
        self._board: JobBoard | None = None
        self._lock = threading.RLock()
        self._context: Any = None
        self._started_at = 0.0
        self._own: list[Finding] = []
        self._told_at: float | None = None
        self._follows = ""
        self._verdict: Verdict | None = None
        self._is_reporting = False
        self.is_over = False

    def notice_deadline(self) -> None:
        """Tell the other machines of a rank that has waited for others in vain, before its process ends.

        An interpreter with torch takes a second or two to end after an error.
        """
        with self._lock:
            if self._told_at is None and self._context is not None and has_missed_deadline(self._context):
                self._own = find_states(self._context)
                self._tell("failure")

    def observe(self, context: Any) -> None:
        """Note the states of the ranks, which are about to be ended; nothing where a signal ends the job.

        Args:
            context: The `PContext` of torch's agent.
        """
        if isinstance(sys.exception(), SignalException):
            if self._board is not None:
                self._board.stop()
            return
        has_failures = bool(getattr(context, "_failures", None))
        with self._lock:  # for ever where this launcher is being ended
            has_answered = self._told_at is not None
            if has_failures and not has_answered:
                self._own = find_states(context)
                self._tell("failure")
        if sys.exception() is not None:
            return  # the launcher ends, and not only its ranks
        is_running = any(handler.proc.poll() is None for handler in context.subprocess_handlers.values())
        if is_running and not has_failures and has_answered and (verdict := self.conclude()) is not None:
            # The ranks of this machine start again, because those of another have failed.
            _print(f"{verdict.text}; all ranks start again")

    def has_cause(self) -> bool:
        """Return whether this machine's ranks cannot go on, whatever they are about to report.

        Otherwise a rank whose connections are closed may be about to report its error, and gets more time.
        """
        return any(
            finding.kind in ("failed", "stopped") or (finding.kind == "waited" and finding.waited_s > 0)
            for finding in self._own
        )

    def conclude(self) -> Verdict | None:
        """Return the verdict; wait some seconds for other machines if the cause is not on this one."""
        board = self._board
        with self._lock:
            if self._own and (renewed := with_records(self._context, self._own)) != self._own:
                self._own = renewed
                self._tell("answer")
        if board is None:
            return judge(self._own, {}) if self._own else None
        if not any(finding.kind in ("failed", "stopped") for finding in self._own):
            board.wait_for_findings(self._answers_until() - time.monotonic(), since=self._started_at)
        findings = [*self._own, *board.findings(since=self._started_at)]
        return judge(findings, board.hosts()) if findings else None

    def conclude_without_host_0(self) -> Verdict | None:
        """Return the verdict after the store was lost, None if no machine has told of a failure before.

        The launcher with the store waits for the others, but not for ever.
        """
        board = self._board
        if board is None or not (self.is_over or board.findings(since=self._started_at)):
            return None
        with self._lock:
            self._is_reporting = True
        return self.conclude()

    def report(self, rank: int, failure: ProcessFailure, *, kept: bool) -> str:
        """Return the report of this launcher, which begins with the verdict.

        Args:
            rank: The rank that torch's agent has found first.
            failure: Its end.
            kept: Whether the folder of the ranks' logs stays.
        """
        return report(
            self._verdict or judge([find_end(rank, failure)], {}),
            self._follows,
            base_rank=rank - failure.local_rank,
            local_world_size=int(self._options.nproc_per_node),
            log_dir=self._options.log_dir,
            kept=kept,
        )

    @contextlib.contextmanager
    def kept(self, logs: LogsSpecs) -> Iterator[None]:
        """Note the ranks, within the block, that torch's agent starts, and exchange findings about them.

        Args:
            logs: The log specification of the agent; a `RankLogs` gets the processes of the ranks.
        """
        _, most = torchrun.parse_min_max_nnodes(self._options.nnodes)
        if isinstance(logs, RankLogs):
            self._logs = logs
            has_store = most > 1 and is_held_by_machine_0(self._options)
            self._board = JobBoard(self._options, self._hear) if has_store else None
        own: Any = api.PContext
        agent: Any = LocalElasticAgent
        start, wait_for_others = own.start, agent._exit_barrier

        def start_and_note(context: Any) -> None:
            start(context)
            self._begin(context)

        def wait_and_part(agent: Any) -> None:
            if self._board is None:
                wait_for_others(agent)
                return
            # A host of this agent's round that has begun another round never comes to the agent's barrier.
            self._board.write("done")
            barrier = threading.Thread(
                target=wait_for_others, args=(agent,), name="hocket-exit-barrier", daemon=True
            )
            barrier.start()
            while barrier.is_alive() and not self._board.have_all_done():
                barrier.join(_BARRIER_S)
            self._board.part(_FAREWELL_S)  # while the agent still has the store

        own.start, agent._exit_barrier = start_and_note, wait_and_part
        try:
            yield
        finally:
            own.start, agent._exit_barrier = start, wait_for_others
            if self._board is not None:
                self._board.stop()

    def _begin(self, context: Any) -> None:
        """Forget an earlier attempt, and note the ranks of this one."""
        with self._lock:
            self._own, self._told_at = [], None
            self._context, self._started_at = context, time.monotonic()
        if self._logs is not None:
            self._logs.pids = lambda: list(context.pids().values())
        if self._board is not None:
            self._board.write("started", ranks=[int(env["RANK"]) for env in context.envs.values()])

    def end_job(self, follows: str) -> None:
        """Tell the other launchers that no restart is left.

        Args:
            follows: The end of the verdict: how many restarts there were.
        """
        with self._lock:
            self._is_reporting, self._follows = True, follows
        answers_until = self._answers_until()
        if self._board is not None:
            self._board.write("final")
        self._verdict = self.conclude()
        if self._board is not None:
            # Those that have not told yet would lose the store, and with it the cause.
            self._board.wait_for_findings(answers_until - time.monotonic(), since=self._started_at)
            self._board.part(_FAREWELL_S, failed_since=self._started_at)

    def _answers_until(self) -> float:
        """Return the time, by the monotonic clock, until which other machines may tell their findings."""
        return (time.monotonic() if self._told_at is None else self._told_at) + _ANSWERS_S

    def _tell(self, kind: str) -> None:
        if self._told_at is None:
            self._told_at = time.monotonic()
        if self._board is not None:
            self._board.write(kind, findings=self._own)

    def _hear(self, entry: Entry) -> None:
        """Act on the entry of another launcher, in the thread of the board."""
        if entry.kind == "failure":
            with self._lock:
                if self._told_at is None and self._context is not None and self._context.subprocess_handlers:
                    self._own = find_states(self._context)
                    self._tell("answer")
        elif entry.kind == "final":
            self.is_over = True
            threading.Thread(target=self._end_with_job, name="hocket-end", daemon=True).start()
        elif entry.kind == "here" and entry.nodes != self._options.nnodes and self._may_refuse():
            own = (self._options.node_rank, socket.gethostname(), self._options.nnodes)
            first, second = sorted([own, (entry.machine, entry.host, entry.nodes)])
            text = (
                "machine {} on host {} was started with `--nnodes {}`, and ".format(*first)
                + "machine {} on host {} with `--nnodes {}`. ".format(*second)
                + "Start all machines with the same `--nnodes`"
            )
            threading.Thread(target=self._leave, args=(text,), name="hocket-end", daemon=True).start()

    def _may_refuse(self) -> bool:
        """Return whether another `--nnodes` ends this launcher: a job that machines may join runs on."""
        return self._options.rdzv_backend == "static" or self._context is None

    def _end_with_job(self) -> None:
        """End this launcher if it does not by itself: it may wait for a rank that hangs, or for machines."""
        deadline = time.monotonic() + _OWN_END_S
        verdict = self.conclude()
        while time.monotonic() < deadline and not self._hangs_here(verdict):
            if self._is_reporting:
                return
            time.sleep(0.05)
            verdict = self.conclude()
        self._leave("another machine has ended the job" if verdict is None else verdict.text)

    def _hangs_here(self, verdict: Verdict | None) -> bool:
        """Return whether the cause is a rank of this machine that others know to be late: it cannot end."""
        cause = None if verdict is None else verdict.cause
        if cause is None or cause.kind not in _HANGS or cause not in self._own:
            return False
        others = [] if self._board is None else self._board.findings(since=self._started_at)
        return any(cause.rank in finding.late for finding in (*self._own, *others))

    def _leave(self, text: str) -> None:
        """Kill the ranks and end this process, whatever its main thread waits for."""
        with self._lock:
            if self._is_reporting:
                return
            _print(text)
            for pid in [] if self._logs is None else self._logs.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self._board is not None:
                self._board.write("gone")
                time.sleep(_GONE_S)
            os._exit(1)


def _print(text: str) -> None:
    print(f"hocket-launch: {text}", file=sys.stderr, flush=True)
