"""Merges of checkpoints, compared with NumPy in 64 bits and with torch's averaged model."""

import json
import math
import re
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from typer.testing import CliRunner

import hocket.ckpt
from hocket.ckpt import convert, merge
from hocket.ckpt.cli.app import app
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
)
from hocket.ckpt.verbs.reshard import reshard

DTYPES = {
    "F32": np.float32,
    "F64": np.float64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def expected(method, arrays, options):
    """Merge arrays by the formulas of the documentation, in 64 bits."""
    arrays = [array.astype(np.float64) for array in arrays]
    number = len(arrays)
    match method:
        case "mean":
            return np.average(arrays, axis=0, weights=options.get("weights"))
        case "ema":
            average = arrays[0]
            for array in arrays[1:]:
                average = options["decay"] * average + (1 - options["decay"]) * array
            return average
        case "1-sqrt":
            steps = [arrays[i] - arrays[i - 1] for i in range(1, number)]
            return arrays[0] + sum(
                (1 - math.sqrt(i / number)) * step for i, step in enumerate(steps, start=1)
            )
        case "task":
            base, *others = arrays
            return base + sum(
                weight * (array - base) for weight, array in zip(options["weights"], others, strict=True)
            )
        case "slerp":
            first, second = arrays
            scale = np.linalg.norm(first) * np.linalg.norm(second)
            angle = math.acos(np.clip(np.vdot(first, second) / scale, -1, 1))
            t = options["t"]
            if angle < 0.0316 or math.pi - angle < 0.0316:
                return (1 - t) * first + t * second
            return (math.sin((1 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle)


@st.composite
def merges(draw):
    method = draw(st.sampled_from(["mean", "mean", "ema", "1-sqrt", "task", "slerp"]))
    number = 2 if method == "slerp" else draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    options = {
        "ema": {"decay": draw(st.floats(0.05, 0.95))},
        "slerp": {"t": draw(st.floats(0, 1))},
        "task": {"weights": list(rng.uniform(-1, 1, number - 1))},
        "mean": draw(st.sampled_from([{}, {"weights": list(rng.uniform(0.1, 2, number))}])),
    }.get(method, {})
    names = draw(st.lists(st.sampled_from(["a.w", "a.b", "c.w", "d"]), min_size=1, max_size=3, unique=True))
    kinds = {name: draw(st.sampled_from(sorted(DTYPES))) for name in names}
    shapes = {name: tuple(draw(st.lists(st.integers(1, 40), max_size=3))) for name in names}
    states = [
        {name: np.asarray(rng.normal(size=shapes[name]), DTYPES[kinds[name]]) for name in names}
        | {"steps": np.asarray(rng.integers(0, 9, 3)), "bn.running_mean": np.float32(rng.normal(size=2))}
        for _ in range(number)
    ]
    return method, options, states


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(merges(), st.sampled_from(["hocket", "dcp", "safetensors", "torch"]))
def test_every_method_is_as_numpy_in_64_bits(tmp_path, merged, to):
    method, options, states = merged
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    places = []
    for index, state in enumerate(states):
        place = folder / f"{index}.safetensors"
        save_file(state, place)
        if index % 2:  # of another format, and in other shards
            convert(place, folder / f"h{index}", to="hocket")
            reshard(folder / f"h{index}", folder / f"r{index}", ranks=1 + index)
            place = folder / f"r{index}"
        places.append(place)
    base, sources = (places[0], places[1:]) if method == "task" else (None, places)
    out = folder / ("out.pt" if to == "torch" else "out")
    merge(sources, out, method=method, base=base, to=to, memory_bytes=16 << 20, **options)
    opened = hocket.ckpt.open(out)
    assert sorted(opened.contents.tensors) == sorted(states[0])
    np.testing.assert_array_equal(opened["steps"], states[-1]["steps"])
    np.testing.assert_array_equal(opened["bn.running_mean"], states[-1]["bn.running_mean"])
    for name in states[0].keys() - {"steps", "bn.running_mean"}:
        want = expected(method, [state[name] for state in states], options)
        found = opened[name]
        assert found.dtype == states[0][name].dtype
        # The sum of narrow items is made in 32 bits, and the result rounded once.
        unit = float(ml_dtypes.finfo(found.dtype).eps)
        scale = sum(np.abs(state[name].astype(np.float64)) for state in states)
        room = unit / 2 * np.abs(want) + (4e-7 if unit > 1e-7 else 1e-14) * (1 + scale)
        room += float(ml_dtypes.finfo(found.dtype).smallest_subnormal)
        assert (np.abs(found.astype(np.float64) - want) <= room).all(), (name, found.dtype)


def test_a_mean_is_that_of_torchs_averaged_model_and_equal_sources_stay_as_they_are(tmp_path):
    torch = pytest.importorskip("torch")
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
        torch.save(models[-1].state_dict(), tmp_path / f"{seed}.pt")
    averaged = torch.optim.swa_utils.AveragedModel(models[0])
    for model in models:
        averaged.update_parameters(model)
    merge([tmp_path / f"{seed}.pt" for seed in range(3)], tmp_path / "mean.pt")
    mean = torch.load(tmp_path / "mean.pt")
    for name, tensor in averaged.module.state_dict().items():
        torch.testing.assert_close(mean[name], tensor, rtol=1e-6, atol=1e-7)
    merge([tmp_path / "1.pt"] * 3, tmp_path / "same.pt")
    same = torch.load(tmp_path / "same.pt")
    assert all(torch.equal(same[name], tensor) for name, tensor in models[1].state_dict().items())


def test_tied_tensors_are_merged_once_and_values_are_the_last_ones(tmp_path):
    torch = pytest.importorskip("torch")
    for index in (1, 2):
        shared = torch.full((4, 4), float(index))
        state = {"model": {"in": shared, "out": shared}, "timestamp": {"batch": 10 * index}}
        torch.save(state, tmp_path / f"{index}.pt")
    done = merge([tmp_path / "1.pt", tmp_path / "2.pt"], tmp_path / "out", to="hocket")
    opened = hocket.ckpt.open(tmp_path / "out")
    assert (done.tensors, opened.contents.num_bytes) == (2, 64)
    assert opened.contents.tensors["model.out"].same_as == "model.in"
    assert (opened["model.out"] == 1.5).all()
    assert opened.manifest.step == 20


def test_what_differs_is_named(tmp_path):
    def saved(name, **arrays):
        save_file(arrays, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    one = saved("one", a=np.ones((2, 3), np.float32), b=np.ones(2, np.float32))
    for other, message, kind in (
        (saved("less", a=np.ones((2, 3), np.float32)), "lacks `b`, which", CheckpointIncompatibleError),
        (
            saved("shape", a=np.ones((3, 2), np.float32), b=np.ones(2, np.float32)),
            "`a` has in .* the shape [2, 3], and in .* [3, 2]",
            CheckpointIncompatibleError,
        ),
        (
            saved("half", a=np.ones((2, 3), np.float16), b=np.ones(2, np.float32)),
            "`a` has in .* the dtype F32, and in .* F16. Pass `dtype`",
            CheckpointIncompatibleError,
        ),
        (
            saved("int", a=np.ones((2, 3), np.int32), b=np.ones(2, np.float32)),
            "`a` has in .* the dtype F32, and in .* I32$",
            CheckpointIncompatibleError,
        ),
        (tmp_path / "none", "none", CheckpointNotFoundError),
    ):
        for sources in ([one, other], [other, one]):
            with pytest.raises(kind) as raised:
                merge(sources, tmp_path / "out", to="hocket")
            if sources[0] is one:
                pattern = message.replace("[", r"\[").replace("]", r"\]")
                assert re.search(pattern, str(raised.value).partition(" [HKT")[0]), raised.value
    assert not (tmp_path / "out").exists()
    half = tmp_path / "half.safetensors"
    merge([one, half], tmp_path / "wide", to="hocket", dtype="F32")
    part = merge([one, tmp_path / "less.safetensors"], tmp_path / "part", to="hocket", exclude=["b", "c"])
    assert [sentence.partition(",")[0] for sentence in part.idle_exclude] == ["`exclude` has `c`"]
    assert (hocket.ckpt.open(tmp_path / "part")["a"] == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "median"}, "`method` is 'median'"),
        ({"method": "ema"}, "`decay` is None; expected a number between 0 and 1"),
        ({"method": "ema", "decay": 1}, "`decay` is 1"),
        ({"method": "mean", "decay": 0.5}, "`decay` is given, and `method` is 'mean'"),
        ({"weights": [1]}, "expected 2 finite numbers"),
        ({"weights": [1, math.nan]}, "expected 2 finite numbers"),
        ({"weights": [1, -1]}, "whose sum is 0"),
        ({"method": "task"}, "`base` is None"),
        ({"method": "slerp", "t": 2}, "`t` is 2"),
        ({"to": "gguf"}, "`to` is 'gguf'"),
    ],
)
def test_invalid_arguments_raise_before_a_source_is_opened(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        merge(["absent-1", "absent-2"], tmp_path / "out", **options)
    with pytest.raises(ValueError, match="expected a list of checkpoints"):
        merge("absent-1", tmp_path / "out")
    with pytest.raises(ValueError, match="1 sources for 'mean'; expected 2 or more"):
        merge(["absent-1"], tmp_path / "out")


def test_a_damaged_source_ends_the_merge_and_a_rerun_resumes(tmp_path):
    states = [{f"w{i}": np.full((512, 512), i + k, np.float32) for i in range(6)} for k in range(2)]
    for index, state in enumerate(states):
        save_file(state, tmp_path / f"{index}.safetensors")
        convert(
            tmp_path / f"{index}.safetensors", tmp_path / str(index), to="hocket", max_shard_bytes=1_200_000
        )
    damaged = sorted((tmp_path / "1" / "data").iterdir())[-1]
    sound = damaged.read_bytes()
    damaged.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    sources, out = [tmp_path / "0", tmp_path / "1"], tmp_path / "out"
    with pytest.raises(CheckpointCorruptError, match="w5"):
        merge(sources, out, memory_bytes=16 << 20, max_shard_bytes=1_200_000)
    damaged.write_bytes(sound)
    done = merge(sources, out, memory_bytes=16 << 20, max_shard_bytes=1_200_000)
    assert 0 < done.files_found < done.files
    assert (hocket.ckpt.open(out)["w5"] == 5.5).all()
    assert merge(sources, out, memory_bytes=16 << 20, max_shard_bytes=1_200_000).files_found >= done.files - 1
    with pytest.raises(CheckpointExistsError, match="not touched"):
        merge(sources, out, memory_bytes=16 << 20, max_shard_bytes=1_200_000, weights=[1, 2])


def test_the_command_merges(tmp_path):
    for index in range(3):
        save_file({"w": np.full(4, index, np.float32)}, tmp_path / f"{index}.safetensors")
    places = [str(tmp_path / f"{index}.safetensors") for index in range(3)]
    out = str(tmp_path / "out.safetensors")
    weights = ["--weight", "1", "--weight", "1", "--weight", "2"]
    told = CliRunner().invoke(app, ["merge", *places, out, *weights])
    assert (told.exit_code, told.stderr) == (0, "")
    assert "from 3 checkpoints" in told.stdout
    assert (hocket.ckpt.open(out)["w"] == 1.25).all()
    task = [
        "merge",
        places[2],
        str(tmp_path / "t"),
        "--method",
        "task",
        "--base",
        places[0],
        "--to",
        "hocket",
    ]
    told = CliRunner().invoke(app, [*task, "--json"])
    assert (told.exit_code, json.loads(told.stdout)["to"]) == (0, "hocket")
    assert (hocket.ckpt.open(tmp_path / "t")["w"] == 2).all()
    told = CliRunner().invoke(app, ["merge", *places, str(tmp_path / "x"), "--method", "ema"])
    assert told.exit_code == 2
    assert "`--decay` is None" in told.stderr
