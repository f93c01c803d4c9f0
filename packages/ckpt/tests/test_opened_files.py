"""Files that are no checkpoint: the message says what they are, and what was expected."""

from pathlib import Path

import pytest

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

EMPTY = "the file is empty: it was never written, or its copy did not finish"
CASES = {
    "empty.pt": (b"", EMPTY),
    "empty.safetensors": (b"", EMPTY),
    "empty.bin": (b"", EMPTY),
    "text.pt": (b"hello world\nand more\n", "it is a text file, which begins with 'hello world'"),
    "long.pt": ("é".encode() * 500, "it is a text file, which begins with 'é"),
    "config.json": (b'{"a": 1}', "it is a text file, which begins with '{\"a\": 1}'"),
    "page.pt": (b"<!DOCTYPE html><html></html>", "it is a web page, as a server sends"),
    "page.safetensors": (b"\n<html><body>404</body></html>", "it is a web page, as a server sends"),
    "zeros.pt": (bytes(4096), "the file begins with zeros: its contents were lost"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_is_no_checkpoint_is_named_by_what_it_is(tmp_path: Path, name: str) -> None:
    contents, reason = CASES[name]
    (tmp_path / name).write_bytes(contents)
    kind = CheckpointCorruptError if name.endswith(".safetensors") else CheckpointNotFoundError
    for place in (tmp_path / name, f"file://{tmp_path}/{name}"):
        with pytest.raises(kind) as caught:
            hocket.ckpt.open(place)
        text = str(caught.value)
        assert text.startswith(f"`{tmp_path / name}` is no checkpoint: {reason}")
        assert "; expected a file of `torch.save` (a zip), a `.safetensors` file" in text
        assert f"({len(contents)} bytes were found)" in text


def test_files_of_other_bytes_keep_their_own_messages(tmp_path: Path) -> None:
    for name, contents, reason in (
        ("cut.pt", b"PK\x03\x04" + bytes(90), "it may have been cut short"),
        ("noise.pt", b"\xff\xfe\xfd" * 100, "has an unknown format"),
        ("pointer.pt", b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
    ):
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(CheckpointError, match=reason):
            hocket.ckpt.open(tmp_path / name)


def test_the_command_says_that_a_file_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.pt").touch()
    with pytest.raises(SystemExit) as end:
        app(["inspect", str(tmp_path / "empty.pt")])
    assert end.value.code == 3
    assert f"`{tmp_path}/empty.pt` is no checkpoint: {EMPTY}" in " ".join(capsys.readouterr().err.split())
