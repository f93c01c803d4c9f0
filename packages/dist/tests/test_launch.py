"""`hocket-launch`, run as a command on real scripts."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.dist import absent_machines, launch, launch_options, preflight, rank_arguments, slurm
from hocket.dist.launch_logs import RankLogs

SCRIPT = """
import json, os, pathlib, signal, sys, time, traceback
rank, out, what = int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), sys.argv[2]
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "OMP_NUM_THREADS"]
print("output of rank", rank)
if what == "raise" and rank == 1:
    raise ValueError("rank one failed")
if what == "follow":
    written = out / "written"
    if rank == 1:
        try:
            raise ValueError("rank one failed")
        except ValueError:
            traceback.print_exc()
        written.touch()
    else:
        while not written.exists():
            time.sleep(0.05)
        raise RuntimeError("Connection closed by peer")
if what == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "wait":
    def stop(number, frame):
        (out / f"stopped-{rank}").write_text(signal.Signals(number).name)
        sys.exit(0)
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, stop)
(out / f"rank-{rank}").write_text(json.dumps({
    "env": {name: os.environ[name] for name in names}, "argv": sys.argv, "pid": os.getpid(),
    "address": bool(os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])),
}))
if what != "end":
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def _command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "hocket.dist.launch", *map(str, arguments)]


def _environment(tmp_path: Path) -> dict[str, str]:
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "TMPDIR": str(tmp_path)}


def _run(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*arguments),
        env=_environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_find_their_places_and_arguments(script: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "2", "-m", "job", tmp_path, "end", "--their=own", "-n", "7")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert found["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "OMP_NUM_THREADS": "1",
        }
        assert found["argv"][1:] == [str(tmp_path), "end", "--their=own", "-n", "7"]
        assert found["address"]
    assert done.stdout == "output of rank 0\n"
    assert not list(tmp_path.glob("hocket-launch-*")), "the logs of a job that went well were left"


def _check_traceback(script: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "2", script, tmp_path, "raise")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("hocket-launch: ") :]
    assert report.startswith("hocket-launch: rank 1 (pid")
    assert "failed first, with exit code 1" in report
    assert done.stderr.count("ValueError: rank one failed") == 1
    (logs,) = tmp_path.glob("hocket-launch-*")
    (stdout,) = logs.glob("*/attempt_0/1/stdout.log")
    assert stdout.read_text() == "output of rank 1\n"
    assert str(logs) in done.stderr
    assert not _is_alive(json.loads((tmp_path / "rank-0").read_text())["pid"])


def _check_first_cause(script: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "3", script, tmp_path, "follow")
    assert done.returncode == 1
    assert "hocket-launch: rank 1 failed first" in done.stderr
    assert "ValueError: rank one failed" in done.stderr
    assert "Ended because of it: rank" in done.stderr


def _check_killed_rank(script: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "2", "--log-dir", tmp_path / "logs", script, tmp_path, "kill")
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 (pid" in done.stderr
    assert "failed first, by SIGKILL" in done.stderr
    assert list((tmp_path / "logs").glob("*/attempt_0/1/stdout.log"))


@pytest.mark.slow
@pytest.mark.parametrize("check", [_check_traceback, _check_first_cause, _check_killed_rank])
def test_the_rank_that_failed_first_ends_the_job_and_is_named(
    script: Path, tmp_path: Path, check: Callable[[Path, Path], None]
) -> None:
    check(script, tmp_path)


DIST_SCRIPT = """
import sys, torch
from torch import nn
from hocket.dist import provide
with provide({}, device="cpu", timeout_s=20) as parallelism:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = parallelism.lay_out(model, [torch.optim.SGD(model.parameters())])
    for step in range(5):
        if step == 2 and str(parallelism.data_parallel[0]) == sys.argv[1]:
            raise ValueError("a bad sample")
        model(torch.ones(2, 4)).sum().backward()
        parallelism.reduce_async(torch.ones(1)).wait()
"""


@pytest.mark.slow
def test_a_script_runs_under_torchrun_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(DIST_SCRIPT + "    print('trained on rank', parallelism.data_parallel[0])\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            path,
            "none",
        ],
        env={**_environment(tmp_path), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # of torch 2.9
    assert sorted(printed) == ["trained on rank 0", "trained on rank 1"]


STUBBORN = """
import os, pathlib, signal, sys, time
ready = pathlib.Path(sys.argv[1], "ready")
if os.environ["RANK"] == "1":
    while not ready.exists():
        time.sleep(0.05)
    raise ValueError("rank one failed")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready.write_text(f"{os.getpid()} {time.time()}")
time.sleep(120)
"""


@pytest.mark.slow
def test_a_rank_that_ignores_the_end_of_another_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(STUBBORN)
    done = _run(tmp_path, "-n", "2", "--shutdown-timeout", "2", path, tmp_path)
    pid, since = (tmp_path / "ready").read_text().split()
    assert time.time() - float(since) < 30
    assert not _is_alive(int(pid))
    assert done.returncode == 1
    assert "hocket-launch: rank 1 (pid" in done.stderr
    assert "ValueError: rank one failed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["1", "0"])
def test_a_failure_in_training_is_shown_once_and_first(tmp_path: Path, failing: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(DIST_SCRIPT)
    done = _run(tmp_path, "-n", "2", path, failing)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert done.stderr.count("ValueError: a bad sample") == 1
    assert f"hocket-launch: rank {failing}" in done.stderr


def test_ranks_write_to_the_files_of_the_formats(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = _run(
        tmp_path,
        "-n", "2", "-v",
        "--stdout", out / "{rank}of{world_size}-{local_rank}-{node_rank}-{local_world_size}.out",
        "--stderr", out / "{rank:03d}.err",
        script, tmp_path, "end",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (out / "1of2-1-0-2.out").read_text() == "output of rank 1\n"
    assert (out / "001.err").read_text() == ""
    assert sorted(path.name for path in out.iterdir()) == ["001.err", "1of2-1-0-2.out"]


@pytest.mark.parametrize("name", ["", "file/{rank}"])
def test_a_file_of_a_format_that_cannot_be_written_is_named(script: Path, tmp_path: Path, name: str) -> None:
    """A folder, and a folder within a file."""
    (tmp_path / "file").touch()
    done = _run(tmp_path, "-n", "2", "--stdout", tmp_path / name, script, tmp_path, "end")
    assert done.returncode == 1
    assert "hocket-launch: error: `--stdout` or `--stderr` names" in done.stderr
    assert "for rank 1, which cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("log-$RANK-of-${WORLD_SIZE}", "log-3-of-8"),
        ("$HOME ~ $RANKS ${LOCAL_RANK $", "$HOME ~ $RANKS ${LOCAL_RANK $"),
        ("$MASTER_PORT", "$MASTER_PORT"),
    ],
)
def test_other_words_with_a_dollar_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch, argument: str, expected: str
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert rank_arguments.expand(argument) == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_slurm", [False, True])
def test_variables_of_the_rank_in_arguments_are_expanded(tmp_path: Path, is_slurm: bool) -> None:
    """As Composer's launcher does."""
    path = tmp_path / "job.py"
    path.write_text("import sys; print(*sys.argv[1:])")
    arguments = ["log-$RANK-of-${WORLD_SIZE}", "$HOME"]
    if is_slurm:
        environment = {**_environment(tmp_path), **SLURM, "SLURM_NTASKS": "8", "SLURM_PROCID": "6"}
        done = subprocess.run(
            _command(path, *arguments), env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "log-6-of-8 $HOME\n", done.stderr
        return
    done = _run(tmp_path, "-n", "2", "--stdout", tmp_path / "{rank}.out", path, *arguments)
    assert done.stdout == "log-0-of-2 $HOME\n", done.stderr
    assert (tmp_path / "1.out").read_text() == "log-1-of-2 $HOME\n"


def test_a_command_is_run_without_python(tmp_path: Path) -> None:
    done = _run(tmp_path, "-n", "1", "-c", "sh", "-c", "echo rank $RANK of $WORLD_SIZE; echo $0", "more")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 1\nmore\n"


RESTARTED = """
import os, pathlib, sys
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
pathlib.Path(sys.argv[1], f"attempt{attempt}-{rank}").touch()
sys.exit(3 if attempt == "0" and rank == "1" else 0)
"""


def _check_restart(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(RESTARTED)
    done = _run(tmp_path, "-n", "2", "--max-restarts", "1", path, tmp_path)
    assert done.returncode == 0, done.stderr
    names = {each.name for each in tmp_path.glob("attempt*")}
    assert {"attempt0-1", "attempt1-0", "attempt1-1"} <= names


def _check_two_machines(tmp_path: Path) -> None:
    """As Composer's users start them."""
    common = ["-n", "1", "--world_size", "2"]
    places = [[*common, "--base_rank", "1"], [*common, "--node_rank", "0"]]
    _launch_machines(tmp_path, places, ["1 2 1", "0 2 0"])


def _check_unequal_machines(tmp_path: Path) -> None:
    """Each machine has its own `-n`; the first rank of a machine writes to the terminal."""
    places = [
        ["-n", "1", "--nnodes", "2", "--node_rank", "1"],
        ["-n", "2", "--nnodes", "2", "--node_rank", "0"],
    ]
    _launch_machines(tmp_path, places, ["2 3 1", "0 3 0"])


def _launch_machines(tmp_path: Path, places: list[list[str]], expected: list[str]) -> None:
    """Start two launchers, as on two machines, and compare the places that their first ranks print."""
    path = tmp_path / "job.py"
    path.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['NODE_RANK'])")
    port = _free_port()
    common = ["--master_addr", "127.0.0.1", "--master_port", port]
    launchers = [
        subprocess.Popen(
            _command(*common, *place, path),
            env=_environment(tmp_path),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    try:
        results = [launcher.communicate(timeout=150) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()
    assert [out.split("\n")[0] for out, _ in results] == expected, results


ELASTIC = """
import os, pathlib, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
out, rank, size = pathlib.Path(sys.argv[1]), dist.get_rank(), dist.get_world_size()
(out / f"{size}-{rank}").touch()
while size == 2:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""


def _check_fewer_machines(tmp_path: Path) -> None:
    """Two launchers; the second and its rank are killed; the first starts again as a job of one machine."""
    path = tmp_path / "job.py"
    path.write_text(ELASTIC)
    port = _free_port()
    common = ["-n", "1", "--nnodes", "1:2", "--max-restarts", "2", "--master_addr", "127.0.0.1"]
    launchers = [
        subprocess.Popen(
            _command(*common, "--master_port", port, "--node_rank", str(node), path, tmp_path),
            env={**_environment(tmp_path), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for node in (0, 1)
    ]
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "2-1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = Path(f"/proc/{launchers[1].pid}/task/{launchers[1].pid}/children").read_text().split()
        for pid in (launchers[1].pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        _, stderr = launchers[0].communicate(timeout=150)
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
            assert launcher.stderr is not None
            launcher.stderr.close()
    assert launchers[0].returncode == 0, stderr
    assert (tmp_path / "1-0").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [_check_restart, _check_two_machines, _check_unequal_machines, _check_fewer_machines]
)
def test_a_job_of_several_attempts_or_machines_ends_well(
    tmp_path: Path, check: Callable[[Path], None]
) -> None:
    check(tmp_path)


def test_composers_long_names_are_the_short_ones() -> None:
    """Composer's launcher has each option under these names."""
    place = ["--world_size", "4", "--node_rank", "1", "--master_addr", "127.0.0.1", "--master_port", "5000"]
    files = ["--stdout", "{rank}.out", "--stderr", "{rank}.err"]
    long = ["--nproc", "2", "--verbose", "--module_mode", *place, *files, "job", "--lr", "1"]
    short = ["-n", "2", "-v", "-m", *place, *files, "job", "--lr", "1"]
    found = launch_options.parse(long)
    assert vars(found) == vars(launch_options.parse(short))
    assert (found.nproc_per_node, found.nnodes, found.module, found.verbose) == ("2", "2", True, True)
    assert found.training_script_args == ["--lr", "1"]
    assert launch_options.parse(["--command_mode", "ls"]).no_python
    assert (
        launch_options.parse(
            ["-n", "2", "--world_size", "4", "--base_rank", "2", *place[4:], "x.py"]
        ).node_rank
        == 1
    )


PLACE = {
    "WORLD_SIZE": "4",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "5000",
    "LOCAL_WORLD_SIZE": "2",
}
"""As the platform of Composer's authors sets them."""


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        (PLACE, [], ("2", "2", 1, "10.0.0.5", 5000)),
        ({**PLACE, "NODE_RANK": "", "BASE_RANK": "2"}, [], ("2", "2", 1, "10.0.0.5", 5000)),
        (PLACE, ["--node_rank", "0", "--master_port", "6000"], ("2", "2", 0, "10.0.0.5", 6000)),
        (PLACE, ["-n", "4"], ("4", "1", 0, "127.0.0.1", None)),
        ({**PLACE, "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, ["-n", "4"], ("4", "1", 0, "127.0.0.1", None)),
        # An operator of Kubernetes counts machines: this is the second of two.
        ({**PLACE, "WORLD_SIZE": "2", "RANK": "1"}, [], ("2", "1", 0, "127.0.0.1", None)),
        (
            {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h"},
            [],
            ("3", "2", 1, "h", None),
        ),
    ],
)
def test_the_place_of_a_machine_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], arguments: list[str], expected: tuple
) -> None:
    """Options come first; Composer's variables, and torchrun's, stand in for those that are not given."""
    if "-n" in arguments:
        environment = {**environment, "WORLD_SIZE": "4", "NODE_RANK": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = launch_options.parse([*arguments, "x.py"])
    assert (
        found.nproc_per_node,
        found.nnodes.removesuffix(":1"),
        found.node_rank,
        found.master_addr,
        found.master_port,
    ) == expected


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("WORLD_SIZE", "four", "`WORLD_SIZE` is 'four', expected a whole number from 0"),
        ("MASTER_PORT", "70000", "`MASTER_PORT` is '70000', expected a whole number from 0 to 65535"),
        ("NODE_RANK", "2", "`--node_rank` is 2, expected 0 to 1 of 2 machines"),
        ("WORLD_SIZE", "2", "Did you mean: hocket-launch --world_size 4 x.py"),
    ],
)
def test_a_wrong_variable_of_the_place_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    words: str,
) -> None:
    for name, kept in {**PLACE, variable: value}.items():
        monkeypatch.setenv(name, kept)
    with pytest.raises(SystemExit):
        launch_options.parse(["x.py"])
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "training_script"),
        (["-n", "0", "x.py"], "expected at least 1 process"),
        (["-m", "-c", "x"], "not both"),
        (["-n", "8", "--world_size", "12", "x.py"], "`--world_size 12` is no multiple of `-n 8`"),
        (
            ["-n", "8", "--world_size", "8", "--node_rank", "1", "x.py"],
            "hocket-launch -n 8 --world_size 16 --node_rank 1 x.py",
        ),
        (["-n", "8", "--world_size=8", "--base_rank", "8", "x.py"], "--world_size=16 --base_rank 8 x.py"),
        (["-n", "8", "--base_rank", "3", "x.py"], "`--base_rank 3` is no multiple of `-n 8`"),
        (
            ["-n", "4", "--world_size", "16", "--base_rank", "8", "--node_rank", "1", "x.py"],
            "is machine 2, but `--node_rank` is 1",
        ),
        (
            ["--nnodes", "2", "--node_rank", "2", "--master_addr", "h", "x.py"],
            "expected 0 to 1 of 2 machines",
        ),
        (["--nnodes", "2", "--node_rank", "1", "x.py"], "needs `--master_addr HOST`"),
        (["-n", "two", "x.py"], "`-n` is 'two', expected a number of processes"),
        (["--nnodes", "two", "x.py"], "`--nnodes` is 'two', expected a number of machines"),
        (["--nnodes", "0", "x.py"], "`--nnodes` is '0', expected a number of machines from 1"),
        (["--nnodes", "2:1", "x.py"], "`--nnodes` is '2:1', expected a number of machines"),
        (["-n", "8", "--world_size", "0", "x.py"], "`--world_size` is 0, expected 1 or more"),
        (
            ["-n", "8", "--nnodes", "3", "--world_size", "16", "--node_rank", "0", "x.py"],
            "`--world_size 16` contradicts `--nnodes 3` with `-n 8`, which is 24 processes",
        ),
        (["--master_port", "99999", "x.py"], "`--master_port` is 99999, expected 0 to 65535"),
        (["--max-restarts", "-1", "x.py"], "`--max-restarts` is -1, expected 0 or more"),
        (["--shutdown-timeout", "-1", "x.py"], "`--shutdown-timeout` is -1, expected 0 or more"),
        (["--signals-to-handle", "SIGTERM,FOO", "x.py"], "has 'FOO', which is no signal of this system"),
        (["--nnodes", "2", "--standalone", "x.py"], "`--standalone` is for one machine, and `--nnodes` is 2"),
        (["--data", "", "x.py"], "`--data` is empty, expected a path"),
    ],
)
def test_options_that_contradict_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py"], "the script `absent.py` is no file"),
        (["python", "train.py"], "the script `python` is no file"),
        (["python3", "train.py"], "Leave it out: every rank runs Python."),
        (["-m", __file__], "is a file. Leave `-m` out."),
        (["-c", os.path.relpath(__file__)], "It is a script of Python: leave `-c` out."),
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
def test_a_launch_that_cannot_work_is_refused_before_it_starts(
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


def test_machine_0_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "PREFLIGHT_S", 0.5)
    arguments = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "127.0.0.1", "--master_port", "9"]
    assert launch.main([*arguments, __file__]) == 1
    message = capsys.readouterr().err
    for words in ("127.0.0.1:9", "interface lo (127.0.0.1)", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert words in message


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


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
def test_machines_that_do_not_come_to_machine_0_are_missed(
    tmp_path: Path, nodes: str, option: str, words: str
) -> None:
    """With a fixed number of machines and with MIN:MAX, whose rendezvous has other errors."""
    place = ["--nnodes", nodes, "--node_rank", "0", "--master_addr", "127.0.0.1"]
    done = _run(tmp_path, "-n", "1", *place, "--master_port", _free_port(), "--rdzv-conf", option, __file__)
    assert done.returncode == 1
    assert f"hocket-launch: error: {words}" in done.stderr
    if words.endswith(":"):
        assert "interface lo (127.0.0.1)" in done.stderr
        assert "set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launcher_that_waits_for_machines_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(absent_machines, "PREFLIGHT_S", 0.05)
    options = launch_options.parse(["-n", "1", "--nnodes", "2:3", "--node_rank", "0", "x.py"])
    for has_started in (False, True):
        logs = RankLogs(str(tmp_path), local_world_size=1)
        if has_started:
            logs.has_started.set()
        with absent_machines.notice_absent_machines(options, logs):
            (timer,) = (one for one in threading.enumerate() if one.name == "hocket-absent-machines")
            timer.join(timeout=60)
        message = capsys.readouterr().err
        words = "after 0.05 s fewer than 2 machines have come to 127.0.0.1:29400"
        assert (words in message) == (not has_started)


SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "PATH": "/nonexistent",
}


def test_a_launcher_on_each_node_of_a_slurm_step_finds_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    options = launch_options.parse(["-n", "4", "x.py"])
    assert (options.nnodes, options.node_rank, options.master_addr) == ("2", 1, "gpu003")
    assert options.master_port == slurm.job_port({"SLURM_JOB_ID": "41"})
    assert slurm.job_port({"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1"}) == options.master_port + 1


def test_a_slurm_step_without_a_list_of_hosts_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(SystemExit):
        launch_options.parse(["-n", "4", "x.py"])
    assert "`SLURM_STEP_NODELIST` is not set. Set `MASTER_ADDR`" in capsys.readouterr().err


def test_a_task_for_each_rank_of_a_slurm_step_runs_the_script_itself(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')))"
    )
    env = {**SLURM, "SLURM_NTASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
    env["SLURM_STEP_TASKS_PER_NODE"] = "4(x2)"
    done = subprocess.run(
        _command(path), env={**_environment(tmp_path), **env}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "6 8 2 gpu003\n", done.stderr


@pytest.mark.slow
def test_a_checkpoint_that_is_known_is_named_after_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "import json, os, pathlib, sys, time\n"
        "pathlib.Path(os.environ['HOCKET_STATUS_FILE']).write_text(json.dumps({'checkpoint': 's3://b/ep1'}))\n"
        "pathlib.Path(sys.argv[1], 'ready').touch()\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        _command("-n", "1", "-c", sys.executable, "-W", "ignore", path, tmp_path),
        env=_environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "ready").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            launcher.send_signal(signal.SIGINT)
            _, stderr = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + signal.SIGINT
    assert stderr.count("hocket-launch:") == 1
    assert "ended all ranks after SIGINT; the last committed checkpoint is s3://b/ep1" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_leaves_none(
    script: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        _command("-n", "2", script, tmp_path, "wait"),
        env=_environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("rank-*"))) < 2:
                assert time.monotonic() < deadline
                assert launcher.poll() is None
                time.sleep(0.05)
            time.sleep(0.2)
            launcher.send_signal(number)
            _, stderr = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + number
    assert f"ended all ranks after {number.name}" in stderr
    for rank in range(2):
        assert (tmp_path / f"stopped-{rank}").read_text() == number.name
        assert not _is_alive(json.loads((tmp_path / f"rank-{rank}").read_text())["pid"])


def test_help_has_our_options_and_torchruns(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            launch.main([flag])
        assert ended.value.code == 0
        ours = capsys.readouterr().out
        assert ours.startswith("usage: hocket-launch -n N [options] script.py")
    with pytest.raises(SystemExit):
        launch.main(["--help-torchrun"])
    theirs = capsys.readouterr().out
    for flag in ("--rdzv-backend", "--max-restarts", "--tee", "--world_size", "--stdout"):
        assert flag in theirs


def test_the_version_is_printed_and_the_package_is_a_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hocket.dist", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("hocket-dist ")
    assert "torch" in done.stdout
