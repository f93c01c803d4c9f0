"""Conversion of a folder of images, with one subfolder per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.stream.convert.sample_writer import (
    Converted,
    choose_columns,
    require,
    source_files,
    source_path,
    write_samples,
)
from hocket.stream.errors import ConfigError, SampleError
from hocket.stream.output import Place

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def from_image_folder(
    source: str | os.PathLike[str],
    out: Place,
    *,
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> Converted:
    """Convert a folder of images to a data set, in the order of paths.

    The columns are `image`, the unchanged file (`png` if all files are, else `jpeg`, which decodes all
    formats of Pillow); `path`, relative to the source; and if the source has subfolders, `class`, the name of
    the first subfolder, and `label`, its position in the sorted names. Every image is opened to verify it.

    Args:
        source: The folder.
        out: Output location.
        columns: Encodings by column name, instead of the inferred ones.
        **settings: Arguments of `MDSWriter`.

    Raises:
        SampleError: A file is not an image.
        SourceNotFoundError: The source does not exist.
        ConfigError: Pillow is not installed, there is no image, or images are beside the classes' folders.
        DatasetExistsError: As `MDSWriter`, with its other errors.
    """
    root = source_path(source)
    files = source_files(root, SUFFIXES)
    names = [file.relative_to(root).parts for file in files] if root.is_dir() else []
    root_files = [parts[0] for parts in names if len(parts) == 1]
    if not names or 0 < len(root_files) < len(names):
        raise ConfigError(
            f"`{root}` has {root_files[:3]} beside folders: expected either one folder per class or "
            "no folders"
        )
    labels = {name: number for number, name in enumerate(sorted({parts[0] for parts in names}))}
    is_png = all(file.suffix.lower() == ".png" for file in files)
    inferred = {"image": "png" if is_png else "jpeg", "path": "str"}
    if not root_files:
        inferred |= {"class": "str", "label": "int"}

    def samples() -> Iterator[dict[str, Any]]:
        for file, parts in zip(files, names, strict=True):
            yield {
                "image": _read(file),
                "path": "/".join(parts),
                "class": parts[0],
                "label": labels[parts[0]],
            }

    return write_samples(samples(), choose_columns(inferred, columns), out, settings)


def _read(path: Path) -> bytes:
    pillow = require("PIL.Image", "pillow")
    try:
        with pillow.open(path) as image:
            image.verify()
        return path.read_bytes()
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise SampleError(f"`{path}` is not an image that Pillow can read: {error}") from None
