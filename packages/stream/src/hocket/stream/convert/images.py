"""A folder of images, with a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.stream.convert.writing import (
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
    """Write images as a data set, in the order of their paths.

    Columns: `image`, the file as it is (`png` where all are, else `jpeg`, which reads every format that
    Pillow does); `path` below the source; and where the source has folders, `class`, the name of the first,
    and `label`, its number in the order of names. Every image is opened to see that it is one.

    Args:
        source: The folder.
        out: Where to write.
        columns: Encodings by name, in place of the inferred ones.
        **settings: Of `MDSWriter`.

    Raises:
        SampleError: A file is no image.
        SourceNotFoundError: There is no source.
        ConfigError: Pillow is not installed, there is no image, or images stand beside the classes' folders.
        DatasetExistsError: And the others of `MDSWriter`.
    """
    root = source_path(source)
    files = source_files(root, SUFFIXES)
    names = [file.relative_to(root).parts for file in files] if root.is_dir() else []
    beside = [parts[0] for parts in names if len(parts) == 1]
    if not names or 0 < len(beside) < len(names):
        raise ConfigError(
            f"`{root}` has {beside[:3]} beside folders: expected a folder for each class, or none"
        )
    labels = {name: number for number, name in enumerate(sorted({parts[0] for parts in names}))}
    is_png = all(file.suffix.lower() == ".png" for file in files)
    inferred = {"image": "png" if is_png else "jpeg", "path": "str"}
    if not beside:
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
        raise SampleError(f"`{path}` is no image that Pillow reads: {error}") from None
