"""The demo's training script counts its tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hocket.recipes.corpus import CONTEXT, GLOBAL_BATCH
from hocket.recipes.train import arguments, make_trainer
from hocket.stream import MDSWriter
from support.ranks import run_ranks


def num_tokens_after_a_step(given: list[str]) -> int:
    with make_trainer(arguments(given)) as trainer:
        trainer.fit()
        return trainer.state.timestamp.counts.token


def test_the_demo_counts_its_tokens(tmp_path: Path) -> None:
    length = CONTEXT + 1
    columns = {"id": "int", "tokens": f"ndarray:uint8:{length}"}
    with MDSWriter(columns=columns, out=str(tmp_path / "data")) as writer:
        for number in range(2 * GLOBAL_BATCH):
            writer.write({"id": number, "tokens": np.full(length, number, dtype=np.uint8)})
    folders = {name: str(tmp_path / name) for name in ("data", "cache", "journal", "save-folder")}
    given = [part for name, folder in folders.items() for part in (f"--{name}", folder)]
    # Runs in a new process, because the script sets the seed and the number of threads.
    tokens = run_ranks(num_tokens_after_a_step, 1, [*given, "--steps", "1"], timeout_s=120)
    assert tokens == [GLOBAL_BATCH * CONTEXT]
