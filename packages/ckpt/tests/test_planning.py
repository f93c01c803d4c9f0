"""Save plans cover every tensor once, are equal on all ranks, and balance the bytes."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.ckpt.document.planning import (
    SPLIT_BYTES,
    Box,
    PlannedTensor,
    TensorPlacement,
    boxes,
    local_box,
    plan_parts,
)


def on_one_axis(world_size, dim):
    return TensorPlacement((world_size,), tuple(range(world_size)), (dim,))


@st.composite
def layouts(draw):
    world_size = draw(st.integers(1, 6))
    items = []
    for number in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        cuts = [None, *range(len(shape))]
        if world_size in (4, 6) and draw(st.booleans()):
            mesh = (2, world_size // 2)
            placing = TensorPlacement(
                mesh, tuple(range(world_size)), (draw(st.sampled_from(cuts)), draw(st.sampled_from(cuts)))
            )
        else:
            placing = on_one_axis(world_size, draw(st.sampled_from(cuts)))
        items.append(PlannedTensor(f"t{number}", shape, draw(st.sampled_from([1, 4, 1 << 14])), placing))
    return world_size, items


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_parts_tile_each_tensor_within_their_writers_shards(layout):
    world_size, items = layout
    plans = [plan_parts(items, world_size, rank) for rank in range(world_size)]
    assert all(loads == plans[0][1] for _, loads in plans)
    by_name = {item.name: item for item in items}
    covered = {item.name: [] for item in items}
    for rank, (parts, loads) in enumerate(plans):
        assert loads[rank] == sum(part.box.num_items * by_name[part.name].item_bytes for part in parts)
        for part in parts:
            item = by_name[part.name]
            held = local_box(item.shape, item.placing, rank)
            for start, size, begin, length in zip(*part.box, *held, strict=True):
                assert begin <= start
                assert start + size <= begin + length
            covered[part.name] += itertools.product(
                *(range(start, start + size) for start, size in zip(*part.box, strict=True))
            )
    for item in items:
        assert sorted(covered[item.name]) == sorted(itertools.product(*map(range, item.shape)))


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 3000), st.booleans()), min_size=1, max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_replicated_bytes_are_balanced_over_the_ranks(world_size, tensors):
    items = [
        PlannedTensor(f"t{number}", (rows, columns), 4, on_one_axis(world_size, 0 if is_cut else None))
        for number, (rows, columns, is_cut) in enumerate(tensors)
    ]
    cut_only = plan_parts([item for item in items if item.placing.cuts == (0,)], world_size, 0)[1]
    _, loads = plan_parts(items, world_size, 0)
    level = max(sum(loads) / world_size, *cut_only)
    assert max(loads) <= level + max(SPLIT_BYTES, 4 * 3000)


def test_a_model_of_a_gigabyte_on_eight_ranks_is_balanced_within_a_tenth():
    shapes = [(50257, 1024), *[(1024, 4096), (4096, 1024), (1024,), (3072, 1024)] * 24]
    items = [
        PlannedTensor(f"t{number}", shape, 4, on_one_axis(8, None)) for number, shape in enumerate(shapes)
    ]
    loads = plan_parts(items, 8, 0)[1]
    assert sum(loads) == sum(4 * math.prod(shape) for shape in shapes)
    assert max(loads) <= 1.1 * sum(loads) / 8


def test_three_rows_on_four_ranks_leave_one_rank_empty():
    placing = on_one_axis(4, 0)
    assert [local_box((3, 2), placing, rank).size for rank in range(4)] == [(1, 2), (1, 2), (1, 2), (0, 2)]
    assert [holding.ranks for holding in boxes((3, 2), placing)] == [(0,), (1,), (2,)]


def test_a_zero_dimensional_tensor_is_one_item_of_one_rank():
    parts = [
        plan_parts([PlannedTensor("step", (), 4, on_one_axis(3, None))], 3, rank)[0] for rank in range(3)
    ]
    assert [len(mine) for mine in parts].count(1) == 1
    assert next(part for mine in parts for part in mine).box == Box((), ())


def test_replicas_of_a_shard_write_a_part_each():
    # Two replicas of two shards: ranks 0 and 2 hold the same half, so each writes half of it.
    placing = TensorPlacement((2, 2), (0, 1, 2, 3), (None, 0))
    parts = [plan_parts([PlannedTensor("w", (400, 1000), 4, placing)], 4, rank)[0] for rank in range(4)]
    assert [[part.box for part in mine] for mine in parts] == [
        [Box((0, 0), (100, 1000))],
        [Box((200, 0), (100, 1000))],
        [Box((100, 0), (100, 1000))],
        [Box((300, 0), (100, 1000))],
    ]


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 90), st.integers(0, 2)), min_size=1, max_size=9),
    st.randoms(),
)
@settings(max_examples=150, deadline=None)
def test_stages_that_know_their_own_items_only_write_each_once(sizes, drawn, rng):
    ends = list(itertools.accumulate(sizes))
    stages = [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    world_size, held = ends[-1], {stage: [] for stage in stages}
    items = []
    for number, (stage, rows, form) in enumerate(drawn):
        # -1: an item of all ranks, whose stages have further items of their own.
        ranks = tuple(range(world_size)) if stage < 0 else stages[stage % len(stages)]
        mesh = (len(ranks),) if form < 2 else (1, len(ranks))
        cuts = (None,) if form == 0 else (0,) if form == 1 else (0, None)
        items.append(PlannedTensor(f"t{number}", (rows, 1000), 4, TensorPlacement(mesh, ranks, cuts)))
        for mine in stages if stage < 0 else [ranks]:
            held[mine].append(items[-1])
    for mine in held.values():
        rng.shuffle(mine)
    written = {item.name: [] for item in items}
    for stage, mine in held.items():
        plans = [plan_parts(mine, world_size, rank, stage) for rank in stage]
        for part in itertools.chain.from_iterable(parts for parts, _ in plans):
            written[part.name] += range(part.box.start[0], part.box.start[0] + part.box.size[0])
    for item in items:
        assert sorted(written[item.name]) == list(range(item.shape[0])), item
