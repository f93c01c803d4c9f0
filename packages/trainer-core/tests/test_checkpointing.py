"""Batches at which no checkpoint can be due are recognized from the run's plain numbers."""

from __future__ import annotations

import pytest

from hocket.trainer import checkpointing
from support.training import FileStore, make


@pytest.mark.parametrize("interval", ["3ba", "20sp", "1ep", "1iter", "0.3dur", "1000sec"])
def test_batches_without_a_due_save_are_recognized_by_plain_numbers(interval, tmp_path, monkeypatch):
    """Most batches end without building `Time` objects, and the saves are the same as with them."""
    asked = []

    class Foreseen(checkpointing._Foreseen):
        def __init__(self, state, after):
            asked.append(after.batch)
            super().__init__(state, after)

    monkeypatch.setattr(checkpointing, "_Foreseen", Foreseen)
    saved = []
    for name in ("quick", "asked"):
        with make(
            checkpoint_store=FileStore(tmp_path / name), save_interval=interval, max_duration="13ba"
        ) as trainer:
            trainer.fit()
        saved.append([entry.step for entry in FileStore(tmp_path / name).list()])
        if name == "quick":
            assert len(asked) <= (13 if interval == "0.3dur" else 8), asked
        monkeypatch.setattr(checkpointing.Checkpointer, "_is_quiet", lambda self, before, now: False)
    assert saved[0] == saved[1]
