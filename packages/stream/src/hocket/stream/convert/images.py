"""Conversion of a folder of images, with one subfolder per class."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hocket.stream.convert.sample_writer import ConvertReport, check_output, choose_columns, write_samples
from hocket.stream.convert.sources import find_files, is_hidden, source_path, split_name
from hocket.stream.encodings.images import decode_whole
from hocket.stream.errors import ConfigError, SampleError
from hocket.stream.write.output import Place

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
#: Images that would be missing from a data set without a word.
_OTHER_SUFFIXES = (".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".heic", ".heif", ".jp2")

_MAX_THREADS = 8


def from_image_folder(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert a folder of images to a data set, in the order of paths.

    The columns are `image`, the unchanged file (`png` if all files are, else `jpeg`, which decodes all
    formats of Pillow); `path`, relative to the source; and if the source has subfolders, `class`, the name of
    the first subfolder, and `label`, its position in the sorted names, as in torchvision's `ImageFolder`.
    Every image is decoded whole, in several threads, with all its frames, so that a truncated one is found.
    Links to folders are followed; hidden files and folders are left out.

    Args:
        source: The folder.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones; `pil` stores decoded pixels.
        split: The split to read if the folder has several: `train`, `validation` or `test`; `all` to merge
            them.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SampleError: A file is not an image, or is truncated.
        SourceNotFoundError: The source does not exist.
        ConfigError: Pillow is not installed, there is no image, images are beside the classes' folders, a
            class has none, an image has a format that no encoding holds, or images belong to several splits.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    check_output(out, columns, settings)
    root = source_path(source)
    files = find_files(root, SUFFIXES + _OTHER_SUFFIXES, split=split).files
    if other := [file for file in files if file.name.lower().endswith(_OTHER_SUFFIXES)]:
        raise ConfigError(
            f"`{other[0]}` is an image of a format that no encoding holds ({len(other)} such files): "
            f"expected {', '.join(SUFFIXES)}; convert it, as to PNG"
        )
    root = _split_folder(root, files, split)
    names = [file.relative_to(root).parts for file in files] if root.is_dir() else []
    root_files = [parts[0] for parts in names if len(parts) == 1]
    if not names or 0 < len(root_files) < len(names):
        raise ConfigError(
            f"`{root}` has {root_files[:3]} beside folders: expected either one folder per class or "
            "no folders"
        )
    if not root_files:
        _check_classes(root, {parts[0] for parts in names})
    labels = {name: number for number, name in enumerate(sorted({parts[0] for parts in names}))}
    is_png = all(file.suffix.lower() == ".png" for file in files)
    inferred = {"image": "png" if is_png else "jpeg", "path": "str"}
    if not root_files:
        inferred |= {"class": "str", "label": "int"}

    def samples() -> Iterator[dict[str, Any]]:
        for image, parts in zip(_read_all(files), names, strict=True):
            yield {
                "image": image,
                "path": "/".join(parts),
                "class": parts[0],
                "label": labels[parts[0]],
            }

    return write_samples(samples(), choose_columns(inferred, columns), out, settings)


def _split_folder(root: Path, files: list[Path], split: str | None) -> Path:
    """Return the folder of the split, where classes begin; else the source."""
    tops = {file.relative_to(root).parts[0] for file in files} if root.is_dir() else set()
    if (
        split not in (None, "all")
        and len(tops) == 1
        and split_name(tuple(tops))
        and (root / min(tops)).is_dir()
    ):
        return root / min(tops)
    return root


def _check_classes(root: Path, found: set[str]) -> None:
    """Raise if a class has no image, because it would be missing from the labels."""
    with os.scandir(root) as entries:
        names = {
            entry.name
            for entry in entries
            if entry.is_dir() and not is_hidden(entry) and not root.samefile(entry.path)
        }
    if empty := sorted(names - found):
        raise ConfigError(
            f"the folders {empty} of `{root}` have no image: expected one in each class "
            f"({', '.join(SUFFIXES)}); remove the folders, or convert the images"
        )


def _read_all(files: list[Path]) -> Iterator[bytes]:
    """Yield the content of each file, decoded ahead in threads: Pillow releases the interpreter's lock."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    reads = collections.deque[Future[bytes]]()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="hocket-images") as pool:
        try:
            for file in files:
                reads.append(pool.submit(_read, file))
                if len(reads) > 2 * num_threads:
                    yield reads.popleft().result()
            while reads:
                yield reads.popleft().result()
        finally:
            for read in reads:
                read.cancel()


def _read(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        decode_whole(data)
    except SampleError as error:
        raise SampleError(f"`{path}` is not an image that Pillow can read: {error}") from None
    return data
