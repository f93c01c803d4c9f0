"""Hostile files raise errors after little processor time and 100 MB at most, and none of their code runs."""

import base64
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from safetensors.numpy import save

import hocket.ckpt
from hocket.ckpt import list_checkpoints
from hocket.ckpt.document.manifest import Manifest
from hocket.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointUnsafeError
from hocket.ckpt.verbs.demo import write_demo
from hocket.native import _native
from hocket.native.errors import StoreIOError

TOOL = Path(__file__).parents[3] / "tools/old_checkpoints.py"

PICKLES = {
    # Calls of os.system("touch executed") by the opcodes REDUCE, INST and STACK_GLOBAL.
    "call": b"\x80\x02cos\nsystem\nX\x0e\x00\x00\x00touch executed\x85R.",
    "inst": b"\x80\x02(X\x0e\x00\x00\x00touch executedios\nsystem\n.",
    "stack-global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0etouch executed\x85R.",
    "extension": b"\x80\x02\x82\x01.",
    # Opcodes that announce 4 GiB of text or bytes, which the file does not have.
    "long-text": b"\x80\x04\x8d\x00\x00\x00\x00\x01\x00\x00\x00abc.",
    "long-bytes": b"\x80\x04\x8e\x00\x00\x00\x00\x01\x00\x00\x00abc.",
    "deep": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "laughs": b"\x80\x02]q\x00"
    + b"".join(b"](" + b"h%c" % level * 10 + b"eq%c" % (level + 1) for level in range(30))
    + b".",
    "holds-itself": b"\x80\x02]q\x00h\x00a.",
    "many": b"\x80\x02" + b"N" * 8_000_000 + b".",
    "empty": b"",
}


def header(entries, data=b"abcd"):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


SAFETENSORS = {
    "huge-header": (1 << 63).to_bytes(8, "little") + b"{}",
    "longer-than-the-file": (1 << 40).to_bytes(8, "little") + b"{}",
    "hole": header({"a": entry(shape=(2,), offsets=(2, 4))}),
    "overlap": header({"a": entry(shape=(3,), offsets=(0, 3)), "b": entry(shape=(2,), offsets=(2, 4))}),
    "short": header({"a": entry(shape=(3,), offsets=(0, 3))}),
    "overflow": header({"a": entry(shape=(1 << 32, 1 << 32))}),
    "overflow-2": header({"a": entry(dtype="F64", shape=(1 << 61,))}),
    "negative": header({"a": entry(shape=(-4,))}),
    "float": header({"a": entry(shape=(4.0,))}),
    "deep": header(b"[" * 5_000_000),
    "deep-in-an-entry": header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "no-object": header(b"[1]"),
    "shards-elsewhere": header(
        {"__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [-1]}}'}, "a": entry()}
    ),
}

OPEN = """
import json, sys, time
from pathlib import Path
import hocket.ckpt
from hocket.ckpt.errors import CheckpointError
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])
told = {}
for path in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = status("VmRSS"), time.process_time()
    try:
        hocket.ckpt.open(path)
        outcome = "opened"
    except CheckpointError as error:
        outcome = type(error).__name__
    told[path] = [outcome, time.process_time() - began, status("VmHWM") - before]
print(json.dumps(told))
"""


@pytest.fixture
def refused(tmp_path):
    """Return a function that opens files in a new process, checks time and memory, and returns the errors."""

    def act(files):
        done = subprocess.run(
            [sys.executable, "-c", OPEN, *map(str, files.values())],
            capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
        )  # fmt: skip
        told = json.loads(done.stdout)
        for path, (_, seconds, grown) in told.items():
            assert seconds < 10, path  # processor time, not wall time
            assert grown < 100 << 20, path
        assert not list(tmp_path.rglob("executed"))
        return {name: told[str(path)][0] for name, path in files.items()}

    return act


def test_hostile_pickles_raise(tmp_path, refused):
    files = {}
    for name, content in PICKLES.items():
        files[name] = tmp_path / name
        files[name].mkdir()
        (files[name] / ".metadata").write_bytes(content)
        stored = zip_of({"a/data.pkl": content, "a/byteorder": b"little"})
        files[f"{name}-zip"] = tmp_path / f"{name}.pt"
        files[f"{name}-zip"].write_bytes(stored)
    errors = refused(files)
    # Files that open hold empty lists, however deep, or a call that is left out.
    harmless = {name for name, error in errors.items() if error == "opened"}
    # In a file of `torch.save` a call is an object, which is named and left out: nothing is imported or run.
    calls = {"call-zip", "stack-global-zip"}
    assert calls <= harmless <= calls | {"many-zip", "laughs-zip", "deep-zip", "holds-itself-zip"}
    for name in calls:
        checkpoint = hocket.ckpt.open(files[name])
        assert not list(checkpoint)
        assert "system" in checkpoint.contents.opaque["value"]
    assert not list(tmp_path.rglob("executed"))
    assert {errors[name] for name in ("call", "inst", "stack-global", "inst-zip")} == {
        "CheckpointUnsafeError"
    }
    kinds = {f"Checkpoint{kind}Error" for kind in ("Unsafe", "Corrupt", "Incompatible")}
    assert set(errors.values()) <= kinds | {"opened"}


def test_hostile_metadata_of_distributed_checkpoints_raise(tmp_path, refused):
    """Open metadata with wrong paths, offsets and chunks, and with a call written by Python's pickle."""
    subprocess.run([sys.executable, TOOL, tmp_path / "made"], timeout=60, check=True)
    errors = refused({folder.name: folder for folder in (tmp_path / "made").glob("bad-*")})
    assert len(errors) == 8
    assert set(errors.values()) <= {"CheckpointUnsafeError", "CheckpointCorruptError"}
    with pytest.raises(CheckpointUnsafeError, match=r"`posix\.system`"):
        hocket.ckpt.open(str(tmp_path / "made/bad-call"))
    assert not (tmp_path / "made/executed").exists()


def zip_of(members):
    """Return a minimal zip file of uncompressed members."""
    import zlib

    file, directory = b"", b""
    for name, content in members.items():
        sizes = struct.pack("<III", zlib.crc32(content), len(content), len(content))
        shared = bytes(8) + sizes + struct.pack("<HH", len(name), 0)
        directory += (
            b"PK\x01\x02\x14\0\x14\0" + shared + bytes(10) + struct.pack("<I", len(file)) + name.encode()
        )
        file += b"PK\x03\x04\x14\0" + shared + name.encode() + content
    count = len(members)
    return file + directory + struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, len(directory), len(file), 0
    )  # fmt: skip


def test_hostile_safetensors_raise(tmp_path, refused):
    files = {}
    for name, content in SAFETENSORS.items():
        files[name] = tmp_path / f"{name}.safetensors"
        files[name].write_bytes(content)
    assert set(refused(files).values()) == {"CheckpointCorruptError"}


def test_hostile_zips_raise(tmp_path, refused):
    sound = zip_of({"a/data.pkl": b"\x80\x02}.", "a/byteorder": b"little"})
    at = sound.index(b"PK\x05\x06")
    spoiled = {
        "many-members": sound[: at + 8] + b"\xfe\xff" * 2 + sound[at + 12 :],
        "far-directory": sound[: at + 16] + b"\xf0\xff\xff\xff" + sound[at + 20 :],
        "long-directory": sound[: at + 12] + b"\xf0\xff\xff\xff" + sound[at + 16 :],
        "wide-numbers": sound[: at + 8] + b"\xff" * 12 + sound[at + 20 :],
        "long-member": sound.replace(struct.pack("<II", 4, 4), struct.pack("<II", 1 << 31, 1 << 31)),
        "cut": sound[:-9],
    }
    files = {}
    for name, content in spoiled.items():
        files[name] = tmp_path / f"{name}.pt"
        files[name].write_bytes(content)
    assert set(refused(files).values()) == {"CheckpointCorruptError"}


def test_hostile_indices_raise(tmp_path, refused):
    import numpy as np

    files = {}
    for name, weight_map in {
        "path": {"a": "../secret.safetensors"}, "absolute": {"a": "/etc/passwd"}, "number": {"a": 1},
        "folder": {"a": "."}, "none": None, "missing": {"b": "x.safetensors"},
    }.items():  # fmt: skip
        files[name] = tmp_path / name
        files[name].mkdir()
        (files[name] / "x.safetensors").write_bytes(save({"a": np.zeros(1)}))
        (files[name] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(refused(files).values()) == {"CheckpointCorruptError"}


def manifest_of(document, head=()):
    """Return an encoded manifest with any document and matching digests."""
    frame = zstandard.compress(document)
    raw = {
        "format": 1, "version": "0.1.0", "save_id": "0" * 32, "step": 1,
        "created": "2026-01-01T00:00:00.000000Z", "files": 0, "tensors": 0, "bytes": 0,
        "digest": _native.xxh3_128(frame).hex(), **dict(head),
    }  # fmt: skip
    content = zstandard.compress(json.dumps(raw).encode() + b"\n") + frame
    return content + bytes.fromhex("502a4d1810000000") + _native.xxh3_128(content)


def test_a_manifest_that_decompresses_to_too_many_bytes_raises():
    with pytest.raises(CheckpointCorruptError, match=r"67108864 bytes when decompressed, at most"):
        _native.ckpt_manifest_decode(manifest_of(b" " * (64 << 20)))
    # A manifest that Hocket writes stays readable, even one with a million equal items.
    manifest = Manifest(
        save_id="0" * 32, step=1, created="2026-01-01T00:00:00.000000Z", version="0.1.0", writer="test",
        world_size=1, user=["the same"] * 10**6,
    )  # fmt: skip
    document = manifest.to_document()
    encoded = _native.ckpt_manifest_encode(document)
    assert 30 * len(encoded) < len(document)
    assert _native.ckpt_manifest_decode(encoded) == document


def test_a_header_as_long_as_its_file_raises():
    size = 6 << 30
    file = {
        "path": "data/x.safetensors", "size": size, "data_start": size,
        "header": base64.b64encode(bytes(16)).decode(), "digests": "",
    }  # fmt: skip
    manifest = Manifest(
        save_id="0" * 32, step=1, created="2026-01-01T00:00:00.000000Z", version="0.1.0", writer="test",
        world_size=1, files=(file,),
    )  # fmt: skip
    with pytest.raises(CheckpointCorruptError, match="a header of 6442450944 bytes"):
        _native.ckpt_manifest_encode(manifest.to_document())


def test_an_invalid_creation_time_raises():
    for created in ("2026-01-01", "\x1b[31m026-01-01T00:00:00.00Z", "2026-01-01T00:00:00.000000+"):
        with pytest.raises(CheckpointCorruptError, match="expected `YYYY-MM-DDTHH"):
            _native.ckpt_manifest_decode(manifest_of(b"{}", {"created": created}))


def test_a_named_pipe_in_place_of_a_file_raises_without_waiting(tmp_path):
    for name in ("checkpoint.json.zst", "model.safetensors", "model.safetensors.index.json", ".metadata"):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        os.mkfifo(folder / name)
        with pytest.raises(StoreIOError if name == "checkpoint.json.zst" else CheckpointNotFoundError):
            hocket.ckpt.open(str(folder))
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(CheckpointNotFoundError):
        hocket.ckpt.open(str(tmp_path / "model.pt"))
    assert {one.status for one in list_checkpoints(str(tmp_path))} == {"foreign"}
    manifest = write_demo(str(tmp_path / "demo"))
    data = tmp_path / "demo" / manifest.files[1]["path"]
    data.unlink()
    os.mkfifo(data)
    [flaw] = hocket.ckpt.verify(str(tmp_path / "demo")).flaws
    assert (flaw.file, flaw.problem) == (manifest.files[1]["path"], "the file is missing")
