"""Images that are converted: each is decoded whole, and its file stays as it is."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter

from hocket.stream import StreamingDataset, convert
from hocket.stream.encodings.images import decode_whole
from hocket.stream.errors import SampleError

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
IMAGE = Image.fromarray(PIXELS).filter(ImageFilter.GaussianBlur(1))
FRAMES = [IMAGE.resize((12, 9)).rotate(90 * number) for number in range(3)]
KINDS: dict[str, tuple[str, Any]] = {
    "jpeg": ("JPEG", {}),
    "progressive": ("JPEG", {"progressive": True}),
    "png": ("PNG", {}),
    "bmp": ("BMP", {}),
    "gif": ("GIF", {}),
    "tiff": ("TIFF", {}),
    "deflate": ("TIFF", {"compression": "tiff_adobe_deflate"}),
    "lzw": ("TIFF", {"compression": "tiff_lzw"}),
    "webp": ("WEBP", {}),
    "frames_gif": ("GIF", {"save_all": True, "append_images": FRAMES[1:]}),
    "frames_tiff": ("TIFF", {"save_all": True, "append_images": FRAMES[1:]}),
    "frames_png": ("PNG", {"save_all": True, "append_images": FRAMES[1:]}),
    "frames_webp": ("WEBP", {"save_all": True, "append_images": FRAMES[1:]}),
}
#: Bytes at the end of a file after all pixels, which some decoders do not ask for.
TAIL = 5


def file_bytes(kind: str) -> bytes:
    format_name, options = KINDS[kind]
    out = io.BytesIO()
    (FRAMES[0] if "frames" in kind else IMAGE).save(out, format=format_name, **options)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Truncated File Read")
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_image_is_found_wherever_it_ends(kind: str) -> None:
    whole = file_bytes(kind)
    decode_whole(whole)
    step = max(1, len(whole) // 150)
    for end in [*range(1, len(whole) - TAIL, step), len(whole) - TAIL]:
        with pytest.raises(SampleError, match="expected a whole image"):
            decode_whole(whole[:end])


@pytest.mark.parametrize("kind", ["jpeg", "bmp", "tiff", "gif", "png"])
def test_a_truncated_image_of_a_folder_is_named(tmp_path: Path, kind: str) -> None:
    suffix = {"jpeg": "jpg"}.get(kind, kind)
    whole = file_bytes(kind)
    source = tmp_path / "in"
    source.mkdir()
    for number in range(40):
        data = whole[: len(whole) // 2] if number == 30 else whole
        (source / f"{number:02}.{suffix}").write_bytes(data)
    with pytest.raises(SampleError, match=rf"30.{suffix}` is not an image that Pillow can read"):
        convert.convert(source, tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()
    (source / f"30.{suffix}").unlink()
    assert convert.convert(source, tmp_path / "again").num_samples == 39


def test_a_palette_image_of_a_folder_keeps_its_palette(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    image = IMAGE.quantize(7)
    image.save(source / "a.png")
    image.save(source / "b.gif")
    convert.convert(source, tmp_path / "out")
    for sample in StreamingDataset(local=tmp_path / "out", batch_size=1):
        assert sample["image"].mode == "P"
        assert sample["image"].convert("RGB").tobytes() == image.convert("RGB").tobytes()
    with pytest.raises(SampleError, match=r"a palette, which `pil` does not store"):
        convert.convert(source, tmp_path / "raw", columns={"image": "pil"})


def test_images_of_a_folder_given_as_pil_are_decoded(tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.png")
    convert.from_image_folder(tmp_path, tmp_path / "out", columns={"image": "pil"})
    assert StreamingDataset(local=tmp_path / "out", batch_size=1)[0]["image"].tobytes() == IMAGE.tobytes()


def write_links(path: Path, links: dict[str, tuple[bytes, str]]) -> None:
    """Write a tar file of two JPEG files of one sample each, and of links by name: their type and target."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in (("a.txt", b"one"), ("b.txt", b"two")):
            member = tarfile.TarInfo(f"set/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, (kind, target) in links.items():
            member = tarfile.TarInfo(f"set/{name}")
            member.type, member.linkname = kind, target
            tar.addfile(member)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_links_within_a_tar_file_are_read(tmp_path: Path, suffix: str) -> None:
    links = {
        "c.txt": (tarfile.LNKTYPE, "set/a.txt"),
        "d.txt": (tarfile.SYMTYPE, "b.txt"),
        "e.txt": (tarfile.SYMTYPE, "../set/c.txt"),
    }
    write_links(tmp_path / f"x{suffix}", links)
    convert.convert(tmp_path / f"x{suffix}", tmp_path / "out")
    found = StreamingDataset(local=tmp_path / "out", batch_size=8)[:]
    with tarfile.open(tmp_path / f"x{suffix}") as tar:
        tar.extractall(tmp_path / "extracted", filter="data")
    expected = {path.stem: path.read_text() for path in (tmp_path / "extracted" / "set").iterdir()}
    assert {sample["__key__"].removeprefix("set/"): sample["txt"] for sample in found} == expected


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
@pytest.mark.parametrize("target", ["missing.txt", "set/c.txt", "c.txt", "/etc/hostname"])
def test_links_to_nothing_in_a_tar_file_are_named(tmp_path: Path, kind: bytes, target: str) -> None:
    write_links(tmp_path / "x.tar", {"c.txt": (kind, target)})
    with pytest.raises(SampleError, match=rf"`set/c.txt` in .* is a link to `{target}`: expected a file"):
        convert.convert(tmp_path / "x.tar", tmp_path / "out")
