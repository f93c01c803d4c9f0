"""Reading boxes from chunks with any strides gives the same items as NumPy's slicing."""

import ctypes
from unittest import mock

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.ckpt import box_reads
from hocket.ckpt.box_reads import BoxReads
from hocket.ckpt.boxes import pieces
from hocket.ckpt.chunks import ForeignChunk
from hocket.ckpt.planning import Box
from support.sampling import cases


@st.composite
def strided_chunk(draw, shape):
    """Draw strides: those of a view of a larger array, with its dims in any order, or any, with overlaps."""
    if draw(st.booleans()):
        return tuple(draw(st.integers(0, 40)) for _ in shape)
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), draw(st.integers(1, 3))
    for dim in order:
        strides[dim] = step
        step *= shape[dim] + draw(st.sampled_from([0, 0, 1, 7]))
    return tuple(strides)


def test_overlapping_items_may_span_as_many_bytes_as_there_are_items():
    file = np.arange(9, dtype=np.uint8)
    chunk = ForeignChunk(file=0, offset=0, length=9, start=(0, 0), size=(3, 3), strides=(2, 2))
    target, plan = np.zeros((3, 3), np.uint8), BoxReads()
    plan.add(target, Box((0, 0), (3, 3)), [chunk])
    plan.run(lambda reads: [ctypes.memmove(to, file.ctypes.data + at, n) for _, at, n, to in reads])
    assert target.tolist() == [[0, 2, 4], [2, 4, 6], [4, 6, 8]]


@settings(max_examples=cases(full=5000, sample=150), deadline=None)
@given(st.data())
def test_any_part_of_any_strided_chunks_is_read(data):
    """Fill boxes slice by slice from bytes in memory, and compare them with NumPy's slicing."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "i4", "c8", ml_dtypes.bfloat16])))
    whole = np.empty(shape, dtype)
    cut = data.draw(st.integers(0, shape[0] - 1)) if shape else 0
    chunks, files = [], []
    for low, high in [(0, cut), (cut, shape[0])] if shape else [(0, 0)]:
        part = whole[low:high] if shape else whole
        if not part.size:
            continue
        strides = data.draw(strided_chunk(part.shape))
        before = data.draw(st.integers(0, 9))
        span = sum((n - 1) * step for n, step in zip(part.shape, strides, strict=True)) + 1
        file = np.random.default_rng(span).integers(0, 256, before + span * dtype.itemsize, np.uint8)
        steps = [step * dtype.itemsize for step in strides]
        part[...] = np.ndarray(part.shape, dtype, file, before, steps)
        start = (low, *[0] * (len(shape) - 1)) if shape else ()
        length = span * dtype.itemsize
        chunks.append(
            ForeignChunk(
                file=len(files), offset=before, length=length, start=start, size=part.shape, strides=strides
            )
        )
        files.append(file)
    if shape and data.draw(st.booleans()):
        # One box at any place of the tensor.
        start = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
        size = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
        wanted = [Box(start, size)]
    else:
        # The whole tensor, in pieces.
        wanted = list(pieces(Box((0,) * len(shape), shape), dtype.itemsize, data.draw(st.integers(1, 300))))
        assert sum(box.num_items for box in wanted) == whole.size
    least, largest, hole, long_run = (data.draw(st.integers(8, 300)) for _ in range(4))
    plan, targets = (
        BoxReads(is_remote=data.draw(st.booleans()), scratch_bytes=max(least, largest)),
        [np.full(box.size, 99, dtype) for box in wanted],
    )
    at_once = []

    def read(reads):
        taken = np.zeros(0, np.int64)
        for file, offset, num_bytes, address in reads:
            assert 0 <= offset <= offset + num_bytes <= len(files[file])
            ctypes.memmove(address, files[file].ctypes.data + offset, num_bytes)
            taken = np.append(taken, np.arange(address, address + num_bytes))
        assert len(np.unique(taken)) == len(taken), "destinations overlap"
        own = [(array.ctypes.data, array.nbytes) for array in targets]
        at_once.append(sum(not any(a <= byte < a + n for a, n in own) for byte in taken))

    limits = {"_LEAST_SCRATCH_BYTES": least}
    limits |= {
        "_HOLE_BYTES": hole,
        "_STORE_HOLE_BYTES": 2 * hole,
        "_LONG_RUN_BYTES": long_run,
        "_READ_BYTES": data.draw(st.integers(0, 40)),
    }
    with mock.patch.multiple(box_reads, **limits):
        for box, target in zip(wanted, targets, strict=True):
            plan.add(target, box, chunks)
        plan.run(read)
    for box, target in zip(wanted, targets, strict=True):
        index = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
        assert target.tobytes() == whole[(*index, ...)].tobytes()
    assert max(at_once) <= min(max(least, whole.nbytes), max(least, largest))
