"""A rendezvous at etcd: what it needs is named, and a job outlives its machine 0."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest

from hocket.dist.errors import AbsentRanksError
from hocket.dist.launch import absent_machines
from hocket.dist.launch import options as launch_options
from hocket.dist.launch.logs import RankLogs
from hocket.dist.ranks.preflight import check_launcher, rendezvous_address
from support import launches
from support.hosts import check_ended, hosts, wait_for

NEEDED = ["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "127.0.0.1", "--rdzv-id", "job-7"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the name that the launcher looks for, without importing it."""
    if importlib.util.find_spec("etcd") is None:
        (tmp_path / "etcd.py").touch()
        monkeypatch.syspath_prepend(tmp_path)


def test_a_rendezvous_at_etcd_without_its_package_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("etcd") is not None:
        pytest.skip("python-etcd is installed")
    with pytest.raises(SystemExit):
        launch_options.parse(["--nnodes", "1:3", *NEEDED, "train.py"])
    assert "`--rdzv-backend etcd-v2` needs the package `python-etcd`" in capsys.readouterr().err


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("nodes", ["1", "1:3"])
@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("--rdzv-endpoint", "`--rdzv-backend etcd-v2` needs `--rdzv-endpoint HOST:2379`"),
        ("--rdzv-id", "needs `--rdzv-id NAME`, a new one for each job"),
    ],
)
def test_an_option_that_etcd_needs_is_named(
    capsys: pytest.CaptureFixture[str], left_out: str, message: str, nodes: str
) -> None:
    index = NEEDED.index(left_out)
    with pytest.raises(SystemExit):
        launch_options.parse(["--nnodes", nodes, *NEEDED[:index], *NEEDED[index + 2 :], "train.py"])
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("package")
def test_a_launcher_that_waits_for_others_at_etcd_names_the_options_of_etcd(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(absent_machines, "NOTICE_S", 0.05)
    options = launch_options.parse(["-n", "1", "--nnodes", "1:3", *NEEDED, "train.py"])
    with absent_machines.notice_absent_machines(options, RankLogs(str(tmp_path), local_world_size=1)):
        for watch in [one for one in threading.enumerate() if one.name == "hocket-absent-machines"]:
            watch.join(timeout=60)
    message = capsys.readouterr().err
    assert "have not all come to 127.0.0.1:2379" in message
    assert "with the same `--nnodes`, `--rdzv-endpoint` and `--rdzv-id`?" in message
    assert "machine 0?" not in message


@pytest.mark.usefixtures("package")
def test_an_etcd_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    options = launch_options.parse(
        ["--nnodes", "1:3", "--start-timeout", "1", *NEEDED, str(tmp_path / "train.py")]
    )
    assert rendezvous_address(options) == ("127.0.0.1", 2379)
    options.rdzv_endpoint = f"127.0.0.1:{launches.free_port()}"
    with pytest.raises(AbsentRanksError, match=r"`--rdzv-endpoint`.*did not answer within 1 s.*Is etcd"):
        check_launcher(options)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """The address of an etcd server."""
    if shutil.which("etcd") is None or importlib.util.find_spec("etcd") is None:
        pytest.skip("there is no command `etcd`, or no package `python-etcd`")
    address = f"127.0.0.1:{launches.free_port()}"
    command = ["etcd", "--enable-v2=true", "--data-dir", str(tmp_path / "etcd")]
    command += ["--listen-peer-urls", f"http://127.0.0.1:{launches.free_port()}"]
    for option in ("--listen-client-urls", "--advertise-client-urls"):
        command += [option, f"http://{address}"]
    with (tmp_path / "etcd.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                with closing(urlopen(f"http://{address}/version", timeout=5)):
                    break
            except OSError:
                assert time.monotonic() < deadline, (tmp_path / "etcd.log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        server.kill()
        server.wait(20)


@pytest.mark.slow
def test_a_job_that_meets_at_etcd_outlives_machine_0(tmp_path: Path, etcd: str) -> None:
    place = ["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", etcd, "--rdzv-id", "job-7"]
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    with hosts(tmp_path, "lost", "1:3", 3, conf="last_call_timeout=3", env=env, place=place) as launchers:
        wait_for(tmp_path, "up-0-*-3")
        first = json.loads(max(tmp_path.glob("start-0-*")).read_text())["pid"]
        os.kill(launchers[0].pid, signal.SIGKILL)
        launchers[0].wait(20)
        deadline = time.monotonic() + 20
        while launches.is_alive(first):
            assert time.monotonic() < deadline, "a rank outlives its launcher"
            time.sleep(0.05)
        lost_at = time.monotonic()
        for host in (1, 2):
            wait_for(tmp_path, f"up-{host}-*-2")
        print(f"the job goes on {time.monotonic() - lost_at:.1f} s after machine 0 was lost")
        (tmp_path / "end").touch()
        check_ended(tmp_path, launchers[1:])
