"""The process that forks ranks: what a fork has of a new interpreter, and when it refuses to fork."""

import ast
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hocket.dist.launch.warm.fork_safety import shadowed_module
from hocket.dist.launch.warm.starter import ColdStartError, RankServer, WarmProcess
from support import launches

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

MODULES = {
    "plain": "",
    "thread": "from threading import Timer\nT = Timer(9, print)\nT.daemon, T.name = True, 'own'\nT.start()",
    "opened": "FILE = open(__file__)",
    "child": "import subprocess\nCHILD = subprocess.Popen(['sleep', '60'])",
    "reader": "import os\nPLACE = os.environ.get('RANK')",
    "setter": "import os\nos.environ.setdefault('ADDED', 'by import')\nos.environ.copy()",
    "copier": "import os\nALL = {**os.environ}\nWORDS = [value for _, value in os.environ.items()]",
    "handler": "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('handled', flush=True))",
    "temporary": (
        "import atexit, shutil, tempfile\nFOLDER = tempfile.mkdtemp()\natexit.register(shutil.rmtree, FOLDER)"
    ),
    "broken": "1 / 0",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    (tmp_path / "scripts").mkdir()
    for name, source in MODULES.items():
        (tmp_path / "lib" / f"{name}.py").write_text(source)
    return tmp_path


@pytest.fixture
def servers(folder: Path) -> Iterator[list[RankServer]]:
    started: list[RankServer] = []
    yield started
    for server in started:
        server.close()


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(folder / "lib"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _start(
    servers: list[RankServer],
    folder: Path,
    *preload: str,
    source: str,
    env: dict[str, str] | None = None,
    launcher: Sequence[str] = (),
    server_env: dict[str, str] | None = None,
) -> WarmProcess:
    """Start a script, or a launcher of it, in a fork of a server; its output goes to `output`."""
    if not servers:
        servers.append(RankServer.spawn({**_environment(folder), **(server_env or {})}))
        servers[0].prepare(preload)
    script = folder / "scripts" / "script.py"
    script.write_text(source)
    with open(os.devnull) as stdin, (folder / "output").open("w") as output:
        return servers[0].start(
            [*launcher, str(script)],
            env={**_environment(folder), **(env or {})},
            stdin=stdin.fileno(),
            stdout=output.fileno(),
            stderr=output.fileno(),
        )


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("thread", "the thread `own` runs after `import thread`"),
        ("opened", "lib/opened.py` is open after `import opened`"),
        ("child", "was started after `import child`"),
        ("reader", "`RANK` is '1' in the rank, and was None on import"),
        ("broken", "`import broken` failed with ZeroDivisionError"),
        ("absent", "`import absent` failed with ModuleNotFoundError"),
    ],
)
def test_imports_that_forks_would_share_lead_to_a_cold_start(
    servers: list[RankServer], folder: Path, module: str, reason: str
) -> None:
    with pytest.raises(ColdStartError) as caught:
        _start(servers, folder, "plain", module, source="", env={"RANK": "1"})
    assert reason in str(caught.value)


def test_programs_and_variables_that_act_on_import_lead_to_a_cold_start(
    servers: list[RankServer], folder: Path
) -> None:
    for source, env, reason in [
        ("", {"OMP_NUM_THREADS": "3"}, "`OMP_NUM_THREADS` is '3' in the rank, and was '1' on import"),
        ("", {"PYTHONHASHSEED": "7"}, "`PYTHONHASHSEED`"),
        (
            "import os\nos.environ['OMP_NUM_THREADS'] = '2'",
            {},
            "sets `OMP_NUM_THREADS`, which acts on import",
        ),
        ("from os import environ\nenviron.update({'MKL_X': '2'})", {}, "sets `MKL_X`"),
        ("import os\nos.environ.setdefault('RANK', '2')", {}, "sets `RANK`"),
        ("", {"ADDED": "by the job"}, "`ADDED` is 'by the job' in the rank"),
    ]:
        with pytest.raises(ColdStartError) as caught:
            _start(servers, folder, "setter", "reader", source=source, env=env)
        assert reason in str(caught.value)
    (folder / "scripts" / "plain.py").touch()
    (folder / "scripts" / "json").mkdir()  # without modules it hides nothing
    assert _start(servers, folder, source="import setter", env={"OTHER": "1"}).wait(20) == 0
    (folder / "scripts" / "setter.py").touch()
    with pytest.raises(
        ColdStartError, match=r"scripts/setter.py` stands before the imported `setter`|setter"
    ):
        _start(servers, folder, source="")


def test_an_import_that_copies_all_variables_does_not_depend_on_the_place_of_the_launcher(
    servers: list[RankServer], folder: Path
) -> None:
    """A PyTorchJob starts each launcher with the number of its machine in `RANK`."""
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "TQDM_DELAY": "1"}
    rank = {**pod, "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
    source = "import os, sys; sys.exit(int(os.environ['RANK']))"
    assert _start(servers, folder, "copier", source=source, env=rank, server_env=pod).wait(20) == 1
    with pytest.raises(ColdStartError, match="`TQDM_DELAY` is '2' in the rank, and was '1' on import"):
        _start(servers, folder, source="", env={**rank, "TQDM_DELAY": "2"})


@pytest.mark.slow
def test_torchmetrics_knows_the_rank_of_a_fork(servers: list[RankServer], folder: Path) -> None:
    """It reads the local rank on import, and takes seconds for it."""
    pytest.importorskip("torchmetrics")
    source = (
        "import sys\nfrom torchmetrics.utilities.prints import rank_zero_only\nsys.exit(rank_zero_only.rank)"
    )
    assert _start(servers, folder, "torchmetrics", source=source, env={"LOCAL_RANK": "3"}).wait(60) == 3


def test_a_temporary_folder_of_an_import_is_shared_and_removed_at_the_end(
    servers: list[RankServer], folder: Path
) -> None:
    # As matplotlib makes one where the home cannot be written to.
    (folder / "tmp").mkdir()
    given = {"TMPDIR": str(folder / "tmp")}
    for _ in range(2):
        source = "import os, temporary\nassert os.path.isdir(temporary.FOLDER)"
        fork = _start(servers, folder, "temporary", source=source, env=given, server_env=given)
        assert fork.wait(60) == 0
        assert (folder / "output").read_text() == ""
    assert len(list((folder / "tmp").iterdir())) == 1
    servers[0].close()
    assert not list((folder / "tmp").iterdir())


def test_a_temporary_folder_of_an_import_is_removed_where_all_ranks_start_cold(
    servers: list[RankServer], folder: Path
) -> None:
    (folder / "tmp").mkdir()
    given = {"TMPDIR": str(folder / "tmp")}
    with pytest.raises(ColdStartError):
        _start(servers, folder, "temporary", "broken", source="", env=given, server_env=given)
    assert len(list((folder / "tmp").iterdir())) == 1
    servers[0].close()
    assert not list((folder / "tmp").iterdir())


def test_a_fork_is_a_child_of_its_client_with_its_own_variables(
    servers: list[RankServer], folder: Path
) -> None:
    source = """
import json, os, random, sys
print(json.dumps([os.getppid(), os.getsid(0) == os.getpid(), os.environ["ADDED"], os.environ["RANK"],
                  random.random(), "json" in sys.modules, os.environ.get("GONE"), type(os.environ).__name__]))
sys.exit(int(os.environ["RANK"]))
"""
    draws = set()
    for rank in ("3", "5"):
        process = _start(servers, folder, "setter", source=source, env={"RANK": rank})
        assert process.wait(20) == int(rank)
        parent, is_leader, added, *more = json.loads((folder / "output").read_text())
        assert (parent, is_leader, added, more[0]) == (os.getpid(), True, "by import", rank)
        draws.add(more[1])
        assert more[3:] == [None, "_Environ"]
    assert len(draws) == 2
    assert _start(servers, folder, source="import os; os.kill(os.getpid(), 9)").wait(20) == -signal.SIGKILL


def test_the_script_of_the_launcher_is_no_module_that_a_rank_would_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = types.ModuleType("__main__")
    script.__file__ = "/own/bin/hocket-launch"
    for name in ("__main__", "__mp_main__"):  # as after `import multiprocessing`
        monkeypatch.setitem(sys.modules, name, script)
    assert shadowed_module("/scripts", "/own/bin") is None
    monkeypatch.setitem(sys.modules, "beside", script)
    assert shadowed_module("/scripts", "/own/bin") == "`beside` was imported from /own/bin"


def test_a_forked_launcher_forks_its_ranks(servers: list[RankServer], folder: Path) -> None:
    source = f"""
import os, pathlib, sys
from hocket.dist.launch.warm.fork_safety import ImportRecord
found = [os.environ["ADDED"], "plain" in sys.modules, os.environ["HOCKET_LAUNCH"] == str(os.getppid()),
         ImportRecord.inherited, sys.modules["torch"].initial_seed()]
pathlib.Path({str(folder)!r}, "rank-" + os.environ["RANK"]).write_text(repr(found))
"""
    launcher = ["-m", "hocket.dist.launch", "-n", "2", "--preload", "plain"]
    process = _start(servers, folder, "torch", "setter", source=source, launcher=launcher)
    assert process.wait(60) == 0, (folder / "output").read_text()
    assert "cold" not in (folder / "output").read_text()
    ranks = [ast.literal_eval((folder / f"rank-{rank}").read_text()) for rank in range(2)]
    assert [rank[:-1] for rank in ranks] == [["by import", True, True, None]] * 2
    assert ranks[0][-1] != ranks[1][-1], "the ranks have one seed"


def test_signals_to_a_whole_job_end_ranks_and_not_the_server(servers: list[RankServer], folder: Path) -> None:
    source = "import time\nprint('ready', flush=True)\ntime.sleep(30)\ntime.sleep(30)"
    process = _start(servers, folder, "handler", source=source)
    deadline = time.monotonic() + 20
    while "ready" not in (folder / "output").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for pid in (servers[0].pid, process.pid):
            os.kill(pid, number)
            time.sleep(0.1)
    assert process.wait(20) == -signal.SIGTERM
    assert (folder / "output").read_text() == "ready\nhandled\n"
    assert _start(servers, folder, source="").wait(20) == 0
    os.kill(servers[0].pid, signal.SIGKILL)
    with pytest.raises(ColdStartError, match="the prepared process has ended"):
        _start(servers, folder, source="")


FACTS = """
import ctypes, json, multiprocessing, os, random, signal, sys, threading, warnings
import numpy, torch, torch._dynamo
death_signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))
numbers = [number for number in range(1, 32) if number not in (9, 19)]
of_this_job = ("MASTER_PORT", "HOCKET_LAUNCH", "HOCKET_STATUS_FILE", "TORCHELASTIC_RUN_ID",
               "TORCH_FR_DUMP_TEMP_FILE")
print(json.dumps({
    "signals": [getattr(signal.getsignal(n), "__name__", str(signal.getsignal(n))) for n in numbers],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "files": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task")), torch.get_num_threads()],
    "session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "parent": os.getppid() == int(os.environ["HOCKET_LAUNCH"]),
    "death signal": death_signal.value,
    "umask": os.umask(0o22),
    "path": sys.path,
    "argv": [sys.argv, sys.orig_argv, sys.executable, __file__],
    "flags": str(sys.flags),
    "shared": sorted({line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/" in line}),
    "environ": {n: v for n, v in os.environ.items() if n not in of_this_job and not n.endswith("ERROR_FILE")},
}))
print(random.random(), numpy.random.rand(), torch.rand(()).item(), multiprocessing.current_process().authkey)
"""


@pytest.mark.slow
def test_ranks_are_as_in_a_cold_start(tmp_path: Path) -> None:
    path = tmp_path / "facts.py"
    path.write_text(FACTS)
    options = ["--stdout", tmp_path / "{rank}", path, "an", "argument"]
    warm = launches.run(tmp_path, "-n", "2", *options)
    assert warm.returncode == 0, warm.stderr
    assert "cold start" not in warm.stderr
    facts, values = warm.stdout.splitlines()
    other_facts, other_values = (tmp_path / "1").read_text().splitlines()
    assert not {*values.split()} & {*other_values.split()}, "two ranks have the same random values"
    cold = launches.run(tmp_path, "-n", "2", "--cold", *options)
    assert cold.returncode == 0, cold.stderr
    for found, expected in [(facts, cold.stdout), (other_facts, (tmp_path / "1").read_text())]:
        for name, value in json.loads(expected.splitlines()[0]).items():
            assert json.loads(found)[name] == value, name
