"""`hocket.ckpt.plain`, a second implementation of the format, reads and refuses what the first one does."""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hocket.ckpt
from hocket.ckpt import plain
from hocket.ckpt.document.chunks import Chunk
from hocket.ckpt.document.dtypes import ITEM_BYTES, numpy_dtype
from hocket.ckpt.document.file_names import data_path, file_metadata
from hocket.ckpt.document.manifest import INLINE_BYTES, Manifest
from hocket.ckpt.document.records import TensorRecord, ValueRecord
from hocket.ckpt.errors import CheckpointError
from hocket.ckpt.verbs.demo import write_demo
from hocket.native import _native
from support.sampling import cases

SAVE_ID = "89abcdef" * 4

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def cut_tensors(draw):
    """Draw tensors, each with a dtype, a shape and the positions where each dim is cut."""
    tensors = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        cuts = [sorted(draw(st.sets(st.integers(1, max(extent - 1, 1)), max_size=2))) for extent in shape]
        tensors.append((draw(st.sampled_from(sorted(ITEM_BYTES))), shape, cuts))
    return tensors


def boxes(shape, cuts):
    if 0 in shape:
        return
    edges = [[0, *(cut for cut in cuts[dim] if cut < extent), extent] for dim, extent in enumerate(shape)]
    for corner in itertools.product(*(itertools.pairwise(dim) for dim in edges)):
        yield tuple(a for a, _ in corner), tuple(b - a for a, b in corner)


def write(uri, arrays, cuts, leaves, num_files, levels, draw_file):
    """Write arrays (name → dtype and array), their boxes divided over files and the small ones inlined."""
    parts = [[] for _ in range(num_files)]
    for name, (dtype, array) in arrays.items():
        for start, size in boxes(array.shape, cuts[name]):
            box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            piece = np.ascontiguousarray(array[box])
            entry = name if size == array.shape else f"{name}@{','.join(map(str, start))}"
            parts[draw_file()].append((name, entry, dtype, start, piece.reshape(size)))
    files, chunks = [], {name: [] for name in arrays}
    for number, part in enumerate(parts):
        written = _native.ckpt_write_file(
            uri,
            data_path(SAVE_ID, number, is_compressed=levels[number] is not None),
            entries=[
                (entry, dtype, piece.shape, piece.ctypes.data, piece.nbytes)
                for _, entry, dtype, _, piece in part
            ],
            metadata=file_metadata(SAVE_ID),
            sync=False,
            compression=levels[number],
        )
        files.append(written)
        for name, entry, _, start, piece in part:
            offset, length = written["entries"][entry]
            chunks[name].append(
                Chunk(file=number, offset=offset, length=length, start=start, size=piece.shape)
            )
    tensors = {
        name: TensorRecord(
            dtype=dtype,
            shape=array.shape,
            path=(name,),
            chunks=tuple(chunks[name]),
            data=array.tobytes() if array.nbytes <= INLINE_BYTES and len(name) % 2 else None,
        )
        for name, (dtype, array) in arrays.items()
    }
    first = next(iter(tensors))
    tensors["tied"] = TensorRecord(
        dtype=tensors[first].dtype, shape=tensors[first].shape, path=("tied",), same_as=first
    )
    manifest = Manifest(
        save_id=SAVE_ID,
        step=3,
        created="2026-01-01T00:00:00.000000Z",
        version="0.1.0",
        writer="test",
        world_size=num_files,
        files=tuple(files),
        tensors=tensors,
        values={name: ValueRecord(path=(name,), value=value) for name, value in leaves.items()},
    )
    _native.ckpt_commit(uri, _native.ckpt_manifest_encode(manifest.to_document()), SAVE_ID)


@pytest.mark.slow
@given(
    tensors=cut_tensors(),
    leaves=st.lists(values, max_size=4),
    levels=st.lists(st.none() | st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=cases(full=1000, sample=25), deadline=None)
def test_plain_reads_what_hocket_writes(tmp_path_factory, tensors, leaves, levels, seed):
    rng = np.random.default_rng(seed)
    arrays, cuts = {}, {}
    for number, (dtype, shape, cut) in enumerate(tensors):
        name = "t" * (number + 1)
        raw = rng.integers(0, 2 if dtype == "BOOL" else 256, (*shape, ITEM_BYTES[dtype]), np.uint8)
        arrays[name] = dtype, raw.reshape(-1).view(numpy_dtype(dtype)).reshape(shape)
        cuts[name] = cut
    leaves = {f"v{number}": value for number, value in enumerate(leaves)}
    folder = tmp_path_factory.mktemp("plain")
    try:
        uri = str(folder / "c")
        write(uri, arrays, cuts, leaves, len(levels), levels, lambda: int(rng.integers(len(levels))))
        first, second = hocket.ckpt.open(uri), plain.load_tensors(uri)
        assert second.keys() == set(first)
        for name in first:
            expected = arrays[next(iter(arrays)) if name == "tied" else name][1]
            for array in (first[name], second[name]):
                assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
                assert array.tobytes() == expected.tobytes()
        assert plain.load_values(uri) == leaves
        assert hocket.ckpt.verify(uri).is_sound
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "demo"
    write_demo(str(folder))
    return folder


def test_plain_reads_one_tensor_and_the_values_of_a_checkpoint(sound):
    checkpoint = hocket.ckpt.open(str(sound))
    (name, array), *more = plain.load_tensors(sound, ["model.head.weight"]).items()
    assert (name, more) == ("model.head.weight", [])
    assert array.tobytes() == checkpoint[name].tobytes()
    assert plain.load_values(sound) == {name: leaf.value for name, leaf in checkpoint.manifest.values.items()}
    with pytest.raises(KeyError, match="no such"):
        plain.load_tensors(sound, ["no such"])


@pytest.mark.slow
@given(
    where=st.floats(0, 1, exclude_max=True), which=st.integers(0, 4), bit=st.integers(0, 7), cut=st.booleans()
)
@settings(max_examples=cases(full=1000, sample=20), deadline=None)
def test_plain_refuses_the_same_changed_files_as_hocket(tmp_path_factory, sound, where, which, bit, cut):
    pytest.importorskip("xxhash", reason="`uv sync --group test` brings xxhash")
    folder = tmp_path_factory.mktemp("spoiled")
    try:
        spoiled = shutil.copytree(sound, folder / "demo")
        files = [spoiled / "checkpoint.json.zst", *sorted((spoiled / "data").iterdir())]
        content = bytearray(files[which].read_bytes())
        at = int(where * len(content))
        if cut:
            del content[at:]
        else:
            content[at] ^= 1 << bit
        files[which].write_bytes(content)
        with pytest.raises(ValueError):
            plain.load_tensors(spoiled)
        try:
            assert not hocket.ckpt.verify(str(spoiled)).is_sound
        except CheckpointError:
            assert which == 0
    finally:
        shutil.rmtree(folder)


def test_plain_is_one_short_file_that_needs_no_other_module_of_hocket(sound, tmp_path):
    source = plain.__file__
    assert len(Path(source).read_text().splitlines()) < 150
    shutil.copy(source, tmp_path / "copied.py")
    program = (
        "import sys, copied\n"
        f"print(copied.load_tensors({str(sound)!r})['model.num_tokens'])\n"
        "assert not [name for name in sys.modules if name.startswith(('hocket', 'torch'))]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("65536000", "")
