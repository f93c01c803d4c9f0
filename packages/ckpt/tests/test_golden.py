"""Golden checkpoints of each released format: today's readers read them, today's writer writes them."""

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import hocket.ckpt
from hocket.ckpt.document.records import DeltaBase, ThinnedState
from hocket.ckpt.errors import CheckpointIncompatibleError
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


FORMS = ["format-1/plain", "format-1/compressed", "format-2/thinned", "format-3/planes"]
VERSIONS = ["version-1", "version-2", "version-3"]
# The second and third version change one more item of each tensor.
WEIGHTS = [TENSORS["model.weight"].copy() for _ in VERSIONS]
WEIGHTS[1][1, 0] = WEIGHTS[2][1, 0] = 2.25
WEIGHTS[2][2, 0] = 4.5
BIASES = [[-2, -1, 0, 1, 2], [-2, 0, 0, 1, 2], [-2, 0, 2, 1, 2]]


def expected_in(form):
    """Return the tensors and values of a checkpoint."""
    dropped = "optimizer." if form == "format-2/thinned" else "(none)"
    return [
        {name: content for name, content in all_of.items() if not name.startswith(dropped)}
        for all_of in (TENSORS, VALUES)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_golden_checkpoint_is_read(form):
    tensors, values = expected_in(form)
    checkpoint = hocket.ckpt.open(str(GOLDEN / form))
    assert set(checkpoint) == set(tensors)
    for name, array in tensors.items():
        assert checkpoint[name].dtype == array.dtype
        np.testing.assert_array_equal(checkpoint[name], array)
    manifest = checkpoint.manifest
    assert {name: record.value for name, record in manifest.values.items()} == values
    assert f"format-{manifest.format_number}" in form
    assert manifest.tensors["model.tied"].same_as == "model.weight"
    assert (manifest.step, manifest.world_size, manifest.mesh) == (1234, 2, {"shard": 2})
    assert (manifest.user, manifest.per_rank.policy) == ({"loss": 0.5}, "require")
    assert manifest.per_rank.ranks == ({"seed": 1}, {"seed": 2})
    assert hocket.ckpt.verify(str(GOLDEN / form)).is_sound
    # `hocket.ckpt.plain`, the second implementation, reads them, too.
    plain = load_tensors(GOLDEN / form)
    assert set(plain) == set(tensors)
    for name, array in plain.items():
        np.testing.assert_array_equal(array, tensors[name])
    assert load_values(GOLDEN / form) == values


def test_paths_of_a_golden_checkpoint_have_positions_in_lists():
    manifest = hocket.ckpt.open(str(GOLDEN / "format-1" / "plain")).manifest
    assert manifest.values["optimizer.param_groups.0"].path == ("optimizer", "param_groups", 0)


def test_a_golden_thinned_checkpoint_says_what_was_dropped():
    checkpoint = hocket.ckpt.open(str(GOLDEN / "format-2" / "thinned"))
    assert checkpoint.manifest.thinned == ThinnedState(
        save_id="0f1e2d3c4b5a69788796a5b4c3d2e1f0", dropped=("optimizer.*",), num_tensors=1, num_bytes=8
    )
    with pytest.raises(CheckpointIncompatibleError, match=r"was thinned: `optimizer\.state\.weight\.step`"):
        checkpoint.manifest.refuse_dropped(["model.weight", "optimizer.state.weight.step"], "golden")


def assert_is_version(arrays, number):
    """Check arrays against the version of a number from 0 on."""
    assert set(arrays) == {"model.weight", "model.bias", "model.tied"}
    np.testing.assert_array_equal(arrays["model.weight"], WEIGHTS[number])
    np.testing.assert_array_equal(arrays["model.tied"], WEIGHTS[number])
    np.testing.assert_array_equal(arrays["model.bias"], np.array(BIASES[number], ml_dtypes.bfloat16))


@pytest.mark.parametrize("number", range(3))
def test_a_golden_version_is_read(number):
    uri = str(GOLDEN / "format-4" / VERSIONS[number])
    checkpoint = hocket.ckpt.open(uri)
    assert_is_version({name: checkpoint[name] for name in checkpoint}, number)
    manifest = checkpoint.manifest
    assert manifest.values["step"].value == manifest.step == number + 1
    assert manifest.user == {"loss": 1 / (number + 1)}
    if number:
        before = hocket.ckpt.open(str(GOLDEN / "format-4" / VERSIONS[number - 1])).manifest
        assert manifest.delta == DeltaBase(VERSIONS[number - 1], before.save_id)
    assert manifest.format_number == (4 if number else 1)
    assert hocket.ckpt.verify(uri).is_sound


def test_golden_versions_are_followed_by_deltas(tmp_path):
    shutil.copytree(GOLDEN / "format-4" / "version-1", tmp_path / "version-1")
    follower = hocket.ckpt.Follower(tmp_path)
    assert follower.update().is_whole
    assert_is_version(follower.arrays, 0)
    shutil.copytree(GOLDEN / "format-4", tmp_path, dirs_exist_ok=True)
    update = follower.update()
    assert (update.step, update.num_deltas) == (3, 2)
    assert_is_version(follower.arrays, 2)


@pytest.mark.parametrize("form", [*FORMS, *(f"format-4/{name}" for name in VERSIONS)])
def test_a_golden_manifest_equals_todays_encoding(form):
    manifest = (GOLDEN / form / "checkpoint.json.zst").read_bytes()
    document = _native.ckpt_manifest_decode(manifest)
    assert hocket.ckpt.open(str(GOLDEN / form)).manifest.to_document() == document
