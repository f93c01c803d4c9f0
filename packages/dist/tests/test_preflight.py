"""The launcher's checks before ranks start, and its errors for machines that do not join."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from hocket.dist.launch import absent_machines
from hocket.dist.launch import command as launch
from hocket.dist.launch import options as launch_options
from hocket.dist.launch.logs import RankLogs
from hocket.dist.ranks import preflight
from support import launches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py"], "the script `absent.py` is no file"),
        (["python", "train.py"], "the script `python` is no file"),
        (["python3", "train.py"], "Leave it out: every rank runs Python"),
        (["-m", __file__], "is a file. Leave `-m` out"),
        (["-c", os.path.relpath(__file__)], "It is a script of Python: leave `-c` out"),
        (["-c", "no-such-command"], "`no-such-command` is not on `PATH`"),
        (["--stdout", "{node}", __file__], "the unknown field {node}"),
        (["-n", "3", "--stderr", "log", __file__], "one file for several ranks"),
        (["--stdout", "{rank:abc}", __file__], "`--stdout {rank:abc}` cannot format a rank"),
        (["--data", "/absent/a", "--data", "s3://b", __file__], "`--data` names /absent/a, which does not"),
        (["--log-dir", "/proc/absent", __file__], "`--log-dir` is '/proc/absent', which cannot be created"),
        (
            ["--nnodes", "2", "--node_rank", "1", "--master_addr", "host.invalid", __file__],
            "`host.invalid` (`--master_addr`) cannot be resolved",
        ),
    ],
)
def test_an_invalid_launch_raises_before_ranks_start(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(arguments) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        arguments = [
            "--nnodes",
            "2",
            "--node_rank",
            "0",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            str(port),
        ]
        assert launch.main([*arguments, __file__]) == 1
    assert f"port {port} of 127.0.0.1 (`--master_port`) cannot be used" in capsys.readouterr().err


def test_a_silent_machine_0_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "PREFLIGHT_S", 0.5)
    arguments = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "127.0.0.1", "--master_port", "9"]
    assert launch.main([*arguments, __file__]) == 1
    message = capsys.readouterr().err
    for words in ("127.0.0.1:9", "interface lo (127.0.0.1)", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert words in message


@pytest.mark.parametrize(
    ("nodes", "option", "words"),
    [
        ("2", "timeout=1", "1 of 2 machines came to 127.0.0.1:"),
        pytest.param(
            "2:3", "join_timeout=1", "not all of 2:3 machines came to 127.0.0.1:", marks=pytest.mark.slow
        ),
        pytest.param("2", "timeout", "torchrun does not take these options", marks=pytest.mark.slow),
    ],
)
def test_machine_0_reports_machines_that_do_not_join(
    tmp_path: Path, nodes: str, option: str, words: str
) -> None:
    """Test a fixed number of machines and MIN:MAX, whose rendezvous raises other errors."""
    place = ["--nnodes", nodes, "--node_rank", "0", "--master_addr", "127.0.0.1"]
    done = launches.run_forked(
        tmp_path, "-n", "1", *place, "--master_port", launches.free_port(), "--rdzv-conf", option, __file__
    )
    assert done.returncode == 1
    assert f"hocket-launch: error: {words}" in done.stderr
    if words.endswith(":"):
        assert "interface lo (127.0.0.1)" in done.stderr
        assert "set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launcher_that_waits_for_machines_logs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(absent_machines, "NOTICE_S", 0.05)
    options = launch_options.parse(["-n", "1", "--nnodes", "2:3", "--node_rank", "0", "x.py"])
    for has_started in (False, True):
        logs = RankLogs(str(tmp_path), local_world_size=1)
        if has_started:
            logs.has_started.set()
        with absent_machines.notice_absent_machines(options, logs):
            # Once ranks run, machine 0 has nothing to watch, and the thread may have ended already.
            for watch in [one for one in threading.enumerate() if one.name == "hocket-absent-machines"]:
                watch.join(timeout=60)
        message = capsys.readouterr().err
        words = "after 0.05 s the machines of `--nnodes 2:3` have not all come to 127.0.0.1:29400"
        assert (words in message) == (not has_started)


def test_a_launcher_whose_machine_0_is_gone_says_so_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(absent_machines, "SILENCE_S", 0.2)
    monkeypatch.setattr(absent_machines, "_POLL_S", 0.02)
    logs = RankLogs(str(tmp_path), local_world_size=1)
    logs.has_started.set()
    with socket.create_server(("127.0.0.1", 0)) as machine_0:
        place = ["--node_rank", "1", "--master_addr", "127.0.0.1"]
        port = machine_0.getsockname()[1]
        options = launch_options.parse(
            ["-n", "1", "--nnodes", "2", *place, "--master_port", str(port), "x.py"]
        )
        with absent_machines.notice_absent_machines(options, logs):
            time.sleep(0.4)
            assert capsys.readouterr().err == ""
            machine_0.close()
            time.sleep(0.8)
    words = f"the launcher of machine 0 at 127.0.0.1:{port} has not answered for"
    assert capsys.readouterr().err.count(words) == 1
