"""The loss of logits of which each rank has its part of the vocabulary, by torch's `loss_parallel`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from hocket.dist.config.tensor_parallel import Style, split_style
from hocket.dist.errors import ConfigError

_METHODS = ("loss", "eval_forward")
"""Methods of a model that take logits, and whose results the trainer takes."""

_FUNCTION = "_loss_function"
"""Where a model of transformers keeps a `loss_function` that was set, in place of that of its class."""

_are_whole: ContextVar[bool] = ContextVar("_are_whole", default=False)
"""Whether logits are whole for now, also while they are trained on."""


def find_head(model: nn.Module, styles: Mapping[str, Style]) -> str:
    """Return the module whose output, the logits, is cut over the vocabulary.

    Args:
        model: The model.
        styles: The plan's, by names of modules.

    Raises:
        ConfigError: The plan cuts none, or several.
    """
    found = [
        name
        for name, style in styles.items()
        if isinstance(style, str)
        and split_style(style)[0] == "colwise_gather_output"
        and not any(part.isdecimal() for part in name.split("."))
    ]
    if len(found) != 1:
        told = ", ".join(f"`{name}`" for name in found) or "none"
        raise ConfigError(
            f"`loss_parallel` takes the logits of the one module that the tensor-parallel plan of "
            f"{type(model).__name__} has as 'colwise_gather_output' outside its blocks, and there is {told}. "
            "Give a `plan` with the output layer in that style (a tied one needs 'embedding_rowwise' for the "
            "embedding), or leave `loss_parallel` out"
        )
    return found[0]


def keep_cut(module: nn.Module, logits: DTensor) -> torch.Tensor:
    """Return logits cut, as a DTensor, while they are trained on, and whole otherwise."""
    if module.training and torch.is_grad_enabled() and not _are_whole.get():
        return logits
    return logits.full_tensor()


@contextmanager
def whole_logits() -> Iterator[None]:
    """Let logits be whole in a trial pass, of which stages without the head have them whole, too."""
    token = _are_whole.set(True)
    try:
        yield
    finally:
        _are_whole.reset(token)


class LossParallel:
    """The methods of a model that take cut logits, and their plain results.

    Torch's rules for the loss of cut logits are in force until `close`, for the backward passes, too.

    Args:
        model: The model, whose methods are replaced until `close`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._uncompiled = _leave_uncompiled(model)
        self._rules = loss_parallel()
        self._rules.__enter__()
        self._replaced = [name for name in _METHODS if callable(getattr(model, name, None))]
        for name in self._replaced:
            setattr(model, name, _with_plain_result(getattr(model, name)))

    def close(self) -> None:
        """Give the model its own methods back."""
        for name in self._replaced:
            self._model.__dict__.pop(name, None)
        self._replaced = []
        for module in self._uncompiled:
            del module.__dict__[_FUNCTION]
        self._uncompiled = []
        self._rules.__exit__(None, None, None)


def _leave_uncompiled(model: nn.Module) -> list[nn.Module]:
    """Let models of transformers compute their loss outside of a compiled program; return these models.

    Compiling torch's rules for cut logits together with the loss fails: the gradient of the logits would be
    an output of the forward pass.
    """
    found = []
    for module in model.modules():
        # A model without a `loss_type` computes none, and warns when it is asked for its function.
        is_asked = isinstance(getattr(type(module), "loss_function", None), property)
        if is_asked and getattr(module, "loss_type", None) and _FUNCTION not in module.__dict__:
            setattr(module, _FUNCTION, torch.compiler.disable(module.loss_function))  # type: ignore[no-untyped-call]
            found.append(module)
    return found


def _with_plain_result(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _plain(method(*args, **kwargs))

    return run


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, Mapping):
        return type(value)(**{name: _plain(one) for name, one in value.items()})
    if isinstance(value, tuple) and any(isinstance(one, DTensor) for one in value):
        return tuple(_plain(one) for one in value)
    return value
