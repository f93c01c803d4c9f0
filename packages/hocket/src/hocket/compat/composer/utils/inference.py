"""Export of a model for inference, as `composer.utils`."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

import hocket.algos
from hocket.compat.composer.utils.checkpoint import load_checkpoint
from hocket.compat.composer.utils.names import parse_uri
from hocket.compat.composer.utils.nested_values import ensure_tuple
from hocket.compat.composer.utils.object_store import ObjectStore, maybe_create_object_store_from_uri
from hocket.compat.composer.utils.string_enum import StringEnum
from hocket.trainer import Logger, State
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.evaluation.forward_only import restore_modes
from hocket.trainer.models.export import export_for_inference as _export
from hocket.trainer.ranks.single_process import SingleProcess

#: A function that changes a model in place; what it returns does not matter.
Surgery: TypeAlias = Callable[[nn.Module], object]

#: A function that returns the model to write in place of a copy.
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
    dynamic_axes: Any = None,
    surgery_algs: Surgery | Sequence[Surgery] | None = None,
    transforms: Transform | Sequence[Transform] | None = None,
    onnx_opset_version: int | None = None,
    load_path: str | None = None,
    load_object_store: Any = None,
    load_strict: bool = False,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    *,
    dynamic_batch: bool = True,
) -> None:
    """Write a model as a program, as `hocket.trainer.models.export.export_for_inference`.

    Args:
        model: The model to write.
        save_format: `"onnx"` or `"torch_export"`.
        save_path: A path, a URI, or a name in `save_object_store`.
        save_object_store: The store to write to; None for the path or URI itself.
        sample_input: A batch as `forward` takes it, or the arguments of `forward`: `(batch,)`, `(batch, {})`.
        dynamic_axes: Must be None or name the first dim alone, because no other dim may vary.
        surgery_algs: Functions that change a copy of the model in place, before it takes the weights,
            such as `functional.apply_squeeze_excite`. They stand for the algorithms of the checkpoint's run.
        transforms: Functions that return the model to write, for the copy with its weights.
        onnx_opset_version: Must be None: torch chooses the version.
        load_path: A checkpoint, as `Trainer(load_path=…)`, whose weights a copy of the model takes first.
        load_object_store: Must be None: the path or URI says which store.
        load_strict: Refuse names that only the model or only the checkpoint has.
        input_names: Names of the inputs in ONNX; by default the keys of a mapping, or `input` for the first.
        output_names: Names of the outputs in ONNX; by default `output` for the first.
        dynamic_batch: Whether the first dim of every tensor in the batch may vary.

    Raises:
        TrainerConfigError: If an argument has a value that the exporter cannot honour.
    """
    _refuse(
        dynamic_axes=None if _is_batch_alone(dynamic_axes) else dynamic_axes,
        onnx_opset_version=onnx_opset_version,
        load_object_store=load_object_store,
    )
    model = _prepared(model, ensure_tuple(surgery_algs), load_path, strict=load_strict)
    steps = ensure_tuple(transforms)

    def transform(copied: nn.Module) -> nn.Module:
        for step in steps:
            copied = step(copied)
        return copied

    batch = _batch_of(sample_input)
    kind = str(getattr(save_format, "value", save_format))
    if kind == ExportFormat.ONNX:
        input_names = input_names or (list(batch) if isinstance(batch, Mapping) else ["input"])
        output_names = output_names or ["output"]

    def write(path: str | Path) -> None:
        _export(
            model,
            path,
            sample_input=batch,
            save_format=kind,
            transforms=transform if steps else None,
            dynamic_batch=dynamic_batch,
            input_names=input_names,
            output_names=output_names,
        )

    _store(write, save_path, save_object_store)


def _prepared(
    model: nn.Module, changes: Sequence[Surgery], load_path: str | None, *, strict: bool
) -> nn.Module:
    """Return a copy of the model with the changes and then the weights; the model itself without either."""
    if not changes and load_path is None:
        return model
    model = copy.deepcopy(model)
    for change in changes:
        change(model)
    if load_path is not None:
        load_checkpoint(
            load_path,
            _state_of(model),
            load_weights_only=True,
            strict_model_weights=strict,
            exclude_algorithms=list(hocket.algos.__all__) if changes else None,
        )
    return model


def _store(write: Callable[[str | Path], None], save_path: str, save_object_store: Any) -> None:
    """Write a file to a path, or to a store by way of a temporary file."""
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


def _state_of(model: nn.Module) -> State:
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    return State(
        model=model,
        optimizers=[],
        schedulers=[],
        callbacks=[],
        algorithms=[],
        parallelism=SingleProcess(device),
        device=device,
        precision="fp32",
        device_train_microbatch_size=None,
        max_duration=None,
        run_name="",
        seed=0,
    )


def _batch_of(sample_input: Any) -> Any:
    """Return the batch of a sample input, which may be a batch or the arguments of `forward`."""
    match sample_input:
        case (batch, dict(names)) if not names:
            return batch
        case (tuple() | list() | dict() as batch,):
            return batch
    return sample_input


def _is_batch_alone(dynamic_axes: Any) -> bool:
    axes = dynamic_axes.values() if isinstance(dynamic_axes, Mapping) else ()
    return all(list(one) == [0] for one in axes)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise TrainerConfigError(
                f"`{name}` of `export_for_inference` is {value!r}, which torch's exporter does not take; "
                "leave it out"
            )


def export_with_logger(
    model: nn.Module,
    save_format: str | ExportFormat,
    save_path: str,
    logger: Logger,
    save_object_store: Any = None,
    sample_input: Any = None,
    transforms: Transform | Sequence[Transform] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write a model as a program, and store it with the loggers that store files, or else at `save_path`."""
    arguments: dict[str, Any] = {
        "sample_input": sample_input,
        "transforms": transforms,
        "input_names": input_names,
        "output_names": output_names,
    }
    if save_object_store is not None or not logger.has_file_destination():
        export_for_inference(model, save_format, save_path, save_object_store, **arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / Path(save_path).name
        export_for_inference(model, save_format, str(local), **arguments)
        logger.upload_file(save_path, local, overwrite=True)
        logger.flush()  # the uploads must end before the folder is removed


@contextlib.contextmanager
def model_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode in a `with` block."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        restore_modes(modes)
