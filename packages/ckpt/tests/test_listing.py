"""The newest checkpoint needs no pointer: it is the committed manifest of the highest step, then the last."""

import pytest

from hocket.ckpt.errors import CheckpointIncompatibleError
from hocket.ckpt.listing import list_checkpoints
from hocket.ckpt.manifest import Manifest, PerRank
from hocket.ckpt.torch import CheckpointStore
from hocket.native import Store, _native


def commit(uri, number, step, created, **fields):
    save_id = f"{number:032x}"
    manifest = Manifest(
        save_id=save_id, step=step, created=f"{created}-01-01T00:00:00.000000Z", version="0.1.0",
        writer="test", world_size=2, **fields,
    )  # fmt: skip
    _native.ckpt_commit(uri, _native.ckpt_manifest_encode(manifest.to_document()), save_id)


def test_the_newest_is_told_by_step_whatever_the_clocks_and_the_names_say(prefix):
    commit(f"{prefix}/zz", 1, 5, 2031)  # by a node whose clock is years ahead
    commit(f"{prefix}/step-9", 2, 7, 2001)
    commit(f"{prefix}/aa", 3, 7, 2002)
    Store(f"{prefix}/latest").put("data/00000004-r00000-000.safetensors", b"of a save that never finished")
    found = [(entry.name, entry.status) for entry in list_checkpoints(prefix)]
    assert found == [("latest", "partial"), *((name, "committed") for name in ("zz", "step-9", "aa"))]
    # Nothing but manifests was written: no pointer that could go stale.
    keys = {found.key for found in Store(prefix).list()}
    assert {key.partition("/")[2] for key in keys} == {
        "checkpoint.json.zst", "data/00000004-r00000-000.safetensors"
    }  # fmt: skip


def test_what_differs_by_rank_is_for_the_same_number_of_ranks(tmp_path):
    for number, policy in enumerate(("reseed", "drop", "require")):
        own = PerRank(policy=policy, ranks=({"seed": 0}, {"seed": 1}))
        commit(str(tmp_path / policy), number, 1, 2026, per_rank=own)
    store = CheckpointStore(str(tmp_path))
    assert store.load("reseed", {}).per_rank is None
    assert store.load("drop", {}).per_rank is None
    with pytest.raises(CheckpointIncompatibleError, match="2"):
        store.load("require", {})
    store.close()
