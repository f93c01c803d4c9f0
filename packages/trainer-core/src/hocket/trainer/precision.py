"""Numeric precision of forward passes, and the scaling of gradients that fp16 needs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hocket.trainer.errors import MissingExtraError, TrainerConfigError

_DTYPE_OF = {
    "fp32": None,
    "amp_bf16": torch.bfloat16,
    "amp_fp16": torch.float16,
    "amp_fp8": torch.bfloat16,
}


class Precision:
    """The precision of forward passes, with loss scaling for fp16 and the optimizer step.

    Forward passes run under `torch.autocast`. Only fp16 needs scaling; its overflow check, torch's
    `GradScaler`, reads one number from the device each step. bf16 and fp32 read none.

    Args:
        name: `"fp32"`, `"amp_bf16"`, `"amp_fp16"` or `"amp_fp8"`. The last runs the layers of Transformer
            Engine in fp8, and everything else in bf16.
        device: The device of the passes.
        config: Arguments of Transformer Engine's `DelayedScaling`, for `"amp_fp8"`.
        loss_scale: Options of `torch.amp.GradScaler`, such as `init_scale` and `growth_interval`; used by
            fp16 alone.

    Raises:
        TrainerConfigError: If the name is none of these, if the device does not support the precision, or if
            `config` is given for another precision.
        MissingExtraError: If the name is `"amp_fp8"` and Transformer Engine is not installed.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        config: Mapping[str, Any] | None = None,
        *,
        loss_scale: Mapping[str, Any] | None = None,
    ) -> None:
        self._device = device
        self._loss_scale = dict(loss_scale or {})
        self._overflows: dict[int, dict[str, Any]] = {}
        self.change(name, config)

    def change(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Compute in another precision from here on; the gradient scale of fp16 starts anew.

        Args:
            name: As for the class.
            config: As for the class.
        """
        device = self._device
        if name not in _DTYPE_OF:
            known = ", ".join(f"`{known}`" for known in _DTYPE_OF)
            raise TrainerConfigError(f"`precision` is `{name}`; expected one of {known}")
        if config is not None and name != "amp_fp8":
            raise TrainerConfigError(
                f"`precision_config` has the scaling of fp8, and `precision` is `{name}`; use "
                "`precision='amp_fp8'`, or leave `precision_config` out"
            )
        dtype = _DTYPE_OF[name]
        fp8 = _fp8_context(device, config or {}) if name == "amp_fp8" else None
        self.name = name
        self._context: Any = (
            contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
        )
        self._fp8 = fp8
        self._is_half_on_cpu = dtype is torch.float16 and device.type == "cpu"
        self.is_plain = dtype is None
        """Whether forward passes and losses need no context."""
        self.is_scaled = dtype is torch.float16
        """Whether losses are scaled, and with them the gradients until `unscale`."""
        self._scaler = torch.amp.GradScaler(device.type, **self._loss_scale) if self.is_scaled else None

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward passes and losses are computed."""
        if self._is_half_on_cpu:
            return self._half_on_cpu()
        context: contextlib.AbstractContextManager[Any] = self._context if self._fp8 is None else self._both()
        return context

    @contextlib.contextmanager
    def _half_on_cpu(self) -> Iterator[None]:
        with _explained_half(), self._context:
            yield

    @contextlib.contextmanager
    def _both(self) -> Iterator[None]:
        assert self._fp8 is not None
        with self._context, self._fp8():
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss`, scaled for fp16."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        if self._is_half_on_cpu:
            with _explained_half():
                scaled.backward()  # type: ignore[no-untyped-call]  # of torch
            return
        scaled.backward()  # type: ignore[no-untyped-call]  # of torch

    def unscale(self, optimizers: Sequence[Optimizer], others: list[torch.Tensor] | None = None) -> None:
        """Divide the gradients by the gradient scale, so that they can be clipped.

        Args:
            optimizers: All optimizers of the run.
            others: Gradients of parameters that no optimizer holds, plain or this rank's parts of them.
        """
        if self._scaler is None:
            return
        for optimizer in optimizers:
            if _has_gradients(optimizer):
                self._scaler.unscale_(optimizer)
        if others:
            scale = self._scaler.scale(torch.ones((), device=others[0].device))
            torch._foreach_mul_(others, scale.reciprocal())

    def step(self, optimizers: Sequence[Optimizer], *, skip: bool = False) -> None:
        """Step the optimizers and clear gradients; a step that overflowed in fp16 is skipped.

        Args:
            optimizers: All optimizers of the run.
            skip: Whether to clear the gradients without a step.
        """
        scaler = self._scaler
        self._overflows = {}
        if not skip:
            for optimizer in optimizers:
                if scaler is None:
                    _step(optimizer)
                elif _has_gradients(optimizer):
                    # Without gradients the scaler has nothing to check, which it refuses.
                    scaler.step(optimizer)
                    self._overflows[id(optimizer)] = scaler._found_inf_per_device(optimizer)
        if scaler is not None:
            # After a skipped step too: without `update`, `unscale_` cannot be called again.
            scaler.update()
        # After all steps, since optimizers may share parameters.
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def has_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last `step` left out an optimizer, because fp16 overflowed; reads the device."""
        return any(bool(found) for found in self._overflows.get(id(optimizer), {}).values())

    def state_dict(self) -> dict[str, Any]:
        """Return the gradient scale and its history; empty except in fp16."""
        return self._scaler.state_dict() if self._scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the return value of `state_dict`; a state of another precision is ignored."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def _step(optimizer: Optimizer) -> None:
    """Step an optimizer; name what Adagrad of torch 2.9 lacks, in place of its `KeyError`."""
    try:
        optimizer.step()
    except KeyError as error:
        if not (torch.__version__ < "2.10" and isinstance(optimizer, torch.optim.Adagrad)):
            raise
        raise TrainerConfigError(
            "`Adagrad` cannot step parameters that were added after it was built: `add_param_group` of torch "
            f"{torch.__version__} gives them no state. Give all parameters when it is built, with "
            "`requires_grad_(False)` as long as they are not trained, or install torch 2.10 or newer"
        ) from error


def _has_gradients(optimizer: Optimizer) -> bool:
    """Return whether any parameter of an optimizer has a gradient."""
    return any(one.grad is not None for group in optimizer.param_groups for one in group["params"])


def _fp8_context(device: torch.device, config: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes the fp8 context of Transformer Engine."""
    if device.type != "cuda":
        raise TrainerConfigError(
            f"`precision` is `amp_fp8`, which a GPU from Hopper on computes, and the device is `{device}`; "
            "use `amp_bf16`"
        )
    try:
        te: Any = importlib.import_module("transformer_engine.pytorch")
        recipe: Any = importlib.import_module("transformer_engine.common.recipe")
    except ImportError as error:
        raise MissingExtraError(
            "`precision='amp_fp8'` needs Transformer Engine, which is not installed: "
            "pip install 'transformer-engine[pytorch]'"
        ) from error
    given = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max", **config}
    given["fp8_format"] = getattr(recipe.Format, str(given["fp8_format"]), given["fp8_format"])
    scaling = recipe.DelayedScaling(**given)
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=scaling)


def default_precision(device: torch.device) -> str:
    """Return `"amp_bf16"` on a GPU that supports bf16, else `"fp32"`."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "amp_bf16" if has_bf16 else "fp32"


@contextlib.contextmanager
def _explained_half() -> Iterator[None]:
    """Add to torch's error for an operation that a CPU does not have in fp16 what to use instead."""
    try:
        yield
    except RuntimeError as error:
        if "precision='amp_bf16'" not in "".join(getattr(error, "__notes__", ())):
            error.add_note(
                "`precision` is `amp_fp16` on a CPU, for which torch lacks some operations in fp16, such as "
                "those of recurrent layers, and of batch norm in some releases; use `precision='amp_bf16'`, "
                "which needs no loss scaling, or `'fp32'`"
            )
        raise
