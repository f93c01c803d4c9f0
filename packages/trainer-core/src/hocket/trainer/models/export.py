"""Writing a trained model for inference."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.trainer.checks import local_path
from hocket.trainer.errors import TrainerConfigError
from hocket.trainer.process.extras import require_extra

_FORMATS = ("torch_export", "onnx")


def export_for_inference(
    model: nn.Module,
    save_path: str | os.PathLike[str],
    *,
    sample_input: Any,
    save_format: str = "torch_export",
    transforms: Callable[[nn.Module], nn.Module] | None = None,
    dynamic_batch: bool = True,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> Path:
    """Write a model's `forward` as a program that runs without its source.

    The model itself is left as it is: a copy in evaluation mode on the CPU is exported.

    Args:
        model: Any module; its parameters must be whole on this rank.
        save_path: The file, such as `"model.pt2"` (`torch.export.load` opens it) or `"model.onnx"`.
        sample_input: A batch as `forward` takes it; its shapes and types become those of the program.
        save_format: `"torch_export"`, or `"onnx"`, which needs the extra `onnx`.
        transforms: Changes the copy before it is exported, such as fusing or quantizing it.
        dynamic_batch: Whether the first dim of every tensor in the batch may vary.
        input_names: Names for the tensors of the batch, in order, in ONNX. An ONNX program has no input for a
            tensor that `forward` does not use, such as labels.
        output_names: Names for the outputs, in order, in ONNX.

    Returns:
        The path of the file.

    Raises:
        TrainerConfigError: If the format is unknown, there is no sample input, the model is sharded, or there
            are names for another format.
        MissingExtraError: If the package that writes the format is not installed.
    """
    check_format(save_format, input_names, output_names)
    path = Path(local_path("save_path", save_path))
    if sample_input is None:
        raise TrainerConfigError("`sample_input` is missing; pass a batch as the model's `forward` takes it")
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise TrainerConfigError(
            "the model's parameters are sharded over ranks; save a checkpoint with `save_weights_only=True`, "
            "load it into the model in one process, and export that"
        )
    exported = copy.deepcopy(model).to("cpu").eval()
    exported = exported if transforms is None else transforms(exported)
    batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), sample_input)
    shapes = pytree.tree_map(_shape, (batch,)) if dynamic_batch else None
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        program = torch.export.export(exported, (batch,), dynamic_shapes=shapes)
    if save_format == "onnx":
        onnx = torch.onnx.export(program, input_names=input_names, output_names=output_names)
        assert onnx is not None  # a program that is exported already always gives one
        inputs = onnx.model.graph.inputs
        inputs[:] = [value for value in inputs if value.uses()]
        onnx.save(path)
    else:
        torch.export.save(program, path)
    return path


def check_format(
    save_format: str, input_names: Sequence[str] | None = None, output_names: Sequence[str] | None = None
) -> None:
    """Check the format of an export and the names, which are for ONNX.

    Raises:
        TrainerConfigError: If the format is unknown, or there are names for another format.
        MissingExtraError: If the package that writes the format is not installed.
    """
    if save_format == "torchscript":
        raise TrainerConfigError(
            "TorchScript has been superseded in torch; use `save_format='torch_export'`, whose file "
            "`torch.export.load` opens"
        )
    if save_format not in _FORMATS:
        raise TrainerConfigError(f"`save_format` is `{save_format}`; expected `torch_export` or `onnx`")
    if save_format == "onnx":
        require_extra("onnxscript", "onnx", needed_by="export_for_inference(save_format='onnx')")
    elif input_names is not None or output_names is not None:
        raise TrainerConfigError(
            f"`input_names` and `output_names` are for ONNX; leave them out for `save_format='{save_format}'`"
        )


def _shape(value: Any) -> Any:
    """Return the dims that may vary: the first one of a tensor."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return {0: torch.export.Dim.AUTO}
    return None
