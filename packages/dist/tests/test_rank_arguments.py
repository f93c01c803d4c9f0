"""Variables such as `$RANK` in the arguments of a script are expanded by each rank."""

import subprocess
from pathlib import Path

import pytest

from hocket.dist import rank_arguments
from support import launches


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("log-$RANK-of-${WORLD_SIZE}", "log-3-of-8"),
        ("$HOME ~ $RANKS ${LOCAL_RANK $", "$HOME ~ $RANKS ${LOCAL_RANK $"),
        ("$MASTER_PORT", "$MASTER_PORT"),
    ],
)
def test_other_words_with_a_dollar_are_not_changed(
    monkeypatch: pytest.MonkeyPatch, argument: str, expected: str
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert rank_arguments.expand(argument) == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_slurm", [False, True])
def test_variables_of_the_rank_in_arguments_are_expanded(tmp_path: Path, is_slurm: bool) -> None:
    """Composer's launcher expands the same variables."""
    path = tmp_path / "job.py"
    path.write_text("import sys; print(*sys.argv[1:])")
    arguments = ["log-$RANK-of-${WORLD_SIZE}", "$HOME"]
    if is_slurm:
        environment = {
            **launches.environment(tmp_path),
            **launches.SLURM,
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "6",
        }
        done = subprocess.run(
            launches.command(path, *arguments), env=environment, capture_output=True, text=True, timeout=150
        )
        assert done.stdout == "log-6-of-8 $HOME\n", done.stderr
        return
    done = launches.run(tmp_path, "-n", "2", "--stdout", tmp_path / "{rank}.out", path, *arguments)
    assert done.stdout == "log-0-of-2 $HOME\n", done.stderr
    assert (tmp_path / "1.out").read_text() == "log-1-of-2 $HOME\n"
