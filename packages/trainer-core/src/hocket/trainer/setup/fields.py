"""Arguments of a method as the fields of a dataclass: checks, groups, refused names and the docstring."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cache, update_wrapper
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar

from hocket.trainer.checks import check_keys, nearest_name, refuse_classes, unknown_argument
from hocket.trainer.errors import TrainerConfigError, UnknownArgumentError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_WIDTH = 106
# The names that other trainers have for arguments: the argument that is meant, and the answer.
_IN_EPOCHS = ("max_duration", "give `max_duration='{}ep'`")
_IN_BATCHES = ("max_duration", "give `max_duration='{}ba'`")
_SAVE_INTERVAL = ("save_interval", "give `save_interval='{}ba'`")
_LOG_EVERY = ("loop", "give `loop={{'log_every': {}}}`")
_OPTIMIZERS = ("optimizers", "give `optimizers={}`")
_RATE = ("optimizers", "give it to the optimizer: `optimizers=torch.optim.AdamW(model.parameters(), lr={})`")
_SCHEDULERS = ("schedulers", "give `schedulers={}`")
_LOADER = ("train_dataloader", "give a data loader: `train_dataloader=DataLoader(…)`")
_EVAL_LOADER = ("eval_dataloader", "give a data loader: `eval_dataloader=DataLoader(…)`")
_BATCH_SIZE = (
    "train_dataloader",
    "give it to the data loader: `train_dataloader=DataLoader(…, batch_size={})`",
)
_MICROBATCHES = (
    "device_train_microbatch_size",
    "give the samples of a microbatch, `device_train_microbatch_size=`; one batch of the loader is an update",
)
_CLIPPING = ("gradient_clipping", "give `gradient_clipping={}`")
_RANKS = ("device", "start the script on the ranks: `hocket-launch -n {} script.py`")
_SHARDING = ("fsdp_config", "give `fsdp_config={{}}` to shard; without it each rank has a copy")

_RESUME = ("autoresume", "give `autoresume=True`, which goes on from the newest checkpoint in `save_folder`")
_NEWEST = ("True", "'last'", "'hpc'")
"""Values, as text, that mean the newest checkpoint to other trainers, where a path is taken too."""

_FOREIGN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("max_epochs", "num_epochs", "n_epochs", "nb_epoch", "epochs", "num_train_epochs"), _IN_EPOCHS
    ),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "max_iters"), _IN_BATCHES),
    "eval_steps": ("eval_interval", "give `eval_interval='{}ba'`"),
    **dict.fromkeys(("save_steps", "every_n_train_steps"), _SAVE_INTERVAL),
    **dict.fromkeys(("logging_steps", "log_every_n_steps"), _LOG_EVERY),
    "check_val_every_n_epoch": ("eval_interval", "give `eval_interval='{}ep'`"),
    "limit_train_batches": ("train_subset_num_batches", "give a number, `train_subset_num_batches=`"),
    "limit_val_batches": ("eval_subset_num_batches", "give a number, `eval_subset_num_batches=`"),
    "weight_decay": ("optimizers", _RATE[1].replace("lr={}", "weight_decay={}")),
    "fp16": ("precision", "give `precision='amp_fp16'`"),
    "bf16": ("precision", "give `precision='amp_bf16'`"),
    **dict.fromkeys(("optimizer", "optim"), _OPTIMIZERS),
    **dict.fromkeys(("lr", "learning_rate"), _RATE),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedulers"), _SCHEDULERS),
    **dict.fromkeys(("train_dataset", "train_data", "dataset", "dataloader", "train_loader"), _LOADER),
    **dict.fromkeys(("train_dataloaders", "datamodule"), _LOADER),
    **dict.fromkeys(("eval_dataset", "val_dataloader", "val_dataloaders", "val_loader"), _EVAL_LOADER),
    **dict.fromkeys(("batch_size", "batchsize", "bs", "per_device_train_batch_size"), _BATCH_SIZE),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum"), _MICROBATCHES),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm", "clip_grad_norm"), _CLIPPING),
    **dict.fromkeys(("devices", "gpus", "n_gpus", "num_gpus"), _RANKS),
    **dict.fromkeys(("strategy", "distributed", "ddp"), _SHARDING),
    "accelerator": ("device", "give `device={}`"),
    "logger": ("loggers", "give `loggers={}`"),
    **dict.fromkeys(
        ("default_root_dir", "output_dir", "checkpoint_dir"), ("save_folder", "give `save_folder={}`")
    ),
    **dict.fromkeys(
        ("ckpt_path", "resume_from_checkpoint", "load_from_checkpoint"), ("load_path", "give `load_path={}`")
    ),
    **dict.fromkeys(("criterion", "loss"), ("loss_fn", "give `loss_fn={}`")),
}


def checked(check: Callable[..., Any], *more: Any, **options: Any) -> dict[str, Any]:
    """Return the metadata of a field that `check(name, value, *more, **options)` accepts or refuses.

    None is not checked where it is the default.
    """
    return {"check": lambda name, value: check(name, value, *more, **options)}


def group(kind: type[Any]) -> dict[str, Any]:
    """Return the metadata of a field that takes the dataclass `kind` or a dict of its fields."""
    return {"group": kind}


def once(flat: str) -> dict[str, Any]:
    """Return the metadata of a group's field that was a flat argument under another name."""
    return {"flat": flat}


def complete(settings: Any) -> None:
    """Make the groups of a frozen dataclass from dicts, and check its fields; for `__post_init__`.

    A class in place of an instance is refused, except in fields whose metadata has `takes_class`.

    Raises:
        TrainerConfigError: If a value is invalid, or a dict has an unknown key.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if not field.metadata.get("takes_class"):
            refuse_classes(field.name, value)
        if (kind := field.metadata.get("group")) is not None and not isinstance(value, kind):
            object.__setattr__(settings, field.name, _as_group(kind, field.name, value))
        elif (check := field.metadata.get("check")) is not None and not (
            value is None and field.default is None
        ):
            check(field.name, value)


def _as_group(kind: type[Any], name: str, given: Any) -> Any:
    if not isinstance(given, Mapping):
        raise TrainerConfigError(
            f"`{name}` is {given!r}; expected a dict of its settings, or a `{kind.__name__}`"
        )
    check_keys(name, given, [field.name for field in fields(kind)])
    return kind(**given)


def grouped_names(settings: Any) -> dict[str, tuple[str, str]]:
    """Return the group and the field of each setting in a group, by the setting's flat name."""
    return {
        inner.metadata.get("flat", inner.name): (outer.name, inner.name)
        for outer in fields(settings)
        if (kind := outer.metadata.get("group")) is not None
        for inner in fields(kind)
    }


def takes_fields(
    settings: Callable[P, S],
) -> Callable[[Callable[[T, S], R]], Callable[Concatenate[T, P], R]]:
    """Return a decorator of a method of one argument, which then takes the fields of a dataclass instead.

    The fields are the one place of an argument's name, type and default: `inspect.signature` and type
    checkers read them. An unknown name raises an `UnknownArgumentError`.

    Args:
        settings: The dataclass.
    """
    init: Any = inspect.getattr_static(settings, "__init__")
    signature = inspect.signature(settings)

    def decorate(method: Callable[[T, S], R]) -> Callable[Concatenate[T, P], R]:
        owner = method.__qualname__.removesuffix(".__init__")

        def flat(self: T, /, *args: P.args, **given: P.kwargs) -> R:
            for name, value in given.items():
                if name not in signature.parameters:
                    raise UnknownArgumentError(_refusal(owner, settings, name, value))
            signature.bind(*args, **given)  # so that a missing argument is not reported as the dataclass's
            return method(self, settings(*args, **given))

        update_wrapper(flat, init)
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(flat, attribute, getattr(method, attribute))
        return flat

    return decorate


def _refusal(owner: str, settings: Any, name: str, value: Any) -> str:
    """Return the message on a name that is no argument."""
    places = grouped_names(settings)
    if name in places:
        outer, inner = places[name]
        text = _as_text(value)
        return f"`{name}={text}` is now `{outer}={{'{inner}': {text}}}`"
    known = [field.name for field in fields(settings)] + list(places)
    if (given := _foreign_argument(name, _as_text(value), known)) is not None:
        return f"`{owner}` has no argument `{name}`; {given}"
    if (near := nearest_name(name, known)) in places:
        outer, inner = places[near]
        return f"`{owner}` has no argument `{name}`; did you mean `{outer}={{'{inner}': …}}`?"
    return unknown_argument(owner, name, known)


def _foreign_argument(name: str, value: str, known: Collection[str]) -> str | None:
    """Return the argument to give for another trainer's, with its value as text; None for other names."""
    argument, answer = _FOREIGN.get(name, ("", ""))
    if argument == "load_path" and value in _NEWEST:
        argument, answer = _RESUME
    if argument == "max_duration" and "duration" in known:  # of `fit`
        argument, answer = "duration", answer.replace("max_duration", "duration")
    return answer.format(value) if argument in known else None


def _as_text(value: Any) -> str:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if is_plain else "…"


@cache
def field_docs(settings: Any) -> dict[str, str]:
    """Return the text below each field of a dataclass; nothing where there is no source."""
    try:
        module = ast.parse(inspect.getsource(sys.modules[settings.__module__]))
    except OSError:
        return {}
    found = (
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == settings.__name__
    )
    docs = {}
    for node in found:
        for field, text in pairwise(node.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    docs[name] = " ".join(words.split())
    return docs


def with_arguments(doc: str | None, settings: Any) -> str:
    """Return a docstring with the fields of a dataclass as its `Args`, ahead of `Raises` or at its end."""
    head, raises, tail = inspect.cleandoc(doc or "").partition("\n\nRaises:")
    return "\n".join([head, "", "Args:", *_entries(settings, "    "), *[raises + tail][: bool(raises)]])


def _entries(settings: Any, indent: str) -> list[str]:
    docs = field_docs(settings)
    lines = []
    for field in fields(settings):
        text = f"{field.name}: {docs.get(field.name, '')}".rstrip()
        lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "    ")
        if (kind := field.metadata.get("group")) is not None:
            lines += _entries(kind, indent + "    ")
    return lines
