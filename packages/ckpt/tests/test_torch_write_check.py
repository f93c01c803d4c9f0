"""A place where checkpoints cannot be saved: one error on every rank, which says what is in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from hocket.ckpt.errors import CheckpointError, CheckpointUnwritableError
from hocket.ckpt.torch import provide
from hocket.native.errors import StoreConfigError, StoreError
from support.ranks import run_ranks

IS_ROOT = os.geteuid() == 0


def refusal(place: object, **options: object) -> CheckpointUnwritableError:
    """Return the error of a store that is opened for saving."""
    with pytest.raises(CheckpointUnwritableError) as caught:
        provide(place, for_saving=True, **options)
    assert caught.value.__notes__ == ["[HKT-CK11]"]
    assert isinstance(caught.value, OSError)
    return caught.value


def test_a_file_or_a_link_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "alias").symlink_to(tmp_path / "file")
    for place, named, reason in (
        ("file", "file", " is a file, where a folder is expected"),
        ("file/run/deep", "file", " is a file, where a folder is expected"),
        ("alias/run", "alias", " is a file, where a folder is expected"),
        ("dangling", "dangling", f" is a link to `{tmp_path}/gone`, which does not exist"),
        ("dangling/run", "dangling", " is a link to"),
        ("loop/run", "loop", f" is a link to `{tmp_path}/loop`, which does not exist or cannot be reached"),
    ):
        text = str(refusal(tmp_path / place))
        assert f"checkpoints cannot be saved to `{tmp_path / place}`: `{tmp_path / named}`{reason}" in text
    assert "`" + str(tmp_path / "file") in str(refusal(f"file://{tmp_path}/file/run"))


def test_a_name_that_the_file_system_does_not_take_has_its_reason(tmp_path: Path) -> None:
    error = refusal(tmp_path / ("n" * 300))
    assert error.errno == errno.ENAMETOOLONG
    assert str(error).endswith(": File name too long; use another folder")


def test_a_file_system_that_is_mounted_read_only_is_named_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert f"`{tmp_path}` is on a file system that is mounted read-only" in str(refusal(tmp_path))


@pytest.mark.parametrize("place", [".", "below"])
def test_a_folder_without_permission_is_named_with_the_user(tmp_path: Path, monkeypatch, place: str) -> None:
    if IS_ROOT:  # to whom everything is permitted

        def deny(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "access", lambda *_, **__: False)
        if place == "below":
            monkeypatch.setattr(os, "makedirs", deny)
    tmp_path.chmod(0o500)
    try:
        text = str(refusal(tmp_path / place))
    finally:
        tmp_path.chmod(0o700)
    assert f"user {os.geteuid()} may not create files in `{tmp_path}`; use another folder" in text


def open_on_ranks(places: list[str]) -> tuple[str, str]:
    rank = int(os.environ["RANK"])
    try:
        provide(places[rank], timeout_s=60, for_saving=True)
    except (CheckpointError, StoreError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("bad", [0, 1])
def test_the_folder_of_one_machine_fails_all_ranks_by_the_same_class(tmp_path: Path, bad: int) -> None:
    (tmp_path / "file").touch()
    places = [str(tmp_path / "good")] * 2
    places[bad] = str(tmp_path / "file" / "run")
    found = run_ranks(open_on_ranks, 2, places, init="gloo")
    assert [name for name, _ in found] == ["CheckpointUnwritableError"] * 2
    reason = f"checkpoints cannot be saved to `{places[bad]}`: `{tmp_path}/file` is a file"
    assert found[bad][1].startswith(reason)
    assert f"failed on rank {bad}: {reason}" in found[1 - bad][1]


def test_an_object_store_that_rank_0_may_not_write_to_fails_all_ranks(server) -> None:
    found = run_ranks(open_on_ranks, 2, ["s3://no-such-bucket/run"] * 2, init="gloo")
    assert [name for name, _ in found] == ["StoreNotFoundError", "CheckpointError"]
    assert found[1][1].startswith(
        f"the preparation of `s3://no-such-bucket/run` failed on rank 0: StoreNotFoundError: {found[0][1]}"
    )


@pytest.mark.parametrize("uri", ["https://example.invalid/run", "hf://org/model"])
def test_a_place_that_is_only_read_is_refused_with_a_code(uri: str) -> None:
    with pytest.raises(StoreConfigError, match=f"`{uri}` cannot be written to") as caught:
        provide(uri, for_saving=True)
    assert caught.value.__notes__ == ["[HKT-NA07]"]
