"""`hocket demo` on a disk, and on an object store that fails one request in twenty."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("hocket")


def demo(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), "demo", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "160", **(env or {})},
        check=False,
    )


def check_output(done: subprocess.CompletedProcess[str], out: Path, *, jobs: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything held" in done.stdout
    assert len(re.findall(r"same samples, same order", done.stdout)) == jobs
    assert re.search(r"partial", done.stdout), "`hocket-ckpt ls` should show the interrupted save"
    assert "identical in every bit" in done.stdout
    table = done.stdout.partition("Compared with the uninterrupted run")[2]
    assert "holds" in table
    assert not re.search(r"Everything held|Loss curves|hocket-ckpt", table), "the table is the last thing"
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(700)
def test_the_demo_resumes_on_other_numbers_of_ranks_after_a_kill(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_output(demo("--out", out, "--steps", 18, "--ranks", "2,2,1,4"), out, jobs=4)


@pytest.mark.timeout(700)
def test_the_demo_runs_on_a_faulty_object_store(tmp_path: Path, s3d_faults) -> None:
    kinds = ("slowdown", "500", "reset", "short_body", "lost_reply")
    server = s3d_faults(*(f"kind={kind},rate=0.01" for kind in kinds), seed=11)
    out = tmp_path / "out"
    done = demo(
        "--out", out, "--steps", 18, "--ranks", "2,2,1", "--store", server.uri("runs"), env=server.env
    )
    check_output(done, out, jobs=3)
    assert server.stats()["faults"], "the server should have injected faults"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--steps", 5), "give at least 18"),
        (("--ranks", "2,x"), "not a list of whole numbers"),
        (("--ranks", "2"), "at least two numbers"),
        (("--ranks", "2,99"), "from 1 to 8"),
    ],
)
def test_arguments_too_small_for_the_demo_raise(
    tmp_path: Path, arguments: tuple[object, ...], complaint: str
) -> None:
    done = demo("--out", tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert complaint in re.sub(r"[\s│]+", " ", done.stderr)


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = demo("--out", tmp_path)
    assert done.returncode == 2
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_unreachable_store_raises_before_any_job_starts(tmp_path: Path) -> None:
    env = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    done = demo("--out", tmp_path / "out", "--store", "s3://bucket/prefix", env=env)
    assert done.returncode == 1
    assert "s3://bucket/prefix" in done.stderr
    assert not (tmp_path / "out" / "uninterrupted").exists()
