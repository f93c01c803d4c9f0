"""Exit codes of commands, and their streams where these take nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hocket.native.cli.exits import exit_on_error

#: A command that prints as many characters as it is told, and a message, and ends with 3.
PROGRAM = """
import sys
from hocket.native.cli.exits import run

def app():
    print("x" * int(sys.argv[1]))
    print("message", file=sys.stderr)
    raise SystemExit(3)

run("hocket-x", app)
"""

NO_SPACE = "hocket-x: [Errno 28] No space left on device\n"
#: The redirection of a shell, the number of characters, and what comes out: the code, stdout and stderr.
STREAMS = {
    "both open": ("", 2, (3, "xx\n", "message\n")),
    "stdout closed": (">&-", 2, (3, "", "message\n")),
    "stdout without a reader": (">&9", 2, (3, "", "message\n")),
    "stdout without a reader, much text": (">&9", 100_000, (3, "", "message\n")),
    "stdout full, much text": (">/dev/full", 100_000, (5, "", NO_SPACE)),
    "stdout full, found at the end": (">/dev/full", 2, (3, "", f"message\n{NO_SPACE}")),
    "stderr closed": ("2>&-", 2, (3, "xx\n", "")),
    "stderr without a reader": ("2>&9", 2, (3, "xx\n", "")),
    "stderr full": ("2>/dev/full", 2, (3, "xx\n", "")),
    "both closed": (">&- 2>&-", 2, (3, "", "")),
    "both full": (">/dev/full 2>/dev/full", 100_000, (5, "", "")),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_command_ends_with_its_code_whatever_its_streams_take(case: str) -> None:
    redirection, number, expected = STREAMS[case]
    reader, gone = os.pipe()
    os.close(reader)
    shell = f'exec 9>&{gone}; exec "$0" -c "$1" {number} {redirection}'
    done = subprocess.run(
        ["bash", "-c", shell, sys.executable, PROGRAM],
        pass_fds=[gone],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(gone)
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_no_other_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    program = """
import os, sys
from hocket.native.cli.exits import run

def app():
    null = os.stat(os.devnull)
    is_null = [os.path.samestat(os.fstat(number), null) for number in range(3)]
    open(sys.argv[1], "w").write(f"{is_null} {list(map(os.get_inheritable, range(3)))}")

run("hocket-x", app)
"""
    shell = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    command = ["bash", "-c", shell, sys.executable, program, str(tmp_path / "found")]
    subprocess.run(command, timeout=60, check=True)
    assert (tmp_path / "found").read_text() == f"{[True] * 3} {[True] * 3}"


def test_a_thread_that_cannot_be_started_is_an_error_that_names_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended, exit_on_error("hocket-x", []):
        raise RuntimeError("can't start new thread")  # Python's words
    assert ended.value.exit_code == 5
    assert "`ulimit -u`" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="other"), exit_on_error("hocket-x", []):
        raise RuntimeError("other")
