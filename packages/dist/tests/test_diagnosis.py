"""The comparison of ranks after a failed collective."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from hocket.dist.ranks.diagnosis import diagnose_in_time
from hocket.dist.ranks.world import World

SERVER = """
from torch.distributed import TCPStore
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
input()
"""


def test_the_diagnosis_names_late_ranks_and_ends_where_the_store_is_silent() -> None:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            store = TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
            world = World(rank=0, world_size=2, local_rank=0, local_world_size=2)
            found = diagnose_in_time(store, world, grace_s=1.0)
            assert found is not None
            assert found.late == (1,)
            os.kill(server.pid, signal.SIGSTOP)
            began = time.monotonic()
            assert diagnose_in_time(store, world, grace_s=1.0) is None
            assert time.monotonic() - began < 30, "it waits for the timeout of the store"
        finally:
            server.kill()
    for thread in threading.enumerate():
        if thread.name == "hocket-diagnosis":
            thread.join(20)
