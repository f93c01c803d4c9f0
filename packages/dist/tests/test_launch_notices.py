"""Signals to `hocket-launch`: passed on once, copies ignored, and an end at once on demand."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import launches

COUNT = """
import os, pathlib, signal, sys, time
out, rank, received = pathlib.Path(sys.argv[1]), os.environ["RANK"], []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda number, frame: received.append(number))
(out / f"ready-{rank}").write_text(os.environ["HOCKET_SAVE_SIGNALS"] + " " + os.environ["HOCKET_GRACE_S"])
while not received:
    time.sleep(0.05)
since = time.monotonic()
while time.monotonic() - since < float(sys.argv[2]):
    time.sleep(0.05)
(out / f"received-{rank}").write_text(" ".join(map(str, received)))
"""


@contextmanager
def running(tmp_path: Path, *, lasts_s: float) -> Iterator[subprocess.Popen[str]]:
    """Start two ranks that count their signals, and go on for some time after the first."""
    path = tmp_path / "job.py"
    path.write_text(COUNT)
    options = ["-n", "2", "--save-signals", "SIGTERM,SIGUSR1", "--grace", "60"]
    with subprocess.Popen(
        launches.command(*options, path, tmp_path, str(lasts_s)),
        env=launches.environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            deadline = time.monotonic() + 100
            while len(list(tmp_path.glob("ready-*"))) < 2:
                assert time.monotonic() < deadline
                assert launcher.poll() is None
                time.sleep(0.05)
            time.sleep(0.2)
            yield launcher
        finally:
            launcher.kill()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=lambda one: one.name
)
def test_copies_of_a_signal_are_not_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, lasts_s=1.5) as launcher:
        for _ in range(3):
            launcher.send_signal(number)
            time.sleep(0.1)
        _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number, stderr
    for rank in range(2):
        assert (tmp_path / f"ready-{rank}").read_text() == "SIGTERM,SIGUSR1 60"
        assert (tmp_path / f"received-{rank}").read_text() == str(int(number))


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGQUIT)])
def test_a_second_ctrl_c_and_sigquit_end_all_ranks_at_once(
    tmp_path: Path, numbers: tuple[signal.Signals, signal.Signals]
) -> None:
    with running(tmp_path, lasts_s=50) as launcher:
        for number in numbers:
            sent_at = time.monotonic()
            launcher.send_signal(number)
            time.sleep(1.2)
        launcher.communicate(timeout=30)
    assert time.monotonic() - sent_at < 15
    assert launcher.returncode == 128 + numbers[0]
    assert not list(tmp_path.glob("received-*"))
