"""Image columns, with Pillow and without."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.stream import MDSWriter, StreamingDataset
from hocket.stream.encodings import resolve_encoding
from hocket.stream.errors import SampleError, ShardCorruptError
from hocket.stream.verify import verify

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: it is in the group `dev`")

MODES = ["1", "L", "LA", "I;16", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F"]


def make(mode: str = "RGB", size: tuple[int, int] = (7, 5)) -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(pixels)
    return image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode)


def file_bytes(image: Any, kind: str) -> bytes:
    out = io.BytesIO()
    image.save(out, format=kind)
    return out.getvalue()


def decode_one(encoding: str, data: bytes) -> Any:
    way = resolve_encoding(encoding)
    return way.item(way.decode(memoryview(data), np.array([0, len(data)], np.uint64)), 0)


def round_trip(encoding: str, value: Any) -> Any:
    return decode_one(encoding, resolve_encoding(encoding).encode(value))


@pytest.mark.parametrize("mode", MODES)
def test_raw_images_round_trip(mode: str) -> None:
    image = make(mode)
    back = round_trip("pil", image)
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())


def test_a_palette_is_kept_by_png_and_refused_by_pil() -> None:
    image = make().quantize(5)
    back = round_trip("png", image)
    assert (back.mode, back.tobytes(), back.getpalette()) == ("P", image.tobytes(), image.getpalette())
    for encoding, value in (("pil", image), ("pil", image.convert("PA")), ("list[pil]", [image])):
        with pytest.raises(SampleError, match=r"a palette, which `pil` does not store.*`png`"):
            resolve_encoding(encoding).store(value)
    grey = Image.frombytes("P", (7, 5), make("L").tobytes())
    back = round_trip("pil", grey)
    assert (back.mode, back.convert("RGB").tobytes()) == ("P", grey.convert("RGB").tobytes())


def test_png_is_exact_and_jpeg_has_pillows_bytes() -> None:
    image = make()
    assert round_trip("png", image).tobytes() == image.tobytes()
    assert resolve_encoding("jpeg").encode(image) == file_bytes(image, "JPEG")


def test_a_jpeg_from_a_file_is_not_encoded_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jpeg"
    make(size=(64, 48)).save(path, quality=30)
    with Image.open(path) as image:
        assert resolve_encoding("jpeg").encode(image) == path.read_bytes()
        image.load()
        assert resolve_encoding("jpeg").encode(image) == path.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.thumbnail((8, 8)),
        lambda image: image.paste((0, 0, 255), (0, 0, 32, 48)),
        lambda image: image.putpixel((0, 0), (0, 0, 255)),
        lambda image: image.draft("L", None),
    ],
)
def test_a_changed_jpeg_from_a_file_is_encoded_again(tmp_path: Path, change: Callable[[Any], object]) -> None:
    path = tmp_path / "a.jpeg"
    Image.new("RGB", (64, 48), (255, 0, 0)).save(path)
    with Image.open(path) as image:
        change(image)
        data = resolve_encoding("jpeg").encode(image)
        assert data == file_bytes(image, "JPEG")
        assert data != path.read_bytes()


@pytest.mark.parametrize("encoding", ["list[pil]", "list[png]", "list[jpeg]", "jpeg_array", "jpegarray"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_images_round_trip(encoding: str, count: int) -> None:
    images = [make(size=(4 + number, 5)) for number in range(count)]
    assert [image.size for image in round_trip(encoding, images)] == [image.size for image in images]


def test_images_round_trip_through_a_data_set(tmp_path: Path) -> None:
    columns = {"a": "jpeg", "b": "list[png]", "c": "pil"}
    jpeg = file_bytes(make(), "JPEG")
    with MDSWriter(columns=columns, out=tmp_path) as writer:
        for _ in range(3):
            writer.write({"a": jpeg, "b": [make(), make("L")], "c": make("F")})
    for sample in StreamingDataset(local=tmp_path, batch_size=2):
        assert sample["a"].tobytes() == Image.open(io.BytesIO(jpeg)).tobytes()
        assert [image.mode for image in sample["b"]] == ["RGB", "L"]
        assert sample["c"].tobytes() == make("F").tobytes()


@pytest.mark.parametrize("column", ["jpeg", "list[jpeg]"])
def test_a_truncated_image_is_found_by_verify_and_replaced(tmp_path: Path, column: str) -> None:
    whole = file_bytes(make(size=(64, 64)), "JPEG")
    with MDSWriter(columns={"id": "int", "a": column}, out=tmp_path) as writer:
        for number in range(4):
            data = whole[: len(whole) // 2] if number == 1 else whole
            writer.write({"id": number, "a": data if column == "jpeg" else [data]})
    (shard,) = verify(str(tmp_path)).shards
    assert "an image of 64×64 pixels" in (shard.problem or "")
    dataset = StreamingDataset(local=tmp_path, batch_size=2, on_bad_sample="replace")
    assert [sample["id"] for sample in dataset] == [0, 2, 2, 3]


def test_an_image_mode_that_jpeg_cannot_hold_raises() -> None:
    with pytest.raises(SampleError, match="JPEG can hold"):
        resolve_encoding("jpeg").encode(make("RGBA"))


HOSTILE = ["pil", "png", "list[pil]", "list[jpeg]", "jpeg_array"]


@settings(deadline=None)  # The first image loads Pillow's formats.
@given(st.sampled_from(HOSTILE), st.binary(max_size=64))
def test_decoding_arbitrary_bytes_raises_only_a_typed_error(encoding: str, data: bytes) -> None:
    told = None
    try:
        decode_one(encoding, data)
    except ShardCorruptError as error:
        told = str(error)
    assert told is None or "restore the shard" in told


def test_a_wrong_image_size_raises_before_memory_is_allocated() -> None:
    header = np.array([1 << 31, 1 << 31, 3], "<u4").tobytes() + b"RGB"
    with pytest.raises(ShardCorruptError, match="a raw image"):
        decode_one("pil", header + bytes(12))
    with pytest.raises(ShardCorruptError, match="as many sizes"):
        decode_one("jpeg_array", b"\xff" * 4)


def test_without_pillow_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['PIL'] = None\n"
        "from hocket.stream.encodings import resolve_encoding\n"
        "resolve_encoding('jpeg').encode(object())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "pip install 'hocket-stream[pillow]'" in done.stderr
