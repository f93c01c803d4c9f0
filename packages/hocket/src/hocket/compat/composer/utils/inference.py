"""Writing a model for inference, as `composer.utils`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from hocket.compat.composer.utils.object_store import ObjectStore, maybe_create_object_store_from_uri
from hocket.compat.composer.utils.small import StringEnum, ensure_tuple, parse_uri
from hocket.trainer import Logger
from hocket.trainer.export import export_for_inference as _export

#: Changes a copy of a model before it is written.
Transform: TypeAlias = Callable[[nn.Module], nn.Module]


class ExportFormat(StringEnum):
    """Names of formats; TorchScript is refused, since torch has superseded it."""

    TORCHSCRIPT = "torchscript"
    ONNX = "onnx"
    TORCH_EXPORT = "torch_export"


def export_for_inference(
    model: nn.Module,
    save_format: str | ExportFormat,
    save_path: str,
    save_object_store: Any = None,
    sample_input: Any = None,
    surgery_algs: Transform | Sequence[Transform] | None = None,
    transforms: Transform | Sequence[Transform] | None = None,
    *,
    dynamic_batch: bool = True,
) -> None:
    """Write a model as a program, as `hocket.trainer.export.export_for_inference`.

    Args:
        model: What to write.
        save_format: `"onnx"` or `"torch_export"`.
        save_path: A path, a URI, or a name in `save_object_store`.
        save_object_store: Where to; None for the path or URI itself.
        sample_input: A batch as `forward` takes it.
        surgery_algs: Change a copy of the model first.
        transforms: Change it after these.
        dynamic_batch: Whether the first dim of every tensor in the batch may vary.
    """
    steps = [*ensure_tuple(surgery_algs), *ensure_tuple(transforms)]

    def change(copied: nn.Module) -> nn.Module:
        for step in steps:
            copied = step(copied)
        return copied

    def write(path: str | Path) -> None:
        _export(
            model,
            path,
            sample_input=sample_input,
            save_format=str(getattr(save_format, "value", save_format)),
            transforms=change if steps else None,
            dynamic_batch=dynamic_batch,
        )

    name, store = save_path, save_object_store
    if store is None and (store := maybe_create_object_store_from_uri(save_path)) is not None:
        name = parse_uri(save_path)[2]
    if store is None:
        write(save_path)
        return
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / Path(name).name
        write(local)
        if isinstance(store, ObjectStore):
            store.upload_object(name, local)
        else:
            store.upload_file(name, local, overwrite=True)


def export_with_logger(
    model: nn.Module,
    save_format: str | ExportFormat,
    save_path: str,
    logger: Logger,
    save_object_store: Any = None,
    sample_input: Any = None,
    transforms: Transform | Sequence[Transform] | None = None,
) -> None:
    """Write a model as a program, and store it with the loggers that keep files, or else at `save_path`."""
    arguments: dict[str, Any] = {"sample_input": sample_input, "transforms": transforms}
    if save_object_store is not None or not logger.has_file_destination():
        export_for_inference(model, save_format, save_path, save_object_store, **arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / Path(save_path).name
        export_for_inference(model, save_format, str(local), **arguments)
        logger.upload_file(save_path, local, overwrite=True)
        logger.flush()  # the folder goes now
