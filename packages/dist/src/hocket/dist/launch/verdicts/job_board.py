"""Entries that the launchers of a job's machines write for one another, in the store at which they meet."""

import argparse
import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # public, and missing from its annotations
    PrefixStore,
    Store,
    TCPStore,
)

from hocket.dist.launch.verdicts.findings import Finding
from hocket.dist.ranks.preflight import rendezvous_address

_POLL_S = 0.2
_CONNECT_S = 2.0
_SILENCE_S = 1.0
"""Seconds without an answer after which the store is not awaited at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry of another launcher.

    Attributes:
        kind: `here`, `started` ranks, `failure`, `answer` to a failure, `final` failure, `done` with its
            ranks, which have ended well, or `gone`.
        launcher: A name of the launcher.
        machine: The number of its machine.
        host: The name of its machine.
        nodes: Its `--nnodes`.
        ranks: The ranks that it has started.
        findings: What it has found about them.
        arrived_at: The time of its arrival, by this machine's monotonic clock.
    """

    kind: str
    launcher: str
    machine: int
    host: str
    nodes: str
    ranks: list[int] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    arrived_at: float = 0.0


class JobBoard:
    """The entries of all launchers of a job. A thread of its own talks to the store.

    A request to a machine whose network is gone waits for a quarter of an hour. The other threads therefore
    never talk to the store, and wait for the board's thread with a deadline.

    Args:
        options: The options of `hocket-launch`.
        hear: Called with each entry of another launcher, in the thread of the board.
    """

    def __init__(self, options: argparse.Namespace, hear: Callable[[Entry], None]) -> None:
        self._options = options
        self._hear = hear
        self._name = f"{options.node_rank}/{socket.gethostname()}/{os.getpid()}"
        self._outbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._entries: list[Entry] = []
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._asked_at: float | None = None
        self.write("here")
        self._thread = threading.Thread(target=self._run, name="hocket-board", daemon=True)
        self._thread.start()

    def write(self, kind: str, *, ranks: Sequence[int] = (), findings: Sequence[Finding] = ()) -> None:
        """Write an entry for the other launchers; returns at once."""
        self._outbox.put(
            {
                "kind": kind,
                "launcher": self._name,
                "machine": self._options.node_rank,
                "host": socket.gethostname(),
                "nodes": self._options.nnodes,
                "ranks": list(ranks),
                "findings": [finding.as_dict() for finding in findings],
            }
        )

    def findings(self, *, since: float) -> list[Finding]:
        """Return what the other launchers have found since a time of the monotonic clock."""
        with self._changed:
            recent = [entry for entry in self._entries if entry.arrived_at >= since]
        return [Finding.from_dict(values) for entry in recent for values in entry.findings]

    def hosts(self) -> dict[int, str]:
        """Return the hosts of the ranks of other machines, by rank."""
        with self._changed:
            return {rank: entry.host for entry in self._entries for rank in entry.ranks}

    def have_all_done(self) -> bool:
        """Return whether the ranks of all other launchers have ended well; False if none is known."""
        with self._changed:
            done = {entry.launcher for entry in self._entries if entry.kind == "done"}
            present = self._present()
        return bool(present | done) and present <= done

    def wait_for_findings(self, timeout_s: float, *, since: float) -> None:
        """Wait until each other launcher has written findings, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._told(since) >= self._present(), timeout_s)

    def part(self, farewell_s: float, *, failed_since: float | None = None) -> None:
        """Take leave, while the store is still there; nothing is heard or written from then on.

        Args:
            farewell_s: The seconds for which the launcher of machine 0, which has the store, waits at most
                for the others to take leave.
            failed_since: After a failure, the time since which those that can be reached have told of it.
        """
        if self._options.node_rank == 0:
            with self._changed:
                awaited = self._present() if failed_since is None else self._told(failed_since)
                self._changed.wait_for(lambda: not awaited & self._present(), farewell_s)
        self.write("gone")
        self.stop()
        asked_at = self._asked_at
        is_silent = asked_at is not None and time.monotonic() - asked_at > _SILENCE_S
        self._thread.join(timeout=0 if is_silent else 5 * _POLL_S)

    def stop(self) -> None:
        """Stop hearing and writing; nobody is told."""
        self._is_closing.set()

    def _told(self, since: float) -> set[str]:
        """Return the launchers that have written findings since a time of the monotonic clock."""
        return {entry.launcher for entry in self._entries if entry.findings and entry.arrived_at >= since}

    def _present(self) -> set[str]:
        """Return the other launchers that have come and not gone."""
        names = {entry.launcher for entry in self._entries if entry.kind == "here"}
        return names - {entry.launcher for entry in self._entries if entry.kind == "gone"}

    def _has_host_gone(self) -> bool:
        return any(entry.kind == "gone" and entry.machine == 0 for entry in self._entries)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store's machine has ended
            store = self._connect()
            num_read = 0
            # Once the launcher with the store has gone, the store ends, and torch would print warnings.
            while store is not None and not self._has_host_gone():
                is_last = self._is_closing.wait(_POLL_S)
                self._asked_at = time.monotonic()
                while not self._outbox.empty():
                    number = store.add("count", 1)
                    store.set(f"entry/{number}", json.dumps(self._outbox.get()))
                num_read = self._read(store, num_read)
                self._asked_at = None
                if is_last:
                    return

    def _connect(self) -> Store | None:
        """Return the store as soon as it can be reached; None if the job ends before."""
        host, port = rendezvous_address(self._options)
        while not self._is_closing.wait(_POLL_S):
            try:
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
            except OSError:
                continue
            client = TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False
            )
            return PrefixStore(f"hocket/board/{self._options.rdzv_id}", client)
        return None

    def _read(self, store: Store, num_read: int) -> int:
        for number in range(num_read + 1, store.add("count", 0) + 1):
            name = f"entry/{number}"
            if not store.check([name]):  # it is being written
                return number - 1
            entry = Entry(**json.loads(store.get(name)), arrived_at=time.monotonic())
            if entry.launcher != self._name:
                with self._changed:
                    self._entries.append(entry)
                    self._changed.notify_all()
                self._hear(entry)
            num_read = number
        return num_read
