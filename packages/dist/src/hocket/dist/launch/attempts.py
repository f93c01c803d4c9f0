"""Attempts that all hosts of a job count alike, and clocks that they need not share.

torch's agent on each host counts the restarts of its own host. Ranks meet under a key of that number, so
hosts with different numbers never meet. With a fixed number of hosts, the number is a counter in the store of
the launchers here. With a number that changes, rank 0 opens a new store for each round.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # public, and missing from its annotations
    PrefixStore,
    TCPStore,
)
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    dynamic_rendezvous,
    registry,
)

from hocket.dist.errors import ConfigError
from hocket.dist.launch.elastic_answers import frequent_polls, prompt_answers
from hocket.dist.launch.logs import RankLogs
from hocket.dist.ranks.preflight import PREFLIGHT_S, await_listener, own_address, rendezvous_address

_KEY = "hocket/attempt"
_POLL_S = 0.2
_ANSWER_S = 30.0
_SETTLED_S = 1.0
_ALIVE_CONF = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=3"
"""A machine counts as lost after 6 s; torch's 15 s would be most of a restart."""
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def use_etcd(options: argparse.Namespace) -> None:
    """Complete the options of a rendezvous at etcd, which outlives any machine of the job.

    Raises:
        ConfigError: A package or an option is missing, on which torch would fail less clearly.
    """
    backend = f"`--rdzv-backend {options.rdzv_backend}`"
    if importlib.util.find_spec("etcd") is None:
        raise ConfigError(f"{backend} needs the package `python-etcd`: `pip install python-etcd`")
    if not options.rdzv_endpoint:
        raise ConfigError(f"{backend} needs `--rdzv-endpoint HOST:2379`, the address of etcd")
    if options.rdzv_id == "none":
        raise ConfigError(
            f"{backend} needs `--rdzv-id NAME`, a new one for each job: etcd keeps the state of earlier jobs"
        )
    if options.local_addr is None:
        options.local_addr = own_address(options.rdzv_endpoint.rpartition(":")[0] or options.rdzv_endpoint)
    options.rdzv_conf = f"{_ALIVE_CONF},{options.rdzv_conf}".strip(",")


def use_c10d(options: argparse.Namespace) -> None:
    """Select torch's c10d rendezvous, held by machine 0, so that machines can join and leave."""
    options.rdzv_backend = "c10d"
    options.rdzv_endpoint = f"{options.master_addr or '127.0.0.1'}:{options.master_port or 29400}"
    options.rdzv_id = options.rdzv_id if options.rdzv_id != "none" else "hocket"
    if options.local_addr is None:
        # Rank 0 of each round is found at this address; a host's name is not known everywhere.
        options.local_addr = own_address(options.master_addr or "127.0.0.1")
    if "is_host" not in options.rdzv_conf and options.node_rank is not None:
        added_conf = f"is_host={1 if options.node_rank == 0 else 0},{_ALIVE_CONF}"
        # Of a name given twice the last value holds: the user's.
        options.rdzv_conf = f"{added_conf},{options.rdzv_conf}".strip(",")


@contextlib.contextmanager
def shared_attempts(options: argparse.Namespace, logs: LogsSpecs) -> Iterator[None]:
    """Have all hosts start their ranks for the same attempt, within the block.

    Args:
        options: The options of `hocket-launch`.
        logs: The log specification of the agent; a `RankLogs` gives ranks the number of the attempt.
    """
    _, most = torchrun.parse_min_max_nnodes(options.nnodes)
    if most == 1 or not isinstance(logs, RankLogs):
        yield
    elif options.rdzv_backend != "static":
        with (
            _new_stores(),
            _own_clocks(),
            _prompt_rounds(_start_deadline(options)),
            frequent_polls(most),
            prompt_answers(),
        ):
            yield
    elif options.max_restarts:
        with _counting(options, logs):
            yield
    else:
        yield


class SharedAttempts(RendezvousHandler):
    """torch's rendezvous of a fixed number of hosts, with one counter of attempts for all of them.

    The host on which a rank fails raises the counter. The others find it raised and start their ranks again,
    too.

    Args:
        handler: torch's rendezvous.
        logs: Gets the number of the attempt for the ranks.
        address: Host and port of the store of the launchers.
    """

    def __init__(self, handler: RendezvousHandler, logs: RankLogs, address: tuple[str, int]) -> None:
        self._handler = handler
        self._logs = logs
        self._address = address
        self._newest = 0
        self._has_ended = threading.Event()
        self._watch = threading.Thread(target=self._poll, name="hocket-attempts", daemon=True)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts for the newest attempt, a new one if a rank of this host has failed.

        Raises:
            RendezvousError: Machine 0 does not answer. A request over the connection to it that is open would
                wait for a quarter of an hour if its network is gone.
        """
        if self._logs.attempt is not None:
            try:
                await_listener(*self._address, _ANSWER_S)
            except OSError as error:
                raise RendezvousError(f"no answer within {_ANSWER_S:g} s: {error}") from error
        info = self._handler.next_rendezvous()
        own, newest = self._logs.attempt, info.store.add(_KEY, 0)
        if own is not None and newest <= own:
            newest = int(info.store.compare_set(_KEY, str(own), str(own + 1)))
        self._logs.attempt = newest
        if self._watch.ident is None:
            self._watch.start()
        return info

    def num_nodes_waiting(self) -> int:
        """Return 1 if another host has begun a newer attempt: the agent then starts its ranks again."""
        return int(self._newest > (self._logs.attempt or 0))

    def close(self) -> None:
        """End the thread that watches the counter."""
        self._has_ended.set()
        if self._watch.is_alive():
            self._watch.join(timeout=2)

    def _poll(self) -> None:
        """Read the counter over a connection of this thread, on which nobody else waits."""
        with contextlib.suppress(RuntimeError):  # the store's host has ended; the ranks notice by themselves
            host, port = self._address
            client = TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False
            )
            store = PrefixStore(self._handler.get_run_id(), client)
            while not self._has_ended.wait(_POLL_S):
                self._newest = store.add(_KEY, 0)

    def get_backend(self) -> str:
        """See base class."""
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return self._handler.use_agent_store

    def is_closed(self) -> bool:
        """See base class."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """See base class."""
        self._handler.set_closed()  # type: ignore[no-untyped-call]

    def get_run_id(self) -> str:
        """See base class."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """See base class."""
        return self._handler.shutdown()


@contextlib.contextmanager
def _counting(options: argparse.Namespace, logs: RankLogs) -> Iterator[None]:
    """Wrap the rendezvous that torch's launcher makes, within the block."""
    made: list[SharedAttempts] = []
    own: Any = registry
    make = own.get_rendezvous_handler

    def make_shared(parameters: Any) -> RendezvousHandler:
        made.append(SharedAttempts(make(parameters), logs, rendezvous_address(options)))
        return made[-1]

    own.get_rendezvous_handler = make_shared
    try:
        yield
    finally:
        own.get_rendezvous_handler = make
        for handler in made:
            handler.close()


@contextlib.contextmanager
def _new_stores() -> Iterator[None]:
    """Have rank 0 open a store for each round, within the block.

    Otherwise hosts keep the address of an earlier round, and keys of it, which a new member cannot know.
    """
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    meet, is_shared = handler.next_rendezvous, handler.use_agent_store

    def meet_at_new_store(self: Any) -> RendezvousInfo:
        # Only for the call: a rank with a variable that its server did not have starts cold.
        before = os.environ.get(_OWN_STORE)
        os.environ[_OWN_STORE] = "1"
        try:
            info: RendezvousInfo = meet(self)
            return info
        finally:
            if before is None:
                del os.environ[_OWN_STORE]

    handler.next_rendezvous = meet_at_new_store
    handler.use_agent_store = property(lambda _: False)
    try:
        yield
    finally:
        handler.next_rendezvous, handler.use_agent_store = meet, is_shared


@contextlib.contextmanager
def _own_clocks() -> Iterator[None]:
    """Judge a host's heartbeats by when they come here, within the block, and not by the time that it wrote.

    torch compares the time of one host's clock with another's. A host whose clock is 15 s ahead takes all
    others for dead, removes them, and no launcher ends.
    """
    module: Any = dynamic_rendezvous
    holder, clock = module._BackendRendezvousStateHolder, module.datetime
    sanitize = holder._sanitize
    seen: dict[Any, tuple[Any, float]] = {}

    def sanitize_by_arrival(self: Any) -> None:
        now, written = time.monotonic(), dict(self._state.last_heartbeats)
        arrived = {}
        for node, stamp in written.items():
            if node not in seen or seen[node][0] != stamp:
                seen[node] = (stamp, now)
            arrived[node] = clock.now(UTC) - timedelta(seconds=now - seen[node][1])
        self._state.last_heartbeats = arrived
        sanitize(self)
        self._state.last_heartbeats = {node: written[node] for node in self._state.last_heartbeats}

    holder._sanitize = sanitize_by_arrival
    try:
        yield
    finally:
        holder._sanitize = sanitize


def _start_deadline(options: argparse.Namespace) -> float:
    """Return the time, by the monotonic clock, until which enough hosts for the first round have to come."""
    if "join_timeout" in options.rdzv_conf and options.start_timeout is None:
        return math.inf  # torch's own option says it
    return time.monotonic() + float(options.start_timeout or PREFLIGHT_S)


@contextlib.contextmanager
def _prompt_rounds(start_deadline: float) -> Iterator[None]:
    """Have rounds begin or fail, within the block, as soon as it is clear that they can.

    torch waits for `last_call_timeout` in each round for further hosts. That is right when a job starts. A
    later round opens when the last host has left the one before; those that left earlier wait for it by then.

    torch waits for 10 minutes (`join_timeout`) for enough hosts. That is right when a host was lost. A job
    that has never started waits for them as one with a fixed number of hosts does.

    Args:
        start_deadline: The time until which the first round waits for enough hosts.
    """
    operation: Any = dynamic_rendezvous._RendezvousJoinOp
    join, action = operation.__call__, dynamic_rendezvous._Action
    settled: dict[str, Any] = {"hosts": None, "since": 0.0}

    def join_promptly(self: Any, ctx: Any, deadline: float) -> Any:
        state, now = ctx.state, time.monotonic()
        if state.round == 0 and not state.complete and len(state.participants) < ctx.settings.min_nodes:
            deadline = min(deadline, start_deadline)
        chosen = join(self, ctx, deadline)
        hosts = (state.round, frozenset(state.participants), frozenset(state.wait_list))
        if hosts != settled["hosts"]:
            settled.update(hosts=hosts, since=now)
        may_begin = (
            chosen in (action.SYNC, action.KEEP_ALIVE)
            and state.round > 0
            and not (state.complete or state.wait_list)
            and ctx.node in state.participants
            and len(state.participants) >= ctx.settings.min_nodes
            and now - settled["since"] >= _SETTLED_S
        )
        return action.MARK_RENDEZVOUS_COMPLETE if may_begin else chosen

    operation.__call__ = join_promptly
    try:
        yield
    finally:
        operation.__call__ = join
