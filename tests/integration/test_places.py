"""Every public function that takes a place takes it as text and as a `Path`, and gives the same answer."""

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hocket.ckpt as ckpt
import hocket.stream as stream
from hocket.ckpt.verbs.demo import write_demo
from hocket.ckpt.verbs.retention import CheckpointRetainer, KeepLast
from hocket.stream.convert import from_csv
from hocket.stream.read.column_stats import measure
from hocket.stream.simulate import Cluster, simulate
from hocket.stream.verify import verify as verify_data

ROOMS = (
    "hocket.ckpt", "hocket.ckpt.torch", "hocket.ckpt.dcp", "hocket.ckpt.verbs.demo",
    "hocket.ckpt.verbs.retention",
    "hocket.stream", "hocket.stream.convert", "hocket.stream.simulate", "hocket.stream.torch",
    "hocket.stream.verify", "hocket.trainer", "hocket.trainer.callbacks", "hocket.trainer.loggers",
    "hocket.trainer.models", "hocket.trainer.profiler",
)  # fmt: skip
PLACES = re.compile(
    r"uri|path|prefix|source|destination|root|out|remote|local|folder|directory|(load|save|log|artifact)_(folder|path|dir)"
)


def _texts_only() -> list[str]:
    """Return the places of public functions whose annotation has no `PathLike`."""
    found = []
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]):
            given = getattr(module, name)
            is_own = getattr(given, "__module__", "").startswith("hocket")
            if not is_own or not (inspect.isfunction(given) or inspect.isclass(given)):
                continue
            if inspect.isclass(given) and (
                hasattr(given, "__dataclass_fields__") or issubclass(given, Exception)
            ):
                continue  # a report or an error, which says the place as text
            for parameter in inspect.signature(given).parameters.values():
                annotation = str(parameter.annotation)
                is_text = re.search(r"\bstr\b", annotation) and not re.search("PathLike|Place", annotation)
                if is_text and PLACES.fullmatch(parameter.name):
                    found.append(f"{room}.{name}({parameter.name}: {annotation})")
    return found


def test_no_place_of_a_public_function_is_annotated_as_text_alone() -> None:
    # These are made by `open`, `save` and the trainer, with the place that they were given.
    made = {"Checkpoint", "SaveHandle", "Destination"}
    assert [one for one in _texts_only() if one.split("(")[0].rpartition(".")[2] not in made] == []


def _demo(folder: Path) -> Path:
    write_demo(str(folder / "run" / "demo"), ranks=2)
    return folder / "run" / "demo"


def _data(folder: Path) -> Path:
    with stream.MDSWriter(out=str(folder / "data"), columns={"x": "int"}) as writer:
        for number in range(8):
            writer.write({"x": number})
    return folder / "data"


def _pair(folder: Path, kind: Callable[[Any], Any]) -> Any:
    out = kind(folder / "local"), kind(folder / "remote")
    with stream.MDSWriter(out=out, columns={"x": "int"}, keep_local=True) as writer:
        writer.write({"x": 3})
    return [
        len(json.loads((folder / side / "index.json").read_text())["shards"]) for side in ("local", "remote")
    ]


def _csv(folder: Path, kind: Callable[[Any], Any]) -> Any:
    (folder / "a.csv").write_text("x\n1\n2\n")
    from_csv(kind(folder / "a.csv"), kind(folder / "out"))
    return [sample["x"] for sample in stream.StreamingDataset(local=kind(folder / "out"), batch_size=1)]


def _merge(folder: Path, kind: Callable[[Any], Any]) -> Any:
    _data(folder / "all")
    stream.merge_index(kind(folder / "all"))
    return len(json.loads((folder / "all" / "index.json").read_text())["shards"])


def _retained(folder: Path, kind: Callable[[Any], Any]) -> Any:
    kept = CheckpointRetainer(kind(_demo(folder).parent), [KeepLast(num=1)])
    return kept.after("demo")


CLUSTER = Cluster(batch_size=2)
CALLS: dict[str, Callable[[Path, Callable[[Any], Any]], Any]] = {
    "ckpt.open": lambda folder, kind: ckpt.open(kind(_demo(folder))).contents.step,
    "ckpt.verify": lambda folder, kind: ckpt.verify(kind(_demo(folder))).num_blocks,
    "ckpt.diff": lambda folder, kind: ckpt.diff(kind(_demo(folder)), kind(folder / "run/demo")).is_empty,
    "ckpt.convert": lambda folder, kind: len(
        ckpt.convert(kind(_demo(folder)), kind(folder / "out"), to="safetensors").left_out
    ),
    "ckpt.merge": lambda folder, kind: len(
        ckpt.merge([kind(_demo(folder)), kind(folder / "run/demo")], kind(folder / "out")).left_out
    ),
    "ckpt.reshard": lambda folder, kind: ckpt.reshard(
        kind(_demo(folder)), kind(folder / "out"), ranks=3
    ).num_written,
    "ckpt.list_checkpoints": lambda folder, kind: len(ckpt.list_checkpoints(kind(_demo(folder).parent))),
    "ckpt.remove": lambda folder, kind: ckpt.remove(kind(_demo(folder))).num_files,
    "ckpt.collect_garbage": lambda folder, kind: ckpt.collect_garbage(kind(_demo(folder).parent)).skipped,
    "ckpt.Manifest.read": lambda folder, kind: len(ckpt.Manifest.read(kind(_demo(folder))).tensors),
    "write_demo": lambda folder, kind: len(write_demo(kind(folder / "demo"), ranks=2).tensors),
    "CheckpointRetainer": _retained,
    "stream.verify": lambda folder, kind: len(verify_data(kind(_data(folder))).shards),
    "stream.simulate": lambda folder, kind: simulate(kind(_data(folder)), CLUSTER).num_batches,
    "stream.measure": lambda folder, kind: len(measure(kind(_data(folder)))[1]),
    "stream.merge_index": _merge,
    "MDSWriter": _pair,
    "from_csv": _csv,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_place_is_taken_as_a_path_as_it_is_as_text(name: str, tmp_path: Path) -> None:
    answers = []
    for kind in (str, Path):
        folder = tmp_path / kind.__name__
        folder.mkdir()
        answers.append(CALLS[name](folder, kind))
    assert answers[0] == answers[1]
