"""A callback that writes the model for inference when the training ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hocket.trainer.callback import Callback
from hocket.trainer.checks import local_path
from hocket.trainer.log.logger import Logger
from hocket.trainer.models.export import check_format, export_for_inference

if TYPE_CHECKING:
    from hocket.trainer.state import State


class ExportForInferenceCallback(Callback):
    """Writes the model as a program that runs without its source, at the end of training, on rank 0.

    Args:
        save_format: `"torch_export"` or `"onnx"`.
        save_path: The file; `{run_name}` is replaced.
        sample_input: A batch as `forward` takes it; the last batch of training by default.
        transforms: A function that changes a copy of the model before it is exported.
        dynamic_batch: Whether the first dim of every tensor in the batch may vary.
        remote_file_name: The name to upload the file under to loggers that keep files; None for no upload.

    Raises:
        TrainerConfigError: If the format is unknown; or at the end of training, as by `export_for_inference`.
        MissingExtraError: If the package that writes the format is not installed.
    """

    needs_whole_model = True
    reads_outputs = False

    def __init__(
        self,
        save_format: str = "torch_export",
        save_path: str | os.PathLike[str] = "{run_name}/model.pt2",
        sample_input: Any = None,
        transforms: Callable[[nn.Module], nn.Module] | None = None,
        dynamic_batch: bool = True,
        remote_file_name: str | None = None,
    ) -> None:
        check_format(save_format)
        self.save_format = save_format
        self.save_path = local_path("save_path", save_path)
        self.sample_input = sample_input
        self.transforms = transforms
        self.dynamic_batch = dynamic_batch
        self.remote_file_name = remote_file_name

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the file."""
        if state.parallelism.global_rank != 0:
            return
        path = export_for_inference(
            state.model,
            self.save_path.format(run_name=state.run_name),
            sample_input=state.batch if self.sample_input is None else self.sample_input,
            save_format=self.save_format,
            transforms=self.transforms,
            dynamic_batch=self.dynamic_batch,
        )
        if self.remote_file_name is not None:
            remote = self.remote_file_name.format(run_name=state.run_name)
            logger.upload_file(remote, path, overwrite=True)
