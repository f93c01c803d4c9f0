"""Golden checkpoints of each released format: today's readers read them, today's writer writes them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import hocket.ckpt
from hocket.ckpt.plain import load_tensors, load_values
from hocket.native import _native

GOLDEN = Path(__file__).parent / "golden"

TENSORS = {
    "model.weight": np.arange(35, dtype=np.float32).reshape(7, 5) / 4,
    "model.tied": np.arange(35, dtype=np.float32).reshape(7, 5) / 4,
    "model.bias": np.array([-2, -1, 0, 1, 2]).astype(ml_dtypes.bfloat16),
    "model.scale": np.array([[0, 1], [2, 3]]).astype(ml_dtypes.float8_e4m3fn),
    "model.mask": np.array([True, False, True]),
    "model.none": np.empty((0, 3), np.float16),
    "optimizer.state.weight.step": np.array(9, np.int64),
}
VALUES = {
    "optimizer.param_groups.0": {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]},
    "loss": float("inf"),
    "large": 2**80,
    "raw": b"\x00\xff",
    "by number": {1: "one", -2: None},
    "note": "naïve é 音",
}


@pytest.mark.parametrize("form", ["format-1/plain", "format-1/compressed", "format-3/planes"])
def test_a_golden_checkpoint_is_read(form):
    checkpoint = hocket.ckpt.open(str(GOLDEN / form))
    assert set(checkpoint) == set(TENSORS)
    for name, array in TENSORS.items():
        assert checkpoint[name].dtype == array.dtype
        np.testing.assert_array_equal(checkpoint[name], array)
    manifest = checkpoint.manifest
    assert {name: record.value for name, record in manifest.values.items()} == VALUES
    assert manifest.tensors["model.tied"].same_as == "model.weight"
    assert manifest.values["optimizer.param_groups.0"].path == ("optimizer", "param_groups", 0)
    assert (manifest.step, manifest.world_size, manifest.mesh) == (1234, 2, {"shard": 2})
    assert (manifest.user, manifest.per_rank.policy) == ({"loss": 0.5}, "require")
    assert manifest.per_rank.ranks == ({"seed": 1}, {"seed": 2})
    assert hocket.ckpt.verify(str(GOLDEN / form)).is_sound
    # `hocket.ckpt.plain`, the second implementation, reads them, too.
    for name, array in load_tensors(GOLDEN / form).items():
        np.testing.assert_array_equal(array, TENSORS[name])
    assert load_values(GOLDEN / form) == VALUES


def test_a_golden_manifest_equals_todays_encoding():
    for form in ("format-1/plain", "format-1/compressed", "format-3/planes"):
        manifest = (GOLDEN / form / "checkpoint.json.zst").read_bytes()
        document = _native.ckpt_manifest_decode(manifest)
        assert hocket.ckpt.open(str(GOLDEN / form)).manifest.to_document() == document
