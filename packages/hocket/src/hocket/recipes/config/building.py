"""Construction of the parts of a run from their sections of the configuration."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import hocket.algos
import hocket.trainer.callbacks
import hocket.trainer.loggers
import hocket.trainer.optim
from hocket.native.errors import HocketError
from hocket.native.paths import is_uri
from hocket.recipes.config.declared_types import as_declared
from hocket.recipes.config.resolving import as_part, check_names, plain_name
from hocket.recipes.gpt import GPT, GPTConfig
from hocket.stream import StreamingDataLoader, StreamingDataset
from hocket.trainer import Algorithm, Callback, LoggerDestination
from hocket.trainer.errors import TrainerConfigError, TrainerError
from hocket.trainer.models import HuggingFaceModel
from hocket.trainer.optim import Scheduler
from hocket.trainer.process.extras import import_extra
from hocket.trainer.profiler import JSONTraceHandler, Profiler, cyclic_schedule

#: For each section, the modules whose classes can be named, and the base class of these classes.
_SOURCES: dict[str, tuple[tuple[Any, ...], type[Any]]] = {
    "algorithms": ((hocket.algos,), Algorithm),
    "callbacks": ((hocket.trainer.callbacks,), Callback),
    "loggers": ((hocket.trainer.loggers,), LoggerDestination),
    "optimizer": ((hocket.trainer.optim, torch.optim), torch.optim.Optimizer),
    "scheduler": ((hocket.trainer.optim,), Scheduler),
}


def build_model(part: Mapping[str, Any]) -> nn.Module:
    """Make the model of a section.

    Raises:
        TrainerConfigError: If there is no such model, or the model does not take an argument.
    """
    name, arguments = _split(part, "model")
    if name.startswith("hf:"):
        return _hugging_face(name.removeprefix("hf:"), arguments)
    if name == "gpt":
        config: GPTConfig = call(GPTConfig, arguments, "model")
        return GPT(config)
    if ":" not in name:
        raise TrainerConfigError(f"`model` is `{name}`; expected `gpt`, `hf:NAME` or `module:function`")
    model: nn.Module = call(_import(name), arguments, "model")
    return model


def _hugging_face(name: str, arguments: dict[str, Any]) -> nn.Module:
    transformers: Any = import_extra("transformers", "transformers", needed_by="model: hf:…")
    tokenizer = arguments.pop("tokenizer", None)
    wrapper_arguments = _taken(arguments, HuggingFaceModel, but=("model",))
    try:
        config, unknown = transformers.AutoConfig.from_pretrained(
            name, return_unused_kwargs=True, **arguments
        )
    except OSError as error:
        raise TrainerConfigError(f"`hf:{name}` cannot be read: {error}") from error
    of_wrapper = [key for key in inspect.signature(HuggingFaceModel).parameters if key != "model"]
    check_names(unknown, [*config.to_dict(), *config.attribute_map, *of_wrapper], "`model`")
    classes = config.architectures or []
    kind = getattr(transformers, classes[0], None) if classes else None
    if kind is None:
        raise TrainerConfigError(
            f"the configuration of `hf:{name}` names no class of transformers in `architectures`; "
            "expected one, or a `module:function` that makes the model"
        )
    model = kind.from_pretrained(name, config=config)
    made = None if tokenizer is None else transformers.AutoTokenizer.from_pretrained(tokenizer)
    wrapped: nn.Module = call(
        HuggingFaceModel, {"model": model, "tokenizer": made, **wrapper_arguments}, "model"
    )
    return wrapped


def build_loaders(section: Mapping[str, Any]) -> dict[str, Any]:
    """Make the loaders of `train` and `eval`; the settings beside these two apply to both."""
    shared = {name: value for name, value in section.items() if name not in ("train", "eval")}
    if "train" not in section:
        raise TrainerConfigError(
            "`data` has no `train`; expected a folder or URI of MDS, or `module:function`"
        )
    loaders = {"train_dataloader": _loader(section["train"], shared, "data.train")}
    if section.get("eval") is not None:
        loaders["eval_dataloader"] = _loader(section["eval"], shared, "data.eval")
    return loaders


def _loader(given: Any, shared: Mapping[str, Any], where: str) -> Any:
    part = {"name": given} if isinstance(given, str) else dict(as_part(given, where))
    name = part.pop("name", None)
    arguments = {**shared, **part}
    if name is not None and not is_uri(name) and ":" in name and not Path(name).exists():
        return _own_loader(_import(name), arguments, where)
    if name is not None:
        arguments["remote" if is_uri(name) else "local"] = name
    options = _taken(arguments, StreamingDataLoader, but=("dataset", "batch_size"))
    dataset: StreamingDataset = call(StreamingDataset, arguments, where)
    return call(StreamingDataLoader, {"dataset": dataset, **options}, where)


def _own_loader(make: Any, arguments: dict[str, Any], where: str) -> Any:
    """Call a function that returns a loader or a data set, and wrap a data set in a `DataLoader`."""
    parameters = inspect.signature(make).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    options = {} if takes_all else _taken(arguments, DataLoader, but=("dataset", *parameters))
    result = call(make, arguments, where)
    if not isinstance(result, torch.utils.data.Dataset):
        if options:
            raise TrainerConfigError(
                f"`{where}` has `{next(iter(options))}` for a loader, and its function returns a "
                f"`{type(result).__name__}`; have it take the setting, or return a data set"
            )
        return result
    return call(DataLoader, {"dataset": result, **options}, where)


def _taken(arguments: dict[str, Any], target: Any, *, but: tuple[str, ...]) -> dict[str, Any]:
    """Remove from `arguments` those that `target` takes, except `but`, and return them."""
    names = [name for name in inspect.signature(target).parameters if name in arguments and name not in but]
    return {name: arguments.pop(name) for name in names}


def build_optimizer(part: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a model's parameters."""
    name, arguments = _split({"name": "AdamW"} | dict(part), "optimizer")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = call(
        _find(name, "optimizer"), {"params": trained, **arguments}, "optimizer"
    )
    return optimizer


def build_part(part: Mapping[str, Any], section: str) -> Any:
    """Make a schedule, an algorithm, a callback or a logger by name."""
    name, arguments = _split(part, section)
    return call(_find(name, section), arguments, f"{section}.{name}")


def build_profiler(section: Mapping[str, Any]) -> Profiler:
    """Make the profiler."""
    arguments = dict(section)
    if isinstance(arguments.get("schedule"), Mapping):
        arguments["schedule"] = call(cyclic_schedule, arguments["schedule"], "profiler.schedule")
    if "trace_folder" in arguments:
        arguments["trace_handlers"] = [JSONTraceHandler(folder=arguments.pop("trace_folder"))]
    return Profiler(**arguments)


def call(target: Any, arguments: Mapping[str, Any], where: str) -> Any:
    """Call a class or function, after a check of the arguments' names and types.

    Raises:
        TrainerConfigError: If the target does not take an argument, lacks a required one, or refuses a value.
    """
    parameters = inspect.signature(target).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_names(arguments, [parameter.name for parameter in parameters], f"`{where}`")
    name = getattr(target, "__name__", str(target))
    values = dict(arguments)
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.name in values:
            of = f"{where}.{parameter.name}"
            values[parameter.name] = as_declared(values[parameter.name], parameter, target, of)
        elif parameter.default is parameter.empty:
            raise TrainerConfigError(f"`{where}` lacks `{parameter.name}`, which `{name}` needs")
    try:
        return target(**values)
    except (HocketError, TrainerError):
        raise
    except (TypeError, ValueError) as error:
        raise TrainerConfigError(
            f"`{where}`: `{name}` does not take its settings: {type(error).__name__}: {error}"
        ) from error


def _split(part: Mapping[str, Any], section: str) -> tuple[str, dict[str, Any]]:
    arguments = dict(part)
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise TrainerConfigError(f"`{section}` has no `name`; expected what it is, such as `name: …`")
    return name, arguments


def _find(name: str, section: str) -> Any:
    """Return a class of a section by its name, in any letter case and with or without `_` between words."""
    if ":" in name:
        return _import(name)
    sources, base = _SOURCES[section]
    classes = {
        key: value
        for source in reversed(sources)
        for key, value in vars(source).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }
    by_plain_name = {plain_name(key): value for key, value in classes.items()}
    if plain_name(name) not in by_plain_name:
        check_names([name], classes, f"`{section}`")
    return by_plain_name[plain_name(name)]


def _import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise TrainerConfigError(
            f"`{name}` cannot be imported: {error}; expected `module:function`, of a module beside the run's "
            "file or on `PYTHONPATH`"
        ) from error
