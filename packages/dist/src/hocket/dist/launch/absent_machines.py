"""Messages about machines that have not joined the launcher's rendezvous."""

import argparse
import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import LogsSpecs

from hocket.dist.launch.logs import RankLogs
from hocket.dist.ranks.preflight import (
    INTERFACES,
    describe_route,
    is_held_by_machine_0,
    rendezvous_address,
)
from hocket.dist.ranks.stack_dump import process_state

NOTICE_S = 10.0
"""Seconds after which machines that have not come are named."""
SILENCE_S = 15.0
"""Seconds without an answer after which machine 0 is named."""
LOST_S = 30.0
"""Seconds without an answer after which a launcher whose ranks have ended ends, too."""

_POLL_S = 5.0
_CONNECT_S = 5.0
_END_S = 0.5


def describe_absent_machines(options: argparse.Namespace, logs: LogsSpecs, error: Exception) -> str:
    """Return the message for a rendezvous that failed, or for one that was lost while ranks ran.

    Args:
        options: The options of `hocket-launch`.
        logs: The log specification of the agent; a `RankLogs` records whether ranks were started.
        error: Torch's error.
    """
    host, port = rendezvous_address(options)
    this_machine = f"this is machine {options.node_rank}, {socket.gethostname()}, {describe_route(host)}"
    if not is_held_by_machine_0(options):
        return (
            f"the launchers could not meet at {host}:{port} (`--rdzv-endpoint`; {this_machine}): {error}. "
            "See whether the service there runs, and whether all machines have the same `--nnodes` and "
            "`--rdzv-id`"
        )
    if isinstance(logs, RankLogs) and logs.has_started.is_set():
        return (
            f"the connection to the launcher of machine 0 at {host}:{port} was lost ({this_machine}): "
            f"{error}. See the log of machine 0"
        )
    match = re.search(r"(\d+)/(\d+) clients joined", str(error))
    joined = f"{match[1]} of {match[2]} machines" if match else f"not all of {options.nnodes} machines"
    reason = f" Torch says: {error}" if str(error) else ""
    return f"{joined} came to {host}:{port} in time ({this_machine}). {_advice(options)}{reason}"


@contextlib.contextmanager
def notice_absent_machines(options: argparse.Namespace, logs: LogsSpecs) -> Iterator[None]:
    """Print a notice, within the block, if machines are awaited, or if machine 0 no longer answers.

    torch's agent waits in silence in both cases, for a minute or for ever. Once machine 0 is lost and the
    ranks of this machine have ended, the launcher ends: the calls in which it waits for machine 0 cannot be
    broken off.
    """
    _, most = torchrun.parse_min_max_nnodes(options.nnodes)
    if most == 1 or not isinstance(logs, RankLogs):
        yield
        return
    has_ended = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(options, logs, has_ended), name="hocket-absent-machines", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        has_ended.set()
        watch.join(timeout=_END_S)  # it may be connecting to a machine that is gone


def _watch(options: argparse.Namespace, logs: RankLogs, has_ended: threading.Event) -> None:
    host, port = rendezvous_address(options)
    place = f"this is machine {options.node_rank}, {socket.gethostname()}, {describe_route(host)}"
    started_at = time.monotonic()
    while not logs.has_started.is_set() and not has_ended.wait(0.1):
        if time.monotonic() - started_at > NOTICE_S:
            _print(
                f"after {NOTICE_S:g} s the machines of `--nnodes {options.nnodes}` have not all come to "
                f"{host}:{port} ({place}); waiting on. If this machine is the only one, leave `--nnodes` "
                f"out. {_advice(options)}"
            )
            break
    answered_at, is_told = time.monotonic(), False
    while options.node_rank and is_held_by_machine_0(options) and not has_ended.wait(_POLL_S):
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
        except OSError as error:
            silent_s = time.monotonic() - answered_at
            if silent_s > SILENCE_S and not is_told and not has_ended.is_set():
                is_told = True
                _print(
                    f"the launcher of machine 0 at {host}:{port} has not answered for {silent_s:.0f} s: "
                    f"{error} ({place}). Without it ranks cannot start again: see the log of machine 0, and "
                    "the network"
                )
            if silent_s > LOST_S and not has_ended.is_set() and not any(map(_is_alive, logs.pids())):
                _print(
                    f"ended, since the launcher of machine 0 at {host}:{port} has not answered for "
                    f"{silent_s:.0f} s, and the ranks of this machine have ended without it ({place}). Start "
                    "the job again: with `autoresume=True` it goes on from its newest checkpoint. Machines "
                    "meet at machine 0, so no job outlives it; a rendezvous of its own does, such as "
                    "`--rdzv-backend etcd-v2 --rdzv-endpoint HOST:2379 --rdzv-id NAME`"
                )
                os._exit(1)
        else:
            answered_at = time.monotonic()
            if is_told:
                is_told = False
                _print(f"the launcher of machine 0 at {host}:{port} answers again")


def _is_alive(pid: int) -> bool:
    """Return whether a process runs: it has not ended and is not stopped."""
    return process_state(pid) not in ("", "Z", "T")


def _print(text: str) -> None:
    print(f"hocket-launch: {text}", file=sys.stderr, flush=True)


def _advice(options: argparse.Namespace) -> str:
    _, port = rendezvous_address(options)
    if not is_held_by_machine_0(options):
        return (
            "Is `hocket-launch` running on every machine with the same `--nnodes`, `--rdzv-endpoint` and "
            "`--rdzv-id`?"
        )
    return (
        "Is `hocket-launch` running on every machine with the same `--nnodes`, `--master_addr` and "
        f"`--master_port`, each with its own `--node_rank`, and is port {port} open in the firewall of "
        f"machine 0? On machines with several networks, set {INTERFACES}."
    )
