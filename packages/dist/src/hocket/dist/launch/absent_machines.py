"""Messages about machines that have not joined the launcher's rendezvous."""

import argparse
import contextlib
import re
import socket
import sys
import threading
from collections.abc import Iterator

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import LogsSpecs

from hocket.dist.launch.logs import RankLogs
from hocket.dist.ranks.preflight import INTERFACES, PREFLIGHT_S, describe_route, rendezvous_address


def describe_absent_machines(options: argparse.Namespace, logs: LogsSpecs, error: Exception) -> str:
    """Return the message for a rendezvous that failed, or for one that was lost while ranks ran.

    Args:
        options: The options of `hocket-launch`.
        logs: The log specification of the agent; a `RankLogs` records whether ranks were started.
        error: Torch's error.
    """
    host, port = rendezvous_address(options)
    this_machine = f"this is machine {options.node_rank}, {socket.gethostname()}, {describe_route(host)}"
    if isinstance(logs, RankLogs) and logs.has_started.is_set():
        return (
            f"the connection to the launcher of machine 0 at {host}:{port} was lost ({this_machine}): "
            f"{error}. See the log of machine 0"
        )
    match = re.search(r"(\d+)/(\d+) clients joined", str(error))
    joined = f"{match[1]} of {match[2]} machines" if match else f"not all of {options.nnodes} machines"
    return f"{joined} came to {host}:{port} in time ({this_machine}). {_advice(port)} Torch says: {error}"


@contextlib.contextmanager
def notice_absent_machines(options: argparse.Namespace, logs: LogsSpecs) -> Iterator[None]:
    """Print a notice, within the block, if no rank was started after `PREFLIGHT_S` seconds.

    With `--nnodes MIN:MAX`, torch's agent waits longer than that, since machines may come back; with a fixed
    number of machines it fails instead.
    """
    least, most = torchrun.parse_min_max_nnodes(options.nnodes)
    if least == most or not isinstance(logs, RankLogs):
        yield
        return

    def notice() -> None:
        if logs.has_started.is_set():
            return
        host, port = rendezvous_address(options)
        print(
            f"hocket-launch: after {PREFLIGHT_S:g} s fewer than {least} machines have come to {host}:{port} "
            f"(this is {socket.gethostname()}, {describe_route(host)}); waiting on. {_advice(port)}",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(PREFLIGHT_S, notice)
    timer.name, timer.daemon = "hocket-absent-machines", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _advice(port: int) -> str:
    return (
        "Is `hocket-launch` running on every machine with the same `--nnodes`, `--master_addr` and "
        f"`--master_port`, each with its own `--node_rank`, and is port {port} open in the firewall of "
        f"machine 0? On machines with several networks, set {INTERFACES}."
    )
