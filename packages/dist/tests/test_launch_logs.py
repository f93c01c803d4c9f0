"""The log files of ranks: `--stdout` and `--stderr` formats."""

from pathlib import Path

import pytest

from support import launches


def test_ranks_write_to_the_files_named_by_the_formats(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = launches.run_forked(
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
def test_an_unwritable_log_file_is_named(script: Path, tmp_path: Path, name: str) -> None:
    """The paths are a folder, and a file below a file."""
    (tmp_path / "file").touch()
    done = launches.run_forked(tmp_path, "-n", "2", "--stdout", tmp_path / name, script, tmp_path, "end")
    assert done.returncode == 1
    assert "hocket-launch: error: `--stdout` or `--stderr` names" in done.stderr
    assert "for rank 1, which cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
