"""`find_gap` and `wait_for_gap`, which find a save with data files and without a manifest."""

from __future__ import annotations

from pathlib import Path

from hocket.native import Store
from hocket.recipes.demo.gap import find_gap, wait_for_gap


def put(root: Path, *keys: str) -> None:
    for key in keys:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def first(root: Path) -> None:
    put(root, "ba6/data/0a1b2c3d-r00000-000.safetensors", "ba6/checkpoint.json.zst")


def test_only_a_save_after_a_committed_one_counts(tmp_path: Path) -> None:
    put(tmp_path, "ba6/data/0a1b2c3d-r00000-000.safetensors")
    assert find_gap(Store(str(tmp_path)), 1) is None
    first(tmp_path)
    assert find_gap(Store(str(tmp_path)), 1) is None
    put(tmp_path, "ba12/data/1a1b2c3d-r00000-000.safetensors")
    assert find_gap(Store(str(tmp_path)), 1) == "ba12"


def test_the_files_of_every_writer_must_exist(tmp_path: Path) -> None:
    first(tmp_path)
    put(tmp_path, "ba12/data/1a1b2c3d-r00000-000.safetensors", "ba12/data/1a1b2c3d-r00000-001.safetensors")
    assert find_gap(Store(str(tmp_path)), 2) is None
    put(tmp_path, "ba12/data/1a1b2c3d-r00001-000.safetensors")
    assert find_gap(Store(str(tmp_path)), 2) == "ba12"


def test_wait_for_gap_ends_when_keep_waiting_returns_false(tmp_path: Path) -> None:
    answers = iter([True, True, False])
    assert wait_for_gap(str(tmp_path), 2, keep_waiting=lambda: next(answers)) is None
