"""Published weights: versions and deltas, and the followers that need no torch."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import hocket.ckpt
from hocket.ckpt import FolderFollower, Follower, plain
from hocket.ckpt.cli.app import app
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
)
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.diff import diff
from hocket.ckpt.verbs.list import list_checkpoints
from hocket.ckpt.verbs.remove import remove
from hocket.ckpt.verbs.thin import thin
from hocket.ckpt.weights.follower import wait_for
from hocket.ckpt.weights.versions import Versions
from hocket.native import Store, _native
from support.sampling import cases

torch = pytest.importorskip("torch")

from hocket.ckpt.torch import CheckpointStore, Publisher  # noqa: E402 - after the check for torch


def state_of(step):
    """Return the weights of a step: most bytes are those of the step before, as in a training."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(300, 257, generator=generator).bfloat16()
    tied = torch.randn(40, 9, generator=generator)
    for number in range(step):
        weight.view(torch.int16)[number % 300] ^= 1 + number % 3
        tied[number % 40] += 0.5
    return {
        "model": {"weight": weight, "tied": tied, "head": tied, "none": torch.empty(0, 3)},
        "scale": torch.tensor(float(step)),
        "step": step,
    }


def bits(step):
    model = state_of(step)["model"]
    arrays = {f"model.{name}": tensor for name, tensor in model.items()} | {"scale": state_of(step)["scale"]}
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in arrays.items()
    }


def assert_holds(arrays, step, names=None):
    for name, expected in bits(step).items():
        if names is None or name in names:
            assert np.ascontiguousarray(arrays[name]).tobytes() == expected, name


def publish(uri, steps, **options):
    with Publisher(uri, **options) as publisher:
        for step in steps:
            publisher.publish(state_of(step), step=step)


def steps_of(uri):
    return {one.step: one.base for one in list_checkpoints(uri) if one.status == "committed"}


def spoil(uri, name):
    """Flip a bit near the end of a version's data file."""
    [entry] = Store(uri).list(f"{name}/data")
    content = bytearray(Store(uri).get(entry.key))
    content[-9] ^= 1
    Store(uri).put(entry.key, bytes(content))


def test_versions_are_followed_by_deltas_and_read_by_every_reader(prefix, tmp_path):
    follower = Follower(prefix)
    with Publisher(prefix, full_every=4, keep_full=3) as publisher:
        for step in range(1, 7):
            assert publisher.publish(state_of(step), step=step, user={"at": step}) == f"version-{step}"
            update = follower.update()
            assert (update.step, follower.step, update.is_whole) == (step, step, step in (1, 5))
            assert_holds(follower.arrays, step)
            assert follower.update() is None
    assert steps_of(prefix) == {
        1: None,
        2: "version-1",
        3: "version-2",
        4: "version-3",
        5: None,
        6: "version-5",
    }
    assert follower.arrays["model.weight"].dtype == ml_dtypes.bfloat16
    for step in range(1, 7):
        uri = f"{prefix}/version-{step}"
        checkpoint = hocket.ckpt.open(uri)
        assert_holds({name: checkpoint[name] for name in checkpoint}, step)
        assert (checkpoint.manifest.values["step"].value, checkpoint.manifest.user) == (step, {"at": step})
        head = json.loads(_native.ckpt_manifest_head(uri))
        assert head["format"] == (1 if step in (1, 5) else 4)
        assert hocket.ckpt.verify(uri).is_sound
    loaded = CheckpointStore(prefix).load("version-3", state_of(1)).state
    assert torch.equal(loaded["model"]["weight"], state_of(3)["model"]["weight"])
    convert(f"{prefix}/version-4", str(tmp_path / "whole"), to="hocket")
    assert Manifest.read(tmp_path / "whole").delta is None
    assert diff(f"{prefix}/version-4", tmp_path / "whole").is_empty
    assert_holds(hocket.ckpt.open(tmp_path / "whole"), 4, names=["model.weight", "model.tied"])


def test_deltas_are_small(tmp_path):
    publish(tmp_path, (1, 2))
    sizes = {one.step: one.num_bytes for one in list_checkpoints(tmp_path)}
    assert sizes[2] < 0.2 * sizes[1]


def test_a_follower_catches_up_from_any_version(tmp_path):
    followers = []
    with Publisher(tmp_path, full_every=3, keep_full=2) as publisher:
        for step in range(1, 9):
            publisher.publish(state_of(step), step=step)
            follower = Follower(tmp_path)
            follower.update()
            followers.append(follower)
    for number, follower in enumerate(followers, start=1):
        update = follower.update()
        assert (None if number == 8 else 8) == (update and update.step)
        assert number == 8 or update.is_whole == (number < 7)
        assert_holds(follower.arrays, 8)


def test_old_versions_that_no_follower_needs_are_removed(prefix):
    publish(prefix, range(1, 10), full_every=3, keep_full=2)
    assert list(steps_of(prefix)) == [4, 5, 6, 7, 8, 9]
    follower = Follower(prefix)
    follower.update()
    assert_holds(follower.arrays, 9)


def test_other_checkpoints_of_the_folder_are_left_alone(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state_of(1), step=99)
    publish(tmp_path, range(1, 6), full_every=1, keep_full=1)
    assert list(steps_of(tmp_path)) == [5, 99]
    follower = Follower(tmp_path)
    assert follower.update().step == 5


def test_a_restarted_publisher_goes_on_and_removes_what_an_abandoned_run_left(tmp_path):
    publish(tmp_path, range(1, 6))
    follower = Follower(tmp_path)
    follower.update()
    publish(tmp_path, (4,))
    assert steps_of(tmp_path) == {1: None, 2: "version-1", 3: "version-2", 4: None}
    assert follower.update().is_whole
    assert follower.step == 4
    with Publisher(tmp_path) as publisher:
        publisher.publish(state_of(6), step=6)
        with pytest.raises(ValueError, match="expected one after 6"):
            publisher.publish(state_of(6), step=6)
        publisher.publish(state_of(7), step=7)
    follower.update()
    assert_holds(follower.arrays, 7)


def test_a_corrupt_block_leaves_a_version_that_is_named(tmp_path):
    with Publisher(tmp_path) as publisher:
        publisher.publish(state_of(1), step=1)
        follower = Follower(tmp_path)
        follower.update()
        for step in (2, 3):
            publisher.publish(state_of(step), step=step)
        spoil(tmp_path, "version-3")
        with pytest.raises(CheckpointCorruptError, match="version-3"):
            follower.update()
        assert follower.step == 2
        assert_holds(follower.arrays, 2)
    publish(tmp_path, (4,))
    spoil(tmp_path, "version-4")
    with pytest.raises(CheckpointCorruptError, match="version-4"):
        follower.update()
    assert follower.step == 2
    assert_holds(follower.arrays, 2)


def test_deltas_before_one_that_fails_stay_applied(tmp_path):
    settled = []

    class Recorder(Follower):
        def _finish(self):
            settled.append(self.step)

    with Publisher(tmp_path) as publisher:
        publisher.publish(state_of(1), step=1)
        follower = Recorder(tmp_path)
        follower.update()
        for step in (2, 3):
            publisher.publish(state_of(step), step=step)
    spoil(tmp_path, "version-3")
    with pytest.raises(CheckpointCorruptError):
        follower.update()
    spoil(tmp_path, "version-3")
    assert follower.update().num_deltas == 1
    assert settled == [1, 2, 3]
    assert_holds(follower.arrays, 3)


def test_arrays_that_somebody_changed_are_read_whole(tmp_path, caplog):
    with Publisher(tmp_path) as publisher:
        publisher.publish(state_of(1), step=1)
        follower = Follower(tmp_path)
        follower.update()
        follower.arrays["model.tied"][3] = 9
        publisher.publish(state_of(2), step=2)
        assert follower.update().is_whole
    assert "changed since the last update" in caplog.text
    assert_holds(follower.arrays, 2)


def test_arrays_of_the_caller_are_updated_in_place_with_any_strides(tmp_path):
    publish(tmp_path, (1,))
    memory = np.zeros((257, 600), ml_dtypes.bfloat16)
    into = {"model.weight": memory.T[::2], "model.head": np.zeros((40, 9), np.float32)}
    follower = Follower(tmp_path, into=into)
    with Publisher(tmp_path) as publisher:
        for step in (2, 3, 4):
            publisher.publish(state_of(step), step=step)
            follower.update()
            assert_holds(into, step, names=into)
    assert not memory[:, 1::2].any()
    for name, array, problem in [
        ("model.weight", np.zeros((300, 257), np.float16), "shape .300, 257. and dtype float16"),
        ("model.weigth", np.zeros(3), "has no tensor `model.weigth`"),
    ]:
        with pytest.raises(CheckpointIncompatibleError, match=problem):
            Follower(tmp_path, into={name: array}).update()


def test_two_names_may_have_one_array_and_no_other_overlap(tmp_path):
    with Publisher(tmp_path) as publisher:
        publisher.publish({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(2)}, step=1)
        array = np.ones(4, np.float32)
        follower = Follower(tmp_path, into={"a": array, "b": array.reshape(4)})
        follower.update()
        publisher.publish({"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(2)}, step=2)
        follower.update()
    np.testing.assert_array_equal(array, np.ones(4))
    with pytest.raises(CheckpointIncompatibleError, match="`a` and `c` overlap"):
        Follower(tmp_path, into={"a": array, "c": array[:2]}).update()


def test_a_part_is_followed_by_globs(tmp_path):
    publish(tmp_path, (1, 2))
    follower = Follower(tmp_path, include=["model.w*"])
    follower.update()
    assert set(follower.arrays) == {"model.weight"}
    with pytest.raises(CheckpointNotFoundError, match=r"no tensor matches `model.x\*`"):
        Follower(tmp_path, include=["model.x*"]).update()


def test_nothing_published_and_no_new_version_in_time_are_said(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no version of weights"):
        Follower(tmp_path / "none").update()
    with pytest.raises(CheckpointTimeoutError, match="no new version within 0 s"):
        Follower(tmp_path / "none").wait(timeout_s=0)
    follower = Follower(tmp_path)

    def update_before_the_first_version():
        try:
            return follower.update()
        finally:
            if follower.step is None:
                publish(tmp_path, (1,))

    assert wait_for(update_before_the_first_version, str(tmp_path), timeout_s=30, interval_s=0.01).step == 1
    assert Follower(tmp_path).wait(timeout_s=5).step == 1


def test_a_base_is_neither_removed_nor_thinned_before_its_deltas(prefix):
    publish(prefix, (1, 2, 3))
    for name, delta in (("version-1", "version-2"), ("version-2", "version-3")):
        with pytest.raises(CheckpointExistsError, match=f"{delta}.*delta to `{name}`"):
            remove(f"{prefix}/{name}")
    for dry_run in (True, False):
        assert thin(prefix, after=1, drop=["scale"], dry_run=dry_run).thinned == ()
    follower = Follower(prefix)
    follower.update()
    assert_holds(follower.arrays, 3)
    for name in ("version-3", "version-2", "version-1"):
        remove(f"{prefix}/{name}")
    assert Versions.find(prefix).newest is None


def test_a_delta_whose_base_is_gone_says_so(tmp_path):
    publish(tmp_path, (1, 2, 3))
    shutil.rmtree(tmp_path / "version-1")
    for verb in (hocket.ckpt.open, hocket.ckpt.verify):
        with pytest.raises(CheckpointNotFoundError, match=r"delta to `version-1`.*which was removed"):
            verb(tmp_path / "version-3")
    with pytest.raises(CheckpointNotFoundError, match="which was removed"):
        Follower(tmp_path).update()
    CheckpointStore(tmp_path).save(state_of(1), step=1, name="version-1")
    with pytest.raises(CheckpointNotFoundError, match="replaced by another save"):
        hocket.ckpt.open(tmp_path / "version-3")
    with pytest.raises(ValueError, match="format 4"):
        plain.load_tensors(tmp_path / "version-2")


def test_a_folder_is_kept_and_continued(prefix, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folder = tmp_path / "served"
    options = {"name_prefix": "model.", "model_folder": tmp_path / "model"}
    kinds = []
    with Publisher(prefix, full_every=4) as publisher:
        for step in range(1, 7):
            publisher.publish(state_of(step), step=step)
            follower = FolderFollower(prefix, folder, **options)  # a new one, as after a restart
            kinds.append(follower.update().is_whole)
            assert (follower.step, follower.update()) == (step, None)
            opened = hocket.ckpt.open(folder)
            assert set(opened) == {"weight", "tied", "none"}  # `head` shares the storage of `tied`
            assert_holds(
                {f"model.{name}": opened[name] for name in opened}, step, names=["model.weight", "model.tied"]
            )
    assert kinds == [True, False, False, False, True, False]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    before = (folder / "model.safetensors").read_bytes()
    with Publisher(prefix) as publisher:
        publisher.publish(state_of(7), step=7)
    spoil(prefix, "version-7")
    with pytest.raises(CheckpointCorruptError):
        FolderFollower(prefix, folder, **options).update()
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(CheckpointIncompatibleError, match=r"begins with `name_prefix` 'modle\.'"):
        FolderFollower(prefix, folder, name_prefix="modle.").update()
    with pytest.raises(ValueError, match="expected a folder of this machine"):
        FolderFollower(prefix, "s3://bucket/served")


def update_until_killed(uri, folder, number):
    """Update a folder in a forked child that kills itself at its `number`-th call; return whether it did."""
    pid = os.fork()
    if pid == 0:
        try:
            left = number

            def count(_frame, event, _argument):
                nonlocal left
                # Before and after each function in C, which are all that can change the folder.
                if event in ("c_call", "c_return"):
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            follower = FolderFollower(uri, folder, name_prefix="model.")
            sys.setprofile(count)
            follower.update()
        finally:
            os._exit(7)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_folder_is_whole_and_goes_on_when_its_follower_is_killed_at_any_point(tmp_path):
    uri, folder = tmp_path / "weights", tmp_path / "served"
    publish(uri, [1])
    FolderFollower(uri, folder, name_prefix="model.").update()
    first = tmp_path / "first"
    shutil.copytree(folder, first)
    with Publisher(uri, full_every=4) as publisher:
        for step in (2, 3, 4):
            publisher.publish(state_of(step), step=step)
    seen, number, stride = set(), 1, cases(full=7, sample=101)
    while update_until_killed(uri, folder, number):
        follower = FolderFollower(uri, folder, name_prefix="model.")
        step = follower.step
        seen.add(step)
        opened = hocket.ckpt.open(folder)
        held = {f"model.{name}": opened[name] for name in opened}
        assert_holds(held, step, names=["model.weight", "model.tied"])
        if step == 1:
            assert follower.update().step == 4
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"] or step == 4
        shutil.rmtree(folder)
        shutil.copytree(first, folder)
        number += stride
    assert number > 4 * stride
    assert seen == {1, 4} or seen == {1}


def test_a_folder_is_kept_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    publish(tmp_path / "weights", [1])
    folder = tmp_path / "served"
    folder.mkdir()
    unknown = folder / ".model.safetensors.other-7.unfinished"
    unknown.write_bytes(b"perhaps of a follower that lives")
    assert FolderFollower(tmp_path / "weights", folder).update().step == 1
    assert sorted(path.name for path in folder.iterdir()) == [unknown.name, "model.safetensors"]


def test_a_file_that_is_not_as_it_was_written_is_replaced(tmp_path):
    publish(tmp_path / "w", (1,))
    folder, file = tmp_path / "served", tmp_path / "served" / "model.safetensors"
    with Publisher(tmp_path / "w") as publisher:
        for step, content in enumerate((None, b"version https://git-lfs.github.com/spec/v1", b""), start=2):
            publisher.publish(state_of(step), step=step)
            FolderFollower(tmp_path / "w", folder).update()
            opened = hocket.ckpt.open(folder)
            assert_holds(opened, step, names=["model.weight"])
            file.write_bytes(file.read_bytes()[:-5] if content is None else content)


def test_what_is_removed_in_vain_is_logged_after_a_commit_and_refused_before(tmp_path, monkeypatch, caplog):
    publish(tmp_path, (1, 2, 3), full_every=1, keep_full=9)

    def delete(uri, name, save_id):
        raise PermissionError(name)

    monkeypatch.setattr(_native, "ckpt_delete", delete)
    publish(tmp_path, (4,), keep_full=1)
    assert "could not remove old versions" in caplog.text
    assert list(steps_of(tmp_path)) == [1, 2, 3, 4]
    with pytest.raises(PermissionError, match="version-4"):
        publish(tmp_path, (2,))
    assert list(steps_of(tmp_path)) == [1, 2, 3, 4]


def test_relative_folders_are_those_of_the_beginning_also_after_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    follower, folder = Follower("w"), FolderFollower("w", "served", model_folder="model")
    publish(tmp_path / "w", (1, 2))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert (follower.update().step, folder.update().step) == (2, 2)
    assert {"model.safetensors", "config.json"} <= set(os.listdir(tmp_path / "served"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_command_follows(tmp_path, capsys):
    publish(tmp_path / "w", (1, 2))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            app(["follow", str(tmp_path / "w"), str(tmp_path / "out"), *arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    code, out, _ = run("--once", "--name-prefix", "model.")
    assert (code, out.startswith("step 2, whole, ")) == (0, True)
    assert run("--once", "--name-prefix", "model.")[1] == "step 2 is there already\n"
    assert json.loads(run("--once", "--json")[1])["step"] == 2
    assert run("--once", "--name-prefix", "x.")[0] == 4
    assert run("--interval", "0")[0] == 2
    command = [
        sys.executable,
        "-m",
        "hocket.ckpt",
        "follow",
        str(tmp_path / "w"),
        str(tmp_path / "live"),
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        try:
            assert json.loads(process.stdout.readline())["step"] == 2
            publish(tmp_path / "w", (3,))
            assert json.loads(process.stdout.readline())["step"] == 3
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
