"""Ray's `TorchTrainer` with `hocket.dist.ray`: a worker that dies, a node that is preempted, checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.dist.errors import ConfigError
from hocket.dist.ray import RayReports, checkpoint_path

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `uv sync --group ray`")

JOB = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from hocket.dist.ray import RayReports, checkpoint_path
from hocket.trainer import Callback, ComposerModel, Trainer

out, case = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.layer(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()


class Record(Callback):
    def batch_end(self, state, logger):
        batch = state.timestamp.counts.batch
        with open(out / f"batches-{rank}", "a") as file:
            print(json.dumps([os.getpid(), batch]), file=file)
        if case == "preempted" and is_first:
            time.sleep(1.5)  # Ray's command takes seconds to start, and its workers look for notices each 5 s
        if case == "dies" and rank == "1" and batch == 6 and not (out / "died").exists():
            (out / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


is_first = not (out / f"node-{rank}").exists()
if "ray" in sys.modules:
    import ray

    (out / f"node-{rank}").write_text(ray.get_runtime_context().get_node_id())
torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=2)
with Trainer(
    model=Model(),
    train_dataloader=data,
    max_duration="24ba",
    save_folder=str(out / "checkpoints"),
    save_interval="1ep",
    autoresume=True,
    run_name="job",
    seed=1,
    device="cpu",
    progress_bar=False,
    callbacks=[Record(), RayReports(every_batches=8)],
    dist_timeout=60,
) as trainer:
    trainer.fit()
    (out / f"weights-{rank}").write_text(json.dumps(trainer.state.model.layer.weight.tolist()))
"""
DRIVER = """
import subprocess, sys, threading, time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from hocket.dist.ray import main

out, case, job = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0 if case == "preempted" else 2})
for _ in range(3 if case == "preempted" else 0):
    cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)


def preempt():
    batches = out / "batches-1"
    while not batches.exists():
        time.sleep(0.05)
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the spot is gone"]
    print("preempting", flush=True)
    node = ["--node-id", (out / "node-1").read_text(), "--deadline-remaining-seconds", "8"]
    subprocess.run([*sys.argv[4:], "drain-node", "--address", cluster.address, *node, *reason], check=True)


if case == "preempted":
    threading.Thread(target=preempt, daemon=True).start()
failures = "1" if case == "dies" else "0"
options = ["--workers", "2", "--gpus", "0", "--max-failures", failures, "--storage", str(out / "ray")]
try:
    code = main([*options, job, str(out), case])
finally:
    ray.shutdown()
    cluster.shutdown()
sys.exit(code)
"""


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("case", ["dies", "preempted"])
def test_a_run_goes_on_where_a_worker_died_or_a_node_was_preempted(case: str, tmp_path: Path) -> None:
    job, driver = tmp_path / "job.py", tmp_path / "driver.py"
    job.write_text(JOB)
    driver.write_text(DRIVER)
    program = [sys.executable, "-m", "ray.scripts.scripts"]
    env = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    for which in (case, "undisturbed"):
        (tmp_path / which).mkdir()
        if which == "undisturbed":
            command = [sys.executable, "-m", "hocket.dist.launch", "-n", "2", str(job)]
        else:
            command = [sys.executable, str(driver)]
        arguments = [str(tmp_path / which), which, *([] if which == "undisturbed" else [str(job), *program])]
        done = subprocess.run(
            [*command, *arguments], env=env, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        if which == case:
            checkpoint = next((tmp_path / case / "checkpoints").glob("*-ba24"))
            assert f"the last checkpoint is {checkpoint}" in done.stdout
    weights = [(tmp_path / which / "weights-0").read_text() for which in (case, "undisturbed")]
    assert weights[0] == weights[1]
    lines = [json.loads(line) for line in (tmp_path / case / "batches-0").read_text().splitlines()]
    starts = list(dict.fromkeys(pid for pid, _ in lines))
    first, second = ([batch for pid, batch in lines if pid == start] for start in starts)
    # A notice loses nothing; a death loses the batches since the last save, that of the epoch.
    begins = first[-1] + 1 if case == "preempted" else 5
    assert second == list(range(begins, 25))
    assert 0 < first[-1] < 24


@needs_ray
@pytest.mark.slow
def test_the_snippet_of_the_page_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "engines" / "ray.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    script = tmp_path / "snippet.py"
    script.write_text(snippet.replace("/tmp/checkpoints", str(tmp_path / "checkpoints")))
    env = {**os.environ, "RAY_AIR_LOCAL_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert str(tmp_path / "checkpoints" / "ep2-ba4") in done.stdout


def test_ray_is_not_needed_where_a_script_runs_without_it() -> None:
    assert "ray" not in sys.modules
    reports = RayReports()
    reports.fit_start(None, None)
    reports.batch_end(None, None)
    reports.epoch_end(None, None)
    with pytest.raises(ConfigError, match="`every_batches` is 0, expected 1 or more"):
        RayReports(0)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_missing_ray_is_named() -> None:
    with pytest.raises(ConfigError, match=r"`pip install 'hocket-dist\[ray\]'`"):
        checkpoint_path()
