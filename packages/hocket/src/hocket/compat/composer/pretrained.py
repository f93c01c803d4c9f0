"""Writing a model in a checkpoint file of Composer as a folder of Hugging Face's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.compat.composer.composer_files import read_composer_file
from hocket.compat.composer.utils.object_store import get_file
from hocket.trainer.errors import ResumeError
from hocket.trainer.extras import import_extra


def write_huggingface_pretrained_from_composer_checkpoint(
    checkpoint_path: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    local_checkpoint_save_location: str | os.PathLike[str] | None = None,
) -> None:
    """Write the weights, configuration and tokenizer that a file of Composer's `HuggingFaceModel` has.

    Args:
        checkpoint_path: The file's path or URI.
        output_folder: Made if it is not there.
        local_checkpoint_save_location: Where a file of a URI is kept; a temporary place if None.

    Raises:
        ResumeError: If the file has no model of Hugging Face's.
    """
    import tempfile

    path = os.fspath(checkpoint_path)
    with tempfile.TemporaryDirectory() as folder:
        if "://" in path:
            local = local_checkpoint_save_location or Path(folder) / "checkpoint.pt"
            get_file(path, local, overwrite=True)
            path = os.fspath(local)
        saved = read_composer_file(path).tree("state")
    found = saved.get("integrations", {}).get("huggingface", {})
    if "model" not in found:
        raise ResumeError(f"`{path}` has no `integrations.huggingface`; expected a run of `HuggingFaceModel`")
    _write_model(found["model"]["config"], saved["model"], output_folder)
    _write_tokenizer(found.get("tokenizer", {}), Path(output_folder))


def _write_model(config: Mapping[str, Any], weights: Mapping[str, Any], folder: Any) -> None:
    transformers: Any = import_extra("transformers", "transformers", needed_by="write_huggingface_pretrained")
    content = dict(config["content"])
    made = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    name = str(config["class"]).rpartition(".")[2].strip("'>")
    model = getattr(transformers, name)(made)
    model.load_state_dict({key.removeprefix("model."): value for key, value in weights.items()})
    model.save_pretrained(folder)


def _write_tokenizer(files: Mapping[str, Any], folder: Path) -> None:
    import json

    for name, file in files.items():
        content = file["content"] if isinstance(file, Mapping) else file
        extension = file.get("file_extension", "") if isinstance(file, Mapping) else ""
        text = json.dumps(content) if extension == ".json" else content
        text = "\n".join(text) if isinstance(text, list) else text
        (folder / f"{Path(str(name)).stem}{extension or Path(str(name)).suffix}").write_text(str(text))
