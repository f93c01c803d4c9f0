"""Thinning keeps weights bit for bit, and leaves every checkpoint whole or thinned, whatever ends it."""

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import hocket.ckpt
from hocket.ckpt import collect_garbage, convert, list_checkpoints, plain, remove, reshard, thin, verify
from hocket.ckpt.cli.app import app
from hocket.ckpt.dcp import HocketReader, HocketWriter
from hocket.ckpt.errors import CheckpointError, CheckpointIncompatibleError, CheckpointNotFoundError
from hocket.ckpt.torch import CheckpointStore, KeepLast, Thin
from hocket.ckpt.verbs import thin as thin_module
from hocket.native import Store, _native


def trained(step):
    """Return the state of a model with tied weights after some steps of AdamW."""
    torch.manual_seed(step)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(64, 16), "head": torch.nn.Linear(16, 64)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model["head"](model["embed"](torch.arange(8))).square().mean().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizers": [optimizer.state_dict()], "seen": step}


def save_all(prefix, steps, **options):
    store = CheckpointStore(prefix, **options)
    for step in steps:
        store.save(trained(step), step=step, user={"loss": 1 / step}, per_rank={"rng": step})
    store.close()


def weights(uri):
    opened = hocket.ckpt.open(uri)
    return {name: opened[name] for name in opened if name.startswith("model.")}


def files_of(prefix, name):
    found = [file.key for file in Store(f"{prefix}/{name}").list("data")]
    named = [file["path"] for file in hocket.ckpt.open(f"{prefix}/{name}").manifest.files]
    return sorted(found), sorted(named)


def assert_thinned(prefix, name, step):
    uri = f"{prefix}/{name}"
    manifest = hocket.ckpt.open(uri).manifest
    assert manifest.thinned is not None
    assert not [one for one in [*manifest.tensors, *manifest.values] if one.startswith("optimizers")]
    want = trained(step)["model"]
    got = weights(uri)
    assert sorted(got) == sorted(f"model.{key}" for key in want)
    for key, tensor in want.items():
        np.testing.assert_array_equal(got[f"model.{key}"], tensor.numpy())
    assert manifest.values["seen"].value == step
    assert (manifest.user, manifest.per_rank.ranks) == ({"loss": 1 / step}, ({"rng": step},))
    assert verify(uri).is_sound


@pytest.mark.parametrize("compression", [None, "zstd:3", "planes+zstd:3"])
def test_all_but_the_newest_and_every_tenth_lose_their_optimizer_state(prefix, compression):
    save_all(prefix, (10, 14, 15, 20, 23), compression=compression)
    Store(prefix).put("notes/readme.txt", b"not ours")
    before = {listing.name: listing for listing in list_checkpoints(prefix)}
    dry = thin(prefix, after=1, every=10, dry_run=True)
    assert {listing.name: listing for listing in list_checkpoints(prefix)} == before
    report = thin(prefix, after=1, every=10)
    assert [one.name for one in report.thinned] == ["step-14", "step-15"]
    assert [(one.name, one.num_tensors, one.num_bytes) for one in dry.thinned] == [
        (one.name, one.num_tensors, one.num_bytes) for one in report.thinned
    ]
    # Two moments and a step count of the embedding and of the bias.
    assert report.thinned[0].num_tensors == 6
    assert report.thinned[0].num_bytes == 2 * 4 * (64 * 16 + 64) + 2 * 4
    assert (report.whole, report.skipped) == (("step-10", "step-20", "step-23"), {})
    for listing in list_checkpoints(prefix):
        old = before[listing.name]
        assert (listing.step, listing.created) == (old.step, old.created)
        assert listing.is_thinned == (listing.name in ("step-14", "step-15"))
        assert listing.is_thinned or listing == old
    for step in (14, 15):
        assert_thinned(prefix, f"step-{step}", step)
        found, named = files_of(prefix, f"step-{step}")
        assert found == named
        assert all(path.endswith(".blocks") == bool(compression) for path in named)
    again = thin(prefix, after=1, every=10)
    assert (again.thinned, again.unchanged) == ((), ("step-14", "step-15"))


def test_a_thinned_checkpoint_loads_as_weights_and_refuses_a_whole_resume_by_name(tmp_path):
    save_all(tmp_path, (1, 2))
    whole = trained(5)
    store = CheckpointStore(tmp_path)
    store.load("step-1", whole)
    thin(tmp_path)
    for strict in (True, False):
        with pytest.raises(CheckpointIncompatibleError, match=r"thinned: `optimizers.0.state.0.step`.* more"):
            store.load("step-1", trained(5), strict=strict)
    fresh = {"model": trained(5)["model"]}
    store.load("step-1", fresh, include=["model"])
    assert torch.equal(fresh["model"]["embed.weight"], trained(1)["model"]["embed.weight"])
    # An optimizer whose tree has no tensors is refused, too, since its settings were dropped.
    with pytest.raises(CheckpointIncompatibleError, match="was thinned: `optimizers`"):
        store.load("step-1", {"model": trained(5)["model"], "optimizers": [], "seen": 0})
    store.close()
    text = CliRunner().invoke(app, ["inspect", str(tmp_path / "step-1")]).output
    assert "thinned: 6 tensors" in text
    assert (
        json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "step-1"), "--json"]).output)[
            "thinned"
        ]["num_tensors"]
        == 6
    )
    assert "step-1  (thinned)" in CliRunner().invoke(app, ["ls", str(tmp_path)]).output
    assert plain.read_manifest(tmp_path / "step-1")["format"] == 2
    assert plain.read_manifest(tmp_path / "step-2")["format"] == 1
    arrays = plain.load_tensors(tmp_path / "step-1")
    np.testing.assert_array_equal(arrays["model.embed.weight"], trained(1)["model"]["embed.weight"].numpy())
    # What is made of it says so, too.
    reshard(tmp_path / "step-1", tmp_path / "cut", ranks=2)
    convert(tmp_path / "step-1", tmp_path / "copy", to="hocket")
    for name in ("cut", "copy"):
        assert (
            hocket.ckpt.open(tmp_path / name).manifest.thinned
            == hocket.ckpt.open(tmp_path / "step-1").manifest.thinned
        )


def test_files_are_cut_as_before_and_aliases_of_dropped_tensors_stay(tmp_path):
    store = CheckpointStore(tmp_path)
    shared = torch.randn(8, 3)
    state = {
        "optimizers": {"average": shared, "m[0]": torch.randn(4)},
        "weights": {"a": shared, "b": shared, "c[1]": torch.randn(9, 2), "none": torch.zeros(0, 2)},
        "layers": {0: {"x": 1}, 1: {"x": torch.ones(2)}},
    }
    store.save(state, step=1, name="one")
    reshard(tmp_path / "one", tmp_path / "wide", ranks=3)
    store.save(state, step=9)
    store.close()
    remove(tmp_path / "one")
    thin(tmp_path, drop=["optimizers.*"])
    opened = hocket.ckpt.open(tmp_path / "wide")
    assert opened.contents.tensors["weights.a"].same_as is None
    assert opened.contents.tensors["weights.b"].same_as == "weights.a"
    assert len(opened.manifest.files) == 3
    assert opened.manifest.integer_keyed == {("layers",)}
    assert len(opened.contents.tensors["weights.c[1]"].chunks) == 3
    for name in ("a", "b", "c[1]", "none"):
        np.testing.assert_array_equal(opened[f"weights.{name}"], state["weights"][name].numpy())
    # A glob in brackets names one tensor; what was dropped adds up.
    thin(tmp_path, drop=["weights.c[[]1]"])
    manifest = hocket.ckpt.open(tmp_path / "wide").manifest
    assert "weights.c[1]" not in manifest.tensors
    assert manifest.thinned.dropped == ("optimizers.*", "weights.c[[]1]")
    assert manifest.thinned.num_tensors == 3


def test_what_cannot_be_thinned_is_named_and_the_rest_is_thinned(tmp_path, capsys):
    save_all(tmp_path, (1, 2, 3, 4))
    data = next((tmp_path / "step-1" / "data").iterdir())
    content = bytearray(data.read_bytes())
    content[-8192:] = bytes(8192)
    data.write_bytes(content)
    (tmp_path / "step-2" / "checkpoint.json.zst").write_bytes(b"junk")
    report = thin(tmp_path)
    assert [one.name for one in report.thinned] == ["step-3"]
    assert list(report.skipped) == ["step-1"]
    assert "step-1" in report.skipped["step-1"]
    assert files_of(tmp_path, "step-1")[0] == files_of(tmp_path, "step-1")[1]
    result = CliRunner().invoke(app, ["thin", str(tmp_path), "--json"])
    assert json.loads(result.output)["unchanged"] == ["step-3"]
    with pytest.raises(CheckpointNotFoundError, match=r"`drop` has `optimisers.\*`.*optimizers"):
        thin(tmp_path, drop=["optimisers.*"])
    output = CliRunner().invoke(app, ["thin", str(tmp_path), "--dry-run", "--every", "1"]).output
    assert output == "would thin 0 checkpoints by 0 B; 3 stay whole, 0 have nothing to drop\n"
    with pytest.raises(ValueError, match="is itself a checkpoint"):
        thin(tmp_path / "step-4")
    for options in ({"after": 0}, {"every": 0}, {"drop": "optimizers.*"}, {"drop": []}, {"memory_bytes": 1}):
        with pytest.raises(ValueError, match="expected"):
            thin(tmp_path, **options)
    assert list(thin(tmp_path, drop=["*"]).skipped) == ["step-1", "step-3"]


@pytest.mark.parametrize("event", ["replaced", "removed"])
def test_a_checkpoint_that_changes_meanwhile_is_left_to_the_other_process(prefix, event):
    save_all(prefix, (1, 2))
    store = CheckpointStore(prefix)
    newer = {**trained(7), "seen": 1}

    def interfere(done, total):
        if not happened:
            happened.append(done)
            if event == "removed":
                remove(f"{prefix}/step-1")
            else:
                store.save(newer, step=1, overwrite=True)

    happened = []
    report = thin(prefix, on_progress=interfere)
    store.close()
    assert (report.thinned, list(report.skipped)) == ((), ["step-1"])
    left = [listing.name for listing in list_checkpoints(prefix)]
    if event == "removed":
        assert left == ["step-2"]
        return
    found, named = files_of(prefix, "step-1")
    assert found == named
    np.testing.assert_array_equal(weights(f"{prefix}/step-1")["model.head.bias"], newer["model"]["head.bias"])


def test_a_save_replaces_a_checkpoint_that_is_thinned_meanwhile(prefix):
    save_all(prefix, (1, 2))
    patch = pytest.MonkeyPatch()
    store = CheckpointStore(prefix)
    commit = _native.ckpt_commit
    newer = {**trained(7), "seen": 1}

    def thin_first(uri, *args, **options):
        patch.undo()
        assert [one.name for one in thin(prefix).thinned] == ["step-1"]
        return commit(uri, *args, **options)

    patch.setattr(_native, "ckpt_commit", thin_first)
    store.save(newer, step=1, overwrite=True)
    store.close()
    found, named = files_of(prefix, "step-1")
    assert found == named
    assert hocket.ckpt.open(f"{prefix}/step-1").manifest.thinned is None
    np.testing.assert_array_equal(weights(f"{prefix}/step-1")["model.head.bias"], newer["model"]["head.bias"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_load_of_a_thinned_checkpoint_says_so(tmp_path, caplog):
    for step in (1, 2):
        dcp.save(trained(step), storage_writer=HocketWriter(tmp_path / f"step-{step}"), no_dist=True)
    thin(tmp_path)
    into = trained(5)
    with pytest.raises(dcp.CheckpointException, match=r"Missing key.*optimizers"):
        dcp.load(into, storage_reader=HocketReader(tmp_path / "step-1"), no_dist=True)
    assert "was thinned: `optimizers.*`" in caplog.text
    dcp.load({"model": into["model"]}, storage_reader=HocketReader(tmp_path / "step-1"), no_dist=True)
    assert torch.equal(into["model"]["embed.weight"], trained(1)["model"]["embed.weight"])


def die_at(point):
    """End this process by SIGKILL around a call of the extension."""
    name, when, number = point
    calls = []
    original = getattr(_native, name)

    def call(*args, **options):
        calls.append(name)
        if len(calls) == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **options)
        if len(calls) == number and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    class Dying:
        def __getattr__(self, other):
            return call if other == name else getattr(_native, other)

    from hocket.ckpt.document import manifest_builder
    from hocket.ckpt.verbs import rewrite

    for module in (thin_module, manifest_builder, rewrite):
        module._native = Dying()


def thin_and_die(prefix, point, delay_s):
    """Thin in a forked process, which is killed at a point or after a time; return whether it was."""
    pid = os.fork()
    if pid == 0:
        if point is not None:
            die_at(point)
        code = 1
        try:
            thin_module.thin(prefix)
            code = 0
        finally:
            os._exit(code)
    if point is None:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


POINTS = [
    (name, when, number)
    for name in ("CkptStreamWriter", "ckpt_commit", "ckpt_delete_files")
    for when in ("before", "after")
    for number in (1, 2)
]


def test_a_kill_at_any_point_leaves_each_checkpoint_whole_or_thinned_and_a_rerun_finishes(prefix):
    random.seed(7)
    kills = [*((point, None) for point in POINTS), *((None, random.uniform(0, 0.05)) for _ in range(6))]
    if "://" in prefix:
        kills = random.sample(kills, 6)
    num_killed = 0
    for number, (point, delay_s) in enumerate(kills):
        place = f"{prefix}-{number}"
        save_all(place, (1, 2, 3))
        num_killed += thin_and_die(place, point, delay_s)
        for step in (1, 2, 3):
            uri = f"{place}/step-{step}"
            assert verify(uri).is_sound
            opened = hocket.ckpt.open(uri)
            has_optimizer = any(name.startswith("optimizers.") for name in opened)
            assert has_optimizer == (opened.manifest.thinned is None)
            if not has_optimizer:
                assert step < 3
                assert_thinned(place, f"step-{step}", step)
            else:
                assert len([name for name in opened if name.startswith("optimizers.")]) == 6
        thin(place)
        for step in (1, 2):
            assert_thinned(place, f"step-{step}", step)
            found, named = files_of(place, f"step-{step}")
            assert found == named
        left = {found.waste for found in collect_garbage(place, min_age_s=0).garbage}
        assert left <= {"manifest", "upload", "probe"}  # a write that the kill cut short
    assert num_killed >= 4


def test_a_store_thins_after_each_save_and_keeps_the_order_of_its_saves(tmp_path, caplog):
    store = CheckpointStore(tmp_path, retention=(KeepLast(num=4), Thin(after=2, every=10)))
    for step in (10, 11, 12, 13, 14):
        store.save(trained(step), step=step, mode="async")
    store.close()
    listed = {listing.step: listing.is_thinned for listing in list_checkpoints(tmp_path)}
    assert listed == {11: True, 12: True, 13: False, 14: False}
    # The next run goes on; what keeps the old ones from being read is logged, and no save fails.
    next((Path(tmp_path) / "step-13" / "data").iterdir()).unlink()
    store = CheckpointStore(tmp_path, retention=Thin(after=2))
    store.save(trained(15), step=15)
    store.save(trained(16), step=16)
    store.close()
    listed = {listing.step: listing.is_thinned for listing in list_checkpoints(tmp_path)}
    assert listed == {11: True, 12: True, 13: False, 14: True, 15: False, 16: False}
    assert "could not thin the old checkpoint" in caplog.text


def test_retention_deletes_what_is_being_thinned_and_leaves_nothing(prefix, caplog):
    store = CheckpointStore(prefix, retention=(KeepLast(num=2), Thin(after=1)))
    for step in range(1, 25):
        mode = "async" if step % 2 else "sync"
        store.save(trained(step), step=step, mode=mode, user={"loss": 1 / step}, per_rank={"rng": step})
    store.close()
    listed = [(listing.name, listing.status, listing.is_thinned) for listing in list_checkpoints(prefix)]
    assert listed == [("step-23", "committed", True), ("step-24", "committed", False)]
    assert_thinned(prefix, "step-23", 23)
    assert collect_garbage(prefix, min_age_s=0).garbage == ()
    assert caplog.text == ""


def test_the_format_number_is_that_of_the_fields(tmp_path):
    save_all(tmp_path, (1, 2))
    thin(tmp_path)
    thinned, whole = (
        json.loads(hocket.ckpt.open(tmp_path / f"step-{step}").manifest.to_document()) for step in (1, 2)
    )
    assert (thinned["format"], whole["format"]) == (2, 1)
    for document, change, problem in (
        (thinned, {"format": 1}, "asked to write format 1; this build writes such a checkpoint in format 2"),
        (whole, {"format": 2}, "asked to write format 2; this build writes such a checkpoint in format 1"),
        (thinned, {"thinned": {**thinned["thinned"], "save_id": "x"}}, "thinned: save_id `x`: expected 32"),
        (thinned, {"thinned": {**thinned["thinned"], "more": 1}}, "unknown field `more`"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            _native.ckpt_manifest_encode(json.dumps(document | change).encode())
