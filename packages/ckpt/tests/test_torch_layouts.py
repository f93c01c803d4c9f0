"""Checkpoints of any layout load into any other: simulated ranks in one process, without a process group."""

import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

import hocket.ckpt
from hocket.ckpt.document.manifest_builder import commit_over
from hocket.ckpt.document.planning import SPLIT_BYTES, PlannedTensor, TensorPlacement, local_box, plan_parts
from hocket.ckpt.torch.layout import DTYPES, TensorInfo
from hocket.ckpt.torch.loading import tensor_reads
from hocket.ckpt.torch.loading.tensor_reads import BoxTarget, plan_reads, read_into
from hocket.ckpt.torch.ranks.coordinator import Coordinator
from hocket.ckpt.torch.saving.job import SaveJob
from hocket.ckpt.torch.saving.joined_manifest import joined_tree_of, union_manifest
from hocket.ckpt.torch.saving.plan import SavePlanner, StagingBuffer, StateSnapshot, stage
from hocket.ckpt.torch.saving.rank_reports import read_reports
from hocket.native import _native
from support.sampling import cases

SAVE_ID = "0123456789abcdef" * 2


MESHES = [(n,) for n in range(1, 9)] + [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2)]


@st.composite
def placings(draw, num_dims):
    """Draw a mesh of up to eight ranks whose axes each shard a dim or replicate, also as in FSDP over TP."""
    mesh = draw(st.sampled_from(MESHES))
    cut = st.none() | st.integers(0, num_dims - 1) if num_dims else st.none()
    late = tuple(axis for axis in range(len(mesh) - 1) if draw(st.booleans()))
    return TensorPlacement(mesh, tuple(range(math.prod(mesh))), tuple(draw(cut) for _ in mesh), late)


@st.composite
def worlds(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=5))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])) for _ in shapes]
    saved = [draw(placings(len(shape))) for shape in shapes]
    loaded = [draw(placings(len(shape))) for shape in shapes]
    return shapes, dtypes, saved, loaded


def part_of(tensor, box):
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def infos(fulls, placings, rank):
    for number, (full, placing) in enumerate(zip(fulls, placings, strict=True)):
        box = local_box(full.shape, placing, rank)
        yield TensorInfo(
            name=f"t{number}",
            path=(f"t{number}",),
            dtype=DTYPES[full.dtype],
            shape=tuple(full.shape),
            item_bytes=full.dtype.itemsize,
            placing=placing,
            box=box,
            local=torch.empty(0) if box is None else part_of(full, box).clone(),
            same_as=None,
        )


def write(uri, fulls, placings, world_size, is_staged):
    """Save as the ranks of a job would, one after the other; every tensor has a mesh of its own."""
    reports, inlined, first = [], {}, None
    for rank in range(world_size):
        mine = list(infos(fulls, placings, rank))
        plan = SavePlanner(rank=rank, world_size=world_size).plan(mine)
        snapshot = StateSnapshot(mine, plan, {}, {}, None)
        job = SaveJob(
            key="save-1",
            uri=uri,
            step=1,
            save_id=SAVE_ID,
            coordinator=Coordinator(HashStore(), rank=rank, world_size=world_size, nonce=b"\0" * 16),
            timeout_s=10,
            user=b"null",
            policy="reseed",
            snapshot=snapshot,
        )
        job.entries, job.held = stage(snapshot, StagingBuffer() if is_staged else None)
        job.write()
        if job.error is not None:
            raise job.error
        reports += read_reports([job.report().to_bytes()])
        inlined |= job.inlined
        first = first or snapshot
    assert len({report.head.layout for report in reports}) == 1
    encoded = union_manifest(
        save_id=SAVE_ID,
        step=1,
        tree=joined_tree_of(first),
        tree_of=[0] * world_size,
        values={},
        integer_keyed=frozenset(),
        mesh=None,
        inlined=inlined,
        reports=_native.CkptReports([report.packed for report in reports]),
        user=b"null",
        policy="drop",
    )
    commit_over(uri, encoded, SAVE_ID, None)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@given(worlds(), st.booleans(), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=cases(full=3000, sample=40), deadline=None)
def test_a_checkpoint_of_any_layout_loads_into_any_other(
    tmp_path_factory, world, is_staged, is_strided, seed
):
    shapes, dtypes, saved, loaded = world
    generator = torch.Generator().manual_seed(seed)
    fulls = [
        torch.randint(0, 2 if dtype is torch.bool else 120, shape, generator=generator).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    folder = tmp_path_factory.mktemp("any")
    uri = str(folder / "c")
    try:
        write(uri, fulls, saved, max(len(placing.ranks) for placing in saved), is_staged)
        opened = hocket.ckpt.open(uri)
        manifest = opened.manifest
        for rank in range(max(len(placing.ranks) for placing in loaded)):
            targets = []
            for number, (full, placing) in enumerate(zip(fulls, loaded, strict=True)):
                box = local_box(full.shape, placing, rank)
                if box is not None:
                    local = torch.zeros(box.size, dtype=full.dtype)
                    if is_strided and local.ndim > 1:
                        local = torch.zeros(box.size[::-1], dtype=full.dtype).permute(
                            *range(local.ndim)[::-1]
                        )
                    record = manifest.tensors[f"t{number}"]
                    # Every other case reads inlined tensors from their chunks: both places must have them.
                    record = (
                        record
                        if rank % 2
                        else type(record)(
                            dtype=record.dtype, shape=record.shape, path=record.path, chunks=record.chunks
                        )
                    )
                    targets.append((full, BoxTarget(f"t{number}", record, local, box)))
            read_into(opened, plan_reads([target for _, target in targets]), check=bool(rank % 3))
            for full, target in targets:
                assert torch.equal(target.local, part_of(full, target.box)), target
    finally:
        shutil.rmtree(folder)


def test_boxes_equal_those_of_torch():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for mesh in [(1,), (2,), (3,), (7,), (2, 3), (3, 2)]:
        for shape in [(), (1,), (5,), (6,), (3, 4), (7, 2), (0, 3)]:
            options = [None, *range(len(shape))]
            for first in options:
                for second in options if len(mesh) == 2 else [None]:
                    cuts = (first, second)[: len(mesh)]
                    placing = TensorPlacement(mesh, tuple(range(math.prod(mesh))), cuts)
                    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
                    for rank in placing.ranks:
                        coordinate = [rank] if len(mesh) == 1 else list(divmod(rank, mesh[1]))
                        size, start = _compute_local_shape_and_global_offset(
                            shape, mesh, coordinate, placements
                        )
                        box = local_box(shape, placing, rank)
                        assert box.size == tuple(size)
                        assert box.start == tuple(start) or box.num_items == 0


def test_strided_shards_equal_torchs_where_torch_splits_evenly():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    for mesh in [(2, 2), (2, 3), (4, 2)]:
        for rows in (24, 48):
            placing = TensorPlacement(mesh, tuple(range(math.prod(mesh))), (0, 0), (0,))
            for rank in placing.ranks:
                size, start = _compute_local_shape_and_global_offset(
                    (rows, 5),
                    mesh,
                    list(divmod(rank, mesh[1])),
                    [_StridedShard(0, split_factor=mesh[1]), Shard(0)],
                )
                assert local_box((rows, 5), placing, rank) == (tuple(start), tuple(size))


@pytest.mark.slow
@given(worlds(), st.integers(1, 8))
@settings(max_examples=cases(full=3000, sample=60), deadline=None)
def test_replicated_tensors_are_written_once_and_balanced(world, num_large):
    shapes, _, saved, _ = world
    items = [
        PlannedTensor(f"t{number}", shape, 4, placing)
        for number, (shape, placing) in enumerate(zip(shapes, saved, strict=True))
    ]
    # The placements may put all these bytes on one rank, which no plan can change.
    small_bytes = sum(math.prod(item.shape) * item.item_bytes for item in items)
    ranks = 8
    everywhere = TensorPlacement((2, 4), tuple(range(ranks)), (None, 0))
    items += [
        PlannedTensor(f"large{number}", (4096, 64 + number), 4, everywhere) for number in range(num_large)
    ]
    for item in items:
        written = [part.box for rank in range(ranks) for part in plan_parts([item], ranks, rank)[0]]
        assert sum(box.num_items for box in written) == math.prod(item.shape)
    parts = [plan_parts(items, ranks, rank) for rank in range(ranks)]
    loads = parts[0][1]
    assert all(other == loads for _, other in parts)
    assert sum(loads) == sum(math.prod(item.shape) * item.item_bytes for item in items)
    assert max(loads) <= 1.1 * sum(loads) / ranks + small_bytes + SPLIT_BYTES


@pytest.mark.parametrize("shape", [(90, 70), (3, 4, 600)])  # rows of 280 bytes, and of 9,600
def test_reads_larger_than_the_scratch_memory_are_whole(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(tensor_reads, "SCRATCH_BYTES", 1000)
    uri = str(tmp_path / "c")
    full = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    by_rows, by_last = (TensorPlacement((2,), (0, 1), (dim,)) for dim in (0, len(shape) - 1))
    write(uri, [full], [by_rows], 2, is_staged=False)
    opened = hocket.ckpt.open(uri)
    for rank in (0, 1):
        box = local_box(full.shape, by_last, rank)
        local = torch.zeros(box.size)
        plan = tensor_reads.plan_reads([tensor_reads.BoxTarget("t0", opened.record("t0"), local, box)])
        tensor_reads.read_into(opened, plan, check=True)
        assert torch.equal(local, part_of(full, box))
