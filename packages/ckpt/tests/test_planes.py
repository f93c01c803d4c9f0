"""Byte planes: a compression of data files that every reader and every rewrite takes."""

import json

import ml_dtypes
import numpy as np
import pytest

import hocket.ckpt
from hocket.ckpt import plain
from hocket.ckpt.document.file_names import Compression, parse_compression, stored_bytes
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.document.planning import Box
from hocket.ckpt.errors import CheckpointCorruptError
from hocket.ckpt.verbs.convert import convert
from hocket.ckpt.verbs.diff import diff
from hocket.ckpt.verbs.merge import merge
from hocket.ckpt.verbs.reshard import reshard
from hocket.native import _native

torch = pytest.importorskip("torch")

from hocket.ckpt.torch import CheckpointStore  # noqa: E402 - after the check for torch


def special_values():
    """Return a state of floating dtypes whose NaNs have payloads, beside other dtypes and an empty tensor."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (70_001,), dtype=torch.int32, generator=generator)
    payload = np.array([0x7FC00001, 0xFFA5A5A5, 0x7F800000], np.uint32).view(np.float32)
    return {
        "bits": bits.view(torch.float32),
        "nan": torch.from_numpy(payload),
        "bf16": torch.randn(400, 301, generator=generator).bfloat16(),
        "f16": torch.randn(3, 3, generator=generator).half(),
        "f64": torch.randn(600, 301, generator=generator).double(),
        "c64": torch.randn(7, 2, dtype=torch.complex64, generator=generator),
        "step": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
    }


@pytest.fixture
def saved(tmp_path):
    store = CheckpointStore(tmp_path, compression="planes+zstd:3")
    state = special_values()
    store.save(state, step=1)
    return store, state, tmp_path / "step-1"


def assert_same_bits(read, state):
    for name, tensor in state.items():
        assert tuple(read[name].shape) == tuple(tensor.shape)
        assert np.asarray(read[name]).tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_torch_and_numpy_read_the_same_bits(saved):
    store, state, folder = saved
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    loaded = store.load("step-1", into).state
    for name, tensor in state.items():
        if tensor.numel():
            assert torch.equal(
                loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            )
    checkpoint = hocket.ckpt.open(folder)
    numpy_state = {name: tensor for name, tensor in state.items() if tensor.ndim and tensor.numel()}
    assert_same_bits(checkpoint, numpy_state)
    assert_same_bits(plain.load_tensors(folder), numpy_state)
    assert checkpoint["bf16"].dtype == ml_dtypes.bfloat16
    row = checkpoint.part("f64", Box((599, 0), (1, 301)))
    assert row.tobytes() == state["f64"][599:].numpy().tobytes()
    assert hocket.ckpt.verify(folder).is_sound


def test_the_format_number_rises_only_with_planes(saved, tmp_path):
    store, _, folder = saved
    assert json.loads(_native.ckpt_manifest_head(str(folder)))["format"] == 3
    (file,) = Manifest.read(folder).files
    runs = file["planes"]
    assert sum(length for _, length in runs) == file["size"] - file["data_start"]
    assert {width for width, _ in runs} == {1, 2, 4, 8}
    store.save({"step": torch.arange(300)}, step=2)
    (file,) = Manifest.read(tmp_path / "step-2").files
    assert file["path"].endswith(".blocks")
    assert "planes" not in file
    assert json.loads(_native.ckpt_manifest_head(str(tmp_path / "step-2")))["format"] == 1


def test_planes_make_weights_smaller(tmp_path):
    state = {"w": torch.randn(1 << 19, generator=torch.Generator().manual_seed(1)).bfloat16()}
    sizes = {}
    for number, compression in enumerate(("zstd:3", "planes+zstd:3")):
        CheckpointStore(tmp_path, compression=compression).save(state, step=number)
        (file,) = Manifest.read(tmp_path / f"step-{number}").files
        sizes[compression] = stored_bytes(file)
    assert sizes["planes+zstd:3"] < 0.95 * sizes["zstd:3"]


def test_a_damaged_block_is_refused_by_name(saved):
    store, state, folder = saved
    (path,) = (folder / "data").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="f64"):
        store.load("step-1", {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    with pytest.raises(ValueError, match=r"zstd|digest"):
        plain.load_tensors(folder)
    assert not hocket.ckpt.verify(folder).is_sound


def test_every_rewrite_reads_and_writes_planes(saved, tmp_path):
    _, state, folder = saved
    names = [name for name, tensor in state.items() if tensor.numel()]
    reshard(folder, tmp_path / "two", ranks=2, compression="planes+zstd:1")
    convert(folder, tmp_path / "plain", to="hocket")
    convert(tmp_path / "plain", tmp_path / "again", to="hocket", compression="planes+zstd:3")
    merge([folder, folder], tmp_path / "mean", include=["bf16", "f64"], compression="planes+zstd:1")
    for name, number in {"two": 3, "plain": 1, "again": 3, "mean": 3}.items():
        head = json.loads(_native.ckpt_manifest_head(str(tmp_path / name)))
        assert head["format"] == number, name
    assert diff(folder, tmp_path / "again").is_empty
    for other in ("two", "plain", "again"):
        checkpoint = hocket.ckpt.open(tmp_path / other)
        assert_same_bits(checkpoint, {name: state[name] for name in names if state[name].ndim})
    mean = hocket.ckpt.open(tmp_path / "mean")
    assert_same_bits(mean, {name: state[name] for name in ("bf16", "f64")})


def test_the_setting_is_parsed_and_another_form_refused():
    assert parse_compression("planes+zstd:7") == Compression(7, planes=True)
    assert parse_compression("zstd:7") == Compression(7)
    for text in ("planes", "planes+zstd:0", "zstd:3+planes", "planes+lz4:1"):
        with pytest.raises(ValueError, match=r"'zstd:N' or 'planes\+zstd:N'"):
            parse_compression(text)
