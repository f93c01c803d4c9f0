"""Weights published by sharded ranks, followed under another layout, and by publishers that are killed."""

import doctest
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hocket.ckpt
from hocket.ckpt import Follower
from hocket.ckpt.errors import CheckpointError, CheckpointIncompatibleError
from hocket.ckpt.torch import Publisher, TensorFollower, publish
from hocket.ckpt.torch.weights import publisher as publishing
from hocket.ckpt.verbs.list import list_checkpoints
from hocket.native import _native
from support.ranks import run_ranks
from support.sampling import cases

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STEPS = 5


def whole_state(step):
    """Return the weights of a step as plain tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(51, 13, generator=generator)
    for number in range(step):
        weight.view(torch.int32)[number % 51] ^= 5 + number
    return {"weight": weight, "norm": torch.full((300,), step).bfloat16(), "scale": torch.tensor(2.0 * step)}


def sharded_state(step, mesh, dim):
    from torch.distributed.tensor import Shard, distribute_tensor

    state = whole_state(step)
    return state | {"weight": distribute_tensor(state["weight"], mesh, [Shard(dim)])}


def publish_and_follow(uri):
    """Publish as two ranks, follow as two ranks under another layout; return what each rank saw."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    mine = sharded_state(0, mesh, 1)
    follower = TensorFollower(uri, mine)
    seen = []
    with Publisher(uri, full_every=3) as publisher:
        for step in range(1, STEPS + 1):
            publisher.publish(sharded_state(step, mesh, 0), step=step, mode="async" if step % 2 else "sync")
            publisher.wait()
            update = follower.update()
            expected = whole_state(step)
            is_equal = all(
                torch.equal(tensor.full_tensor() if name == "weight" else tensor, expected[name])
                for name, tensor in mine.items()
            )
            seen.append((update.step, update.is_whole, is_equal))
            dist.barrier()
        # One rank fails: nothing is published, and the next version is whole.
        state = sharded_state(STEPS + 1, mesh, 0)
        if dist.get_rank() == 1:
            state["bad"] = object()
        with pytest.raises(CheckpointError):
            publisher.publish(state, step=STEPS + 1)
        publisher.publish(sharded_state(STEPS + 2, mesh, 0), step=STEPS + 2)
    return seen


def test_sharded_ranks_publish_without_a_gather_and_follow_under_another_layout(tmp_path):
    uri = str(tmp_path)
    for seen in run_ranks(publish_and_follow, 2, uri, init="gloo"):
        assert seen == [(step, step in (1, 4), True) for step in range(1, STEPS + 1)]
    listed = {
        one.step: (one.base, one.num_files) for one in list_checkpoints(uri) if one.status == "committed"
    }
    assert listed == {
        4: (None, 2), 5: ("version-4", 2), 7: (None, 2),
    }  # fmt: skip
    follower = Follower(uri)  # without torch, in one process
    follower.update()
    for name, tensor in whole_state(STEPS + 2).items():
        assert follower.arrays[name].tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_of_every_kind_are_updated_in_place(tmp_path):
    state = {
        "bf16": torch.randn(3, 4).bfloat16(), "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]), "scalar": torch.tensor(1.0),
        "c64": torch.randn(3, dtype=torch.complex64),
        "turned": torch.randn(5, 7).T, "none": torch.empty(0, 2), "list": [torch.arange(3)], "lr": 0.1,
    }  # fmt: skip
    with Publisher(tmp_path) as publisher:
        publisher.publish(state, step=1)
        into = {
            name: torch.zeros_like(tensor) if isinstance(tensor, torch.Tensor) else tensor
            for name, tensor in state.items()
        }
        into["list"] = [torch.zeros(3, dtype=torch.int64)]
        follower = TensorFollower(tmp_path, into)
        follower.update()
        state["bf16"][1] += 1
        state["scalar"] += 1
        state["turned"][2] = 0
        state["bool"][1] = True
        state["c64"][0] = 1j
        publisher.publish(state, step=2)
        assert not follower.update().is_whole
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(
                into[name].contiguous().reshape(-1).view(torch.uint8),
                tensor.contiguous().reshape(-1).view(torch.uint8),
            ), name
    assert torch.equal(into["list"][0], state["list"][0])
    with pytest.raises(CheckpointIncompatibleError, match="has no tensor `more`"):
        TensorFollower(tmp_path, {"more": torch.zeros(3)}).update()
    with pytest.raises(CheckpointIncompatibleError, match="`bf16` is F32"):
        TensorFollower(tmp_path, {"bf16": torch.zeros(3, 4)}).update()


def test_a_changed_layout_is_published_whole(tmp_path):
    with Publisher(tmp_path) as publisher:
        publisher.publish({"w": torch.zeros(4)}, step=1)
        publisher.publish({"w": torch.zeros(4), "more": torch.ones(300)}, step=2)
        publisher.publish({"w": torch.ones(4), "more": torch.ones(300)}, step=3)
    assert [one.base for one in list_checkpoints(tmp_path)] == [None, None, "version-2"]
    follower = Follower(tmp_path)
    follower.update()
    np.testing.assert_array_equal(follower.arrays["w"], np.ones(4))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_versions_are_those_of_the_call_whatever_changes_afterwards(tmp_path, mode):
    state = whole_state(0)
    follower = Follower(tmp_path)
    with Publisher(tmp_path, full_every=3) as publisher:
        for step in range(1, 8):
            for name, tensor in whole_state(step).items():
                state[name].copy_(tensor)
            publisher.publish(state, step=step, mode="sync" if step == 5 else mode)
            for tensor in state.values():  # as the next step of a training
                tensor.fill_(-1)
            publisher.wait(30)
            update = follower.update()
            assert (update.step, update.is_whole) == (step, step in (1, 4, 7))
            for name, tensor in whole_state(step).items():
                assert (
                    follower.arrays[name].tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_versions_are_published_within_inference_mode_and_outside_of_it(tmp_path, mode):
    follower = Follower(tmp_path)
    with Publisher(tmp_path) as publisher:
        for step in (1, 2, 3, 4):
            # One tensor is not contiguous, so that its part is a copy that is made in the mode.
            state = {"w": torch.arange(900.0) + step, "turned": torch.full((30, 20), step).T}
            with torch.inference_mode(step in (1, 3)):
                publisher.publish(state, step=step, mode=mode)
            publisher.wait(30)
            assert follower.update().num_deltas == (step > 1)
            for name, tensor in state.items():
                np.testing.assert_array_equal(follower.arrays[name], tensor.numpy())


def test_the_error_of_an_asynchronous_version_is_raised_and_the_next_one_is_whole(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no room")

    write = _native.ckpt_write_file
    with Publisher(tmp_path) as publisher:
        for step in (1, 2):
            publisher.publish(whole_state(step), step=step, mode="async")
        for step in (3, 5):
            publisher.wait(30)
            monkeypatch.setattr(_native, "ckpt_write_file", fail)
            publisher.publish(whole_state(step), step=step, mode="async")
            with pytest.raises(OSError, match="no room"):
                publisher.wait(30) if step == 3 else publisher.publish(whole_state(6), step=6)
            monkeypatch.setattr(_native, "ckpt_write_file", write)
            publisher.publish(whole_state(step + 1), step=step + 1, mode="async")
    assert [(one.step, one.base) for one in list_checkpoints(tmp_path)] == [(4, None), (6, None)]
    with pytest.raises(ValueError, match="`mode` is 'asynch'"):
        Publisher(tmp_path).publish(whole_state(7), step=7, mode="asynch")
    follower = Follower(tmp_path)
    assert follower.update().step == 6


FORKED = """
import os, sys, threading, torch
from hocket.ckpt.torch import Publisher
from hocket.native import _native
write, may_write = _native.ckpt_write_file, threading.Event()
_native.ckpt_write_file = lambda *args, **options: may_write.wait(60) and write(*args, **options)
publisher = Publisher(sys.argv[1])
publisher.publish({"w": torch.zeros(900)}, step=1, mode="async")
child = os.fork()
may_write.set()
if child == 0:
    publisher.wait(1)  # for nothing: the parent writes it
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
publisher.publish({"w": torch.ones(900)}, step=2)
"""


def test_a_forked_child_does_not_wait_for_the_version_that_its_parent_writes(tmp_path):
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    subprocess.run(command, timeout=200, check=True)
    assert [(one.step, one.base) for one in list_checkpoints(tmp_path)] == [(1, None), (2, "version-1")]


# The calls of the extension by which a publisher changes what followers see.
CALLS = (
    "ckpt_write_file",
    "ckpt_manifest_encode",
    "ckpt_commit",
    "ckpt_delete",
    "ckpt_list",
)


def publish_until_killed(uri, first, number, *, is_after):
    """Publish in a forked child that kills itself at its `number`-th call; return whether it did."""
    pid = os.fork()
    if pid == 0:
        try:
            left = number

            def wrapped(call):
                def run(*args, **kwargs):
                    nonlocal left
                    left -= 1
                    if left == 0 and not is_after:
                        os.kill(os.getpid(), signal.SIGKILL)
                    try:
                        return call(*args, **kwargs)
                    finally:
                        if left == 0:
                            os.kill(os.getpid(), signal.SIGKILL)

                return run

            for name in CALLS:
                setattr(_native, name, wrapped(getattr(_native, name)))
            publisher = Publisher(uri, full_every=3, keep_full=1)
            for step in range(first, first + 30):
                publisher.publish(whole_state(step), step=step)
        finally:
            os._exit(7)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_follower_survives_publishers_that_are_killed_at_any_point(tmp_path):
    follower = Follower(tmp_path)
    first, num_killed = 1, 0
    for number in range(1, cases(full=60, sample=26)):
        for is_after in (False, True):
            num_killed += publish_until_killed(tmp_path, first, number, is_after=is_after)
            if all(one.status != "committed" for one in list_checkpoints(tmp_path)):
                continue
            follower.update()
            assert follower.step >= first - 1
            fresh = Follower(tmp_path)
            fresh.update()
            for name, tensor in whole_state(follower.step).items():
                expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert follower.arrays[name].tobytes() == fresh.arrays[name].tobytes() == expected
            first = follower.step + 1  # as a training that resumes from there
    assert num_killed == 2 * (cases(full=60, sample=26) - 1)


def test_the_function_keeps_its_publisher(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "_publishers", {})
    weights = {"w": torch.zeros(1000)}
    for step in (1, 2):
        weights["w"][step] = 1
        assert publish(weights, tmp_path, step) == f"version-{step}"
    assert [one.base for one in list_checkpoints(tmp_path)] == [None, "version-1"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    publish(weights, "here", 1)
    monkeypatch.chdir("other")
    publish(weights, "here", 1)
    for folder in (tmp_path / "here", tmp_path / "other" / "here"):
        assert [one.name for one in list_checkpoints(folder)] == ["version-1"]
    with pytest.raises(ValueError, match="`full_every` is 0"):
        Publisher(tmp_path, full_every=0)
    with pytest.raises(ValueError, match="`full_every` is 1001; expected at most 1000"):
        Publisher(tmp_path, full_every=1001)


@pytest.mark.parametrize(
    "module",
    ["torch.weights.publisher", "torch.weights.tensor_follower", "weights.follower", "weights.folder"],
)
def test_the_examples_in_docstrings_run(tmp_path, module):
    with Publisher(tmp_path / "versions") as publisher:
        publisher.publish({"weight": torch.arange(3.0)}, step=1)
        publisher.publish({"weight": torch.tensor([0.0, 1.0, 4.0])}, step=2)
    imported = importlib.import_module(f"hocket.ckpt.{module}")
    names = {
        "folder": str(tmp_path),
        "versions": str(tmp_path / "versions"),
        "torch": torch,
        "hocket": hocket,
    }
    ran = doctest.testmod(imported, extraglobs=names)
    assert ran.attempted >= 3
    assert ran.failed == 0


def test_the_page_runs_a_training_and_a_generating_process(tmp_path, monkeypatch):
    """The training and the process that generates run at the same time, each as the page has it."""
    page = (Path(__file__).parents[1] / "docs" / "weights.md").read_text()
    train, generate = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "generate.py").write_text(generate)
    processes = [
        subprocess.Popen([sys.executable, name], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for name in ("generate.py", "train.py")
    ]
    try:
        heard, _ = processes[0].communicate(timeout=120)
        processes[1].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    lines = heard.splitlines()
    assert lines[-1].startswith("step 20:")
