"""`Chunks`, which holds a tensor's chunks in columns, finds those that overlap a box."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.ckpt.boxes import intersect
from hocket.ckpt.chunks import Columns
from hocket.ckpt.planning import Box
from support.sampling import cases


@settings(max_examples=cases(full=2000, sample=100), deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.booleans(), st.integers(0, 2**31), st.data())
def test_the_chunks_that_overlap_a_box_are_found(rows, columns, is_sorted, seed, data):
    """Draw tilings of a matrix, sorted or not, with few or many chunks."""
    generator = np.random.default_rng(seed)
    cuts = sorted({0, rows, *generator.integers(0, rows, rows // 2).tolist()})
    tiles = [
        (low, column, high - low, 1) for low, high in itertools.pairwise(cuts) for column in range(columns)
    ]
    if not is_sorted:
        generator.shuffle(tiles)
    top, left, height, width = map(list, zip(*tiles, strict=True))
    chunks = Columns(
        {
            "file": [0] * len(tiles),
            "offset": list(range(len(tiles))),
            "length": [1] * len(tiles),
            "start": [top, left],
            "size": [height, width],
        }
    )
    for _ in range(3):
        start = (data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1)))
        size = (
            data.draw(st.integers(1, rows - start[0])),
            data.draw(st.integers(1, columns - start[1])),
        )
        box = Box(start, size)
        expected = [c.offset for c in chunks if intersect(Box(c.start, c.size), box) is not None]
        assert [c.offset for c in chunks.near(*box)] == expected
