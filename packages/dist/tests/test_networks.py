"""A job over three network namespaces, as over three machines, one of which loses its network."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import launches

TIMEOUT_S = 10
TRAIN = f"""
import os, pathlib, sys, time, torch
from torch import nn
from hocket.dist import provide
out = pathlib.Path(sys.argv[1])
(out / f"started-{{os.environ['RANK']}}").touch()
while len(list(out.glob("started-*"))) < 3:
    time.sleep(0.05)
with provide({{}}, device="cpu", timeout_s={TIMEOUT_S}) as parallelism:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    module = parallelism.lay_out(model, [torch.optim.SGD(model.parameters())])
    for step in range(1000):
        module(torch.ones(2, 4)).sum().backward()
        parallelism.reduce_async(torch.ones(1)).wait()
        time.sleep(0.05)
        if step == 3:
            (out / f"ready-{{parallelism.data_parallel[0]}}").touch()
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


def _can_make_networks() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"hocket-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except subprocess.SubprocessError:
        return False
    return True


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Make three namespaces, 10.77.31.1 to 10.77.31.3, each with a link `hkN` to a bridge in a fourth."""
    if not _can_make_networks():
        pytest.skip("needs root and `ip netns`")
    switch, *names = (f"hocket-{name}-{os.getpid()}" for name in ("switch", "a", "b", "c"))
    made = []
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            own, port = f"hk{index}", f"port{index}"
            _ip("link", "add", own, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"10.77.31.{index + 1}/24", "dev", own)
            _ip("-n", name, "link", "set", own, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


@pytest.mark.slow
def test_a_machine_without_network_is_named_by_the_others(networks: list[str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    launchers = []
    common = ["-n", "1", "--nnodes", "3", "--master_addr", "10.77.31.1", "--master_port", "29571"]
    for node, name in enumerate(networks):
        options = [
            *common,
            "--node_rank",
            str(node),
            "--shutdown-timeout",
            "3",
            "--log-dir",
            tmp_path / "logs",
        ]
        own = {"NETWORK": name, "GLOO_SOCKET_IFNAME": f"hk{node}"}
        log = tmp_path / f"log-{node}"
        launchers.append(launches.fork_launcher(*options, path, tmp_path, env=own, log=log))
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("ready-*"))) < 3:
            assert time.monotonic() < deadline, (tmp_path / "log-0").read_text()
            assert launchers[0].poll() is None, (tmp_path / "log-0").read_text()
            time.sleep(0.1)
        _ip("-n", networks[2], "link", "set", "hk2", "down")
        cut_at = time.monotonic()
        for launcher in launchers[:2]:
            launcher.wait(timeout=150)
        assert time.monotonic() - cut_at < TIMEOUT_S + 100
    finally:
        for launcher in launchers:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
            for pid in children.read_text().split() if children.exists() else ():
                os.kill(int(pid), 9)
            if launcher.poll() is None:
                os.kill(launcher.pid, 9)
                launcher.wait(20)
    for node in range(2):
        report = (tmp_path / f"log-{node}").read_text()
        assert launchers[node].returncode != 0
        assert "hocket-launch: rank 2 on host " in report, report
        assert " did not answer, nor did the launcher there" in report, report
