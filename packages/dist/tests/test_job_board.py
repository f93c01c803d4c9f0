"""Launchers of several machines exchange entries over the store at which they meet."""

import argparse
import threading
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from hocket.dist.launch.verdicts.findings import Finding
from hocket.dist.launch.verdicts.job_board import Entry, JobBoard
from support import leaks

FINDING = Finding(rank=1, pid=7, host="h", kind="stopped", line="a.py:1", since=1.0)


def test_findings_reach_the_other_launchers_and_the_last_one_waits_for_their_end() -> None:
    known = {path.name for path in Path("/proc/self/fd").iterdir()}
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    for path in Path("/proc/self/fd").iterdir():
        if path.name not in known and path.is_fifo():
            leaks.keep_file(int(path.name))  # torch does not close the pipe by which it ends a server
    heard: list[list[Entry]] = [[], []]
    boards = []
    for machine in (0, 1):
        options = argparse.Namespace(
            rdzv_endpoint="", master_addr="127.0.0.1", master_port=server.port, rdzv_id="r"
        )
        options.node_rank, options.nnodes = machine, "2"
        boards.append(JobBoard(options, heard[machine].append))
    deadline = time.monotonic() + 20
    while not all(heard):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first, second = boards
    second.write("started", ranks=[1])
    second.write("answer", findings=[FINDING])
    first.wait_for_findings(20, since=0.0)
    assert first.findings(since=0.0) == [FINDING]
    assert first.hosts() == {1: heard[0][0].host}
    assert second.findings(since=0.0) == []
    closing = threading.Thread(target=first.part, args=(20.0,))
    closing.start()
    closing.join(0.3)
    assert closing.is_alive(), "the store would end before the other launcher has read it"
    second.part(1.0)
    closing.join(10)
    assert not closing.is_alive()
    assert [entry.kind for entry in heard[0] if entry.kind != "here"] == ["started", "answer", "gone"]
