"""Whole Composer scripts run unchanged: on one rank, and on several with each launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hocket.compat.streaming import MDSWriter
from support.s3d import Server

SCRIPTS = Path(__file__).parent / "composer_scripts"
pytestmark = pytest.mark.timeout(900)

_COMPOSER = "import sys; from hocket.compat.composer.command import main; sys.exit(main())"

#: The command by which each launcher starts a script on a number of ranks.
LAUNCHERS = {
    "python": lambda ranks: ["-m", "hocket.compat.composer"],
    "composer": lambda ranks: ["-c", _COMPOSER, "-n", str(ranks)],
    "hocket-launch": lambda ranks: ["-m", "hocket.dist.launch", "--compat", "composer", "-n", str(ranks)],
    "torchrun": lambda ranks: [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "hocket.compat.composer"),
    ],
}


def launch(launcher: str, num_ranks: int, script: str, *arguments: object) -> str:
    """Run a script; return its output."""
    command = [*LAUNCHERS[launcher](num_ranks), str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "cold start" not in done.stderr
    return done.stdout


def test_a_users_algorithm_runs_on_two_ranks_with_torchrun() -> None:
    printed = launch("torchrun", 2, "own_algorithm.py")
    assert "batches=24 applied=[12, 12] scales=0.1..0.075" in printed
    assert "accuracy=1.000" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "num_ranks"), [("python", 1), ("composer", 2), ("hocket-launch", 4)])
@pytest.mark.parametrize("script", ["own_algorithm.py", "own_loop.py", "causal.py"])
def test_a_script_without_arguments(script: str, launcher: str, num_ranks: int) -> None:
    pytest.importorskip("transformers")
    printed = launch(launcher, num_ranks, script)
    if script == "own_loop.py":
        assert f"ranks={num_ranks} better=True same=True" in printed
    elif script == "own_algorithm.py":
        applied = [24 // num_ranks] * num_ranks
        assert f"batches={48 // num_ranks} applied={applied} scales=0.1..0.075" in printed
        assert "accuracy=1.000" in printed
    else:
        assert f"ranks={num_ranks} batches={16 // num_ranks}" in printed
        assert "better=True no_positions=True" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 4)])
def test_a_bert_is_sharded_saved_and_resumed_on_another_number_of_ranks(
    first: int, second: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    printed = launch("composer", first, "bert.py", tmp_path, "4ep")
    steps = 16 // first  # steps in an epoch of 512 samples
    assert f"ranks={first} from=0 to={4 * steps} samples=2048sp" in printed
    assert _accuracy(printed) > 0.9
    assert "norms=5" in printed
    assert {"loss", "l2_norm", "lr-DecoupledAdamW", "metrics", "throughput", "time"} <= _logged(printed)
    folder = tmp_path / "checkpoints"
    kept = [f"ep3-ba{3 * steps}", f"ep4-ba{4 * steps}"]
    assert sorted(path.name for path in folder.iterdir()) == kept

    printed = launch("composer", second, "bert.py", tmp_path, "5ep", folder / "latest-rank0.pt")
    end = 4 * steps + 16 // second
    assert f"ranks={second} from={4 * steps} to={end} samples=2560sp" in printed
    assert _accuracy(printed) > 0.9
    assert sorted(path.name for path in folder.iterdir()) == [f"ep4-ba{4 * steps}", f"ep5-ba{end}"]

    lines = [json.loads(line) for line in (tmp_path / "training_log.txt").read_text().splitlines()]
    logged = [line["step"] for line in lines if "loss/train/total" in line]
    assert logged == list(range(1, end + 1))
    rates = [line["lr-DecoupledAdamW/group0"] for line in lines if "lr-DecoupledAdamW/group0" in line]
    assert rates[0] < max(rates) > rates[-1]
    others = {f"training_log-rank{rank}.txt" for rank in range(1, max(first, second))}
    assert others <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "num_ranks"), [("python", 1), ("hocket-launch", 2)])
def test_an_image_classifier_streams_its_data_from_a_bucket(
    launcher: str, num_ranks: int, s3d: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3d.env.items():
        monkeypatch.setenv(name, value)
    remote = s3d.uri(f"images-{num_ranks}")
    write_images(f"{remote}/train", 192, seed=1)
    write_images(f"{remote}/val", 30, seed=2)
    printed = launch(launcher, num_ranks, "images.py", remote, tmp_path, "6ep")
    assert f"ranks={num_ranks} batches={72 // num_ranks} samples=1152" in printed
    assert _accuracy(printed) > 0.9
    assert "blurred=2 frozen=True head_is_frozen=False" in printed
    assert any((tmp_path / "train").rglob("*.mds*"))


def write_images(uri: str, count: int, seed: int) -> None:
    """Store images whose class is their brightest corner."""
    numbers = np.random.default_rng(seed)
    with MDSWriter(out=uri, columns={"image": "ndarray:uint8:16,16,3", "label": "int"}) as writer:
        for index in range(count):
            image = numbers.integers(0, 120, (16, 16, 3), dtype=np.uint8)
            row, column = divmod(index % 4, 2)
            image[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 100
            writer.write({"image": image, "label": index % 4})


def _accuracy(printed: str) -> float:
    found = re.search(r"accuracy=([\d.]+)", printed)
    assert found is not None, printed
    return float(found[1])


def _logged(printed: str) -> set[str]:
    found = re.search(r"logged=\[(.*)\]", printed)
    assert found is not None, printed
    return set(found[1].replace("'", "").split(", "))
