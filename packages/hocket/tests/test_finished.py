"""`is_finished`: a demo run is finished once the save of its last step is committed."""

from __future__ import annotations

from pathlib import Path

import torch

from hocket.ckpt import list_checkpoints
from hocket.ckpt.torch import CheckpointStore
from hocket.native import Store
from hocket.recipes.demo.run import is_finished


def test_only_a_committed_save_of_the_last_step_finishes_a_run(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.save({"weight": torch.ones(2)}, step=12)
    Store(str(tmp_path / "ba18")).put("data/00000004-r00000-000.safetensors", b"of a save that was killed")
    assert not is_finished(list_checkpoints(str(tmp_path)), 18)
    checkpoints.save({"weight": torch.ones(2)}, step=18)
    assert is_finished(list_checkpoints(str(tmp_path)), 18)
    checkpoints.close()
