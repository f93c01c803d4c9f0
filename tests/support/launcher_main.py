"""One launcher, forked from a process that has imported torch: `python -m support.launcher_main ARGUMENTS`.

It is `hocket-launch`, and forks its ranks from a copy of itself. `CLOCK_AHEAD_S` sets its clock ahead of that
of other launchers, `NETWORK` its network namespace, and `LOST_S` the time after which machine 0 is lost.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import os
import socket
import sys
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from hocket.dist.launch import absent_machines
from hocket.dist.launch.command import main
from hocket.dist.launch.warm.fork_safety import ImportRecord
from hocket.dist.launch.warm.rank_server import Server, own_path_entry
from hocket.dist.launch.warm.starter import RankServer, WarmProcess
from hocket.dist.ranks import rank_command

_NEW_NETWORK = 0x40000000  # `CLONE_NEWNET`, of linux/sched.h


class _Ahead(dt.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        seconds = float(os.environ["CLOCK_AHEAD_S"])
        return dt.datetime.now(tz) + dt.timedelta(seconds=seconds)


def _fork_server() -> RankServer:
    own_entry, record, launcher = own_path_entry(), ImportRecord(), os.getpid()
    own_end, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        own_end.close()
        rank_command.end_with_parent(launcher)
        Server(other_end, record, own_entry).serve()
    other_end.close()
    record.stop()
    return RankServer(own_end, WarmProcess(pid))


if __name__ == "__main__":
    if "NETWORK" in os.environ:
        with open(f"/var/run/netns/{os.environ['NETWORK']}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _NEW_NETWORK) == 0
    absent_machines.LOST_S = float(os.environ.get("LOST_S", absent_machines.LOST_S))
    if "CLOCK_AHEAD_S" in os.environ:
        dynamic_rendezvous.datetime = _Ahead  # type: ignore[attr-defined,misc]
    sys.exit(main(sys.argv[1:], server=_fork_server()))
