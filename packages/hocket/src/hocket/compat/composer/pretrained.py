"""The configuration and tokenizer in checkpoints of a `HuggingFaceModel`, and models made from them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hocket.ckpt as ckpt
from hocket.ckpt.torch.functions import provide
from hocket.compat.composer.composer_files import as_tensor, is_composer_file, read_composer_file
from hocket.compat.composer.load_paths import find_checkpoint
from hocket.compat.composer.utils.object_store import get_file
from hocket.native.paths import is_uri
from hocket.trainer import Callback, Logger, State
from hocket.trainer.errors import ResumeError, TrainerConfigError
from hocket.trainer.models.huggingface_folder import FolderWriter
from hocket.trainer.models.huggingface_saving import adapter_names
from hocket.trainer.process.extras import import_extra


class HuggingFaceRecord(Callback):
    """A callback of this layer's trainer that saves a Hugging Face model's configuration and tokenizer."""

    saves_rank_zero_state = True

    def __init__(self) -> None:
        self._model: Any = None

    def init(self, state: State, logger: Logger) -> None:
        """Remember the model."""
        self._model = state.model

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration, the class and the tokenizer's files."""
        return {"huggingface": metadata_of(self._model)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the record is read before a model is made, and a resumed run has its own model."""


def metadata_of(model: Any) -> dict[str, Any]:
    """Return a `HuggingFaceModel`'s configuration, class and tokenizer's files, as plain values."""
    base_model = model.model.get_base_model() if model.is_peft else model.model
    config = {
        "file_extension": ".json",
        "content": json.loads(model.config.to_json_string(use_diff=False)),
        "class": f"{type(base_model).__module__}.{type(base_model).__qualname__}",
    }
    files = {}
    if model.tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            model.tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                text = path.read_text(encoding="utf-8")
                files[path.name] = {"file_extension": path.suffix, "content": _content(text, path.suffix)}
    described = {"config": config}
    if model.is_peft:
        adapters = model.model.peft_config[model.model.active_adapter].to_dict()
        # Sets, such as that of `target_modules`, become lists.
        content = json.loads(json.dumps(adapters, default=sorted))
        described["peft_config"] = {"file_extension": ".json", "content": content}
    return {"model": described, "tokenizer": files}


def hf_from_composer_checkpoint(
    checkpoint_path: str | os.PathLike[str],
    model_instantiation_class: Any = None,
    model_config_kwargs: Mapping[str, Any] | None = None,
    local_checkpoint_save_location: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Make the model and the tokenizer of a checkpoint, without the checkpoint's weights.

    Args:
        checkpoint_path: A checkpoint of this layer's trainer, as `Trainer(load_path=…)`, or Composer's file.
        model_instantiation_class: The class to make, one of the `Auto…` classes, or a class's full name; the
            one that was saved if None.
        model_config_kwargs: Changes of the configuration, such as `num_labels`.
        local_checkpoint_save_location: Path to download a URI's file to; a temporary one if None.
        trust_remote_code: Whether the tokenizer may run code from its files.

    Returns:
        The model and the tokenizer; the tokenizer is None if the checkpoint has none.

    Raises:
        ResumeError: If the checkpoint is not of a `HuggingFaceModel`, or has weights alone.
        TrainerConfigError: If the class cannot be imported.
    """
    record, _ = _read(checkpoint_path, local_checkpoint_save_location, has_weights=False)
    saved = record["model"]["config"]
    given = model_instantiation_class
    kind = _class_of(saved["class"]) if given is None else _class_of(given, is_saved=False)
    config = _config_of(saved, model_config_kwargs or {})
    model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    if not record.get("tokenizer"):
        return model, None
    transformers: Any = import_extra("transformers", "transformers", needed_by="hf_from_composer_checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(record["tokenizer"], Path(folder))
        return model, transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def write_huggingface_pretrained_from_composer_checkpoint(
    checkpoint_path: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    local_checkpoint_save_location: str | os.PathLike[str] | None = None,
) -> None:
    """Write the weights, configuration and tokenizer of a checkpoint as a Hugging Face folder.

    For a model with `peft` adapters, the folder has the adapters and the name of the base model.

    Args:
        checkpoint_path: As `hf_from_composer_checkpoint` takes it.
        output_folder: The folder; it is made if it does not exist.
        local_checkpoint_save_location: Path to download a URI's file to; a temporary one if None.

    Raises:
        ResumeError: If the checkpoint has no Hugging Face model.
    """
    record, weights = _read(checkpoint_path, local_checkpoint_save_location, has_weights=True)
    model = _class_of(record["model"]["config"]["class"])(_config_of(record["model"]["config"], {}))
    weights = {key.removeprefix("model."): value for key, value in weights.items()}
    if "peft_config" in record["model"]:
        model = _with_adapters(model, record["model"]["peft_config"]["content"], weights)
        state = model.state_dict()
        own = weights.keys() - adapter_names(model, state, prefix="")
        # A checkpoint of adapters has no other parameters than those that were trained beside them.
        is_whole = state.keys() <= weights.keys()
        beside = {name for name, _ in model.named_parameters() if name in own and not is_whole}
        writer = FolderWriter(model, wrapper=None, task="", trained=beside)
        writer.write(output_folder, tokenizer=None, has_own_base=False)
    else:
        model.load_state_dict(weights)
        model.save_pretrained(output_folder)
    _write_tokenizer(record.get("tokenizer", {}), Path(output_folder))


def _with_adapters(base: Any, settings: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
    peft: Any = import_extra("peft", "peft", needed_by="HuggingFaceModel")
    model = peft.get_peft_model(base, peft.get_peft_config(dict(settings)))
    # The base model is missing where only adapters were saved.
    unexpected = model.load_state_dict(weights, strict=False).unexpected_keys
    missing = adapter_names(model, model.state_dict(), prefix="") - weights.keys()
    if unexpected or missing:
        raise ResumeError(
            f"the checkpoint's adapters do not fit its `peft_config`: missing {sorted(missing)}, "
            f"unexpected {unexpected}"
        )
    return model


def _read(
    checkpoint_path: str | os.PathLike[str], local: str | os.PathLike[str] | None, *, has_weights: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's record of its model, and the weights if `has_weights` is set."""
    path = os.fspath(checkpoint_path)
    with tempfile.TemporaryDirectory() as folder:
        if is_uri(path) and path.endswith(".pt") and not _is_folder(path):
            download_path = local or Path(folder) / "checkpoint.pt"
            get_file(path, download_path, overwrite=True)
            path = os.fspath(download_path)
        if is_composer_file(path):
            saved = read_composer_file(path).tree("state")
            record, weights = saved.get("integrations", {}).get("huggingface", {}), saved["model"]
        else:
            path = find_checkpoint(path) or path
            record, weights = _read_own(path, has_weights=has_weights)
    if "model" not in record:
        raise ResumeError(
            f"`{path}` says nothing of a model of Hugging Face's; expected a checkpoint with the whole state "
            "of a run of `HuggingFaceModel`"
        )
    return record, weights


def _is_folder(path: str) -> bool:
    """Return whether a URI means a checkpoint folder, as `…/latest-rank0.pt` does beside committed ones."""
    with contextlib.suppress(TrainerConfigError, ckpt.errors.CheckpointError):
        return any(entry.status == "committed" for entry in ckpt.list_checkpoints(path.rpartition("/")[0]))
    return False


def _read_own(path: str, *, has_weights: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    with contextlib.closing(provide(path.rpartition("/")[0] or ".")) as store:
        user: Any = store.load(path, {}, strict=False).user or {}
    record = user.get("callbacks", {}).get(HuggingFaceRecord.__name__, {}).get("huggingface", {})
    if not has_weights:
        return record, {}
    checkpoint = ckpt.open(path)
    weights = {
        name.removeprefix("model."): as_tensor(checkpoint[name])
        for name in checkpoint
        if name.startswith("model.")
    }
    return record, weights


def _class_of(given: Any, *, is_saved: bool = True) -> Any:
    """Return a class by its name; a saved class may have moved within `transformers`."""
    if not isinstance(given, str):
        return given
    module, _, name = given.strip("<>'").removeprefix("class '").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        transformers: Any = import_extra("transformers", "transformers", needed_by="HuggingFaceModel")
        if is_saved and hasattr(transformers, name):
            return getattr(transformers, name)
        raise TrainerConfigError(
            f"the class `{given}` could not be imported; give `model_instantiation_class`, a class or the "
            "full name of one that can be"
        ) from None


def _config_of(saved: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    transformers: Any = import_extra("transformers", "transformers", needed_by="HuggingFaceModel")
    content = dict(saved["content"])
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _content(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    return text.split("\n") if suffix == ".txt" else text


def _write_tokenizer(files: Mapping[str, Any], folder: Path) -> None:
    for name, file in files.items():
        content = file["content"] if isinstance(file, Mapping) else file
        extension = file.get("file_extension", "") if isinstance(file, Mapping) else ""
        text = json.dumps(content) if extension == ".json" else content
        text = "\n".join(text) if isinstance(text, list) else text
        (folder / f"{Path(str(name)).stem}{extension or Path(str(name)).suffix}").write_text(
            str(text), encoding="utf-8"
        )
