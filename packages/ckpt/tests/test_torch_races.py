"""Two jobs save under one name at once: one wins; the other raises, names the winner and leaves no files."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import hocket.ckpt
from hocket.ckpt.torch import CheckpointStore
from hocket.native import Store
from support.sampling import cases
from support.workers import worker

SCRIPT = Path(__file__).with_name("racing_writers.py")


@pytest.fixture(scope="module")
def script():
    """Import the writers' script, for the states that they save."""
    spec = importlib.util.spec_from_file_location("racing_writers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def race():
    """Return a function that lets two processes save concurrently and returns their outcomes."""
    with worker(sys.executable, str(SCRIPT)) as ask:
        yield lambda **request: ask(request)


def names_of(uri):
    """Return all keys or paths below a location."""
    if "://" in uri:
        return {found.key for found in Store(uri).list("")}
    return {str(path.relative_to(uri)) for path in Path(uri).rglob("*") if path.is_file()}


def check(script, prefix, trial, heard):
    """Check that one writer won with all its data, and that the other's error names the winner."""
    assert sum(said is None for said in heard) == 1, heard
    winner = heard.index(None)
    step, name = script.step_of(trial, winner), f"trial-{trial}"
    assert heard[1 - winner].startswith(f"CheckpointExistsError: `{prefix}/{name}`"), heard
    assert f"of step {step}" in heard[1 - winner], heard
    saved = script.state(step)
    into = {key: torch.zeros_like(value) if key != "step" else -1 for key, value in saved.items()}
    loaded = CheckpointStore(prefix).load(name, into)
    assert loaded.step == loaded.state.pop("step") == saved.pop("step")
    assert all(torch.equal(loaded.state[key], tensor) for key, tensor in saved.items())
    uri = f"{prefix}/{name}"
    paths = {file["path"] for file in hocket.ckpt.open(uri).manifest.files}
    assert names_of(uri) == {*paths, "checkpoint.json.zst"}, heard
    return "was committed there" in heard[1 - winner]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_of_two_processes_wins_and_the_others_error_names_it(
    tmp_path, s3d_faults, race, script, monkeypatch
):
    trials = cases(full=50, sample=2)
    # Half of the manifests' writes get the reply that another write conflicts, whether one does or not.
    server = s3d_faults("kind=conflict,rate=0.5,op=PutObject,key=*checkpoint.json.zst", latency_ms=2)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    for prefix in (str(tmp_path / "runs"), server.uri("runs")):
        heard = race(prefix=prefix, env=server.env, trials=trials)
        assert len(heard) == trials
        met = [check(script, prefix, trial, each) for trial, each in enumerate(heard)]
        # Otherwise the later writer found the other's checkpoint before it wrote anything.
        assert any(met) or trials < 50
    assert server.stats()["faults"]["conflict"] > 0
