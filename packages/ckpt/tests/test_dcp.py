"""`torch.distributed.checkpoint` with `HocketWriter` and `HocketReader`, which use Hocket's files."""

import doctest
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.utils._pytree import tree_map_only

import hocket.ckpt
from hocket.ckpt.cli.app import app
from hocket.ckpt.dcp import HocketReader, HocketWriter, reading, writing
from hocket.ckpt.document.dtypes import ITEM_BYTES
from hocket.ckpt.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointStateError,
)
from hocket.ckpt.torch import load
from hocket.ckpt.torch.layout import DTYPES
from hocket.ckpt.torch.loading import tensor_reads
from hocket.ckpt.verbs.convert import convert
from support.ranks import run_ranks

# torch warns when the world has one process only.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp2.py"


def tree(fill=0):
    generator = torch.Generator().manual_seed(fill)
    model = {"weight": torch.randn(7, 5, generator=generator), "bias": torch.randn(5, generator=generator)}
    model["turned"] = torch.randn(6, 4, generator=generator).t()
    model["spread"] = torch.randn(3, 1, generator=generator).expand(3, 4)
    model["conjugate"] = torch.randn(3, 2, dtype=torch.complex64, generator=generator).conj()
    for dtype, name in DTYPES.items():
        bits = torch.randint(0, 2, (2, 3, 8), generator=generator, dtype=torch.uint8)
        model[f"of.{name}"] = bits.view(dtype)
        model[f"0-d.{name}"] = bits.reshape(-1)[:8].view(dtype)[0].clone()
        model[f"empty.{name}"] = torch.empty(0, 3, dtype=dtype)
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    optimizer = {"state": {"weight": {"m": torch.ones(2), "step": torch.tensor(3.0)}}, "param_groups": groups}
    values = {"note": "é", "large": 2**80, "bytes": b"\x00\xff", "nothing": None, "loss": float("inf")}
    return {"model": model, "optimizer": optimizer, **values, "fill": fill}


def blank(node):
    if isinstance(node, torch.Tensor):
        return torch.empty(node.shape, dtype=node.dtype)
    if isinstance(node, dict):
        return {key: blank(child) for key, child in node.items()}
    return [blank(child) for child in node] if isinstance(node, list) else None


def check(found, expected):
    if isinstance(expected, torch.Tensor):
        # `clone` sets stride 1, which a view as bytes needs: one element is contiguous at any stride.
        flat = [tensor.resolve_conj().reshape(-1) for tensor in (found, expected)]
        bits = [part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in flat]
        assert found.dtype == expected.dtype
        assert torch.equal(*bits)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, child in expected.items():
            check(found[key], child)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    else:
        assert found == expected


def save(path, state=None, **options):
    dcp.save(tree() if state is None else state, storage_writer=HocketWriter(path, **options), no_dist=True)


def raised(act):
    """Return rank 0's error, unwrapped from torch's `CheckpointException`."""
    with pytest.raises(CheckpointException) as caught:
        act()
    return caught.value.failures[0][0]


def test_a_checkpoint_saved_by_dcp_is_a_hocket_checkpoint_for_every_reader(tmp_path, capsys):
    path = tmp_path / "step-12"
    save(path, user={"by": "dcp"})
    assert sorted(found.name for found in path.iterdir()) == ["checkpoint.json.zst", "data"]
    assert b"PK\x03\x04" not in b"".join(
        file.read_bytes() for file in path.rglob("*.*")
    )  # no zip files of `torch.save`
    assert hocket.ckpt.verify(str(path)).is_sound
    opened = hocket.ckpt.open(str(path))
    assert (opened.manifest.step, opened.manifest.writer) == (12, "hocket.ckpt.dcp")
    assert opened["model.weight"].tobytes() == tree()["model"]["weight"].numpy().tobytes()
    loaded = load(str(path), blank(tree()))
    check(loaded.state, tree())
    assert loaded.user == {"by": "dcp"}
    with pytest.raises(SystemExit) as ended:
        app(["inspect", str(path), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["values"]["note"] == "é"


@pytest.mark.parametrize("options", [{}, {"compression": "zstd:1"}, {"compression": "planes+zstd:1"}])
def test_dcp_loads_what_dcp_saved(tmp_path, options):
    save(tmp_path / "x", **options)
    into = blank(tree())
    dcp.load(into, storage_reader=HocketReader(tmp_path / "x"), no_dist=True)
    check(into, tree())


def test_changes_after_async_save_are_not_in_the_checkpoint(tmp_path):
    state, expected, writer = tree(), tree(), HocketWriter()
    del state["model"]["conjugate"], expected["model"]["conjugate"]  # torch's stager loses the conjugate bit
    for step in (1, 2):
        future = dcp.async_save(
            state, checkpoint_id=str(tmp_path / f"step-{step}"), storage_writer=writer, no_dist=True
        )
        with torch.no_grad():
            state["model"]["weight"].fill_(-step)
        future.result(timeout=60)
    for step in (1, 2):  # the change after the first save is in the second one
        into = blank(expected)
        dcp.load(
            into, checkpoint_id=str(tmp_path / f"step-{step}"), storage_reader=HocketReader(), no_dist=True
        )
        check(into, expected)
        expected["model"]["weight"].fill_(-1)
    listed = hocket.ckpt.list_checkpoints(str(tmp_path))
    assert [(found.step, found.status) for found in listed] == [(1, "committed"), (2, "committed")]


def test_a_writer_may_start_a_save_before_the_previous_one_has_finished(tmp_path):
    writer, places = HocketWriter(), [str(tmp_path / f"step-{step}") for step in range(12)]
    futures = [
        dcp.async_save(
            {"w": torch.full((1 << 18,), float(step))},
            checkpoint_id=place,
            storage_writer=writer,
            no_dist=True,
        )
        for step, place in enumerate(places)
    ]
    for step, future in enumerate(futures):
        future.result(timeout=60)
        saved = hocket.ckpt.open(places[step])
        assert saved.manifest.step == step
        assert (saved["w"] == step).all()


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_checkpoints_in_other_formats_are_loaded(tmp_path, form, monkeypatch):
    model = {name: tensor for name, tensor in tree()["model"].items() if "conjugate" not in name}
    state = {"model": model, "epoch": 3}
    source = tmp_path / ("x.pt" if form == "torch" else "x")
    if form == "dcp":
        dcp.save(state, checkpoint_id=str(source), no_dist=True)
    elif form == "torch":
        torch.save(state, source)
    else:
        save(tmp_path / "ours", state)
        convert(str(tmp_path / "ours"), str(source), to="safetensors")
        state = {f"model.{name}": tensor for name, tensor in model.items()}
    into = blank(state)
    dcp.load(into, storage_reader=HocketReader(source), no_dist=True)
    check(into, state)
    # With scratch memory that is smaller than most tensors, which a load into another dtype goes through.
    read, sizes = hocket.ckpt.Checkpoint.read_boxes, []

    def watched(self, boxes, **options):
        dtypes = [self.record(name).dtype for name, *_ in boxes]
        sizes.append(
            sum(ITEM_BYTES[dtype] * math.prod(it[2]) for it, dtype in zip(boxes, dtypes, strict=True))
        )
        read(self, boxes, **options)

    monkeypatch.setattr(tensor_reads, "SCRATCH_BYTES", 80)
    monkeypatch.setattr(hocket.ckpt.Checkpoint, "read_boxes", watched)
    wide = tree_map_only(torch.Tensor, lambda it: it.double() if it.is_floating_point() else it, state)
    into = blank(wide)
    dcp.load(into, storage_reader=HocketReader(source, cast=True), no_dist=True)
    check(into, wide)
    # The first read is the one in place, of the tensors that keep their dtype.
    assert len(sizes) > 2
    assert max(sizes[1:]) <= 40


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path):
    path = tmp_path / "last"
    save(path)
    before = {found.name for found in (path / "data").iterdir()}
    error = raised(lambda: save(path, tree(1)))
    assert isinstance(error, CheckpointExistsError)
    assert "overwrite=True" in str(error)
    assert {found.name for found in (path / "data").iterdir()} == before
    save(path, tree(1), overwrite=True)
    check(load(str(path), blank(tree())).state, tree(1))
    after = {found.name for found in (path / "data").iterdir()}
    assert len(after) == 1
    assert not after & before


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (Path("x"), "`note`"),
        ({1, 2}, "`note`"),
        (torch.zeros(2, dtype=torch.complex128), "`note` has dtype `torch.complex128`"),
    ],
)
def test_unsupported_values_raise_with_their_name(tmp_path, leaf, message):
    error = raised(lambda: save(tmp_path / "x", {"w": torch.ones(3), "note": leaf}))
    assert isinstance(error, CheckpointStateError)
    assert message in str(error)
    assert not (tmp_path / "x" / "checkpoint.json.zst").exists()


def test_invalid_arguments_raise(tmp_path):
    for options in ({"step": -1}, {"step": True}, {"compression": "gzip"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            HocketWriter(tmp_path, **options)
    assert isinstance(raised(lambda: dcp.save({}, storage_writer=HocketWriter(), no_dist=True)), ValueError)
    with pytest.raises(ValueError, match="checkpoint_id"):
        HocketReader().read_metadata()
    with pytest.raises(CheckpointIncompatibleError, match="use_collectives"):
        dcp.save({}, storage_writer=HocketWriter(tmp_path), no_dist=True, use_collectives=False)


def test_a_planner_with_cached_plans_raises(tmp_path):
    planner = DefaultSavePlanner(enable_plan_caching=True)

    def act(name):
        writer = HocketWriter(tmp_path / name)
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner, no_dist=True)

    act("first")
    error = raised(lambda: act("second"))
    assert isinstance(error, CheckpointIncompatibleError)
    assert "enable_plan_caching=False" in str(error)


def test_dtypes_are_cast_only_when_asked(tmp_path):
    save(tmp_path / "x", {"w": torch.arange(6.0)})
    into = {"w": torch.zeros(6, dtype=torch.float64)}
    error = raised(lambda: dcp.load(into, storage_reader=HocketReader(tmp_path / "x"), no_dist=True))
    assert isinstance(error, CheckpointIncompatibleError)
    assert "`w` is F32 there and torch.float64 here" in str(error)
    dcp.load(into, storage_reader=HocketReader(tmp_path / "x", cast=True), no_dist=True)
    assert torch.equal(into["w"], torch.arange(6.0, dtype=torch.float64))


def test_corrupt_and_missing_checkpoints_raise(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        HocketReader(tmp_path / "x").read_metadata()
    save(tmp_path / "x", {"w": torch.zeros(1000)})
    (file,) = (tmp_path / "x" / "data").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    into = {"w": torch.ones(1000)}
    error = raised(lambda: dcp.load(into, storage_reader=HocketReader(tmp_path / "x"), no_dist=True))
    assert isinstance(error, CheckpointCorruptError)
    assert "`w`" in str(error)
    assert file.name in str(error)
    dcp.load(into, storage_reader=HocketReader(tmp_path / "x", check=False), no_dist=True)


def example():
    spec = importlib.util.spec_from_file_location("fsdp2", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def full(model, optimizer):
    """Return all tensors, gathered, by name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, slots = get_state_dict(model, optimizer)
    found = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name, each in slots["state"].items():
        found |= {f"optimizer.state.{name}.{slot}": tensor for slot, tensor in each.items()}
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in found.items()
    }


def two_then_one_and_three(folder):
    from torch.distributed.device_mesh import DeviceMesh

    script, rank = example(), dist.get_rank()
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (1, 2, 3)}
    if rank < 2:
        script.train(folder, meshes[2], steps=2)
    dist.barrier()
    checkpoint = hocket.ckpt.open(f"{folder}/step-2")
    assert checkpoint.manifest.world_size == 2
    for size in (1, 3):
        if rank < size:
            model, optimizer = script.build(meshes[size])
            assert script.resume(folder, model, optimizer, meshes[size]) == 2
            tensors = full(model, optimizer)
            assert set(tensors) == set(checkpoint)
            for name, tensor in tensors.items():
                assert tensor.numpy().tobytes() == checkpoint[name].tobytes(), name
    script.train(folder, meshes[3], steps=4)
    # A failure while one rank writes raises on all ranks; nothing is committed.
    dtype = torch.complex128 if rank == 2 else torch.float32
    state = {"w": torch.ones(4), f"of rank {rank}": torch.zeros(3, dtype=dtype)}
    try:
        dcp.save(state, checkpoint_id=f"{folder}/bad", storage_writer=HocketWriter())
    except CheckpointException as error:
        return {failed: type(failure).__name__ for failed, (failure, _) in error.failures.items()}
    return {}


def test_the_example_saves_on_two_ranks_and_resumes_on_one_and_three(tmp_path):
    found = run_ranks(two_then_one_and_three, 3, str(tmp_path), timeout_s=120, init="gloo")
    assert found == [{2: "CheckpointStateError"}] * 3
    listed = {listing.name: listing.status for listing in hocket.ckpt.list_checkpoints(str(tmp_path))}
    # The dtype was refused before a byte was written, so the failed save left no files.
    assert listed == {"step-2": "committed", "step-4": "committed"}
    assert hocket.ckpt.open(str(tmp_path / "step-4")).manifest.world_size == 3


def test_the_examples_in_docstrings_run(tmp_path):
    names = {"folder": str(tmp_path), "torch": torch, "hocket": hocket}
    names |= {"HocketWriter": HocketWriter, "HocketReader": HocketReader}
    for module in (writing, reading):
        ran = doctest.testmod(module, globs=names)
        assert ran.attempted >= 2
        assert ran.failed == 0
