"""The table of formats that Hocket writes: the name of each, its marker files, and its layout.

Formats that are only read are not in the table; `open` recognises them in the extension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hocket.ckpt.document.file_names import Compression
from hocket.ckpt.formats.companions import companions
from hocket.ckpt.formats.hocket import plan_conversion
from hocket.ckpt.formats.output_file import ZIP_START
from hocket.ckpt.formats.pickling import PICKLE_START
from hocket.ckpt.formats.writers import ConversionContent, FilePlan, plan_dcp, plan_safetensors, plan_torch
from hocket.ckpt.uris import local_path
from hocket.native import _native

__all__ = ["FORMATS", "ConversionTarget", "FileFormat", "Format"]

Format = Literal["hocket", "dcp", "safetensors", "torch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionTarget:
    """The destination of a conversion, and the arguments that its layout depends on."""

    destination: str
    limit: int
    """Limit of tensor bytes per file."""
    save_id: Callable[[], str]
    """Computes the save id of a Hocket checkpoint."""
    compression: Compression | None = None
    """The encoding of compressed files."""
    unfenced: bool = False
    """Whether to commit to a store that ignores or rejects conditional writes."""
    model_root: str | None = None
    """The folder of a source model, whose config and tokenizer are copied too."""

    @property
    def folder(self) -> str:
        """The destination as a folder or prefix."""
        return self.destination.rstrip("/")

    @property
    def file(self) -> tuple[str, str]:
        """The destination as a file: its folder and its name."""
        root, slash, name = local_path(self.folder).rpartition("/")
        return root or slash or ".", name


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFormat:
    """A format of checkpoints."""

    title: str
    """Its display name."""
    plan: Callable[[ConversionTarget, ConversionContent], FilePlan]
    """Lays out a checkpoint in this format."""
    markers: tuple[str, ...] = ()
    """The files that mark a folder as a complete checkpoint."""
    file_suffixes: tuple[str, ...] = ()
    """Ends of the names of destinations that are one file."""
    has_folders: bool = True
    """Whether a destination without such a suffix is a folder."""
    has_strides: bool = False
    """Whether one item can be stored for many, by a stride of 0."""
    has_companions: bool = False
    """Whether the files hold one model, which may lie in parts, beside its config and tokenizer."""
    start: bytes = b""
    """The first bytes of the first marker file, or of the one file, where those of other programs differ."""
    has_manifest: bool = False
    """Whether a manifest records step and `user`, and describes data files that may be compressed."""

    def is_file(self, destination: str) -> bool:
        """Return whether a destination is one file, by its name.

        Raises:
            ValueError: The format is always one file, and the name has none of its suffixes.
        """
        is_file = destination.rstrip("/").endswith(self.file_suffixes)
        if not is_file and not self.has_folders:
            raise ValueError(
                f"`{destination}`: expected a file name that ends in one of {', '.join(self.file_suffixes)}"
            )
        return is_file


def _hocket(target: ConversionTarget, content: ConversionContent) -> FilePlan:
    return plan_conversion(
        target.folder,
        content,
        target.limit,
        save_id=target.save_id(),
        compression=target.compression,
        unfenced=target.unfenced,
    )


def _dcp(target: ConversionTarget, content: ConversionContent) -> FilePlan:
    return plan_dcp(target.folder, content, target.limit)


def _safetensors(target: ConversionTarget, content: ConversionContent) -> FilePlan:
    if FORMATS["safetensors"].is_file(target.destination):
        root, name = target.file
        return plan_safetensors(root, name, content, target.limit)
    plan = plan_safetensors(target.folder, None, content, target.limit)
    if target.model_root is not None:
        plan.files += companions(target.model_root)
    return plan


def _torch(target: ConversionTarget, content: ConversionContent) -> FilePlan:
    root, name = target.file
    return plan_torch(root, name, content)


FORMATS: Mapping[str, FileFormat] = {
    "hocket": FileFormat(
        title="Hocket checkpoint", plan=_hocket, markers=(_native.CKPT_MANIFEST_NAME,), has_manifest=True
    ),
    "dcp": FileFormat(
        title="distributed checkpoint of torch", plan=_dcp, markers=(".metadata",), start=PICKLE_START
    ),
    "safetensors": FileFormat(
        title="safetensors",
        plan=_safetensors,
        file_suffixes=(".safetensors",),
        has_companions=True,
        markers=("model.safetensors", "model.safetensors.index.json"),
    ),
    "torch": FileFormat(
        title="file of torch.save",
        plan=_torch,
        file_suffixes=tuple(_native.FOREIGN_TORCH_SUFFIXES),
        has_folders=False,
        has_companions=True,
        has_strides=True,
        start=ZIP_START,
    ),
}
"""The formats, by the name that `convert` takes and `Checkpoint.format` gives."""

assert FORMATS.keys() == set(get_args(Format))
