"""`hocket-launch` as a command: places of ranks, several machines, restarts, signals and exit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import launches


def test_ranks_get_their_environment_and_arguments(script: Path, tmp_path: Path) -> None:
    done = launches.run(tmp_path, "-n", "2", "-m", "job", tmp_path, "end", "--their=own", "-n", "7")
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
    assert not list(tmp_path.glob("hocket-launch-*")), "a successful job left its logs"


def test_the_ranks_of_one_machine_meet_on_the_loopback(tmp_path: Path) -> None:
    # On a machine whose name does not resolve, if this user may rename it in a namespace of its own.
    prefix = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host && "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        prefix = []
    program = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier()"
    path = tmp_path / "job.py"
    path.write_text(f"{program}\nimport os; print(os.environ['MASTER_ADDR'])\n")
    done = subprocess.run(
        [*prefix, *launches.command("-n", "2", path)],
        env=launches.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # from torch 2.9
    assert (done.returncode, printed) == (0, ["127.0.0.1"]), done.stderr
    assert "cannot be retrieved" not in done.stderr


@pytest.mark.slow
def test_a_script_runs_under_torchrun_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    # One write per line, so that the lines of two ranks do not mix.
    line = "f'trained on rank {parallelism.data_parallel[0]}\\n'"
    path.write_text(launches.DIST_SCRIPT + f"    sys.stdout.write({line})\n")
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
        env={**launches.environment(tmp_path), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # from torch 2.9
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
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(STUBBORN)
    done = launches.run_forked(tmp_path, "-n", "2", "--shutdown-timeout", "2", path, tmp_path)
    pid, since = (tmp_path / "ready").read_text().split()
    assert time.time() - float(since) < 100
    assert not launches.is_alive(int(pid))
    assert done.returncode == 1
    assert "hocket-launch: rank 1 (pid" in done.stderr
    assert "ValueError: rank one failed" in done.stderr


def test_the_other_ranks_end_at_once_when_a_rank_has_failed(tmp_path: Path) -> None:
    """Without `--shutdown-timeout`, a rank that SIGTERM does not end has 30 s after a signal to the job."""
    path = tmp_path / "job.py"
    path.write_text(STUBBORN)
    done = launches.run_forked(tmp_path, "-n", "2", path, tmp_path)
    pid, since = (tmp_path / "ready").read_text().split()
    assert time.time() - float(since) < 20
    assert not launches.is_alive(int(pid))
    assert "ValueError: rank one failed" in done.stderr


def test_a_command_is_run_without_python(tmp_path: Path) -> None:
    done = launches.run_forked(
        tmp_path, "-n", "1", "-c", "sh", "-c", "echo rank $RANK of $WORLD_SIZE; echo $0", "more"
    )
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
    done = launches.run_forked(tmp_path, "-n", "2", "--max-restarts", "1", path, tmp_path)
    assert done.returncode == 0, done.stderr
    names = {each.name for each in tmp_path.glob("attempt*")}
    assert {"attempt0-1", "attempt1-0", "attempt1-1"} <= names


def _check_two_machines(tmp_path: Path) -> None:
    """Start two machines with the options that Composer's users pass."""
    common = ["-n", "1", "--world_size", "2"]
    places = [[*common, "--base_rank", "1"], [*common, "--node_rank", "0"]]
    _launch_machines(tmp_path, places, ["1 2 1", "0 2 0"])


def _check_unequal_machines(tmp_path: Path) -> None:
    """Start machines with different `-n`; the first rank of each machine writes to the terminal."""
    places = [
        ["-n", "1", "--nnodes", "2", "--node_rank", "1"],
        ["-n", "2", "--nnodes", "2", "--node_rank", "0"],
    ]
    _launch_machines(tmp_path, places, ["2 3 1", "0 3 0"])


def _launch_machines(tmp_path: Path, places: list[list[str]], expected: list[str]) -> None:
    """Start two launchers, as on two machines, and compare the places that their first ranks print."""
    path = tmp_path / "job.py"
    path.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['NODE_RANK'])")
    port = launches.free_port()
    common = ["--master_addr", "127.0.0.1", "--master_port", port]
    launchers = [
        subprocess.Popen(
            launches.command(*common, *place, path),
            env=launches.environment(tmp_path),
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
    port = launches.free_port()
    common = ["-n", "1", "--nnodes", "1:2", "--max-restarts", "2", "--master_addr", "127.0.0.1"]
    launchers = [
        subprocess.Popen(
            launches.command(*common, "--master_port", port, "--node_rank", str(node), path, tmp_path),
            env={**launches.environment(tmp_path), "GLOO_SOCKET_IFNAME": "lo"},
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


def test_a_task_for_each_rank_of_a_slurm_step_runs_the_script_itself(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')))"
    )
    env = {**launches.SLURM, "SLURM_NTASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
    env["SLURM_STEP_TASKS_PER_NODE"] = "4(x2)"
    done = subprocess.run(
        launches.command(path),
        env={**launches.environment(tmp_path), **env},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout == "6 8 2 gpu003\n", done.stderr


@pytest.mark.slow
def test_ctrl_c_prints_the_latest_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "import json, os, pathlib, sys, time\n"
        "pathlib.Path(os.environ['HOCKET_STATUS_FILE']).write_text(json.dumps({'checkpoint': 's3://b/ep1'}))\n"
        "pathlib.Path(sys.argv[1], 'ready').touch()\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        launches.command("-n", "1", "-c", sys.executable, "-W", "ignore", path, tmp_path),
        env=launches.environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            deadline = time.monotonic() + 150
            while not (tmp_path / "ready").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            launcher.send_signal(signal.SIGINT)
            _, stderr = launcher.communicate(timeout=150)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + signal.SIGINT
    assert stderr.count("hocket-launch:") == 1
    assert "ended all ranks after SIGINT; the last committed checkpoint is s3://b/ep1" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_and_ends_every_rank(script: Path, tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        launches.command("-n", "2", script, tmp_path, "wait"),
        env=launches.environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            deadline = time.monotonic() + 150
            while len(list(tmp_path.glob("rank-*"))) < 2:
                assert time.monotonic() < deadline
                assert launcher.poll() is None
                time.sleep(0.05)
            time.sleep(0.2)
            launcher.send_signal(number)
            _, stderr = launcher.communicate(timeout=150)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + number
    assert f"ended all ranks after {number.name}" in stderr
    for rank in range(2):
        assert (tmp_path / f"stopped-{rank}").read_text() == number.name
        assert not launches.is_alive(json.loads((tmp_path / f"rank-{rank}").read_text())["pid"])


def test_python_m_hocket_dist_prints_the_version(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hocket.dist", "--version"], capture_output=True, text=True, timeout=150
    )
    assert done.stdout.startswith("hocket-dist ")
    assert "torch" in done.stdout
