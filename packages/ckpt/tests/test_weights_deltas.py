"""Property tests of the delta's reader: every dtype, shape and layout, and damage of every kind."""

import base64
import math
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hocket.ckpt
from hocket.ckpt import FolderFollower, Follower
from hocket.ckpt.document.dtypes import DTYPES, ITEM_BYTES, numpy_dtype
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointError
from support.sampling import cases

torch = pytest.importorskip("torch")

from hocket.ckpt.torch import Publisher, TensorFollower  # noqa: E402 - after the check for torch

LAYOUTS = ("plain", "turned", "stepped", "backwards")
SHAPES = st.lists(st.sampled_from((0, 1, 1, 2, 3, 7, 40)), max_size=3).map(tuple)


def laid_out(items, layout, empty):
    """Return memory of the items' shape and dtype in a layout; `empty` makes contiguous memory."""
    shape = tuple(items.shape)
    if layout == "turned":
        memory, dims = empty(shape[::-1]), tuple(range(len(shape)))[::-1]
        return memory.permute(dims) if isinstance(memory, torch.Tensor) else memory.transpose(dims)
    if layout == "stepped":
        return empty((*shape, 3))[..., 1]
    return empty(shape)


def tensor_of(dtype, shape, data, layout):
    """Return a torch tensor with the given bytes in a layout."""
    items = torch.frombuffer(bytearray(data) or bytearray(8), dtype=torch.uint8)[: len(data)]
    items = items.clone().view(getattr(torch, DTYPES[dtype].torch)).reshape(shape)
    memory = laid_out(items, layout, lambda shape: torch.empty(shape, dtype=items.dtype))
    # As integers, since a copy may change the payload of a NaN.
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[items.itemsize]
    if dtype == "C64":
        memory.copy_(items)
    else:
        memory.view(same).copy_(items.view(same))
    return memory


def array_of(dtype, shape, layout):
    """Return a NumPy array in a layout."""
    items = np.empty(shape, numpy_dtype(dtype))
    if layout == "backwards" and shape:
        return np.zeros(shape, items.dtype)[::-1]
    return laid_out(items, layout, lambda shape: np.zeros(shape, items.dtype))


def bytes_of(memory):
    if isinstance(memory, torch.Tensor):
        # A clone has strides of its own, also of a tensor with at most one item.
        items = memory.clone(memory_format=torch.contiguous_format).view(-1)
        return items.view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(memory).tobytes()


@st.composite
def changing_tensors(draw):
    """Draw a tensor: dtype, shape, bytes at three steps, layouts of the publisher and of the follower."""
    dtype, shape = draw(st.sampled_from(sorted(DTYPES))), draw(SHAPES)
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    kind = draw(st.sampled_from(("noise", "few", "same", "signs")))
    data = [generator.bytes(num_bytes)]
    for _ in range(2):
        before = np.frombuffer(data[-1], np.uint8).copy()
        if kind == "noise":
            before[:] = np.frombuffer(generator.bytes(num_bytes), np.uint8)
        elif kind == "few" and num_bytes:
            before[generator.integers(num_bytes)] ^= 1 << int(generator.integers(8))
        elif kind == "signs":  # of a floating dtype, 0.0 becomes -0.0 and a NaN one of the other sign
            before[ITEM_BYTES[dtype] - 1 :: ITEM_BYTES[dtype]] ^= 0x80
        data.append(before.tobytes())
    if dtype == "BOOL":
        data = [bytes(byte & 1 for byte in each) for each in data]
    return dtype, shape, data, draw(st.sampled_from(LAYOUTS[:3])), draw(st.sampled_from(LAYOUTS))


@pytest.mark.slow
@settings(max_examples=cases(full=400, sample=10), deadline=None)
@given(tensors=st.lists(changing_tensors(), min_size=1, max_size=6), turned=st.booleans())
def test_deltas_give_the_bits_of_every_tensor_in_every_layout(tmp_path_factory, tensors, turned):
    folder = tmp_path_factory.mktemp("deltas")
    uri = str(folder / "weights")
    drawn = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    arrays = {name: array_of(dtype, shape, own) for name, (dtype, shape, _, _, own) in drawn.items()}
    into = {
        name: tensor_of(dtype, shape, bytes(len(data[0])), own)
        for name, (dtype, shape, data, _, own) in drawn.items()
    }
    followers = [Follower(uri), Follower(uri, into=arrays), TensorFollower(uri, into)]
    served = FolderFollower(uri, folder / "served")
    with Publisher(uri) as publisher:
        for step in range(3):
            state = {
                # The publisher's own layout may change from version to version, as after `contiguous`.
                name: tensor_of(dtype, shape, data[step], "plain" if turned and step == 1 else layout)
                for name, (dtype, shape, data, layout, _) in drawn.items()
            }
            publisher.publish(state, step=step)
            for follower in (*followers, served):
                assert follower.update().is_whole == (step == 0)
            read = hocket.ckpt.open(f"{uri}/version-{step}")
            kept = hocket.ckpt.open(folder / "served")
            for name, (_, _, data, _, _) in drawn.items():
                for memory in (followers[0].arrays[name], arrays[name], into[name], read[name], kept[name]):
                    assert bytes_of(memory) == data[step], name
    shutil.rmtree(folder)


def test_a_tensor_of_one_item_with_any_stride_is_published(tmp_path):
    items = torch.arange(6.0).bfloat16()
    with Publisher(tmp_path) as publisher:
        for step in (1, 2):
            items += step
            publisher.publish({"one": items[1::3][:1], "all": items}, step=step)
    follower = Follower(tmp_path)
    follower.update()
    assert follower.arrays["one"].astype(float).tolist() == [4.0]


def damaged_state(step):
    """Return weights whose delta has two data blocks, and small tensors of several dtypes."""
    generator = torch.Generator().manual_seed(step)
    large = torch.randn(3 << 18, generator=generator)  # a new one at each step, hence with a large delta
    return {
        "large": large,
        "half": torch.randn(700, generator=generator).bfloat16(),
        "count": torch.tensor(step),
        "flags": torch.rand(9, generator=generator) < 0.5,
        "none": torch.empty(0, 3),
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Publish two versions, the second as a delta, and a third in a folder of its own."""
    folder = tmp_path_factory.mktemp("published")
    with Publisher(folder / "weights") as publisher:
        for step in (1, 2, 3):
            publisher.publish(damaged_state(step), step=step)
    shutil.move(folder / "weights" / "version-3", folder / "other")
    record = folder / "weights" / "newest.json"
    if record.exists():
        record.unlink()
    return folder


KINDS = ("flip", "cut", "extend", "zeros", "gone", "other")


def damage(path, kind, at, other):
    """Damage a file; `at` is a place in it, as a share of its size."""
    content = bytearray(path.read_bytes())
    place = min(int(at * len(content)), len(content) - 1)
    if kind == "flip":
        content[place] ^= 1 << (place % 8)
    elif kind == "cut":
        del content[place:]
    elif kind == "extend":
        content += content[place:] or b"x"
    elif kind == "zeros":
        content[place : place + 64] = bytes(len(content[place : place + 64]))
    elif kind == "other":
        content = bytearray(other.read_bytes())
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(content)


@settings(max_examples=cases(full=600, sample=8), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    at=st.floats(0, 1),
    is_manifest=st.booleans(),
    scratch=st.sampled_from((0, 26)),
)
@pytest.mark.slow
def test_a_damaged_delta_is_refused_by_name_and_changes_nothing(
    tmp_path_factory, published, kind, at, is_manifest, scratch
):
    folder = tmp_path_factory.mktemp("damaged")
    uri, version = folder / "weights", folder / "weights" / "version-2"
    shutil.copytree(published / "weights", uri)
    first, second = (
        {name: bytes_of(tensor) for name, tensor in damaged_state(step).items()} for step in (1, 2)
    )
    whole = folder / "version-2"
    shutil.move(version, whole)
    options = {"scratch_bytes": 1 << scratch} if scratch else {}
    into = {name: torch.zeros_like(tensor) for name, tensor in damaged_state(1).items()}
    followers = [Follower(uri, **options), TensorFollower(uri, into, **options)]
    served = FolderFollower(uri, folder / "served", **options)

    def held():
        yield followers[0].arrays
        yield into
        yield hocket.ckpt.open(folder / "served")

    def assert_held(expected):
        for memory in held():
            assert {name: bytes_of(memory[name]) for name in expected} == expected

    for follower in (*followers, served):
        assert follower.update().step == 1
    shutil.copytree(whole, version)
    [data] = (version / "data").iterdir()
    num_bytes = data.stat().st_size
    [other] = (published / "other" / "data").iterdir()
    header_bytes = int.from_bytes(base64.b64decode(Manifest.read(version).files[0]["frames"])[:4], "little")
    if is_manifest:
        damage(version / "checkpoint.json.zst", kind, at, published / "other" / "checkpoint.json.zst")
    else:
        damage(data, kind, at, other)
    num_read = 0
    for follower in (*followers, served):
        try:
            update = follower.update()
        except CheckpointError as error:
            assert "version-2" in str(error)  # noqa: PT017 - which errors are allowed depends on the damage
            assert follower.step == 1
        else:
            if update is None:
                # Only a delta without a manifest is none, as after a publisher killed before its commit.
                assert (kind, is_manifest) == ("gone", True)
            else:
                # Of a data file, the frame of the header, which holds no item, is not read.
                assert not is_manifest
                assert kind == "extend" or at * num_bytes < header_bytes
                num_read += 1
    assert_held(first if num_read == 0 else second)
    shutil.rmtree(version)
    shutil.copytree(whole, version)
    for follower in (*followers, served):
        if num_read == 0:
            assert follower.update().num_deltas == 1
    assert_held(second)
    shutil.rmtree(folder)
