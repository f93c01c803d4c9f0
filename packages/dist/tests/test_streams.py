"""The standard streams of `hocket-launch`, closed, full or without a reader, leave the job's code alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import launches

NULL = """
import os, sys
null = os.stat(os.devnull)
are_null = [os.path.samestat(os.fstat(number), null) for number in range(3)]
"""
#: Prints and writes messages, and ends with 3, after it has written down its streams.
PROGRAM = f"""
from hocket.dist.launch.streams import forgive_streams
forgive_streams()
{NULL}
with open(sys.argv[1], "w") as found:
    print(are_null, file=found)
print("x" * 100_000, flush=True)
for _ in range(3):
    print("message", file=sys.stderr, flush=True)
sys.exit(3)
"""
#: As `PROGRAM`, a job of which each rank prints nothing.
JOB = f"{NULL}\nopen(sys.argv[1], 'w').write(f'{{are_null}}\\n'); sys.exit(int(sys.argv[2]))"

#: The redirections of a shell, and which streams are the null device then.
STREAMS = {
    "stdin closed": ("<&- >/dev/full 2>/dev/full", [True, False, False]),
    "stdout closed": (">&- 2>/dev/full </dev/zero", [False, True, False]),
    "stderr closed": ("2>&- >/dev/full </dev/zero", [False, False, True]),
    "all closed": ("<&- >&- 2>&-", [True, True, True]),
    "all without a reader": (">&9 2>&9 </dev/zero", [False, False, False]),
}


def run(redirection: str, *command: str | Path, env: dict[str, str] | None = None) -> int:
    """Run a command under a redirection, where 9 is a pipe without a reader, and return its code."""
    reader, gone = os.pipe()
    os.close(reader)
    shell = f'exec 9>&{gone}; exec "$@" {redirection}'
    arguments = ["bash", "-c", shell, "sh", *map(str, command)]
    try:
        return subprocess.run(arguments, pass_fds=[gone], env=env, timeout=150, check=False).returncode
    finally:
        os.close(gone)


@pytest.mark.parametrize("case", STREAMS)
def test_what_a_stream_does_not_take_is_lost_and_a_closed_one_is_the_null_device(
    case: str, tmp_path: Path
) -> None:
    redirection, are_null = STREAMS[case]
    assert run(redirection, sys.executable, "-c", PROGRAM, tmp_path / "found") == 3
    assert (tmp_path / "found").read_text() == f"{are_null}\n"


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("case", STREAMS)
def test_a_launcher_ends_with_the_code_of_its_job(case: str, code: int, tmp_path: Path) -> None:
    redirection, are_null = STREAMS[case]
    (tmp_path / "job.py").write_text(JOB)
    command = launches.command("-n", "1", tmp_path / "job.py", tmp_path / "found", str(code))
    assert run(redirection, *command, env=launches.environment(tmp_path)) == code
    assert (tmp_path / "found").read_text() == f"{are_null}\n"
